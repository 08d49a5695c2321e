"""The bridge on a real engine: tokens against completions, and every way in which a generation ends early."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from groupwise.engine.local import LocalEngine
from groupwise.errors import AdapterNotFoundError, DeadlineError, GroupwiseError, ModelError
from groupwise.server import generate
from groupwise.server.generate import Generation, SlowReaderError, Token
from groupwise.tasks.reply import TextStream
from groupwise.types import Completion, FinishReason, PolicyVersion, SamplingParams, SamplingRequest
from serving import comes_within, starter
from wording import raises

PROMPT = tuple(range(20, 40))
BASE = PolicyVersion.base()
T = TypeVar("T")


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(starter(), max_rows=16)
    yield engine
    engine.close()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def request(
    *, n: int = 1, prompt: tuple[int, ...] = PROMPT, version: PolicyVersion = BASE, **params
) -> SamplingRequest:
    params = {"max_tokens": 12, "seed": 3, "ignore_eos": True} | params
    return SamplingRequest(prompt_ids=prompt, n=n, version=version, params=SamplingParams(**params))


def endless(n: int = 4) -> SamplingRequest:
    """To the end of the model's context, which takes seconds."""
    return request(n=n, max_tokens=1000)


async def all_tokens(generation: Generation) -> list[Token]:
    tokens: list[Token] = []
    while (more := await generation.next(15)) is not None:
        tokens += more
    return tokens


def idle_within(engine: LocalEngine, seconds: float) -> bool:
    return comes_within(lambda: not (engine.stats()["running"] or engine.stats()["waiting"]), seconds)


# ---- tokens and completions ----


def test_the_tokens_of_a_stream_are_those_of_the_completions(engine: LocalEngine) -> None:
    requests = [request(n=3, top_logprobs=2), request(prompt=PROMPT[:5], seed=9, max_tokens=5)]

    async def both():
        whole = await Generation(engine, requests, timeout_s=60).completions()
        generation = Generation(engine, requests, timeout_s=60, stream=True)
        tokens = await all_tokens(generation)
        return whole, tokens, await generation.completions()

    whole, tokens, again = run(both())
    assert again == whole
    for p, completions in enumerate(whole):
        for j, completion in enumerate(completions):
            mine = [token for token in tokens if (token.prompt, token.choice) == (p, j)]
            assert tuple(token.id for token in mine) == completion.token_ids
            assert [token.logprob for token in mine] == pytest.approx(completion.logprobs)
            assert tuple(token.top for token in mine if token.top) == completion.top_logprobs


@pytest.mark.parametrize("stop", [("e",), ("\ufffd\ufffd\ufffd\ufffd", "zz"), ("a", "b"), ("4\ufffd", "\ufffdx")])
def test_streamed_text_joins_to_the_engines_text(make_base, stop: tuple[str, ...]) -> None:
    """A random model over bytes: broken characters everywhere, and stop strings that occur in such text."""
    base = make_base("qwen3", context=64)
    engine = LocalEngine(base, max_rows=32)
    asked = request(n=32, prompt=tuple(range(10, 20)), max_tokens=40, stop=stop)

    async def streamed() -> tuple[list[Token], list[Completion]]:
        generation = Generation(engine, [asked], timeout_s=60, stream=True)
        return await all_tokens(generation), (await generation.completions())[0]

    tokens, completions = run(streamed())
    engine.close()
    assert any(completion.finish_reason is FinishReason.STOP for completion in completions)
    for j, completion in enumerate(completions):
        stream = TextStream(base.tokenizer, SamplingParams(stop=tuple(stop)))
        pieces = [stream.push(token.id) for token in tokens if token.choice == j]
        assert completion.text.startswith("".join(pieces))
        assert "".join(pieces) + stream.finish(completion.text) == completion.text


def test_silence_is_an_empty_answer_and_the_end_is_none(engine: LocalEngine) -> None:
    async def listen():
        generation = Generation(engine, [endless()], timeout_s=60, stream=True)
        silences = [await generation.next(0.0) for _ in range(2)]
        generation.cancel()
        return silences

    assert [] in run(listen())
    assert idle_within(engine, 1)


# ---- errors ----


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_sampled_is_refused_at_once_and_leaves_nothing_behind(engine, stream: bool) -> None:
    async def submit(*requests: SamplingRequest) -> None:
        Generation(engine, requests, timeout_s=60, stream=stream)

    with raises(ModelError):
        run(submit(endless(), request(prompt=(99999,))))
    with pytest.raises(AdapterNotFoundError):
        run(submit(endless(), request(version=PolicyVersion("gone", 1))))
    assert idle_within(engine, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_frees_the_rows(engine: LocalEngine, stream: bool) -> None:
    async def wait() -> None:
        generation = Generation(engine, [endless()], timeout_s=0.1, stream=stream)
        await (all_tokens(generation) if stream else generation.completions())

    with raises(DeadlineError):
        run(wait())
    assert idle_within(engine, 1)


def test_the_first_token_has_a_deadline_of_its_own(engine: LocalEngine) -> None:
    async def wait() -> None:
        first = Generation(engine, [endless(16)], timeout_s=60)  # takes every row
        second = Generation(engine, [request()], timeout_s=60, stream=True, first_token_s=0.2)
        try:
            with raises(DeadlineError):
                await all_tokens(second)
        finally:
            first.cancel()
        late = Generation(engine, [endless(1)], timeout_s=60, stream=True, first_token_s=1.0)
        assert await late.next(15)
        await asyncio.sleep(1.1)
        assert await late.next(15), "which counts only until there is a token"
        late.cancel()

    run(wait())
    assert idle_within(engine, 1)


@pytest.mark.slow
def test_a_slow_reader_loses_its_own_request_only(engine: LocalEngine, monkeypatch) -> None:
    monkeypatch.setattr(generate, "MOST_UNREAD", 100)

    async def read() -> list[Token]:
        slow = Generation(engine, [request(max_tokens=900)], timeout_s=60, stream=True)
        quick = Generation(engine, [request(max_tokens=400, seed=8)], timeout_s=60, stream=True)
        tokens = await all_tokens(quick)
        with pytest.raises(SlowReaderError, match="100 tokens unread"):
            await slow.next(15)
        return tokens

    assert len(run(read())) == 400
    assert idle_within(engine, 1)


def test_the_engines_failure_reaches_whoever_waits(make_base) -> None:
    engine = LocalEngine(make_base("qwen3", context=2048), max_rows=4)

    async def wait() -> list[BaseException | object]:
        asked = request(prompt=(1, 2, 3), max_tokens=2000)
        stream, whole = (Generation(engine, [asked], timeout_s=60, stream=s) for s in (True, False))
        threading.Timer(0.2, engine.close).start()
        return await asyncio.gather(all_tokens(stream), whole.completions(), return_exceptions=True)

    errors = run(wait())
    assert all(isinstance(error, GroupwiseError) and "closed" in error.message for error in errors)
