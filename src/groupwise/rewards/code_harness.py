"""What `code` puts into its boxes, as a script; it imports nothing but the standard library.

    harness.py serve FD    load program.py, then answer calls of its functions
    harness.py check FD    run tests; whatever name they do not define themselves is a function of the program

Messages on the channel FD are JSON, each with 8 bytes of length before it:

    serve   {"id", "call", "args", "kwargs"}  ->  {"id", "value"} or {"id", "raised": [type, message]}
    check   {"test": code}                    ->  {"passed"}, and before that any number of
            {"call", "args", "kwargs"}        <-  {"value"} or {"raised"}

Values are encoded, so that what is decoded is plain data of Python's own types, whose equality is Python's.
"""

from __future__ import annotations

import builtins
import json
import os
import sys

TYPE_CHECKING = False  # what is not imported here is time that every program is spared
if TYPE_CHECKING:
    from typing import Any


def encode(value: Any) -> Any:
    """Plain data as JSON's. Raises TypeError for anything else.

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
        return {"set": [encode(each) for each in value]}
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
    """The inverse of `encode`. Raises ValueError, TypeError or RecursionError for what `encode` does not make."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    [(kind, inside)] = value.items()
    if kind == "tuple":
        return tuple(decode(each) for each in inside)
    if kind == "set":
        return {decode(each) for each in inside}
    if kind == "dict":
        return {decode(key): decode(each) for key, each in inside}
    if kind == "bytes":
        return bytes.fromhex(inside)
    if kind == "complex":
        return complex(*inside)
    raise ValueError(f"{kind!r} is no kind of value")


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


def raised(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)[:500]]


def serve(pipe: Pipe, source: str) -> None:
    """Load the program and answer calls of what it defines."""
    namespace: dict[str, Any] = {"__name__": "program"}
    broken: list[str] | None = None
    try:
        exec(compile(source, "program.py", "exec"), namespace)
    except SystemExit:
        pass  # what it had defined by then is there
    except BaseException as error:
        broken = raised(error)
    while True:
        request = json.loads(pipe.receive())
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            if broken is not None:
                reply["raised"] = broken
            elif request["call"] not in namespace:
                raise NameError(f"the program defines no {request['call']}")
            else:
                function = namespace[request["call"]]
                reply["value"] = encode(function(*decode(request["args"]), **decode(request["kwargs"])))
            message = json.dumps(reply).encode()
        except BaseException as error:
            message = json.dumps({"id": request["id"], "raised": raised(error)}).encode()
        pipe.send(message)


class Remote:
    """A function of the program, seen from the tests."""

    def __init__(self, pipe: Pipe, name: str):
        self._pipe = pipe
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {"call": self._name, "args": encode(list(args)), "kwargs": encode(kwargs)}
        self._pipe.send(json.dumps(call).encode())
        reply = json.loads(self._pipe.receive())
        if "raised" not in reply:
            return decode(reply["value"])
        name, message = reply["raised"]
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind, message = RuntimeError, f"{name}: {message}"
        try:
            error = kind(message)
        except TypeError:  # UnicodeDecodeError and the like take more
            error = RuntimeError(f"{name}: {message}")
        raise error


def check(pipe: Pipe) -> None:
    """Run one test after another, each in a namespace of its own."""
    import ast

    while True:
        test = json.loads(pipe.receive())["test"]
        tree = ast.parse(test)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(dir(builtins))
        namespace: dict[str, Any] = {name: Remote(pipe, name) for name in names}
        try:
            exec(compile(tree, "test.py", "exec"), namespace | {"__name__": "tests"})
            passed = True
        except BaseException:
            passed = False
        pipe.send(json.dumps({"passed": passed}).encode())


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        with open("program.py", encoding="utf-8", errors="replace") as file:
            text = file.read()
        serve(Pipe(int(sys.argv[2])), text)
    else:
        check(Pipe(int(sys.argv[2])))
