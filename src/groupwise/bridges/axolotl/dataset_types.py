"""Axolotl's dataset types of SFT and DPO as rows of ours: which columns a type reads, and what it makes of them.

    chat_template, sharegpt            a conversation                 messages, tools
    alpaca, alpaca:chat, ...           instruction, input, output     prompt and completion, which are plain text
    {field_instruction: ..., ...}      columns and formats of one's own, likewise
    chat_template.default, ...         a conversation and a pair      prompt, chosen, rejected
    chatml.intel, llama3.icr, ...      a question and a pair          likewise, in the template of that name

`rows` reads those of one entry of `datasets`, as a `data.source` does; where a type is not here, `reader_of` says what
to write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.bridges.axolotl.data import Part
from groupwise.bridges.axolotl.data import rows as written_rows
from groupwise.errors import DataError
from groupwise.tasks.tables import row_of

Kind = Literal["sft", "dpo"]
Row = Mapping[str, Any]
Reader = Callable[[Row], dict[str, Any] | None]

CHAT = ("chat_template", "chat_template.load")
SHAREGPT = "sharegpt"
EXAMPLES = "write rows with messages (type: chat_template), or with instruction and output (type: alpaca)"
PAIRS = (
    "write rows with messages, chosen and rejected (type: chat_template.default), or with prompt, chosen and rejected"
)
PLAIN_TEXT = "plain text has no answer to learn"
ROLES = {
    "human": "user",
    "user": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "system": "system",
    "tool": "tool",
}
KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content")  # of a message, besides its role and content

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A plain-text format of instructions: the system message, and the rest with and without an input."""

    system: str
    with_input: str
    without_input: str


FORMATS: Mapping[str, Format] = {
    "alpaca": Format(
        system="{system}\n\n",
        with_input="### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        without_input="### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "alpaca:chat": Format(
        system="SYSTEM: {system}\n",
        with_input="USER: {instruction}\n{input}\nASSISTANT:",
        without_input="USER: {instruction}\nASSISTANT:",
    ),
    "alpaca:chatml": Format(
        system="<|im_start|>system\n{system}<|im_end|>\n",
        with_input="<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        without_input="<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "alpaca:phi": Format(
        system="<|system|>\n{system}<|end|>\n",
        with_input="<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        without_input="<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    ),
}

TEMPLATES: dict[str, str] = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
}
"""The chat templates in which the types `chatml.*` and `llama3.*` write their prompts."""

NAMED_TEMPLATES = TEMPLATES | {"llama3": TEMPLATES["llama3"].replace("{{ m.content }}", "{{ m.content | trim }}")}
"""What `chat_template: chatml` and `chat_template: llama3` stand for."""


class TypeNotHere(ValueError):
    """The dataset's type is not supported; the message says why, and what to write."""


# ---- as sources of a run ----


def rows(
    *,
    kind: Kind,
    dataset: Mapping[str, Any],
    folder: str = ".",
    part: Part | None = None,
    held_out: float = 0.0,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of an entry of `datasets`: of SFT messages, or prompt and completion, and of DPO prompt, chosen
    and rejected. Those in which nothing would be learned are left out, as there.

    Args:
        part, held_out, seed: see `axolotl.data.rows`.

    Raises:
        DataError: a row is not of the type; names it. Or a part would be empty.
        TypeNotHere: the entry's type is not read.
    """
    read = reader_of(kind, dataset)
    untyped = {**dataset, "type": None}  # which names no transform here
    written = written_rows(datasets=[untyped], folder=folder, part=part, held_out=held_out, seed=seed)
    for index, each in enumerate(written):
        row = row_of(each)
        try:
            made = read(row)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            what = f"there is no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            message = f"{dataset['path']}:{index} is no row of type {dataset.get('type')}: {what}"
            raise DataError(message, hint=f"the columns are {', '.join(map(repr, row))}") from error
        if made is not None:
            yield made


def reader_of(kind: Kind, dataset: Mapping[str, Any]) -> Reader:
    """Return the converter of the rows of an entry of `datasets` to ours. Raises TypeNotHere, which says what to
    write."""
    return example_reader(dataset) if kind == "sft" else pair_reader(dataset)


# ---- examples ----


def example_reader(dataset: Mapping[str, Any]) -> Reader:
    """Return the converter of an SFT dataset's rows to ours. Raises TypeNotHere."""
    kind = dataset.get("type")
    if isinstance(kind, Mapping):
        return _own_format(kind)
    if kind in CHAT:
        return _Conversations.of(dataset).example
    if kind == SHAREGPT:
        shared = {"field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"}}
        return _Conversations.of(shared | dict(dataset)).example
    if (written := FORMATS.get("alpaca" if kind == "alpaca:instruct" else str(kind))) is not None:
        return _alpaca(written)
    if kind is None or str(kind).partition(".")[0] in ("completion", "input_output", "pretrain"):
        raise TypeNotHere(f"{PLAIN_TEXT if kind else 'type is missing'}: {EXAMPLES}")
    raise TypeNotHere(f"{kind} is not read: {EXAMPLES}")


def is_chat(dataset: Mapping[str, Any]) -> bool:
    """Return whether an entry's rows are conversations, which a chat template renders."""
    kind = str(dataset.get("type") or "")
    return kind in CHAT or kind == SHAREGPT or kind.partition(".")[0] in ("chat_template", *TEMPLATES)


def roles_of(dataset: Mapping[str, Any]) -> Mapping[str, str]:
    """Return our role of each that the messages of an entry say."""
    said = dataset.get("roles") or {}
    return {theirs: ours for ours, those in said.items() for theirs in those} or ROLES


@dataclass(frozen=True, kw_only=True)
class _Conversations:
    """Reads the conversations in the rows of an entry, by the names that the entry gives columns, properties and
    roles."""

    column: str
    system: str
    tools: str
    properties: Mapping[str, str]  # what we call it -> what a message calls it
    roles: Mapping[str, str]  # what a message says -> our role
    drops_system: bool

    @classmethod
    def of(cls, dataset: Mapping[str, Any]) -> _Conversations:
        properties = {
            "role": dataset.get("message_field_role") or "role",
            "content": dataset.get("message_field_content") or "content",
        } | dict(dataset.get("message_property_mappings") or {})
        if thought := dataset.get("field_thinking"):
            properties.setdefault(dataset.get("template_thinking_key") or "reasoning_content", thought)
        return cls(
            column=dataset.get("field_messages") or "messages",
            system=dataset.get("field_system") or "system",
            tools=dataset.get("field_tools") or "tools",
            properties=properties,
            roles=roles_of(dataset),
            drops_system=bool(dataset.get("drop_system_message")),
        )

    def example(self, row: Row) -> dict[str, Any] | None:
        """Return the conversation of a row; None where the assistant says nothing in it."""
        if row.get("images") or row.get("image"):
            raise ValueError("it has images, and rows are texts")
        messages = self.messages(row)
        if not any(message.get("role") == "assistant" for message in messages):
            return None
        tools = row.get(self.tools)
        return {"messages": messages} | ({"tools": tools} if tools else {})

    def messages(self, row: Row) -> list[dict[str, Any]]:
        """Return the messages of a row, the first of them the row's own system message, if it has one."""
        written = row[self.column]
        turns = json.loads(written) if isinstance(written, str) else written
        messages = [self.message(turn) for turn in turns]
        if row.get(self.system) and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": row[self.system]})
        return messages[1:] if self.drops_system and messages[0].get("role") == "system" else messages

    def message(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in our words."""
        named = {ours: turn[theirs] for ours, theirs in self.properties.items() if turn.get(theirs) is not None}
        taken = {*self.properties, *self.properties.values()}
        rest = {key: turn[key] for key in KEPT if key not in taken and turn.get(key) is not None}
        return {**named, "role": self.roles.get(named.get("role", ""), named.get("role")), **rest}


def _alpaca(written: Format) -> Reader:
    def read(row: Row) -> dict[str, Any] | None:
        more = row.get("input")
        system = written.system.format(system=_WITH_INPUT if more else _WITHOUT_INPUT)
        turn = written.with_input if more else written.without_input
        asked = turn.format(instruction=row["instruction"], input=more)
        return _answered(f"{system}{asked}", row["output"])

    return read


def _answered(prompt: str, output: Any) -> dict[str, Any] | None:
    """Return a prompt with its completion; None where that is empty, so that nothing would be learned."""
    return {"prompt": prompt, "completion": output} if output is not None and str(output).strip() else None


def _own_format(said: Mapping[str, Any]) -> Reader:
    """Return the reader of a type that is written out. Raises TypeNotHere for a format that cannot be filled in."""
    known = ("system_prompt", "system_format", "format", "no_input_format")
    columns = {each: said.get(f"field_{each}") or each for each in ("system", "instruction", "input", "output")}
    if odd := sorted(said.keys() - {*known, *(f"field_{each}" for each in columns)}):
        raise TypeNotHere(f"{odd[0]} is no key of a type of one's own: {', '.join(known)} and field_* are")
    system_format = said.get("system_format") or "{system}"
    with_input = said.get("format") or "{instruction} {input} "
    without = said.get("no_input_format") or "{instruction} "
    _fill(system_format, system="")
    _fill(with_input, instruction="", input="")
    _fill(without, instruction="")

    def read(row: Row) -> dict[str, Any] | None:
        system = row.get(columns["system"]) or said.get("system_prompt")
        before = _fill(system_format, system=system) if system else ""
        asked, more = row[columns["instruction"]], row.get(columns["input"])
        turn = _fill(with_input, instruction=asked, input=more) if more else _fill(without, instruction=asked)
        return _answered(f"{before}{turn}", row.get(columns["output"]))

    return read


def _fill(written: str, **values: Any) -> str:
    """Return a format with its values. Raises TypeNotHere where it has others."""
    try:
        return written.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        named = ", ".join(f"{{{name}}}" for name in values)
        raise TypeNotHere(f"the format {written!r} cannot be filled in: it may have {named}") from error


# ---- pairs ----


def pair_reader(dataset: Mapping[str, Any]) -> Reader:
    """Return the converter of a DPO dataset's rows to our pairs. Raises TypeNotHere."""
    kind = dataset.get("type")
    if isinstance(kind, Mapping):
        return _own_pairs(kind)
    if kind is None or kind in ("passthrough", "passthrough.default"):
        return lambda row: {key: row[key] for key in ("prompt", "chosen", "rejected") if row.get(key) is not None}
    of, _, form = str(kind).partition(".")
    if of == "chat_template" and form in ("", "default", "argilla_chat"):
        return _ConversationPairs(dataset, whole=form == "argilla_chat")
    if of in TEMPLATES and (form or "default") in QUESTIONS:
        return QUESTIONS[form or "default"]
    raise TypeNotHere(f"{kind} is not read: {PAIRS}")


def template_of(dataset: Mapping[str, Any]) -> str | None:
    """Return the name of the template in which an entry's type writes its prompts; None where it names none."""
    kind = dataset.get("type")
    of = kind.partition(".")[0] if isinstance(kind, str) else ""
    return of if of in TEMPLATES else None


class _ConversationPairs:
    """Reads a conversation, in `field_messages` or, `whole`, in each completion, and a pair of messages."""

    def __init__(self, dataset: Mapping[str, Any], *, whole: bool):
        self._read, self._whole = _Conversations.of(dataset), whole
        self._columns = tuple(dataset.get(f"field_{each}") or each for each in ("chosen", "rejected"))

    def __call__(self, row: Row) -> dict[str, Any]:
        chosen, rejected = (self._said(row[column]) for column in self._columns)
        if self._whole:
            prompt = [self._read.message(turn) for turn in row[self._columns[0]][:-1]]
        elif isinstance(asked := row[self._read.column], str):
            prompt = [{"role": "user", "content": asked}]
        else:
            prompt = [self._read.message(turn) for turn in asked]
        return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}

    def _said(self, written: Any) -> dict[str, Any]:
        """Return the message that is learned: a text, a message, or the last of several."""
        if isinstance(written, str):
            return {"role": "assistant", "content": written}
        return self._read.message(written if isinstance(written, Mapping) else written[-1])


def _asked(row: Row, prompt: str, chosen: Any, rejected: Any) -> dict[str, Any]:
    """Return a question, after the row's system message if it has one, and the pair."""
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return {"prompt": [*system, {"role": "user", "content": prompt}], "chosen": chosen, "rejected": rejected}


def _of_column(column: str) -> Reader:
    return lambda row: _asked(row, row[column], row["chosen"], row["rejected"])


def _of_any_column(row: Row) -> dict[str, Any]:
    asked = next(key for key in ("prompt", "input", "question", "instruction") if key in row or key == "instruction")
    chosen, rejected = (key if key in row else f"{key}_response" for key in ("chosen", "rejected"))
    return _asked(row, row[asked], row[chosen], row[rejected])


def _of_exchanges(row: Row) -> dict[str, Any]:
    """Return the first question of two conversations, and the first answer in each."""
    chosen, rejected = (_contents(row[key]) for key in ("chosen", "rejected"))
    return {"prompt": [{"role": "user", "content": chosen[0]}], "chosen": chosen[1], "rejected": rejected[1]}


def _of_binarized(row: Row) -> dict[str, Any]:
    return _asked(row, row["prompt"], _contents(row["chosen"])[1], _contents(row["rejected"])[1])


def _contents(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    return [turn["content"] for turn in turns[:2]]


QUESTIONS: Mapping[str, Reader] = {
    "default": _of_any_column,
    "intel": _of_column("question"),
    "icr": _of_column("input"),
    "prompt_pairs": _of_column("prompt"),
    "argilla_chat": _of_exchanges,
    "ultra": _of_binarized,
}
"""What follows the dot in `chatml.` and `llama3.`."""


def _own_pairs(said: Mapping[str, Any]) -> Reader:
    """Return the reader of a type of pairs that is written out. Raises TypeNotHere."""
    columns = {each: said.get(f"field_{each}") or each for each in ("system", "prompt", "chosen", "rejected")}
    for each in ("chosen", "rejected"):
        if (said.get(f"{each}_format") or f"{{{each}}}") != f"{{{each}}}":
            what = f"{each}_format {said[f'{each}_format']!r} is not read: a completion is its column's text"
            raise TypeNotHere(f"{what}, and the end of the turn is added; write {{{each}}}")
    written = said.get("prompt_format") or "{prompt}"
    _fill(written, system="", prompt="")

    def read(row: Row) -> dict[str, Any]:
        prompt = _fill(written, system=row.get(columns["system"]) or "", prompt=row[columns["prompt"]])
        return {"prompt": prompt, "chosen": row[columns["chosen"]], "rejected": row[columns["rejected"]]}

    return read
