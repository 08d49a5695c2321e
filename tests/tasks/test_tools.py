"""Functions as tools: definitions from hints and docstrings, and an answer to every call, whatever goes wrong."""

from __future__ import annotations

import asyncio
import doctest
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from groupwise.errors import ConfigError
from groupwise.tasks import tool_schema, tools
from groupwise.tasks.tool_schema import read_docstring
from groupwise.tasks.tools import THREADS, CallableTool, CallOutcome, ToolBox, ToolError
from groupwise.types import Message
from wording import raises


class Point(BaseModel):
    x: int
    y: int = 0


@dataclass
class Stock:
    item: str
    title: str


def search(query: str, limit: int = 5, *, kind: Literal["note", "task"] = "note") -> list[str]:
    """Search the notes.

    All words must occur.

    Args:
        query: Words to look for,
            in any order.
        limit (int): How many.
    """
    return [f"{kind} {query}"] * limit


async def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def plot(points: list[Point], stock: Stock | None = None) -> str:
    """Plot.

    :param points: Where they are.
    """
    return f"{sum(point.x for point in points)} {stock.item if stock else ''}"


def call(name: str, arguments: Any = None, call_id: str = "call_0") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(box: ToolBox, name: str, arguments: Any = None) -> str:
    message = asyncio.run(box.call(call(name, arguments)))
    assert message["role"] == "tool" and message.get("tool_call_id") == "call_0" and message.get("name") == name
    content = message.get("content")
    assert isinstance(content, str)
    return content


# ---- definitions ----
def test_a_function_becomes_a_definition() -> None:
    (definition,) = ToolBox([search]).definitions
    assert definition == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the notes.\n\nAll words must occur.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to look for, in any order."},
                    "limit": {"type": "integer", "default": 5, "description": "How many."},
                    "kind": {"type": "string", "enum": ["note", "task"], "default": "note"},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


def test_nested_types_have_schemas_and_lose_only_pydantics_titles() -> None:
    parameters = CallableTool.from_function(plot).parameters
    assert parameters["properties"]["points"] == {
        "type": "array",
        "items": {"$ref": "#/$defs/Point"},
        "description": "Where they are.",
    }
    stock = parameters["$defs"]["Stock"]
    assert set(stock["properties"]) == {"item", "title"} and "title" not in stock
    box = ToolBox([plot])
    assert answer(box, "plot", {"points": [{"x": 1}, {"x": "2"}], "stock": {"item": "a", "title": "b"}}) == "3 a"


def test_names_that_pydantic_keeps_for_itself_are_fine() -> None:
    def odd(schema: int, json: int, _private: int, model_config: int = 4, copy: str = "x") -> list[Any]:
        return [schema, json, _private, model_config, copy]

    assert json.loads(answer(ToolBox([odd]), "odd", {"schema": 1, "json": 2, "_private": 3})) == [1, 2, 3, 4, "x"]


def test_a_hints_own_description_and_bounds_count() -> None:
    def roll(sides: Annotated[int, Field(ge=2, description="Of the die.")]) -> int:
        return sides

    tool = CallableTool.from_function(roll, name="die", description="Roll.", time_limit_s=1)
    assert (tool.name, tool.description, tool.time_limit_s) == ("die", "Roll.", 1)
    assert tool.parameters["properties"] == {"sides": {"type": "integer", "minimum": 2, "description": "Of the die."}}
    assert "greater than or equal to 2" in answer(ToolBox([tool]), "die", {"sides": 1})


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def step(self, by: int = 1) -> int:
        """Count."""
        self.count += by
        return self.count

    async def read(self) -> int:
        """The count."""
        return self.count

    @staticmethod
    def twice(x: int) -> int:
        """Two of it."""
        return 2 * x

    @classmethod
    def named(cls) -> str:
        """Its name."""
        return cls.__name__


def test_methods_are_tools_of_their_object() -> None:
    one, other = Counter(), Counter()
    box = ToolBox([one.step, one.read, one.twice, one.named])
    assert "self" not in json.dumps(box.definitions) and "cls" not in json.dumps(box.definitions)
    assert [answer(box, "step", {"by": 2}), answer(box, "step"), answer(box, "read")] == ["2", "3", "3"]
    assert (answer(box, "twice", {"x": 4}), answer(box, "named")) == ("8", "Counter")
    assert (one.count, other.count) == (3, 0) and [tool.owner for tool in box][:2] == [one, one]


def no_hint(x) -> None: ...
def by_position(x: int, /) -> None: ...
def any_number(*x: int) -> None: ...
def by_any_name(**x: int) -> None: ...
def no_schema(x: threading.Lock) -> None: ...
def no_such_type(x: Missing) -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    "given",
    [no_hint, by_position, any_number, by_any_name, no_schema, no_such_type, 3, partial(search, limit=1)],
)
def test_what_cannot_be_a_tool_is_refused(given: Any) -> None:
    with raises(ConfigError):
        ToolBox([given])


def test_two_tools_of_one_name_are_refused() -> None:
    with raises(ConfigError):
        ToolBox([search, ToolBox([search])])
    assert len(ToolBox([search, CallableTool.from_function(search, name="find"), ToolBox([add])])) == 3


@pytest.mark.parametrize(
    ("text", "summary", "described"),
    [
        ("", "", {}),
        ("Add.", "Add.", {}),
        ("Add.\n\nReturns:\n    x: no parameter.\n", "Add.", {}),
        (
            "Add.\n\nArguments:\n  a: One: two.\n\n  b: Three.\nRaises:\n  c: no.",
            "Add.",
            {"a": "One: two.", "b": "Three."},
        ),
        ("Add.\n\n:param int a: One\n    more.\n:param b: Two.\n:returns: x", "Add.", {"a": "One more.", "b": "Two."}),
        ("Args:\n    a: One.\n        b: is not a parameter.", "", {"a": "One. b: is not a parameter."}),
        ("Arguments are added.\n\n>>> 1 + 1\n2", "Arguments are added.", {}),
    ],
)
def test_docstrings(text: str, summary: str, described: dict[str, str]) -> None:
    assert read_docstring(text) == (summary, described)


def test_the_docstrings_example() -> None:
    assert doctest.testmod(tool_schema).failed == 0


# ---- answers ----
@pytest.mark.parametrize(
    ("name", "arguments", "content", "outcome"),
    [
        ("add", {"a": 1, "b": 2}, "3.0", "ok"),
        ("add", '{"a": 1, "b": "2"}', "3.0", "ok"),
        ("search", {"query": "x", "limit": 2, "kind": "task"}, '["task x","task x"]', "ok"),
        (
            "serch",
            {},
            "Error: there is no tool 'serch'; did you mean 'search'? The tools are add, search.",
            "unknown_tool",
        ),
        ("", {}, "Error: there is no tool ''; The tools are add, search.", "unknown_tool"),
        ("add", {"a": 1}, "Error: wrong arguments for add: b: Field required", "wrong_arguments"),
        (
            "add",
            {"a": "x", "b": 1, "c": 2},
            "Error: wrong arguments for add: a: Input should be a valid number, unable to parse string as a number; "
            "c: Extra inputs are not permitted",
            "wrong_arguments",
        ),
        ("add", "[1]", "Error: the arguments for add are of type list; give an object", "wrong_arguments"),
        ("add", 3, "Error: the arguments for add are of type int; give an object", "wrong_arguments"),
    ],
)
def test_a_call_is_answered(name: str, arguments: Any, content: str, outcome: str) -> None:
    box = ToolBox([add, search])
    assert answer(box, name, arguments) == content
    assert box.outcomes == {CallOutcome(outcome): 1}


def test_arguments_that_are_no_json_are_answered() -> None:
    assert answer(ToolBox([add]), "add", "{oops").startswith("Error: the arguments for add are not JSON: ")


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("text", "text"),
        (None, "null"),
        ({"a": [1, True]}, '{"a":[1,true]}'),
        (Point(x=1), '{"x":1,"y":0}'),
        (Stock("a", "b"), '{"item":"a","title":"b"}'),
        (date(2026, 5, 1), '"2026-05-01"'),
        ("a\ud800", "a?"),
        ("café", "café"),
    ],
)
def test_results_are_texts_or_json(result: Any, content: str) -> None:
    def get() -> Any:
        return result

    assert answer(ToolBox([get]), "get") == content


def test_a_result_that_goes_round_in_circles_is_an_error() -> None:
    def circle() -> list[Any]:
        round_: list[Any] = []
        round_.append(round_)
        return round_

    assert answer(ToolBox([circle]), "circle").startswith("Error: the result cannot be written as JSON")


def test_a_long_result_is_cut() -> None:
    def shout() -> str:
        return "a" * 1_000_000

    content = answer(ToolBox([shout], longest_result=100), "shout")
    assert content == "a" * 100 + "\n... (999,900 more characters were cut)"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "content"),
    [
        (ValueError("no\nsuch thing"), "Error: fail raised ValueError: no such thing"),
        (ToolError("Try later."), "Error: Try later."),
        (TimeoutError("its own"), "Error: fail raised TimeoutError: its own"),
        (StopIteration(), "StopIteration"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "cancel"),
        (RecursionError("deep"), "RecursionError: deep"),
    ],
)
def test_whatever_a_tool_raises_is_answered(error: BaseException, content: str, is_async: bool) -> None:
    def fail() -> None:
        raise error

    async def fail_async() -> None:
        raise error

    box = ToolBox([CallableTool.from_function(fail_async if is_async else fail, name="fail")])
    assert content.lower() in answer(box, "fail").lower() and box.outcomes == {CallOutcome.FAILED: 1}


def test_a_hanging_tool_holds_up_nobody() -> None:
    free = threading.Event()

    def hang() -> None:
        free.wait(600)

    async def hang_async() -> None:
        await asyncio.sleep(600)

    def quick() -> str:
        return "here"

    slow = [CallableTool.from_function(function, time_limit_s=0.2) for function in (hang, hang_async)]
    box = ToolBox([*slow, quick])

    async def all_at_once() -> list[Message]:
        names = ["hang"] * THREADS + ["hang_async", "quick"]
        return await asyncio.gather(*(box.call(call(name, {}, str(i))) for i, name in enumerate(names)))

    begun = time.monotonic()
    messages = asyncio.run(all_at_once())
    assert time.monotonic() - begun < 300
    free.set()
    assert messages[0].get("content") == "Error: hang took longer than 0.2 s and was given up"
    assert messages[-2].get("content") == "Error: hang_async took longer than 0.2 s and was given up"
    assert messages[-1].get("content") == "here"
    assert box.outcomes == {CallOutcome.TIME: THREADS + 1, CallOutcome.OK: 1}


def test_a_hanging_tool_does_not_keep_the_process() -> None:
    script = """
import asyncio, time
from groupwise.tasks.tools import CallableTool, ToolBox
def hang() -> None:
    time.sleep(600)
box = ToolBox([CallableTool.from_function(hang, time_limit_s=0.1)])
print(asyncio.run(box.call({"id": "a", "function": {"name": "hang", "arguments": {}}}))["content"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("Error: hang took longer than 0.1 s and was given up\n", "")


def test_tools_that_are_not_async_run_at_once() -> None:
    both = threading.Barrier(2, timeout=120)

    def meet() -> str:
        both.wait()
        return "met"

    box = ToolBox([meet])

    async def two() -> list[Message]:
        return await asyncio.gather(box.call(call("meet")), box.call(call("meet")))

    assert [message.get("content") for message in asyncio.run(two())] == ["met", "met"]


def test_waiting_for_a_turn_is_not_the_tools_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight calls of 0.1 s, one after another, each with 0.7 s."""
    monkeypatch.setattr(tools, "THREADS", 1)

    def work() -> str:
        time.sleep(0.1)
        return "done"

    box = ToolBox([CallableTool.from_function(work, time_limit_s=0.7)])

    async def eight() -> list[Message]:
        return await asyncio.gather(*(box.call(call("work")) for _ in range(8)))

    begun = time.monotonic()
    assert {message.get("content") for message in asyncio.run(eight())} == {"done"}
    assert time.monotonic() - begun > 0.8


def test_who_cancels_the_caller_is_obeyed() -> None:
    async def hang() -> None:
        await asyncio.sleep(30)

    async def cancelled() -> None:
        task = asyncio.create_task(ToolBox([hang]).call(call("hang")))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(["search", "add", "plot", "x", ""]), JSON | st.text())
@settings(max_examples=150)
def test_no_arguments_are_an_error_of_ours(name: str, arguments: Any) -> None:
    box = ToolBox([search, add, plot])
    message = asyncio.run(box.call(call(name, arguments)))
    content = message.get("content")
    assert isinstance(content, str) and content.encode()
    assert sum(box.outcomes.values()) == 1


@pytest.mark.parametrize("broken", [{}, {"function": None}, {"id": None, "function": {"name": None}}])
def test_a_call_without_its_parts_is_answered(broken: dict[str, Any]) -> None:
    message = asyncio.run(ToolBox([add]).call(broken))
    assert str(message.get("content")).startswith("Error: there is no tool")
