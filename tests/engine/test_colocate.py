"""When a vLLM in the trainer's process sleeps: before training begins, and never under a request.

vLLM itself cannot sleep on a CPU, and is a stand-in here that writes down what it is told; what is tested is ours.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from groupwise.config.engine import VllmConfig
from groupwise.engine.vllm import colocate
from groupwise.engine.vllm.client import sampling_body
from groupwise.engine.vllm.server import Shape
from groupwise.errors import EngineError
from groupwise.types import SamplingParams
from wording import raises

SHAPE = Shape(model="m", dtype="bfloat16", context_length=64, rank=8, targets=("q_proj",), rows=4)


class StandIn:
    """vLLM's `LLM` and its engine; a request is done at the step after `go`."""

    def __init__(self, told: list[str], go: threading.Event, **options: Any):
        self.told, self.go, self.llm_engine, self._number = told, go, self, ""
        self.model_config = SimpleNamespace(max_model_len=64)
        self.slept = options["enable_sleep_mode"]

    def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.told.append("wake")

    def add_request(self, number: str, *args: Any, **options: Any) -> None:
        self._number = number
        self.told.append("request")

    def abort_request(self, numbers: list[str]) -> None:
        self.told.append("abort")

    def step(self) -> list[Any]:
        if not self.go.wait(0.01):
            return []
        self.told.append("done")
        said = SimpleNamespace(index=0, token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-1.0)}])
        said.finish_reason = "length"
        return [SimpleNamespace(finished=True, request_id=self._number, outputs=[said])]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], threading.Event]:
    said, go = list[str](), threading.Event()
    vllm: Any = ModuleType("vllm")
    vllm.__version__ = "0.32.0"
    vllm.LLM = lambda **options: StandIn(said, go, **options)
    vllm.SamplingParams = lambda **options: options
    vllm.sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=1))
    lora = ModuleType("vllm.lora")
    for name, module in {"vllm": vllm, "vllm.lora": lora, "vllm.lora.request": ModuleType("vllm.lora.request")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(colocate, "IDLE_S", 3600.0)  # so that it sleeps only when it is told to
    return said, go


def test_it_sleeps_when_training_begins_and_not_while_something_is_sampled(told) -> None:
    said, go = told
    body = sampling_body((1, 2), SamplingParams(max_tokens=1), n=1, max_tokens=1, seed=0, eos_ids=())

    async def run() -> None:
        engine = colocate.InProcess(VllmConfig(mode="colocate", sleep=True), SHAPE)
        await engine.rest()
        await engine.rest()
        assert said == ["sleep 1"]
        asked = asyncio.create_task(engine.complete("base", body))
        while "request" not in said:
            await asyncio.sleep(0.01)
        await engine.rest()  # it samples: training that overlaps goes on beside it
        assert said == ["sleep 1", "wake", "request"]
        go.set()
        assert (await asked)[0].token_ids == (7,)
        await engine.rest()
        assert said == ["sleep 1", "wake", "request", "done", "sleep 1"]
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("when", ["before its turn", "at its turn"])
def test_a_request_that_is_given_up_ends_itself_alone(told, when: str) -> None:
    """Its turn comes between two steps of the engine, which others wait for."""
    said, go = told
    body = sampling_body((1, 2), SamplingParams(max_tokens=1), n=1, max_tokens=1, seed=0, eos_ids=())

    async def run() -> None:
        engine = colocate.InProcess(VllmConfig(mode="colocate", sleep=True), SHAPE)
        begun, held = threading.Event(), threading.Event()

        def hold(*args: Any, **options: Any) -> None:
            begun.set()
            held.wait(20)

        await engine.facts()
        blocking = asyncio.create_task(engine._do(hold))
        if when == "at its turn":
            blocking.cancel()
            engine._llm.add_request = hold
        given_up = asyncio.create_task(engine.complete("base", body))
        await asyncio.to_thread(begun.wait, 20)
        given_up.cancel()
        await asyncio.sleep(0)
        held.set()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert said == (["abort"] if when == "at its turn" else [])
        engine._llm.__dict__.pop("add_request", None)
        go.set()
        assert (await engine.complete("base", body))[0].token_ids == (7,)
        await engine.close()

    asyncio.run(run())


def test_a_request_that_is_refused_keeps_nothing_awake(told, monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = told
    body = sampling_body((1, 2), SamplingParams(max_tokens=1), n=1, max_tokens=1, seed=0, eos_ids=())

    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("the prompt is too long")

    async def run() -> None:
        engine = colocate.InProcess(VllmConfig(mode="colocate", sleep=True), SHAPE)
        with monkeypatch.context() as patch:
            patch.setattr(StandIn, "add_request", refuse)
            with raises(EngineError):
                await engine.complete("base", body)
        await engine.rest()
        assert said == ["sleep 1"]
        await engine.close()

    asyncio.run(run())
