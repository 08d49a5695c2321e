"""The rows of a run's data as prompts.

A row is a mapping with a prompt, a list of chat messages or a string (one message of the user), under `prompt` or
`messages`. `tools` may hold tool definitions, and every other column goes to the rewards by its name:

    {"prompt": "2+2?", "answer": "4"}
    {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}

`open_prompts` reads and checks all rows of one source or several, so that a bad row stops a run before a model is
loaded; of a set that is streamed it checks the first, and the others as they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.config.data import BUFFER, DataConfig, DatasetConfig, RowsConfig, RunKind
from groupwise.errors import DataError
from groupwise.pictures import COLUMNS, pictures_in
from groupwise.tasks.image_urls import AT_ONCE, fetched
from groupwise.tasks.mixture import MixedOrder
from groupwise.tasks.prompt_stream import PromptSource
from groupwise.tasks.row_formats import message_of
from groupwise.tasks.row_images import read_images, with_images
from groupwise.tasks.rows import RowCount, Rows
from groupwise.tasks.streamed_prompts import StreamedPrompts
from groupwise.types import Message, Prompt

ROLES = ("system", "developer", "user", "assistant", "tool")
PROMPT_KEYS = ("messages", "prompt")
ANSWER_KEYS = ("completion", "answer", "response", "output")
LIKELY_KEYS = ("question", "problem", "query", "instruction", "input", "text")  # in data of others; only suggested
TOKENS = "prompt_token_ids"  # of rows to imitate and of pairs: the prompt as it was asked (`groupwise feedback export`)
RESERVED = ("prompts", "completions", "completion_ids")  # what rewards get under these names is not the dataset's


def open_prompts(
    config: DatasetConfig, *, folder: str | Path = ".", seed: int = 0, cases: bool = False, kind: RunKind = "grpo"
) -> PromptSource | StreamedPrompts:
    """Read and check every row of a dataset, or with `streaming` the first of them; with `cases`, of an environment or
    agent, a row may be without a prompt. A row of a run of kind sft must have an answer (`data.answer_key`), one of
    kind dpo a pair (`tasks.pairs`).

    Raises DataError naming the row and its key, and LoadError for a function that cannot be loaded.
    """
    parts = [Rows(part, folder=folder, streaming=config.streaming) for part in config.parts]
    to_prompt = partial(_read, cases=cases, kind=kind, folder=Path(folder))
    shuffle = isinstance(config, DataConfig) and config.shuffle
    if isinstance(config, DataConfig) and config.streaming:
        buffer = (config.shuffle_buffer or BUFFER) if shuffle else 1
        weights = config.weights or (1.0,)
        return StreamedPrompts(parts, weights=weights, to_prompt=to_prompt, seed=seed, buffer=buffer)
    prompts, counts, weights = list[Prompt](), list[RowCount](), config.weights
    for index, rows in enumerate(parts):
        before = len(prompts)
        prompts += _prompts(rows, to_prompt)
        if len(prompts) == before:
            raise rows.empty()
        share = None if weights is None else weights[index] / sum(weights)
        counts.append(rows.count(len(prompts) - before, share=share))
    sizes = [each.used for each in counts]
    order = None if weights is None else MixedOrder(sizes, weights, seed=seed, shuffle=shuffle)
    return PromptSource(prompts, seed=seed, shuffle=shuffle, order=order, counts=counts)


def _prompts(rows: Rows, to_prompt: Callable[[RowsConfig, str, Any], Prompt]) -> list[Prompt]:
    """Return the rows of a source as prompts. Where images are fetched for them, several at once."""
    if not rows.config.images.allowed_hosts:
        return [to_prompt(rows.config, id, row) for id, row in rows]
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="groupwise-fetch")
    try:
        return list(pool.map(lambda each: to_prompt(rows.config, *each), rows))
    finally:
        pool.shutdown(cancel_futures=True)


def _read(config: RowsConfig, id: str, row: Any, *, cases: bool, kind: RunKind, folder: Path) -> Prompt:
    """Return a row in our words as a prompt."""
    row = fetched(row, config.images, id=id)
    if kind == "dpo":
        from groupwise.tasks.pairs import to_pair  # which reads prompts as this does

        return to_pair(row, id=id, config=config, folder=folder)
    if kind == "sft":
        return to_example(row, id=id, config=config, folder=folder)
    return to_prompt(
        row,
        id=id,
        prompt_key=config.prompt_key,
        raw=config.raw,
        system=config.system,
        case=cases,
        completion_only=config.completion_only,
        folder=folder,
    )


def to_prompt(
    row: Any,
    *,
    id: str,
    prompt_key: str | None = None,
    raw: bool = False,
    system: str | None = None,
    case: bool = False,
    completion_only: bool = True,
    folder: Path = Path(),
) -> Prompt:
    """Return a row as a Prompt, with its images (`tasks.row_images`; relative paths are from `folder`).

    A `case` without its own prompt has columns alone. Where a prompt ends with the assistant's words,
    `completion_only` says whether rewards see what continues them without them. A string is a message of the user, and
    plain text for a model without a chat template; `raw` makes it plain text for every model.

    Raises:
        DataError: names `id` and the key that is wrong.
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
    messages, columns = with_images(messages, columns, folder=folder, id=id)
    text = (
        None if len(messages) > 1 or tools or pictures_in(messages) else text
    )  # they would be lost without a template
    prompt = Prompt(id=id, messages=messages, text=text, tools=_tools(tools, id), columns=columns)
    return replace(prompt, shows_opening=not completion_only and bool(prompt.opening))


def row_at(row: Any, id: str) -> Mapping[str, Any]:
    """Return the row, which must be an object. Raises DataError."""
    if not isinstance(row, Mapping):
        raise DataError(f"{id}: the row is a {type(row).__name__}; it must be an object such as {{'prompt': ...}}")
    return row


def to_example(row: Any, *, id: str, config: RowsConfig, folder: Path = Path()) -> Prompt:
    """Return a row as a Prompt with the `answer` that supervised training learns.

    The answer is the column that `config.answer_key` names: a text, a message, or several. Without that key it is what
    the assistant says in `messages`, from its first message on; else the first of `ANSWER_KEYS`; else what the
    assistant says in another conversation. The columns' images are those of the whole conversation; an answer in a
    column of its own has its images in its parts. Raises DataError naming `id` and what is missing.
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
            every = tuple(message_at(said[i], f"{id}: {prompt_key}[{i}]") for i in range(last + 1))
            every, columns = with_images(every, {**row, prompt_key: None}, folder=folder, id=id)
            shown = {name: columns.pop(name) for name in COLUMNS if name in columns}
            prompt = asked({**columns, prompt_key: every[:first]}, id, config)
            return replace(prompt, answer=every[first:], columns={**prompt.columns, **shown})
    if key is None or row.get(key) is None:
        what = (
            f"no column {key!r}" if key else f"no answer: none of {', '.join(ANSWER_KEYS)}, and no assistant's message"
        )
        held = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{id}: {what}; the columns are {held}", hint="name the column in data.answer_key")
    answer = said_at(row, key, id)
    if isinstance(answer, str):
        if not answer.strip():
            raise DataError(f"{id}: {key!r} is an empty string; an answer needs text")
        answer = [Message(role="assistant", content=answer)]
    elif answer[-1]["role"] != "assistant":
        raise DataError(f"{id}: {key!r} ends with a message of {answer[-1]['role']!r}; the last is the assistant's")
    read = [read_images(message, where=f"{id}: {key}[{i}]", folder=folder) for i, message in enumerate(answer)]
    return replace(asked(row, id, config, folder=folder), answer=tuple(read))


def said_at(row: Mapping[str, Any], key: str, id: str) -> str | list[Message]:
    """Return what a column says, of an answer or of a completion: a text, as which a number counts, or messages, ours
    or ShareGPT's. Raises DataError."""
    value = row[key]
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, Sequence) or not listed:
        raise DataError(f"{id}: {key!r} is {value!r:.80}; it must be text, a message or a list of messages")
    ours = [message_of(each) if isinstance(each, Mapping) else each for each in listed]
    return [message_at(each, f"{id}: {key}[{i}]") for i, each in enumerate(ours)]


def asked(row: Mapping[str, Any], id: str, config: RowsConfig, *, plain: bool = False, folder: Path = Path()) -> Prompt:
    """Return the prompt of a row that has its answer, too: columns whose names rewards get from us are left out, being
    answers here. `plain` makes a text plain, as `data.raw` does. Raises DataError."""
    if TOKENS in row:
        return _prompt_of_tokens(row, id)
    kept = {name: value for name, value in row.items() if name not in RESERVED}
    return to_prompt(
        kept, id=id, prompt_key=config.prompt_key, raw=config.raw or plain, system=config.system, folder=folder
    )


def _prompt_of_tokens(row: Mapping[str, Any], id: str) -> Prompt:
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
    if role == "assistant" and content in (None, "", []) and message.get("tool_calls"):
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
