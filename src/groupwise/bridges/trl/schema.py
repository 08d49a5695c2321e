"""The bodies of the routes in `trainer_routes`. Names and defaults are those of TRL's and Axolotl's clients.

They pass on vLLM's sampling parameters, also in `generation_kwargs`, which override the parameters next to them. A
parameter that this server does not have is refused by name, unless its value changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field

from groupwise.sdk.types import Answer
from groupwise.server.schema_completions import Prompts
from groupwise.server.schema_messages import Conversation, OfferedTools
from groupwise.server.schema_openai import Sampling, TemplateOptions
from groupwise.server.wire import AtMost, OwnPart, OwnRequest, Unsupported

DEFAULT_TOKENS = 16  # theirs


class _VllmSampling(Sampling):
    """vLLM's sampling parameters."""

    logprobs: Annotated[int, Field(ge=0), AtMost("max_top_logprobs")] | None = None
    """The number of likeliest tokens that are returned in addition to the sampled one."""


class Further(_VllmSampling, OwnPart):
    """Holds the sampling parameters in `generation_kwargs`, which override the parameters next to it."""


class Drawn(_VllmSampling, OwnRequest):
    """Sampling parameters of a request."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = DEFAULT_TOKENS
    logprobs: Annotated[int, Field(ge=0), AtMost("max_top_logprobs")] | None = 0
    """The number of likeliest tokens that are returned in addition to the sampled one; null returns no
    log-probabilities."""
    generation_kwargs: Further | None = None

    images: Annotated[Any, Unsupported([])] = None
    structured_outputs_regex: Annotated[str, Field(min_length=1)] | None = None
    """A regular expression that each completion matches as a whole."""
    guided_decoding_regex: Annotated[str, Field(min_length=1)] | None = None
    """`structured_outputs_regex`, as TRL called it before 0.26."""

    def whole(self) -> Self:
        """Return it with what `generation_kwargs` says in its place."""
        further = self.generation_kwargs
        given = {} if further is None else {name: getattr(further, name) for name in further.model_fields_set}
        if further is not None and further.answer_grammar is not None:
            given = dict.fromkeys(self.forms) | given
        return self.model_copy(update=given)


class GenerateRequest(Drawn):
    """The body of POST /generate/."""

    prompts: Prompts
    """Texts or token ids, one or a list of either."""


class ChatsRequest(Drawn):
    """The body of POST /chat/."""

    messages: Annotated[list[Conversation], Field(min_length=1), AtMost("max_batch_completions")]
    """One or more conversations."""
    tools: OfferedTools | None = None
    chat_template_kwargs: TemplateOptions | None = None


class Drawings(Answer):
    """Answer with `n` completions of each prompt, by prompt; log-probabilities are [completion][token][alternative]."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[list[float]]] | None
    logprob_token_ids: list[list[list[int]]] | None


class LoraPath(OwnRequest):
    """An adapter in PEFT's layout, in a directory that this server can read."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    lora_int_id: int | None = None
    """Changes nothing: versions are counted here."""
    load_inplace: bool = False
    """/v1/load_lora_adapter: let it answer from now on what names no adapter."""
    base_model_name: str | None = None
    """Changes nothing: an adapter that does not fit the served model is refused in any case."""


class LoraName(OwnRequest):
    """An adapter by the name it was loaded under."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_int_id: int | None = None


class Done(Answer):
    """Answer to a command that was carried out, in the words that each client looks for."""

    status: str = "ok"
    message: str = ""
    success: bool = True


class WorldSize(Answer):
    world_size: int = 1
