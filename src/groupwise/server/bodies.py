"""Parses the bytes of a body into a validated model, or refuses them with one clear 400.

    read_body     what a route calls: content type, bytes, model
    parse_body    bytes -> model, without a request

Refused as `invalid_json`: what is not JSON in UTF-8, NaN and Infinity, lone surrogates, nesting without end, and a key
that stands twice in an object (of two rewards, or two system prompts, which one counts?). Refused as `invalid_value`,
or with its own code: what the model does not take. `param` is the JSON path of the field; a value is repeated
shortly.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from pydantic_core.core_schema import ErrorType
from starlette.requests import Request as HTTPRequest

from groupwise.config.serve import ServeConfig
from groupwise.config.yaml import dotted, key_paths
from groupwise.errors import MediaTypeError, RequestError
from groupwise.server.errors import echo, printable

M = TypeVar("M", bound=BaseModel)

Path = tuple[str | int, ...]

IN_A_THREAD = 1 << 18  # bytes from which parsing would be felt by other requests

MAX_KEYS = 4096  # of one object

MAX_OBJECTS = 1 << 18  # of one body: a million small ones would take a gigabyte to refuse

MOST_DIGITS = 4300  # of a number: Python's limit for integers

SHOWN = 3  # problems told at once

_PYDANTIC = frozenset(get_args(ErrorType))

_ADAPTER = "^[A-Za-z0-9][A-Za-z0-9._-]"  # how the pattern of an adapter's name begins

_NAMED = "a name is 1 to 64 of A-Z a-z 0-9 . _ - starting with a letter or digit"


async def read_body(request: HTTPRequest, model: type[M], *, optional: bool = False) -> M:
    """Return the body as a `model`; with `optional`, an empty one counts as `{}`. The raw bytes stay in
    `request.body()`. A model whose limits the configuration sets is read by `Reader.read_json`.

    Raises:
        MediaTypeError: the content type is not JSON.
        BodyTooLargeError, SlowBodyError: the guard's limits, while reading.
        RequestError: malformed JSON, or the model refuses it; with `param`, `code` and `hint`.
    """
    raw = await request.body()
    if optional and not raw:
        raw = b"{}"
    else:
        check_content_type(request)
    if len(raw) > IN_A_THREAD:
        return await asyncio.to_thread(parse_body, raw, model)
    return parse_body(raw, model)


def check_content_type(request: HTTPRequest, *, wanted: str = "application/json") -> None:
    """Raise MediaTypeError unless the request says that its body is `wanted`."""
    given = request.headers.get("content-type", "")
    kind, _, parameters = given.partition(";")
    charset = re.search(r'charset="?([\w-]+)', parameters, re.IGNORECASE)
    if kind.strip().lower() != wanted:
        raise MediaTypeError(
            f"the content type is {echo(given) if given else 'missing'}; this route reads {wanted}",
            hint=f"send the header Content-Type: {wanted}",
        )
    if charset and charset[1].lower() not in ("utf-8", "utf8"):
        raise MediaTypeError(f"the charset is {echo(charset[1])}; JSON is UTF-8", hint="encode the body as UTF-8")


def parse_body(raw: bytes, model: type[M], config: ServeConfig | None = None) -> M:
    """Parse `raw` as a `model`, within the limits of `config`. Raises RequestError."""
    _scan(raw)
    try:
        return model.model_validate_json(raw, context=config or ServeConfig())
    except ValidationError as error:
        problem = _explain(error, raw, model)
    raise problem  # here, so that it does not keep the error, and with it all that was parsed


# ---- malformed JSON ----
class _Refused(ValueError):
    """Valid for Python's parser, not for us."""


def _scan(raw: bytes) -> None:
    """Refuse what pydantic's parser lets through: NaN, repeated keys, huge and countless objects."""
    objects = 0

    def constant(name: str) -> None:
        raise _Refused(f"{name} is not JSON; there is no such number")

    def members(pairs: list[tuple[str, Any]]) -> None:
        nonlocal objects
        objects += 1
        if objects > MAX_OBJECTS:
            raise _Refused(f"it has more than {MAX_OBJECTS} objects; send several smaller requests")
        if len(pairs) > MAX_KEYS:
            raise _Refused(f"an object has {len(pairs)} keys; the most is {MAX_KEYS}")
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {echo(key)} stands twice in one object; keep one")
            seen.add(key)

    try:  # numbers come to nothing: millions of them would be millions of objects
        json.loads(
            raw.decode(), object_pairs_hook=members, parse_constant=constant, parse_int=_digits, parse_float=_nothing
        )
    except UnicodeDecodeError as error:
        raise _invalid_json(f"it is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _invalid_json("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _invalid_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except _Refused as error:
        raise _invalid_json(str(error)) from None


def _digits(number: str) -> None:
    if len(number.lstrip("-")) > MOST_DIGITS:
        raise _Refused("a number has too many digits")


def _nothing(_: str) -> None:
    pass


def _invalid_json(what: str) -> RequestError:
    return RequestError(f"the body cannot be read as JSON: {what}", code="invalid_json")


# ---- what the model refuses ----
def _explain(error: ValidationError, raw: bytes, model: type[BaseModel]) -> RequestError:
    """Return the first problems in words; the first of them gives `param`, `code` and `hint`."""
    every = error.errors(include_url=False, include_input=False)  # `data` has it already
    problems = [each for each in every if each["type"] != "default_factory_not_called"]  # only follows from another
    if problems[0]["type"] == "json_invalid":
        return _invalid_json(problems[0]["msg"].removeprefix("Invalid JSON: "))
    data = from_json(raw)
    found = [(_path(problem, data), problem) for problem in problems[:64]]
    found.sort(key=lambda each: each[1]["type"] == "missing")  # the unknown `rewrd` before the missing `reward`
    told = list(dict.fromkeys(_tell(path, problem, model, data) for path, problem in found))
    shown = "; ".join(message for message, _ in told[:SHOWN])
    more = len(told) - SHOWN + max(0, len(problems) - 64)
    path, first = found[0]
    own_code = first["type"] if first["type"] not in (*_PYDANTIC, "conflict") else None
    param = dotted([printable(key) if isinstance(key, str) else key for key in path]) or None
    return RequestError(
        f"{shown}; and {more} more problems" if more > 0 else shown, hint=told[0][1], field=param, code=own_code
    )


def _path(problem: ErrorDetails, data: Any) -> Path:
    """Return the path of the problem in the body, without the members of unions that Pydantic's location also names."""
    path: list[str | int] = []
    for i, key in enumerate(problem["loc"]):
        last = i == len(problem["loc"]) - 1
        if isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        elif (
            isinstance(data, dict) and isinstance(key, str) and (key in data or (last and problem["type"] == "missing"))
        ):
            data = data.get(key)
        else:
            continue
        path.append(key)
    inside = problem.get("ctx", {}).get("param")
    return (*path, inside) if isinstance(inside, str) else tuple(path)


def _tell(path: Path, problem: ErrorDetails, model: type[BaseModel], data: Any) -> tuple[str, str | None]:
    """Return a problem in words, and what to do."""
    place = dotted([printable(key) if isinstance(key, str) else key for key in path]) or "the body"
    kind, message = problem["type"], problem["msg"]
    if kind == "extra_forbidden":
        return f"{place} is unknown", _suggest(path, model)
    if kind == "missing":
        return f"{place} is required and missing", None
    if kind in ("value_error", "conflict"):
        return f"{place}: {message.removeprefix('Value error, ')}", None
    if kind not in _PYDANTIC:
        context = problem.get("ctx", {})
        whole = "param" in context and len(path) == 1
        return message if whole else f"{place}{':' if 'param' in context else ''} {message}", context.get("hint")
    wanted = re.sub("^[A-Z][a-z]+ should", "it must", message).replace("valid array", "list")
    wanted = re.sub(r"valid dictionary or instance of \w+|valid dictionary", "object", wanted)
    wanted = re.sub(r" after validation, not \d+$", "", wanted).replace("an instance of", "an object like")
    return f"{place} is {echo(_value(path, data))}; {wanted}", _in_words(problem.get("ctx", {}).get("pattern", ""))


def _in_words(pattern: str) -> str | None:
    """Return what an adapter's name, or what selects a policy, looks like."""
    if not pattern.startswith(_ADAPTER):
        return None
    return f"write 'base', a name, or a version as in 'math@3'; {_NAMED}" if "@" in pattern else _NAMED


def _value(path: Path, data: Any) -> Any:
    for key in path:
        data = data[key]
    return data


def _suggest(path: Path, model: type[BaseModel]) -> str:
    """Return where an unknown field goes, or why nowhere: what its users are known to mean, the same name elsewhere, or
    a similar one."""
    name, section = str(path[-1]), [key for key in path[:-1] if isinstance(key, str)]
    if meant := getattr(model, "elsewhere", {}).get(name):
        moved = re.fullmatch(r"config\.\w+", meant) is not None and "config" not in section
        return f"write {meant}{': options go under config' if moved else ''}"
    if why := getattr(model, "nowhere", {}).get(name):
        return why
    everywhere = list(key_paths(model))
    beside = [keys[-1] for keys in everywhere if list(keys[:-1]) == section]
    for candidate in _candidates(name, everywhere, beside, path):
        return f"did you mean {candidate}?"
    return f"the fields of {dotted(path[:-1]) or 'the body'} are {', '.join(beside)}"


def _candidates(name: str, everywhere: Sequence[tuple[str, ...]], beside: Sequence[str], path: Path) -> Iterator[str]:
    elsewhere = {keys[-1]: ".".join(keys) for keys in reversed(everywhere)}
    if name in elsewhere:
        yield elsewhere[name]
    for similar in difflib.get_close_matches(name, beside, n=1):
        yield dotted((*path[:-1], similar))
    for similar in difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.75):
        yield elsewhere[similar]
