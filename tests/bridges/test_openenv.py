"""An OpenEnv server's tools, with a client that has what the wire has; tests/slow has the package's own."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from groupwise.bridges.openenv import OpenEnvironment
from groupwise.errors import ConfigError
from wording import raises

CLIENT = """
from types import SimpleNamespace as Result

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Client:
    tools = [{"name": "add", "description": "Adds four.", "input_schema": SCHEMA}]

    def __init__(self, base_url):
        self.steps = []

    async def reset(self, **columns):
        return Result(observation={"text": "Count."}, reward=None, done=False)

    async def step(self, action):
        self.steps.append(action)
        if action == {"type": "list_tools"}:
            return Result(observation={"tools": self.tools}, reward=None, done=False)
        if action.get("type") != "call_tool":
            return Result(observation={"text": "Heard."}, reward=5.0, done=True)
        if action["arguments"]["a"] < 0:
            raise ConnectionError("the server is gone")
        if action["arguments"]["a"] > 9:
            error = {"error_type": "invalid_args", "message": "at most 9"}
            return Result(observation={"tool_name": "add", "error": error}, reward=-0.5, done=False)
        result = {"content": [{"type": "text", "text": "x"}], "data": action["arguments"]["a"] + 4}
        done = action["arguments"]["a"] == 9
        return Result(observation={"tool_name": "add", "result": result}, reward=1.0, done=done)

    async def close(self):
        self.closed = True


class Without(Client):
    tools = []
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "open_clients.py").write_text(CLIENT, encoding="utf-8")
    return str(tmp_path)


def calls(*values: int) -> dict:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": value})}}
        for i, value in enumerate(values)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def play(folder: str, *messages: dict, client: str = "Client", **options) -> SimpleNamespace:
    async def played() -> SimpleNamespace:
        env = OpenEnvironment(base_url="http://x", client=f"open_clients:{client}", folder=folder, **options)
        seen = await env.reset({}, 1)
        results = [await env.step(message) for message in messages]  # type: ignore[arg-type]
        await env.close()
        return SimpleNamespace(seen=seen, results=results, client=env._client)

    return asyncio.run(played())


def test_each_call_is_a_step_and_its_result_the_answer(folder):
    played = play(folder, calls(1, 12), calls(2), {"role": "assistant", "content": "Done."}, tools=True)
    assert [tool["function"]["name"] for tool in played.seen.tools] == ["add"]
    assert played.seen.tools[0]["function"]["parameters"]["required"] == ["a"]
    first, second, last = played.results
    assert [(m["tool_call_id"], m["content"]) for m in first.messages] == [("c0", "5"), ("c1", "Error: at most 9")]
    assert (first.reward, first.done, first.info["tool_wrong_arguments"]) == (0.5, False, 1.0)
    assert (second.messages[0]["content"], second.reward) == ("6", 1.0)
    assert (last.done, last.reward, last.messages) == (True, None, [])  # a message without a call
    assert len(played.client.steps) == 4 and played.client.closed  # the list, and three calls


def test_what_ends_the_episode_ends_it_before_the_next_call(folder):
    (result,) = play(folder, calls(9, 1), tools=True).results
    assert [m["content"] for m in result.messages] == ["13", "Error: the episode is over"]
    assert (result.reward, result.done) == (1.0, True)


def test_a_lost_server_is_no_answer_of_a_tool(folder):
    with raises(ConnectionError):
        play(folder, calls(-1), tools=True)


def test_text_is_an_action_where_there_are_no_tools_or_an_action_is_given(folder):
    text = {"role": "assistant", "content": "hello"}
    (result,) = play(folder, text).results
    assert (result.reward, result.done) == (5.0, True)
    (result,) = play(folder, text, tools=True, action="builtins:dict").results
    assert result.reward == 5.0


def test_a_server_without_tools_is_named(folder):
    with raises(ConfigError):
        play(folder, client="Without", tools=True)
