"""The common form of the dialects: a request as OpenAI's chat completions have it, a reply as parts and an ending.

    a body of a dialect  ->  `DialectRequest.chat()`: the same as a body of /v1/chat/completions  ->  the policy
    the policy's reply   ->  `ReplyPart`s and an `Ending`  ->  a `Writer`: events of the dialect, and the whole answer

The chat form is what the live server and the endpoint of episodes check, render and sample, each by its own rules; a
dialect only translates. A `Writer` is fed the parts as they come, also where nothing is streamed, so that the events of
a stream add up to the whole answer.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import ErrorType

from groupwise.errors import GrammarError, GroupwiseError, RequestError
from groupwise.model.chat import decode
from groupwise.model.reply_formats.known import format_of
from groupwise.types import Completion, FinishReason, Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.reply_formats.parser import ReplyPart

MOST_MESSAGES = 1 << 16  # messages, items or blocks of one list; a server's own limits are lower
LONGEST_SHOWN = 64  # characters of a value that an error repeats
NEARLY = 0.8  # how similar to ours a name is, of 1, that is a slip
MOST_SLIPS = 64  # unknown fields that are compared with ours
PYDANTIC = frozenset(get_args(ErrorType))  # the codes of errors that are not ours
PASSED_ON = ("adapter", "adapters", "ignore_eos", "min_p", "seed", "stop_token_ids", "top_k")
SYSTEM = ("system", "developer")  # roles of those who say how to answer

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]  # of what is offered; a call has any
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
CallId = Annotated[str, Field(max_length=256)]


# ---- requests ----
class Strict(BaseModel):
    """A body, or a piece of one: numbers are not read from strings, true is not a number, and NaN is refused."""

    model_config = ConfigDict(
        strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class BodyPart(Strict):
    """A piece of a body. What it does not know is ignored: messages and blocks come from many clients."""

    model_config = ConfigDict(extra="ignore")


class Refused(NamedTuple):
    """An option that is known and not offered: the values that change nothing, and what to do instead."""

    neutral: tuple[Any, ...] = ()
    hint: str = "leave it out"


class DialectRequest(BodyPart):
    """A body of a dialect. Fields that it does not know are ignored, but not misspelt ones."""

    model_config = ConfigDict(extra="allow")

    refused: ClassVar[Mapping[str, Refused]] = {}
    bookkeeping: ClassVar[frozenset[str]] = frozenset()
    """Fields that are ignored on purpose: the same is sampled without them."""
    names: ClassVar[Mapping[str, str]] = {}
    """Fields of the chat form -> what they are called in the dialect. Under their old names they are refused."""

    @model_validator(mode="after")
    def _nothing_refused(self) -> DialectRequest:
        given = self.model_extra or {}
        unknown = [name for name in given if name not in self.refused and name not in PASSED_ON]
        check_spelling(self, unknown, known=self.bookkeeping)
        for name, meant in self.names.items():
            if given.get(name) is not None:
                shown = "{name} is a field of /v1/chat/completions, and has another name here"
                raise fault("invalid_value", shown, name=name, param=name, hint=f"use {meant}")
        for name, option in self.refused.items():
            value = given.get(name)
            if value is not None and not any(type(value) is type(same) and value == same for same in option.neutral):
                raise fault(
                    "unsupported_parameter",
                    "{name} is not supported by this server",
                    name=name,
                    param=name,
                    hint=option.hint,
                )
        return self

    def chat(self) -> dict[str, Any]:
        """Return the same as a body of /v1/chat/completions. Raises RequestError."""
        raise NotImplementedError

    @property
    def passed_on(self) -> dict[str, Any]:
        """Fields of the chat form that the dialect does not have, and that mean here what they mean there."""
        return {name: value for name, value in (self.model_extra or {}).items() if name in PASSED_ON}


def check_spelling(body: BaseModel, unknown: Sequence[str], *, known: Container[str]) -> None:
    """Raise a fault for one of the `unknown` fields that is nearly a field of `body`, unless it is `known`."""
    for name in unknown[:MOST_SLIPS]:
        meant = difflib.get_close_matches(name[:LONGEST_SHOWN], type(body).model_fields, n=1, cutoff=NEARLY)
        if meant and name not in known:
            hint, shown = f"did you mean {meant[0]}?", repr(name[:LONGEST_SHOWN])
            raise fault("invalid_value", "{name} is unknown", name=shown, param=name, hint=hint)


R = TypeVar("R", bound=BaseModel)


def fault(code: str, message: str, **context: Any) -> PydanticCustomError:
    """Return the error for a validator to raise. `{name}` in the message stands for `context[name]`.

    Of the context, `hint` becomes the error's hint. `param` names the field inside the model that is at fault; the
    message is then a whole sentence. Without it the sentence begins with the field: "n", "is 500; ...".
    """
    return PydanticCustomError(code, message, context)  # pyright: ignore[reportArgumentType]


def check_finite(value: Any) -> Any:
    """Return `value` if JSON can have every number in it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise fault("invalid_value", "holds {value}, which is not a JSON number", value=str(value))
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            check_finite(item)
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(check_finite)]  # what is passed on as it is


class FailFast:
    """Annotated[list[T], FailFast()]: the first bad item ends the check; a million of them need not be told apart."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}  # pyright: ignore[reportReturnType]


def _shape(content: Any) -> str:
    return "parts" if isinstance(content, list) else "text"


TEXT_OR_PARTS = Discriminator(_shape)
"""Tells `Annotated[str, Tag("text")]` from `Annotated[list[...], Tag("parts")]`: errors then speak of one of them."""


def unknown_kind(value: Any, known: Sequence[str], says: str, hint: str, *, code: str = "unsupported_content") -> Any:
    """Return `value`, unless it is an object whose `type` is none of the `known`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in known:
        shown = kind if len(kind) <= LONGEST_SHOWN else f"{kind[: LONGEST_SHOWN - 3]}..."
        raise fault(code, says, kind=repr(shown), hint=hint)
    return value


def read(body: bytes, model: type[R]) -> R:
    """Return a body, checked. Raises RequestError."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx") or {}
    inside = [context["param"]] if context.get("param") else []
    where = ".".join(map(str, (*first["loc"], *inside))) or "the body"
    message = first["msg"] if inside and not first["loc"] else f"{where}: {first['msg']}"
    code = None if first["type"] in PYDANTIC else first["type"]
    raise RequestError(message, hint=context.get("hint"), field=where, code=code)


def renamed(error: RequestError | GrammarError, names: Mapping[str, str]) -> RequestError | GrammarError:
    """Return an error about the chat form in the words of a dialect, whose `names` its fields have."""
    field, new = error.field or "", copy.copy(error)
    new.field = path_of(field, names)
    new.message = new.field + error.message.removeprefix(field) if error.message.startswith(field) else error.message
    new.args = (new.message,)
    return new


def path_of(field: str, names: Mapping[str, str]) -> str:
    """Return the path to a field of the chat form, as a dialect has it: functions of tools and schemas of formats are
    no objects of their own there."""
    root = field.partition(".")[0].partition("[")[0]
    rest = field[len(root) :]
    if root == "tools":
        name, function, of_function = rest.partition(".function")
        if function and of_function.startswith(".parameters"):
            of_function = f".{names.get('parameters', 'parameters')}" + of_function.removeprefix(".parameters")
        rest = name + of_function
    elif root == "response_format":
        rest = rest.replace(".json_schema", "", 1)
    return names.get(root, root) + rest


def grammar_of(grammar: Grammar, names: Mapping[str, str]) -> Grammar:
    """Return the same grammar, of which errors speak in the words of a dialect."""
    parts = tuple((name, grammar_of(part, names)) for name, part in grammar.parts)
    return replace(grammar, field=path_of(grammar.field, names), parts=parts)


def joined(texts: Sequence[str]) -> str:
    """Return a message's blocks as its text, each on its own line."""
    return "\n".join(texts)


def image_part(url: str) -> dict[str, Any]:
    """Return a part of the chat form that is an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def together(contents: Sequence[str | Sequence[dict[str, Any]]], *, between: str = "\n") -> str | list[dict[str, Any]]:
    """Return contents of the chat form, each a text or parts, as one: a text, unless there are images."""
    parts: list[dict[str, Any]] = []
    for content in contents:
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if parts and part["type"] == parts[-1]["type"] == "text":
                parts[-1] = {"type": "text", "text": f"{parts[-1]['text']}{between}{part['text']}"}
            else:
                parts.append(part)
    if all(part["type"] == "text" for part in parts):
        return parts[0]["text"] if parts else ""
    return parts


def one_system(system: str, said: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of the chat form with one system message, at the head, as chat templates have it: `system` and
    those that `said` begins with. Later ones, in which harnesses remind the model, are the user's."""
    begun = next((i for i, message in enumerate(said) if message["role"] not in SYSTEM), len(said))
    head = [content for content in (system, *(message["content"] for message in said[:begun])) if content]
    later = [{**each, "role": "user"} if each["role"] in SYSTEM else each for each in said[begun:]]
    return merged([*([{"role": "system", "content": together(head)}] if head else []), *later])


def merged(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of the chat form in which neighbours that one speaker said are one, as chat templates want it."""
    said: list[dict[str, Any]] = []
    for message in messages:
        before = said[-1] if said else None
        if before is None or before["role"] != message["role"] or message["role"] not in ("user", "assistant"):
            said.append(dict(message))
        elif message["role"] == "user":
            before["content"] = together([before["content"], message["content"]])
        else:
            said[-1] = _both(before, message)
    return said


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return two messages of the assistant's as one."""
    content = f"{first.get('content') or ''}{second.get('content') or ''}"
    thoughts = [each["reasoning_content"] for each in (first, second) if each.get("reasoning_content")]
    return assistant(content, joined(thoughts), [*first.get("tool_calls", ()), *second.get("tool_calls", ())])


def assistant(content: str, thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return a message of the assistant's in the chat form."""
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the chat form."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# ---- replies ----
@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a reply: `stop`, `length` or `tool_calls`; `stop` is the stop string that ended it, if one did; `full`
    says that it was cut where the context ends, before it had as many tokens as it might have."""

    finish_reason: str
    stop: str | None = None
    full: bool = False
    prompt_tokens: int
    completion_tokens: int
    thought_tokens: int = 0
    cached_tokens: int = 0
    completion: Completion


class StreamEvent(NamedTuple):
    """A server-sent event. Without a `name` it is data alone."""

    name: str | None
    data: Mapping[str, Any]

    @property
    def bytes(self) -> bytes:
        head = "" if self.name is None else f"event: {self.name}\n"
        return f"{head}data: {json.dumps(self.data)}\n\n".encode()


def bytes_of(events: Sequence[StreamEvent]) -> bytes:
    """Return the events as bytes to send."""
    return b"".join(event.bytes for event in events)


class Writer(Protocol):
    """Writes a reply in a dialect: the events of its stream, and the whole answer that they make."""

    def open(self, prompt_tokens: int) -> list[StreamEvent]:
        """Return the events before the first token."""
        ...

    def push(self, parts: Sequence[ReplyPart]) -> list[StreamEvent]:
        """Return the events for the next parts of the reply."""
        ...

    def close(self, ending: Ending) -> list[StreamEvent]:
        """Return the events that end a whole reply; `answer` is set from here on."""
        ...

    def fail(self, error: GroupwiseError) -> list[StreamEvent]:
        """End the stream without the rest of the reply."""
        ...

    @property
    def answer(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        ...


def ending_of(
    completion: Completion,
    *,
    called: bool,
    stop: Sequence[str],
    prompt_tokens: int,
    context: int,
    most: int | None,
    thinks: bool,
    tokenizer: PreTrainedTokenizerBase,
) -> Ending:
    """Return how a completion ended. `called`: it has tool calls; `most`: the tokens that it might have had by what was
    asked; `thinks`: its prompt opened a thought."""
    reason, length = completion.finish_reason, len(completion.token_ids)
    return Ending(
        finish_reason="tool_calls" if called and reason is FinishReason.STOP else reason.value,
        stop=stopped_by(completion, stop, tokenizer),
        full=reason is FinishReason.LENGTH and prompt_tokens + length >= context and (most is None or length < most),
        prompt_tokens=prompt_tokens,
        completion_tokens=length,
        thought_tokens=thought_tokens(completion, thinks=thinks, tokenizer=tokenizer),
        cached_tokens=completion.cached_tokens or 0,
        completion=completion,
    )


def stopped_by(completion: Completion, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the stop string that ended a completion, which its text lacks and its tokens have; None where none did."""
    if not stop or completion.finish_reason is not FinishReason.STOP:
        return None
    rest = decode(completion.token_ids, tokenizer)[len(completion.text) :]
    return max((each for each in stop if rest.startswith(each)), key=len, default=None)


def thought_tokens(completion: Completion, *, thinks: bool, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many of a completion's tokens are its thought, its markers among them."""
    text, ids, marks = completion.text, completion.token_ids, format_of(tokenizer).thought
    if not thinks and not text.lstrip().startswith(marks.start):
        return 0
    if marks.end not in text:
        return len(ids)
    low, high = 0, len(ids)  # the first `high` tokens have the end of the thought, the first `low` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if marks.end in decode(ids[:middle], tokenizer) else (middle, high)
    return high
