"""Prompt sources (files, Hugging Face datasets, functions, generators) as one endless stream that can be resumed.

A row is a mapping with a prompt, a list of chat messages or a string (one message of the user), under `prompt` or
`messages`. `tools` may hold tool definitions, and every other column goes to the rewards by its name:

    {"prompt": "2+2?", "answer": "4"}
    {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}

All rows are read and checked when the source is opened, so that a bad row stops a run before a model is loaded. The
order of an epoch depends on (seed, epoch) only, so a cursor is an epoch, a position in it, and what before that is on
its way.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from groupwise.config.data import FILES, DataConfig, DatasetConfig, RunKind
from groupwise.config.hub import reading
from groupwise.config.load import load_object, with_folder
from groupwise.errors import ConfigError, DataError
from groupwise.tasks.data_source import data_source
from groupwise.tasks.row_formats import as_ours
from groupwise.tasks.tables import csv_rows, parquet_rows, row_of
from groupwise.types import Message, Prompt, RolloutGroup

ROLES = ("system", "developer", "user", "assistant", "tool")
PROMPT_KEYS = ("messages", "prompt")
ANSWER_KEYS = ("completion", "answer", "response", "output")
LIKELY_KEYS = ("question", "problem", "query", "instruction", "input", "text")  # in data of others; only suggested
_BUILDER = "one of another kind, or a directory of many, is read by a builder: source: json, args: {data_files: PATH}"
TOKENS = "prompt_token_ids"  # of rows to imitate and of pairs: the prompt as it was asked (`groupwise feedback export`)
RESERVED = ("prompts", "completions", "completion_ids")  # what rewards get under these names is not the dataset's


class Ticket(NamedTuple):
    """Names one drawing of a row: the epoch, and the position in its order. No two drawings have the same one."""

    epoch: int
    position: int


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A prompt on its way through sampling and training. `again`: it was so already when the run stopped."""

    ticket: Ticket
    prompt: Prompt
    again: bool = False


class PromptStream(Protocol):
    """What a loop draws prompts from: a PromptSource, or a Curriculum or an AdaptiveDifficulty around one."""

    def __len__(self) -> int: ...

    def issue(self, n: int) -> list[Issued]: ...

    def resolve(self, ticket: Ticket) -> None: ...

    def all(self, limit: int | None = None) -> list[Prompt]: ...

    def prompt(self, id: str) -> Prompt: ...

    def observe(self, groups: Sequence[RolloutGroup]) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    @property
    def epochs(self) -> float: ...

    @property
    def cursor(self) -> dict[str, Any]: ...

    def restore(self, cursor: Mapping[str, Any]) -> None: ...


class PromptSource:
    """Prompts in epochs, each a new order if `shuffle`.

    A prompt is issued with a ticket and, once it was trained on or given up, resolved; in any order. `cursor` holds the
    position up to which prompts were issued and the tickets that are not resolved. A stream restored from it issues
    those first, so that none is lost and none is trained twice, however far ahead others had come.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True):
        if not prompts:
            raise DataError("there are no prompts", hint="give at least one")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self._open: dict[Ticket, int] = {}  # issued, not resolved -> row; in the order in which they were issued
        self._again: list[Ticket] = []  # of these, the ones to be issued again, last first

    def __len__(self) -> int:
        """Number of prompts in an epoch."""
        return len(self._prompts)

    def issue(self, n: int) -> list[Issued]:
        """Return the next n prompts with their tickets; an epoch follows another, so a prompt can come twice."""
        issued: list[Issued] = []
        while len(issued) < n:
            again = bool(self._again)
            ticket = self._again.pop() if again else self._advance()
            issued.append(Issued(ticket=ticket, prompt=self._prompts[self._open[ticket]], again=again))
        return issued

    def resolve(self, ticket: Ticket) -> None:
        """Take note that the prompt is done with: after a restart it does not come again. Raises ValueError if it is
        not issued."""
        if ticket not in self._open or ticket in self._again:
            raise ValueError(f"{ticket} is not issued, or is resolved already; resolve each ticket of issue() once")
        del self._open[ticket]

    def all(self, limit: int | None = None) -> list[Prompt]:
        """Return the first `limit` prompts (None: all), in the order of the rows; the stream does not move."""
        return list(self._prompts[:limit])

    def prompt(self, id: str) -> Prompt:
        """Return the prompt of that id; the stream does not move. Raises DataError if there is none."""
        if id not in self._by_id:
            raise DataError(f"there is no prompt {id!r}", hint="resume with the dataset that the run was started with")
        return self._by_id[id]

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Scored groups; the order of this stream does not depend on them."""

    def metrics(self) -> dict[str, float]:
        """Nothing: every prompt is drawn once an epoch."""
        return {}

    @property
    def epochs(self) -> float:
        """How many epochs were issued."""
        return self._epoch + self._position / len(self._prompts)

    @property
    def cursor(self) -> dict[str, Any]:
        """Where the stream stands, for `restore`; goes through JSON."""
        unresolved = [list(ticket) for ticket in self._open]
        return {
            "epoch": self._epoch,
            "position": self._position,
            "rows": len(self._prompts),
            "unresolved": unresolved,
        }

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue where `cursor` was taken. Raises DataError when the dataset has another number of rows."""
        epoch, position, rows = (cursor.get(key, -1) for key in ("epoch", "position", "rows"))
        if rows != len(self._prompts):
            message = f"the cursor is of a dataset with {rows} rows; this one has {len(self._prompts)}"
            raise DataError(message, hint="resume with the dataset that the run was started with")
        unresolved = cursor.get("unresolved", ())
        tickets = [Ticket(*each) for each in unresolved if len(each) == 2]
        issued = all(0 <= each.position < rows and (0, 0) <= each < (epoch, position) for each in tickets)
        issued = issued and len(set(tickets)) == len(unresolved)
        if epoch < 0 or not 0 <= position <= rows or not issued:
            raise DataError(f"{dict(cursor)} is not a cursor; take one from PromptSource.cursor")
        self._epoch, self._position, self._order = epoch, position, self._order_of(epoch)
        orders = {each: self._order_of(each) for each in {ticket.epoch for ticket in tickets}}
        self._open = {ticket: orders[ticket.epoch][ticket.position] for ticket in tickets}
        self._again = tickets[::-1]

    def _advance(self) -> Ticket:
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        ticket = Ticket(self._epoch, self._position)
        self._open[ticket] = self._order[self._position]
        self._position += 1
        return ticket

    @cached_property
    def _by_id(self) -> dict[str, Prompt]:
        return {prompt.id: prompt for prompt in reversed(self._prompts)}  # the first, where ids repeat

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)  # a string seed is hashed with SHA-512: stable
        return order


class WrappedStream:
    """What a PromptStream around `source` does not do in a way of its own."""

    def __init__(self, source: PromptSource):
        self._source = source

    def __len__(self) -> int:
        """Number of prompts in an epoch of the source."""
        return len(self._source)

    def resolve(self, ticket: Ticket) -> None:
        """See `PromptSource.resolve`."""
        self._source.resolve(ticket)

    def all(self, limit: int | None = None) -> list[Prompt]:
        """See `PromptSource.all`."""
        return self._source.all(limit)

    def prompt(self, id: str) -> Prompt:
        """See `PromptSource.prompt`."""
        return self._source.prompt(id)

    @property
    def epochs(self) -> float:
        """How many epochs of the source were issued."""
        return self._source.epochs


def open_prompts(
    config: DatasetConfig, *, folder: str | Path = ".", seed: int = 0, cases: bool = False, kind: RunKind = "grpo"
) -> PromptSource:
    """Read and check every row of a dataset; with `cases`, of an environment or agent, a row may be without a prompt. A
    row of a run of kind sft must have an answer (`data.answer_key`), one of kind dpo a pair (`tasks.pairs`).

    Raises DataError naming the row and its key, and LoadError for a function that cannot be loaded.
    """
    prompts = [_read(row, id, config, cases=cases, kind=kind) for id, row in read_rows(config, folder=folder)]
    if not prompts:
        raise DataError(f"{config.source} has no rows", hint="a dataset needs at least one prompt")
    return PromptSource(prompts, seed=seed, shuffle=isinstance(config, DataConfig) and config.shuffle)


def _read(row: Any, id: str, config: DatasetConfig, *, cases: bool, kind: RunKind) -> Prompt:
    ours = as_ours(row, id=id, columns=config.columns, prompt_key=config.prompt_key)
    if kind == "dpo":
        from groupwise.tasks.pairs import to_pair  # which reads prompts as this does

        return to_pair(ours, id=id, config=config)
    if kind == "sft":
        return to_example(ours, id=id, config=config)
    return to_prompt(
        ours,
        id=id,
        prompt_key=config.prompt_key,
        raw=config.raw,
        system=config.system,
        case=cases,
        completion_only=config.completion_only,
    )


def read_rows(config: DatasetConfig, *, folder: str | Path = ".") -> Iterator[tuple[str, Any]]:
    """Return each row with its id, as it is written, up to `config.limit`. Raises DataError and LoadError."""
    read = {"file": _file_rows, "function": _function_rows, "dataset": _dataset_rows, "generated": _generated_rows}
    return itertools.islice(read[config.kind](config, Path(folder)), config.limit)


# ---- rows ----


def _file_rows(config: DatasetConfig, folder: Path) -> Iterator[tuple[str, Any]]:
    path = folder / Path(config.source).expanduser()
    if path.is_dir():
        raise DataError(f"{path.resolve()} is a directory; data.source names a file in it", hint=_BUILDER)
    if not path.is_file():
        beside = [each.name for each in path.parent.glob("*") if each.suffix in FILES and each.is_file()]
        similar = difflib.get_close_matches(path.name, beside, n=1)
        hint = f"did you mean {similar[0]}?" if similar else "a relative path starts at the config file's folder"
        raise DataError(f"there is no file {path.resolve()}", hint=hint)
    return _opened(path)


def _opened(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file. Raises DataError where this user may not read it."""
    try:
        yield from {".jsonl": _lines, ".json": _json_rows}.get(path.suffix, _table_rows)(path)
    except PermissionError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", hint=f"let user {os.geteuid()} read it (`ls -l {path}`)"
        ) from None


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield a list of objects, an object with one list of them, or lines after all."""
    try:
        value = json.loads(path.read_bytes())
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a second value after the first
            yield from _lines(path)
            return
        raise DataError(
            f"{path.name}: invalid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    lists = [each for each in value.values() if isinstance(each, list)] if isinstance(value, dict) else []
    if isinstance(value, dict) and not ({"prompt", "messages"} & value.keys()) and len(lists) == 1:
        value = lists[0]
    if not isinstance(value, list):
        value = [value]  # one line that is a row
    yield from ((f"{path.name}:{index}", row) for index, row in enumerate(value))


def _table_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield a table's rows, as `tables` reads them."""
    import pyarrow

    try:
        rows = csv_rows(path) if path.suffix == ".csv" else parquet_rows(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {error}", hint=f"is it a {path.suffix} file with one table?") from error
    yield from ((f"{path.name}:{index}", row) for index, row in enumerate(rows))


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            id = f"{path.name}:{number}"
            if not line.strip():
                continue
            try:
                yield id, json.loads(line.rstrip())
            except UnicodeDecodeError as error:
                raise DataError(f"{id}: not UTF-8 text (byte {error.start} of the line)") from None
            except json.JSONDecodeError as error:
                message = f"{id}: invalid JSON at column {error.colno}: {error.msg}"
                raise DataError(message, hint="each line is one JSON object, without line breaks inside") from None


def _function_rows(config: DatasetConfig, folder: Path) -> Iterator[tuple[str, Any]]:
    function = load_object(config.source, folder=folder)
    try:
        for index, row in enumerate(function(**with_folder(function, config.args, folder))):
            yield f"{config.source}:{index}", row
    except DataError:
        raise
    except Exception as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in config.args.items())
        raise DataError(f"{config.source}({arguments}) failed: {type(error).__name__}: {error}") from error


def _dataset_rows(config: DatasetConfig, folder: Path) -> Iterator[tuple[str, Any]]:
    local = folder / Path(config.source).expanduser()
    if local.is_file():
        raise DataError(
            f"data.source {config.source!r} is a file that ends with {local.suffix or 'nothing'!r}; files of rows end "
            f"with {', '.join(FILES)}",
            hint=_BUILDER,
        )
    try:
        import datasets  # pandas and pyarrow take a second to import, and most runs read JSON lines

        if (local / "dataset_info.json").is_file() or (local / "dataset_dict.json").is_file():
            dataset: Any = datasets.load_from_disk(str(local), **config.args)
        else:
            source = str(local) if local.exists() else config.source
            with reading(source):
                dataset = datasets.load_dataset(source, split=config.split or "train", **config.args)
    except Exception as error:
        hint = "a name on the Hugging Face hub, a directory, or a builder such as csv with args.data_files"
        message = f"cannot load the dataset {config.source!r}: {type(error).__name__}: {error}"
        raise DataError(message, hint=hint) from error
    if isinstance(dataset, datasets.DatasetDict):
        split = config.split or "train"
        if split not in dataset:
            raise DataError(f"{config.source} has no split {split!r}; it has {', '.join(map(str, dataset))}")
        dataset = dataset[split]
    elif config.split is not None and (local / "dataset_info.json").is_file():
        raise ConfigError(f"data.split {config.split!r} does not act: {config.source} was saved as a single split")
    yield from ((f"{config.source}:{index}", row_of(row)) for index, row in enumerate(dataset))


def _generated_rows(config: DatasetConfig, folder: Path) -> Iterator[tuple[str, Any]]:
    yield from data_source(config.source).rows(config)


def to_prompt(
    row: Any,
    *,
    id: str,
    prompt_key: str | None = None,
    raw: bool = False,
    system: str | None = None,
    case: bool = False,
    completion_only: bool = True,
) -> Prompt:
    """Return a row as a Prompt; a `case` without a prompt of its own has columns alone. Where a prompt ends with the
    assistant's words, `completion_only` says whether rewards see what continues them without them.

    A string is a message of the user, and plain text for a model without a chat template; `raw` makes it plain text for
    every model. Raises DataError naming `id` and the key that is wrong.
    """
    row = row_at(row, id)
    if case and prompt_key is None and all(row.get(key) is None for key in PROMPT_KEYS):
        return _case(row, id, system)
    key = prompt_key or _find_key(row, id)
    if key not in row:
        raise DataError(f"{id}: no column {key!r}; it has {', '.join(map(repr, row)) or 'none'}")
    columns = {name: value for name, value in row.items() if name not in (key, "tools")}
    if clash := [name for name in RESERVED if name in columns]:
        raise DataError(f"{id}: the column {clash[0]!r} has a name that rewards get from us; rename it")
    tools, value = row.get("tools"), row[key]
    text = value if isinstance(value, str) else None
    if text is not None:
        if not text.strip():
            raise DataError(f"{id}: {key!r} is an empty string; a prompt needs text")
        if raw and (system is not None or tools):
            extra = "tools need" if tools else "data.system needs"
            raise DataError(f"{id}: {extra} a chat prompt; with data.raw {key!r} is plain text")
        if raw:
            return Prompt(id=id, text=text, columns=columns)
        value = ({"role": "user", "content": text},)
    messages = _messages(value, f"{id}: {key}", answered=key == "messages")
    if system is not None:
        if messages[0]["role"] in ("system", "developer"):
            raise DataError(f"{id}: {key}[0] is a system message already; remove it or data.system")
        messages = (Message(role="system", content=system), *messages)
    text = None if len(messages) > 1 or tools else text  # without a template these would be lost
    prompt = Prompt(id=id, messages=messages, text=text, tools=_tools(tools, id), columns=columns)
    return replace(prompt, shows_opening=not completion_only and bool(prompt.opening))


def row_at(row: Any, id: str) -> Mapping[str, Any]:
    """Return the row, which must be an object. Raises DataError."""
    if not isinstance(row, Mapping):
        raise DataError(f"{id}: the row is a {type(row).__name__}; it must be an object such as {{'prompt': ...}}")
    return row


def to_example(row: Any, *, id: str, config: DatasetConfig) -> Prompt:
    """Return a row as a Prompt with the `answer` that supervised training learns.

    The answer is the column that `config.answer_key` names: a text, a message, or several. Without that key it is what
    the assistant says in `messages`, from its first message on; else the first of `ANSWER_KEYS`; else what the
    assistant says in another conversation. Raises DataError naming `id` and what is missing.
    """
    row = row_at(row, id)
    prompt_key = config.prompt_key or ("prompt" if TOKENS in row else _find_key(row, id))
    said = None if TOKENS in row else row.get(prompt_key)
    key = config.answer_key or next((each for each in ANSWER_KEYS if row.get(each) is not None), None)
    whole = config.answer_key is None and (key is None or prompt_key == "messages")  # the conversation has the answer
    if whole and isinstance(said, Sequence) and not isinstance(said, str):
        places = [i for i, each in enumerate(said) if _role(each) == "assistant"]
        if places and places[0]:
            first, last = places[0], places[-1]
            answer = [message_at(said[i], f"{id}: {prompt_key}[{i}]") for i in range(first, last + 1)]
            return replace(_asked({**row, prompt_key: said[:first]}, id, config), answer=tuple(answer))
    if key is None or row.get(key) is None:
        what = (
            f"no column {key!r}" if key else f"no answer: none of {', '.join(ANSWER_KEYS)}, and no assistant's message"
        )
        held = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{id}: {what}; the columns are {held}", hint="name the column in data.answer_key")
    value = row[key]
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        answer = [Message(role="assistant", content=str(value))]
        if not str(value).strip():
            raise DataError(f"{id}: {key!r} is an empty string; an answer needs text")
    else:
        listed = [value] if isinstance(value, Mapping) else value
        if not isinstance(listed, Sequence) or not listed:
            raise DataError(f"{id}: {key!r} is {value!r:.80}; it must be text, a message or a list of messages")
        answer = [message_at(each, f"{id}: {key}[{i}]") for i, each in enumerate(listed)]
        if _role(answer[-1]) != "assistant":
            raise DataError(f"{id}: {key!r} ends with a message of {_role(answer[-1])!r}; the last is the assistant's")
    return replace(_asked(row, id, config), answer=tuple(answer))


def _asked(row: Mapping[str, Any], id: str, config: DatasetConfig) -> Prompt:
    """Return the row's prompt; columns whose names rewards get from us are left out, being answers here."""
    if TOKENS in row:
        return prompt_of_tokens(row, id)
    kept = {name: value for name, value in row.items() if name not in RESERVED}
    return to_prompt(kept, id=id, prompt_key=config.prompt_key, raw=config.raw, system=config.system)


def prompt_of_tokens(row: Mapping[str, Any], id: str) -> Prompt:
    """Return the prompt of a row that has it as token ids, as what a server answered was asked. Raises DataError."""
    ids = row[TOKENS]
    if not isinstance(ids, Sequence) or not ids or not all(isinstance(each, int) and each >= 0 for each in ids):
        raise DataError(f"{id}: {TOKENS!r} is {ids!r:.80}; it must be a list of token ids")
    return Prompt(id=id, token_ids=tuple(ids), columns={"prompt": row.get("prompt")})


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _case(row: Mapping[str, Any], id: str, system: str | None) -> Prompt:
    """Return what an environment or agent gets, and makes a prompt of itself."""
    if system is not None:
        raise DataError(f"{id}: data.system needs a chat prompt, and the row has none; write it where the case is read")
    if clash := [name for name in RESERVED if name in row]:
        raise DataError(f"{id}: the column {clash[0]!r} has a name that rewards get from us; rename it")
    return Prompt(id=id, columns=dict(row))


def _find_key(row: Mapping[str, Any], id: str) -> str:
    found = [key for key in PROMPT_KEYS if row.get(key) is not None]
    if len(found) == 2:
        raise DataError(f"{id}: both 'messages' and 'prompt' are there", hint="choose one with data.prompt_key")
    if not found:
        message = f"{id}: no 'prompt' and no 'messages'; the columns are {', '.join(map(repr, row)) or 'none'}"
        likely = next((key for key in LIKELY_KEYS if isinstance(row.get(key), str | list)), None)
        otherwise = "name the column that holds the prompt in data.prompt_key"
        hint = f"is it {likely!r}? set data.prompt_key: {likely} (and eval.data's)" if likely else otherwise
        raise DataError(message, hint=hint)
    return found[0]


def _messages(value: Any, place: str, *, answered: bool) -> tuple[Message, ...]:
    """Return the messages of a prompt. Where the assistant's last one is an answer as a rule (`answered`), and not the
    beginning of one, it is refused."""
    if not isinstance(value, Sequence):
        raise DataError(f"{place} is {value!r:.80} ({type(value).__name__}); it must be a string or a list of messages")
    if not value:
        raise DataError(f"{place} is an empty list; a chat prompt needs at least one message")
    messages = tuple(message_at(each, f"{place}[{index}]") for index, each in enumerate(value))
    last = messages[-1]
    if last["role"] in ("user", "tool"):
        return messages
    if last["role"] != "assistant":
        role = last["role"]
        raise DataError(f"{place} ends with a message of {role!r}; the policy answers a 'user' or 'tool' message")
    if answered:
        raise DataError(
            f"{place} ends with a message of the assistant's, which as a rule is the answer",
            hint="learn the answers (kind: sft), or leave them out; what the policy is to continue is called 'prompt'",
        )
    if last.get("tool_calls") or not isinstance(last.get("content"), str):
        raise DataError(f"{place} ends with a message of the assistant's that is no text, which nothing can continue")
    return messages


def message_at(value: Any, place: str) -> Message:
    """Return a message of a conversation, without keys that are null. Raises DataError naming the `place`."""
    if not isinstance(value, Mapping):
        raise DataError(f"{place} is a {type(value).__name__}; a message is {{'role': ..., 'content': ...}}")
    message = {key: each for key, each in value.items() if each is not None}  # Arrow fills absent keys with null
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DataError(f"{place}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    if role == "assistant" and content is None and message.get("tool_calls"):
        return message  # type: ignore[return-value]
    parts = isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content)
    blank = not content and not (role == "tool" and content == "")  # a tool may have nothing to say
    if blank or not (isinstance(content, str) or parts):
        empty = content is None or content in ("", [])
        was = "missing or empty" if empty else f"a {type(content).__name__}"
        raise DataError(f"{place}.content is {was}; it must be text or a list of parts such as {{'type': 'text'}}")
    return message  # type: ignore[return-value]


def _tools(value: Any, id: str) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"{id}: 'tools' is {value!r}; it must be a list of tool definitions (JSON objects)")
    return tuple(dict(tool) for tool in value)
