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
from groupwise.types import SamplingParams

SHAPE = Shape(model="m", dtype="bfloat16", context_length=64, rank=8, targets=("q_proj",), rows=4)


class StandIn:
    """vLLM's `LLM` and its engine; a request is done at the step after `go`."""

    def __init__(self, told: list[str], go: threading.Event, **options: Any):
        self.told, self.go, self.llm_engine, self._number = told, go, self, ""
        self.slept = options["enable_sleep_mode"]

    def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.told.append("wake")

    def add_request(self, number: str, *args: Any, **options: Any) -> None:
        self._number = number
        self.told.append("request")

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
