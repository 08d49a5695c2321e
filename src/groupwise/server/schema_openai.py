"""The bodies of /v1/chat/completions, and what every route that samples has in common with it.

Names and meanings are OpenAI's, and vLLM's where OpenAI has none; `adapter`, `adapters` and what gives token ids back
are ours. Ranges and what excludes what are checked here, before anything is tokenised. An option that this server does
not have is refused, unless its value changes nothing, also one that only other servers have (`OTHERS`). Fields without
an effect on the answer (`BOOKKEEPING`) and unknown fields are ignored on OpenAI's routes and refused on ours. null
counts as a field that is left out.

Completions for training (`Sampling` alone) have no penalties and no biases: their tokens would be sampled from another
distribution than the trained one. `ShapedSampling` has these options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from groupwise import types
from groupwise.config.section import NullIsAbsent
from groupwise.server.errors import echo
from groupwise.server.schema_messages import (
    Choices,
    Conversation,
    StructuredOutputs,
    Tools,
)
from groupwise.server.wire import AtMost, OpenRequest, OwnPart, Unsupported
from groupwise.tasks.dialects.chat_form import NamedTool, ResponseFormat, StreamOptions, Tool, ToolChoice
from groupwise.tasks.dialects.form import BodyPart, FailFast, JsonObject, StopString, Strict, check_finite, fault
from groupwise.tasks.structured import format_grammar

MAX_COMPOSED = 16

MAX_BIASED = 1024  # tokens of one request

RENDERED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "messages",
    "return_assistant_tokens_mask",
    "tools",
)  # what the server itself tells the chat template

MAX_TOKEN_ID = (1 << 31) - 1
MAX_PROMPT_ID = (1 << 63) - 1  # those of images are beyond every vocabulary

BOOKKEEPING = frozenset(
    (
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)  # OpenAI's fields for who asks, what is kept there and how fast it goes; the same is sampled without them

Selector = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[0-9]{1,12})?$")]

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]

TokenIds = Annotated[list[TokenId], FailFast()]
PromptIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_PROMPT_ID)]], FailFast()]

MaxTokens = Annotated[int, Field(ge=1, le=1 << 20)]

LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASED),
]


# ---- which policy, and how it is sampled ----
class AdapterShare(NullIsAbsent, OwnPart):
    """An adapter in a composition, and what its update is multiplied by."""

    name: Selector
    scale: float = Field(default=1.0, ge=-100, le=100)


class PolicyChoice(BodyPart):
    """The policy that a request asks to be answered by. Without `adapter` and `adapters`, `model` decides; without any,
    the active version."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The served model's name (the active version), `base`, or an adapter: `name` or `name@3`."""
    adapter: Selector | None = None
    """`base`, `name` (its active or newest version), or `name@3`."""
    adapters: Annotated[list[AdapterShare], Field(min_length=1, max_length=MAX_COMPOSED)] | None = None
    """A sum of adapters, for this request."""

    @model_validator(mode="after")
    def _one_choice(self) -> Any:
        if self.adapter is not None and self.adapters is not None:
            raise fault("invalid_value", "adapter and adapters exclude each other; give one of them", param="adapters")
        return self


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 1024}

Stop = Annotated[
    list[StopString],
    FailFast(),
    AtMost("max_stop"),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "x-limit": "max_stop"}]}),
]

_OLDER = {"guided_json": "json", "guided_choice": "choice", "guided_grammar": "grammar"}  # the others are regex

_FORMAT = "use response_format or structured_outputs"

_ON_POLICY = "what is sampled for training is drawn from the policy itself; /v1/chat/completions has it for other text"

_SCORE = "POST /v1/completions with echo: true, logprobs and max_tokens: 0 gives those of a prompt's tokens"

_ONE_BY_ONE = "completions are drawn token by token; use n, and choose yourself"

_THINKING = "use chat_template_kwargs.enable_thinking"

_ANOTHER_CUT, _LEAVE_OUT, _REPETITION = "use top_p or min_p", "leave it out", "use repetition_penalty"

OTHERS: Mapping[str, Unsupported] = {
    name: Unsupported(*neutral, hint=hint)
    for names, neutral, hint in (
        ("regex ebnf grammar json_schema structured_outputs_regex", (), _FORMAT),
        ("enable_thinking think thinking", (), _THINKING),
        ("n_predict thinking_token_budget", (), "use max_tokens"),
        ("repeat_penalty encoder_repetition_penalty", (1, 1.0), _REPETITION),
        ("no_repeat_ngram_size dry_multiplier penalty_alpha", (0, 0.0), _REPETITION),
        ("typical_p tfs_z", (1, 1.0), _ANOTHER_CUT),
        ("top_a epsilon_cutoff eta_cutoff xtc_probability mirostat", (0, 0.0), _ANOTHER_CUT),
        ("top_n_sigma", (-1, -1.0, 0, 0.0), _ANOTHER_CUT),
        ("dynatemp_range", (0, 0.0), "use temperature"),
        ("guidance_scale", (1, 1.0), _LEAVE_OUT),
        ("watermark", (False,), _LEAVE_OUT),
        ("logits_processors", ([],), _LEAVE_OUT),
        ("custom_logit_processor", (), _LEAVE_OUT),
        ("min_new_tokens", (0,), "use min_tokens"),
        ("num_beams", (1,), _ONE_BY_ONE),
        ("do_sample", (True,), "temperature: 0 is greedy"),
        ("stop_regex", ([],), "use stop"),
        ("no_stop_trim", (False,), "use include_stop_str_in_output"),
        ("lora_path", (), "use adapter"),
        ("options", ({},), "give temperature, top_p and the like beside messages"),
        ("documents", ([],), "use chat_template_kwargs.documents, where the template reads it"),
    )
    for name in names.split()
}  # of vLLM, SGLang, llama.cpp, Ollama, transformers and text-generation-inference: names, what changes nothing, a hint

_FORMS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs_regex", "guided_decoding_regex"),  # TRL's
)


class Sampling(PolicyChoice):
    """Sampling parameters of a request: how completions are drawn."""

    n: Annotated[int, Field(ge=1), AtMost("max_n")] | None = None
    """Completions of each prompt; default 1."""
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """0 is greedy; default 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draw among the likeliest tokens that make up this probability; default 1, off."""
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    """Draw among this many likeliest tokens; default 0, off, as is -1."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Leave out tokens less likely than this fraction of the likeliest; default 0, off."""
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    """The newer name of `max_tokens`; the smaller counts where both are given."""
    stop: Stop | None = None
    """Strings that end a completion; they are cut from its text."""
    stop_token_ids: Annotated[list[TokenId], FailFast(), AtMost("max_stop")] | None = None
    """Token ids that end a completion, in addition to the model's own."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    """The same seed and version draw the same completions."""
    ignore_eos: bool | None = None
    """Go on after the end of the turn."""
    return_token_ids: bool | None = None
    """Give back the ids of prompt and completion: what training needs."""

    presence_penalty: Annotated[Any, Unsupported(0, 0.0, hint=_ON_POLICY)] = None
    frequency_penalty: Annotated[Any, Unsupported(0, 0.0, hint=_ON_POLICY)] = None
    repetition_penalty: Annotated[Any, Unsupported(1, 1.0, hint=_ON_POLICY)] = None
    logit_bias: Annotated[Any, Unsupported({}, hint=_ON_POLICY)] = None
    min_tokens: Annotated[Any, Unsupported(0, hint=_ON_POLICY)] = None
    include_stop_str_in_output: Annotated[Any, Unsupported(False, hint="the token ids hold it")] = None
    truncate_prompt_tokens: Annotated[Any, Unsupported(-1, hint="shorten the prompts")] = None

    bad_words: Annotated[Any, Unsupported([], hint="use logit_bias on /v1/chat/completions")] = None
    allowed_token_ids: Annotated[Any, Unsupported([], hint="use logit_bias on /v1/chat/completions")] = None
    best_of: Annotated[Any, Unsupported(1, hint=_ONE_BY_ONE)] = None
    use_beam_search: Annotated[Any, Unsupported(False, hint=_ONE_BY_ONE)] = None
    length_penalty: Annotated[Any, Unsupported(1, 1.0, hint=_ONE_BY_ONE)] = None
    early_stopping: Annotated[Any, Unsupported(False, hint=_ONE_BY_ONE)] = None
    prompt_logprobs: Annotated[Any, Unsupported(hint=_SCORE)] = None
    skip_special_tokens: Annotated[Any, Unsupported(False, hint="special tokens stay in the text")] = None
    return_tokens_as_token_ids: Annotated[Any, Unsupported(False, hint="use return_token_ids")] = None

    response_format: ResponseFormat | None = None
    """The required form of the answer, under OpenAI's name."""
    structured_outputs: StructuredOutputs | None = None
    """The required form of the answer, under vLLM's name. Only one of these six fields may be given."""
    guided_json: str | JsonObject | None = None
    """`structured_outputs.json`, as vLLM called it before."""
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    """`structured_outputs.regex`, as vLLM called it before."""
    guided_choice: Choices | None = None
    """`structured_outputs.choice`, as vLLM called it before."""
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    """`structured_outputs.grammar`, as vLLM called it before."""

    @model_validator(mode="after")
    def _one_form(self) -> Any:
        given = self.forms
        if len(given) > 1:
            message = "{given} exclude each other; give one of them"
            raise fault("invalid_value", message, given=" and ".join(given), param=list(given)[1])
        if given and self.ignore_eos:
            message = "ignore_eos is true, and nothing can follow what {given} asks for"
            raise fault("invalid_value", message, given=next(iter(given)), param="ignore_eos")
        return self

    @property
    def forms(self) -> dict[str, Any]:
        """The fields that say what the answer must be."""
        given = {name: getattr(self, name) for name in _FORMS if getattr(self, name, None) is not None}
        if self.response_format is not None and self.response_format.type == "text":
            del given["response_format"]
        return given

    @property
    def answer_grammar(self) -> types.Grammar | None:
        """Return the grammar of the answer; None if it is not constrained."""
        for name, value in self.forms.items():
            if isinstance(value, ResponseFormat):
                given = value.json_schema
                schema, strict = (None, None) if given is None else (given.json_schema, given.strict)
                return format_grammar(value.type, schema, strict=strict)
            if isinstance(value, StructuredOutputs):
                return value.as_grammar(name)
            return types.Grammar.of_option(_OLDER.get(name, "regex"), value, field=name)
        return None

    @property
    def most_tokens(self) -> int | None:
        """Return the requested limit of the completion; None is the server's default."""
        return min((m for m in (self.max_tokens, self.max_completion_tokens) if m is not None), default=None)


class ShapedSampling(Sampling):
    """Sampling parameters of completions that are not for training: they may also change the logits. The
    log-probabilities that are returned are the unchanged policy's all the same."""

    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logits of what the completion has already; default 0."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """The same times how often it has it; default 0."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """The factor of the logit by which tokens of the prompt or completion become less likely; default 1, off."""
    logit_bias: LogitBias | None = None
    """Token id -> what is added to its logit; -100 and 100 all but ban and force it."""
    min_tokens: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    """Before so many tokens neither the end of the turn nor `stop` ends a completion; default 0."""
    include_stop_str_in_output: bool | None = None
    """Leave the stop string, or the text of the stop token id, in the text."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keep only this many of the last tokens of a prompt; -1: as many as fit with the requested tokens."""

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_something(cls, value: int | None) -> int | None:
        if value == 0:
            raise fault("invalid_value", "is 0, which leaves nothing; it must be at least 1, or -1 for what fits")
        return value


class TemplateOptions(Strict):
    """Holds variables for the chat template in addition to the messages, by the template's names."""

    model_config = ConfigDict(extra="allow")

    enable_thinking: bool | None = None

    @model_validator(mode="after")
    def _for_the_template(self) -> TemplateOptions:
        for name, value in (self.model_extra or {}).items():
            if name in RENDERED or not re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII):
                why = "the server's own" if name in RENDERED else "no name of a template's variable"
                shown = name if name in RENDERED else repr(name[:64])
                raise fault("invalid_value", f"{{name}} is {why}; it cannot be given here", name=shown, param=name[:64])
            check_finite(value)
        return self


# ---- /v1/chat/completions ----
class ChatRequest(ShapedSampling, OpenRequest):
    """The body of POST /v1/chat/completions."""

    bookkeeping: ClassVar = BOOKKEEPING
    others: ClassVar = OTHERS

    messages: Conversation
    tools: Tools | None = None
    """With `strict` a tool's calls are valid for its schema, and so are all with `tool_choice` required or named."""
    tool_choice: ToolChoice | None = None
    """`auto` (the default with tools), `none`, `required`, or the tool that is to be called."""
    parallel_tool_calls: bool | None = None
    """false allows one call, or keeps the first."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    """Report the log-probability of each token, after temperature."""
    top_logprobs: Annotated[int, Field(ge=0), AtMost("max_top_logprobs")] | None = None
    """Report this many likeliest tokens with each sampled one."""
    chat_template_kwargs: TemplateOptions | None = None
    continue_final_message: bool | None = None
    """Whether the reply continues the last message if that is the assistant's, as by default. With false the reply is a
    separate turn."""
    add_generation_prompt: bool | None = None
    """The opposite of `continue_final_message`, as other servers also have it."""
    echo: bool | None = None
    """Give back the message that the reply continues with, in front of it."""

    add_special_tokens: Annotated[Any, Unsupported(False, hint="the chat template writes them")] = None
    functions: Annotated[Any, Unsupported([], hint="use tools")] = None
    function_call: Annotated[Any, Unsupported("none", hint="use tool_choice")] = None
    chat_template: Annotated[Any, Unsupported(hint="the model's own template is used")] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    audio: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported(hint=_THINKING)] = None
    verbosity: Annotated[Any, Unsupported("medium", hint="ask for it in the prompt")] = None
    web_search_options: Annotated[Any, Unsupported(hint="offer a search tool in tools")] = None
    moderation: Annotated[Any, Unsupported()] = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        check_stream(self.stream, self.stream_options)
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs is {count} and needs logprobs: true"
            raise fault("invalid_value", message, count=self.top_logprobs, param="top_logprobs")
        self._check_continuation()
        check_tools(self.tools)
        self._check_choice()
        return self

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Return the offered tools, in the form of the chat templates."""
        return [] if self.tool_choice == "none" else [tool.as_dict() for tool in self.tools or ()]

    def _check_choice(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice == "required" and not names:
            message = "tool_choice is 'required' and there are no tools; offer some"
            raise fault("invalid_value", message, param="tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            message = "tool_choice names the tool {name}, and offered are {names}"
            shown = ", ".join(names) or "none"
            raise fault(
                "invalid_value", message, name=echo(self.tool_choice.function.name), names=shown, param="tool_choice"
            )

    @property
    def continues(self) -> bool:
        """Return whether the reply continues with the last message."""
        asked = self.continue_final_message
        if asked is None and self.add_generation_prompt is not None:
            asked = not self.add_generation_prompt
        return self.messages[-1].role == "assistant" if asked is None else asked

    def _check_continuation(self) -> None:
        if self.continue_final_message is not None and self.add_generation_prompt == self.continue_final_message:
            message = "continue_final_message and add_generation_prompt are both {value}; they are opposites"
            shown = str(self.add_generation_prompt).lower()
            raise fault("invalid_value", message, value=shown, param="continue_final_message")
        spoken = "the last message is of role '{role}', not the assistant's"
        if self.continues and self.messages[-1].role != "assistant":
            param = "add_generation_prompt" if self.continue_final_message is None else "continue_final_message"
            message = f"{param} asks for a reply that goes on with the last message, and {spoken}"
            raise fault("invalid_value", message, role=self.messages[-1].role, param=param)
        if self.echo and not self.continues:
            message = "echo gives back the message that the reply goes on with, and it goes on with none"
            raise fault("invalid_value", message, hint="end with a message of the assistant's", param="echo")


def check_stream(stream: bool | None, options: StreamOptions | None) -> None:
    if options is not None and not stream:
        raise fault("invalid_value", "stream_options needs stream: true", param="stream_options")


def check_tools(tools: Sequence[Tool] | None) -> None:
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        raise fault("invalid_value", "two tools have the same name; give each its own", param="tools")
