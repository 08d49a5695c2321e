"""The script that runs inside the sandbox for `rewards.code`: loads the program and runs its tests; standard library
only.

    harness.py serve FD    load program.py, then answer calls of its functions
    harness.py check FD    run tests, in which the `asked` names are functions of the program

Messages on the channel FD are JSON, each with 8 bytes of length before it:

    serve   {"id", "call", "args", "kwargs"}  ->  {"id", ANSWER}
    check   {"test": code, "asked": [name]}   ->  {"passed", "calls", "cause"}, and before that any number of
            {"call", "args", "kwargs"}        <-  {ANSWER}

    ANSWER  "value": an encoded value, "raised": [[the exception's type and its bases], message], or
            "absent": why there is neither: no such function, no plain data

Values are encoded, so that what is decoded is plain data of Python's own types, whose equality is Python's.

The tests' process gets nothing of the program but such values and, in a test that expects exceptions, builtin ones made
here of their names. Where a test expects none, one exception of the program fails it, whatever becomes of that on its
way up: many a loop of Python's ends at a StopIteration, and hasattr() takes an AttributeError for an answer.
"""

from __future__ import annotations

import builtins
import json
import os
import sys

TYPE_CHECKING = False  # what is not imported here is time that every program is spared
if TYPE_CHECKING:
    from typing import Any


MOST_ALIKE = 64  # entries of a set, or keys of a dict, that have the same hash


def encode(value: Any) -> Any:
    """Encode plain data for JSON. Raises TypeError for anything else.

    >>> encode([(1, 2), {3: b"x"}])
    [{'tuple': [1, 2]}, {'dict': [[3, {'bytes': '78'}]]}]
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [encode(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(each) for each in value]}
    if isinstance(value, set | frozenset):
        return {"set" if isinstance(value, set) else "frozenset": [encode(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "tolist"):
        return encode(value.tolist())  # NumPy's
    raise TypeError(f"a {type(value).__name__} is no plain data")


def decode(value: Any) -> Any:
    """Return the inverse of `encode`. Raises ValueError, TypeError or RecursionError for what `encode` does not
    make."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    [(kind, inside)] = value.items()
    if kind == "tuple":
        return tuple(decode(each) for each in inside)
    if kind in ("set", "frozenset"):
        return (set if kind == "set" else frozenset)(spread([decode(each) for each in inside]))
    if kind == "dict":
        keys = spread([decode(key) for key, _ in inside])
        return dict(zip(keys, (decode(each) for _, each in inside), strict=True))
    if kind == "bytes":
        return bytes.fromhex(inside)
    if kind == "complex":
        return complex(*inside)
    raise ValueError(f"{kind!r} is no kind of value")


def spread(values: list[Any]) -> list[Any]:
    """Return the entries of a set, or the keys of a dict. Raises ValueError where many of them have one hash, as the
    multiples of 2^61 - 1: putting so many together takes the square of their number."""
    counts: dict[int, int] = {}
    for value in values:
        key = hash(value)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] > MOST_ALIKE:
            raise ValueError(f"more than {MOST_ALIKE} entries have one hash")
    return values


class Pipe:
    """The channel, from within."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def send(self, message: bytes) -> None:
        data = len(message).to_bytes(8, "big") + message
        while data:
            data = data[os.write(self.descriptor, data) :]

    def receive(self) -> bytes:
        return self._exactly(int.from_bytes(self._exactly(8), "big"))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (part := os.read(self.descriptor, count - len(data))):
                sys.exit(0)
            data += part
        return data


def raised(error: BaseException) -> list[Any]:
    """Return an exception as a message: the names of those of its types that are Python's own, and its text."""
    names = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
    return [names, str(error)[:500]]


def serve(pipe: Pipe, source: str) -> None:
    """Load the program and answer calls of what it defines."""
    namespace: dict[str, Any] = {"__name__": "program"}
    broken: str | None = None
    try:
        exec(compile(source, "program.py", "exec"), namespace)
    except SystemExit:
        pass  # what it had defined by then is there
    except BaseException as error:
        broken = f"the program does not load: {type(error).__name__}"
    while True:
        request = json.loads(pipe.receive())
        try:
            message = json.dumps({"id": request["id"], **answer(request, namespace, broken)})
        except BaseException as error:  # of encode, of json
            message = json.dumps(
                {"id": request["id"], "absent": f"its answer is no plain data: {type(error).__name__}"}
            )
        pipe.send(message.encode())


def answer(request: dict[str, Any], namespace: dict[str, Any], broken: str | None) -> dict[str, Any]:
    if broken is not None:
        return {"absent": broken}
    if not callable(function := namespace.get(request["call"])):
        return {"absent": f"the program defines no function {request['call']}"}
    args, kwargs = decode(request["args"]), decode(request["kwargs"])
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        return {"raised": raised(error)}
    return {"value": encode(value)}


class Test:
    """A test that runs: what it expects, and what the program has answered so far."""

    def __init__(self, code: str):
        import ast

        self.tree = ast.parse(code)
        nodes = list(ast.walk(self.tree))
        self.names = {node.id for node in nodes if isinstance(node, ast.Name)}
        methods = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        self.expects = any(isinstance(node, ast.ExceptHandler | ast.With | ast.AsyncWith) for node in nodes) or any(
            "raises" in name.lower() for name in self.names | methods
        )
        self.calls = 0
        self.failed = False


class Remote:
    """A function of the program, seen from a test."""

    def __init__(self, pipe: Pipe, name: str, test: Test):
        self._pipe = pipe
        self._name = name
        self._test = test

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {"call": self._name, "args": encode(list(args)), "kwargs": encode(kwargs)}
        self._test.calls += 1
        self._pipe.send(json.dumps(call).encode())
        reply = json.loads(self._pipe.receive())
        try:
            if "value" in reply:
                return decode(reply["value"])
            error = self._exception(*reply["raised"]) if self._test.expects and "raised" in reply else None
        except Exception:  # forged
            error = None
        if error is None:
            self._test.failed = True
            error = RuntimeError(f"the program answers {str(reply)[:500]}")
        raise error

    def _exception(self, names: list[str], message: str) -> Exception:
        """Return the exception of the first of the types that can be made. One by which Python's own loops and
        look-ups are ended is raised only in a test that names it; elsewhere it is a RuntimeError, as in a generator
        (PEP 479)."""
        for name in names:
            kind = getattr(builtins, name, None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                break
            if name in SIGNALS and name not in self._test.names:
                break
            try:
                return kind(message)
            except TypeError:  # UnicodeDecodeError takes more
                continue
        return RuntimeError(f"{names[0]}: {message}")


SIGNALS = ("StopIteration", "StopAsyncIteration", "AttributeError")


def check(pipe: Pipe) -> None:
    """Run one test after another, each in its own namespace."""
    while True:
        request = json.loads(pipe.receive())
        test = Test(request["test"])
        namespace: dict[str, Any] = {name: Remote(pipe, name, test) for name in request["asked"]}
        cause = ""
        try:
            exec(compile(test.tree, "test.py", "exec"), namespace | {"__name__": "tests"})
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}"[:500]
        passed = not cause and not test.failed
        pipe.send(json.dumps({"passed": passed, "calls": test.calls, "cause": cause}).encode())


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        with open("program.py", encoding="utf-8", errors="replace") as file:
            text = file.read()
        serve(Pipe(int(sys.argv[2])), text)
    else:
        check(Pipe(int(sys.argv[2])))
