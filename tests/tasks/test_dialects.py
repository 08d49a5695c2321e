"""Episodes of agents that speak Anthropic's and OpenAI's dialects: what they are told, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from openai import AsyncOpenAI

from groupwise.algo.samples import segments_of
from groupwise.tasks.starter.tasks import CALCULATOR
from groupwise.types import Completion, Rollout, SamplingParams
from peers import peer
from wording import warns

anthropic = peer("anthropic")

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
FOUR = ("base_url", "api_key")
CALL = "Use the calculator: 47 * 12"
THINK = "What is 47 + 138? Think step by step."
FUNCTION = CALCULATOR["function"]
TOOLS = {
    "chat": [CALCULATOR],
    "responses": [{"type": "function", "strict": False, **FUNCTION}],
    "stored": [{"type": "function", "strict": False, **FUNCTION}],  # with previous_response_id
    "messages": [
        {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    ],
}


class Talk:
    """A conversation in a dialect; what comes back goes into the next request as the client has it."""

    def __init__(self, dialect: str, base_url: str, api_key: str, *, stream: bool, tools: bool = False):
        self.dialect, self.stream, self.history = dialect, stream, []
        self.previous: str | None = None
        self.tools = TOOLS[dialect] if tools else []
        self.chat = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        url = base_url.removesuffix("/v1")
        self.messages = anthropic.AsyncAnthropic(base_url=url, api_key=api_key, max_retries=0)

    async def __aenter__(self) -> Talk:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.chat.close()
        await self.messages.close()

    async def say(self, text: str) -> Any:
        self.history.append({"role": "user", "content": text})
        return await getattr(self, f"_{self.dialect}")()

    async def result(self, call: Any, text: str) -> Any:
        """A tool's result, and the next turn."""
        if self.dialect in ("responses", "stored"):
            self.history.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
        elif self.dialect == "chat":
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": text})
        else:
            block = {"type": "tool_result", "tool_use_id": call.id, "content": text}
            self.history.append({"role": "user", "content": [block]})
        return await getattr(self, f"_{self.dialect}")()

    async def _chat(self) -> Any:
        asked = {"model": "any", "messages": self.history, "tools": self.tools or None}
        if not self.stream:
            message = (await self.chat.chat.completions.create(**asked)).choices[0].message
        else:
            async with self.chat.chat.completions.stream(**without_none(asked)) as stream:
                async for _ in stream:
                    pass
                message = (await stream.get_final_completion()).choices[0].message
        self.history.append(json.loads(message.model_dump_json(exclude_none=True)))
        return message.tool_calls[0] if message.tool_calls else message.content

    async def _responses(self) -> Any:
        response = await self._response(input=self.history)
        options = {"exclude_none": True, "exclude": {"parsed", "parsed_arguments"}}
        self.history += [json.loads(item.model_dump_json(**options)) for item in response.output]
        last = response.output[-1]
        return last if last.type == "function_call" else response.output_text

    async def _stored(self) -> Any:
        response = await self._response(input=self.history, previous_response_id=self.previous)
        self.history, self.previous = [], response.id
        last = response.output[-1]
        return last if last.type == "function_call" else response.output_text

    async def _response(self, **asked: Any) -> Any:
        asked = without_none({"model": "any", "tools": self.tools, **asked})
        if not self.stream:
            return await self.chat.responses.create(**asked)
        async with self.chat.responses.stream(**asked) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    async def _messages(self) -> Any:
        asked = {"model": "any", "messages": self.history, "tools": self.tools, "max_tokens": 64}
        if not self.stream:
            message = await self.messages.messages.create(**asked)
        else:
            async with self.messages.messages.stream(**asked) as stream:
                async for _ in stream:
                    pass
                message = await stream.get_final_message()
        self.history.append({"role": "assistant", "content": message.content})
        last = message.content[-1]
        return last if last.type == "tool_use" else last.text


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def is_one_segment(rollout: Rollout, recorder: Any) -> None:
    """All that was sampled, and nothing else, is trained in the context in which it was sampled."""
    sampled = [completion for _, completion in recorder.turns]
    assert [turn.completion for turn in rollout.turns] == sampled and len(sampled) > 1
    for turn, (request, completion) in zip(rollout.turns, recorder.turns, strict=True):
        assert turn.prompt_ids == request.prompt_ids
        assert turn.completion.logprobs == completion.logprobs and turn.completion.version == request.version
    (segment,) = segments_of(rollout.turns)
    trained = [token for token, on in zip(segment.completion_ids, segment.mask, strict=True) if on]
    assert trained == [token for completion in sampled for token in completion.token_ids]


# ---- what is recorded ----
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dialect", TOOLS)
def test_a_conversation_with_calls_is_one_segment_of_what_was_sampled(play_group, recorder, dialect, stream):
    heard: list[Any] = []

    async def agent(base_url, api_key):
        async with Talk(dialect, base_url, api_key, stream=stream, tools=True) as talk:
            call = await talk.say(CALL)
            heard.append(await talk.result(call, "564"))
            heard.append(await talk.say(CALL))
        return 1.0

    (rollout,) = play_group(agent, takes=FOUR, params=GREEDY).rollouts
    assert rollout.error is None and heard[0] == "564" and heard[1].type
    assert rollout.info["tool_calls"] == 2 and rollout.info["forks"] == 0
    is_one_segment(rollout, recorder)


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dialect", TOOLS)
def test_a_thought_that_is_passed_back_is_what_was_sampled(play_group, recorder, dialect, stream):
    async def agent(base_url, api_key):
        async with Talk(dialect, base_url, api_key, stream=stream) as talk:
            assert await talk.say(THINK) == "185"
            await talk.say(THINK)
        return 1.0

    (rollout,) = play_group(agent, takes=FOUR, params=GREEDY).rollouts
    assert rollout.error is None and "</think>" in rollout.turns[0].completion.text
    is_one_segment(rollout, recorder)


def test_one_dialect_goes_on_from_another(play_group, recorder):
    """A sub-agent, or a gateway in between, may put the same conversation into other words."""

    async def agent(base_url, api_key):
        async with Talk("chat", base_url, api_key, stream=False, tools=True) as talk:
            call = await talk.say(CALL)
            use = {"type": "tool_use", "id": call.id, "name": call.function.name}
            use["input"] = json.loads(call.function.arguments)
            talk.history[1:] = [{"role": "assistant", "content": [use]}]
            talk.dialect, talk.tools = "messages", TOOLS["messages"]
            await talk.result(call, "564")
        return 1.0

    (rollout,) = play_group(agent, takes=FOUR, params=GREEDY).rollouts
    assert rollout.error is None, rollout.error
    is_one_segment(rollout, recorder)


@pytest.mark.parametrize("dialect", TOOLS)
def test_the_same_is_sampled_streamed_or_not(play_group, recorder, dialect):
    said = []
    for stream in (False, True):

        async def agent(base_url, api_key, stream=stream):
            async with Talk(dialect, base_url, api_key, stream=stream) as talk:
                said.append(await talk.say(THINK))
            return 1.0

        play_group(agent, takes=FOUR, params=SamplingParams(max_tokens=48))
    (_, first), (_, second) = recorder.turns
    assert first.token_ids == second.token_ids and said[0] == said[1]


# ---- streams ----
STREAMED = ("chat", "messages", "responses")


class Held:
    """Streams the first tokens of what the engine says, and the rest when it is let go."""

    def __init__(self, engine: Any, *, first: int):
        self.engine, self.first, self.context_length = engine, first, engine.context_length
        self.let_go, self.cancelled = threading.Event(), threading.Event()

    async def sample(self, requests):
        raise AssertionError("a stream is submitted")

    def submit(self, requests, *, on_token=None):
        outer: Future[list[Completion]] = Future()
        outer.add_done_callback(lambda done: self.cancelled.set() if done.cancelled() else None)
        if on_token is None:
            return self.engine.submit(requests)

        def play() -> None:
            ((completion,),) = self.engine.generate(requests)
            for i, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                if i == self.first:
                    assert self.let_go.wait(60)
                on_token(0, token, logprob, ())
            if outer.set_running_or_notify_cancel():
                outer.set_result([completion])

        threading.Thread(target=play).start()
        return [outer]


def begun(talk: Talk) -> Any:
    """A stream of events: what to await for it."""
    said = [{"role": "user", "content": THINK}]
    if talk.dialect == "chat":
        return talk.chat.chat.completions.create(model="any", messages=said, stream=True)
    if talk.dialect == "responses":
        return talk.chat.responses.create(model="any", input=said, stream=True)
    return talk.messages.messages.create(model="any", messages=said, stream=True, max_tokens=64)


@pytest.mark.parametrize("dialect", STREAMED)
def test_tokens_are_sent_as_they_are_sampled(play_group, starter_engine, dialect):
    held, heard = Held(starter_engine, first=20), []

    async def agent(base_url, api_key):
        async with Talk(dialect, base_url, api_key, stream=True) as talk:
            events = await begun(talk)
            async for _ in events:
                heard.append(held.let_go.is_set())
                if len(heard) == 6:
                    held.let_go.set()
        return 1.0

    (rollout,) = play_group(agent, takes=FOUR, params=GREEDY, sampler=held).rollouts
    assert rollout.error is None and heard[:6] == [False] * 6 and heard[-1]
    assert len(rollout.turns) == 1


@pytest.mark.parametrize("dialect", STREAMED)
def test_a_stream_that_its_client_leaves_is_no_turn(play_group, starter_engine, dialect):
    held = Held(starter_engine, first=12)

    async def agent(base_url, api_key):
        async with Talk(dialect, base_url, api_key, stream=True) as talk:
            events = await begun(talk)
            async for _ in events:
                break
            await events.close()
            assert await asyncio.to_thread(held.cancelled.wait, 60), "the engine is told"
            held.let_go.set()
            talk.stream = False
            held.sample = starter_engine.sample
            await talk.say("1 + 1")
        return 1.0

    (rollout,) = play_group(agent, takes=FOUR, params=GREEDY, sampler=held).rollouts
    assert rollout.error is None, rollout.error
    assert len(rollout.turns) == 1 and "Think" not in str(rollout.messages)


# ---- what is told ----
def test_tokens_are_counted_as_the_policy_sees_them(play_group):
    told: list[Any] = []

    async def agent(base_url, api_key):
        async with Talk("messages", base_url, api_key, stream=False, tools=True) as talk:
            said = [{"role": "user", "content": CALL}]
            counted = await talk.messages.messages.count_tokens(model="any", messages=said, tools=talk.tools)
            told.append(counted.input_tokens)
            answer = await talk.messages.messages.create(model="any", messages=said, tools=talk.tools, max_tokens=9)
            told.append(answer.usage.input_tokens + answer.usage.cache_read_input_tokens)
            told.append((answer.stop_reason, answer.model))
        return 1.0

    (rollout,) = play_group(agent, takes=FOUR, params=GREEDY).rollouts
    assert told == [len(rollout.turns[0].prompt_ids)] * 2 + [("max_tokens", "policy")]


def test_limits_and_refusals_are_in_the_words_of_the_dialect(play_group):
    told: list[Any] = []

    async def agent(base_url, api_key):
        async with Talk("messages", base_url, api_key, stream=False) as talk:
            ask = talk.messages.messages.create
            asked = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "1 + 1"}]}
            for more in (
                {"tool_choice": {"type": "any"}},
                {"extra_body": {"output_format": {"type": "json_schema", "schema": {"type": "strin"}}}},
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
                    ]
                },
                {"messages": [*asked["messages"], {"role": "assistant", "content": "It"}]},
            ):
                with pytest.raises(anthropic.BadRequestError) as refused:
                    await ask(**{**asked, **more})
                told.append(refused.value.body["error"])
            raw = await talk.messages.messages.with_raw_response.create(
                **asked,
                stop_sequences=["x"],
                thinking={"type": "enabled", "budget_tokens": 99},
                extra_body={"temperature": 0.5},
            )
            told.append(raw.headers["x-ignored"])
            for stream in (False, True):
                with pytest.raises(anthropic.PermissionDeniedError) as over:
                    await ask(**asked, stream=stream)
                told.append(over.value.body["error"])
        return 1.0

    with warns():
        (rollout,) = play_group(agent, takes=FOUR, params=GREEDY, max_turns=1).rollouts
    assert rollout.stop == "max_turns" and rollout.error is None
    forced, form, image, prefill, ignored, over, streamed = told
    assert (forced["param"], image["code"], prefill["param"]) == ("tool_choice", "invalid_image", "messages")
    assert form["param"].startswith("output_") and form["param"].endswith("schema") and "strin" in form["message"]
    assert ignored == "temperature, thinking"
    assert over == streamed and (over["type"], over["code"]) == ("permission_error", "max_turns")
