"""The environment with tools: what it offers, how it answers a turn's calls, when it is done."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from typing import Any

from PIL import Image

from groupwise.errors import ConfigError, EnvError
from groupwise.pictures import pictures_in, read_picture
from groupwise.tasks.env import Observation, StepResult, messages_of
from groupwise.tasks.own_thread import OwnThread
from groupwise.tasks.tool_calls import parse
from groupwise.tasks.tool_env import ToolEnv
from groupwise.tasks.tools import CallableTool, ToolBox
from groupwise.types import Message
from seeing_models import drawn
from wording import raises

MEETING = threading.Barrier(2)


def meet(who: str) -> str:
    """Two calls of it must run at once."""
    MEETING.wait(timeout=120)
    return f"met {who}"


async def double(x: int) -> int:
    """Twice as much."""
    return 2 * x


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


class Shelf(ToolEnv):
    """A list that grows; each instance has its own."""

    def __init__(self, title: str = "shelf"):
        self.title = title
        self.items: list[str] = []

    def first_message(self, case: Any, seed: int) -> Any:
        self.items = list(case["items"])
        return f"Sort the {self.title}."

    def put(self, item: str) -> list[str]:
        """Put an item on the shelf."""
        held = [*self.items, item]
        time.sleep(0.002)  # two at once would lose one
        self.items = held
        return held

    async def look(self) -> int:
        """How many items there are."""
        return len(self.items)

    tools = (put, look, meet, ToolBox([double]), CallableTool.from_function(sleep, time_limit_s=0.1))

    def score(self, episode: Any) -> float:
        return float(len(self.items))


def message(*calls: tuple[str, dict[str, Any]], **more: Any) -> Message:
    listed = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return Message(role="assistant", content="", **({"tool_calls": listed} if listed else {}), **more)


def contents(result: StepResult) -> list[Any]:
    return [one.get("content") for one in result.messages]


def begun(env: ToolEnv, case: dict[str, Any] | None = None) -> Observation:
    return env.reset(case or {"items": ["a"]}, 0)


def test_reset_offers_the_tools_with_the_question() -> None:
    seen = begun(Shelf("box"))
    assert seen.messages == [{"role": "user", "content": "Sort the box."}]
    functions = [tool["function"] for tool in seen.tools]
    assert [function["name"] for function in functions] == ["put", "look", "meet", "double", "sleep"]
    assert functions[0]["description"] == "Put an item on the shelf."
    assert functions[0]["parameters"]["required"] == ["item"]


def test_a_turns_calls_are_answered_in_their_order() -> None:
    one, other = Shelf(), Shelf()
    begun(one), begun(other)
    calls = [("put", {"item": str(i)}) for i in range(20)]
    said = message(("sleep", {"seconds": 0.02}), *calls, ("meet", {"who": "x"}), ("look", {}), ("meet", {"who": "y"}))
    result = asyncio.run(one.step(said))
    assert [one.get("tool_call_id") for one in result.messages] == [f"call_{i}" for i in range(24)]
    assert {one["role"] for one in result.messages} == {"tool"}
    assert contents(result)[0] == "null"
    assert contents(result)[1:3] == ['["a","0"]', '["a","0","1"]']
    assert contents(result)[-3:] == ["met x", "21", "met y"]  # `look` is a method, and after all of `put`
    assert one.items == ["a", *map(str, range(20))] and other.items == ["a"]
    assert not result.done and result.reward is None and result.info["tool_errors"] == 0
    one.close()


def test_a_message_without_calls_ends_the_episode() -> None:
    env = Shelf()
    begun(env)
    result = asyncio.run(env.step(Message(role="assistant", content="Done.")))
    assert (result.done, result.messages, result.reward) == (True, [], None)
    assert set(result.info.values()) == {0.0}


def test_what_goes_wrong_comes_back_and_is_counted() -> None:
    env = Shelf()
    begun(env)
    text = '<tool_call>{"name": "put", </tool_call><tool_call>{"name": "put"}</tool_call><tool_call>'
    reply = parse(text)
    said: dict[str, Any] = {"role": "assistant", "content": reply.content, "tool_calls": reply.calls}
    said["malformed_calls"] = [str(one) for one in reply.malformed]
    result = asyncio.run(env.step(said))  # type: ignore[arg-type]
    first, second, third = contents(result)
    assert first == "Error: wrong arguments for put: item: Field required"
    assert second.startswith("Error: The call is not JSON: ") and '<tool_call>{"name": "put", </tool_call>' in second
    assert third == "Error: The call is not closed: </tool_call> is missing. It was: <tool_call>"
    assert len({one.get("tool_call_id") for one in result.messages}) == 3 and not result.done
    errors = {name: number for name, number in result.info.items() if number}
    assert errors == {"tool_errors": 3, "tool_malformed": 2, "tool_wrong_arguments": 1}
    result = asyncio.run(env.step(message(("sleep", {"seconds": 5}), ("pot", {}))))
    assert contents(result)[0] == "Error: sleep took longer than 0.1 s and was given up"
    assert "did you mean 'put'" in contents(result)[1]
    assert (result.info["tool_time_limit"], result.info["tool_unknown_tool"]) == (1, 1)


class Database(ToolEnv):
    """SQLite's connections mind in which thread they are used."""

    async def first_message(self, case: Any, seed: int) -> Any:
        return Observation(messages=[{"role": "system", "content": "SQL."}], tools=[{"type": "function", "more": True}])

    def opened(self) -> None:
        self.connection = sqlite3.connect(":memory:")

    def query(self, sql: str) -> list[Any]:
        """Run SQL."""
        return self.connection.execute(sql).fetchall()

    def score(self, episode: Any) -> float:
        return float(self.connection.execute("select count(*) from t").fetchone()[0])

    tools = (query,)


def test_methods_run_in_the_episodes_thread() -> None:
    async def play() -> float:
        thread, env = OwnThread(), Database()
        env.thread = thread
        await thread.call(env.opened, timeout_s=5, what="opened")
        seen = await thread.call(env.reset, {}, 0, timeout_s=5, what="reset")
        assert len(seen.tools) == 2 and seen.messages[0]["role"] == "system"
        made = [
            ("query", {"sql": sql}) for sql in ("create table t (x)", "insert into t values (1)", "select x from t")
        ]
        result = await thread.call(env.step, message(*made), timeout_s=5, what="step")
        assert contents(result) == ["[]", "[]", "[[1]]"]
        value = await thread.call(env.score, None, timeout_s=5, what="score")
        env.close()
        thread.close()
        return value

    assert asyncio.run(play()) == 1.0


class Louder(Shelf):
    def put(self, item: str) -> list[str]:
        """Put it there, loudly."""
        return super().put(item.upper())

    def reset(self, case: Any, seed: int) -> Any:
        return self.offer([{"role": "system", "content": "Shout."}, {"role": "user", "content": str(case)}])


def test_a_subclass_overrides_tools_and_reset() -> None:
    env = Louder()
    seen = begun(env, {"q": 1})
    assert [one["role"] for one in seen.messages] == ["system", "user"]
    assert seen.tools[0]["function"]["description"] == "Put it there, loudly."
    assert contents(asyncio.run(env.step(message(("put", {"item": "b"}))))) == ['["B"]']
    env.close()


def test_what_is_missing_is_said() -> None:
    class Empty(ToolEnv): ...

    class Wrong(ToolEnv):
        tools = (3,)

        def first_message(self, case: Any, seed: int) -> str:
            return "?"

    with raises(EnvError):
        Empty().reset({}, 0)
    with raises(ConfigError):
        Wrong().reset({}, 0)
    assert contents(asyncio.run(Empty().step(message(("f", {}))))) == [
        "Error: there is no tool 'f'; The tools are none."
    ]


class Painter(ToolEnv):
    """Paints, and says so."""

    def first_message(self, case: Any, seed: int) -> Any:
        return "Paint."

    def paint(self, colour: str) -> Any:
        """Paint the wall."""
        return ["It is", Image.new("RGB", (8, 6), colour), {"dry": False}] if colour != "red" else drawn(8, 6)

    tools = (paint,)


def test_a_tools_images_are_parts_of_its_answer() -> None:
    env = Painter()
    env.reset({}, 0)
    answers = asyncio.run(env.step(message(("paint", {"colour": "red"}), ("paint", {"colour": "blue"})))).messages
    one, several = (answer.get("content") for answer in answers)
    assert isinstance(one, list) and isinstance(several, list)
    assert one == [{"type": "image", "image": one[0]["image"]}] and one[0]["image"].size == (8, 6)
    assert [part.get("text") for part in several] == ["It is", None, '{"dry":false}']
    (read,) = messages_of([answers[1]], "step", limit=100, roles=("tool",))
    assert pictures_in([read]) == [read_picture(Image.new("RGB", (8, 6), "blue"))]
    env.close()
