"""The loop of examples/loop_by_hand.py in process, over HTTP by our own client, and by the `tinker` package: the same
data and seeds make the same adapter.

Each completion is a request of its own with the seed that the SDK's sampler gives it, one after another: a batch of
other rows may round a log-probability otherwise. AdamW makes a whole step of a gradient that is all but 0, and so of
how it was rounded. Hence the loss is a sum, so that nobody divides, and where the arithmetic differs still, since the
wire's datums have their prompts among their targets, eps is larger. (With the example's own numbers 0.5% of an
adapter's are more than 1e-5 apart, and the furthest 1.4e-4.)
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("tinker", "0.38")

import tinker

from crash.place import Place, a_place
from groupwise import AdamParams, Client, compute_advantages, setup_infra
from groupwise.model.chat import encode_prompt
from groupwise.model.load import load_tokenizer
from groupwise.sdk.types import SampledGroup
from groupwise.seeds import seed_of
from groupwise.types import Prompt

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
types: Any = tinker.types

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop_by_hand.py"
STEPS, PROMPTS, GROUP, EPS = 3, 6, 4, 1e-4
Asked = list[tuple[str, int]]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loop_by_hand", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PROMPTS, module.GROUP, module.DIVIDED_BY = PROMPTS, GROUP, None
    return module


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with a_place(tmp_path_factory.mktemp("place"), settings=("tinker=true",)) as place:
        place.start()
        place.await_ready()
        yield place


Weights = dict[str, np.ndarray]


def in_process(example: ModuleType, directory: Path) -> tuple[list[float], Weights]:
    """The mean rewards and the adapter of the example's loop, a completion at a time."""
    with setup_infra(example.config(str(directory)), needs_reference=False, needs_inference=True) as infra:
        assert infra.sampler is not None
        concurrency = infra.sampler.concurrency
        concurrency.window = concurrency.maximum = 1.0

        async def loop() -> list[float]:
            return [await example.step(infra, number) for number in range(1, STEPS + 1)]

        rewards = asyncio.run(loop())
        (directory / "end").mkdir()
        infra.policy.learner.save_adapter(directory / "end")
    return rewards, weights(directory / "end")


def weights(directory: Path) -> Weights:
    return load_file(directory / "adapter_model.safetensors")


def seeds(step: int, prompt: int) -> list[int]:
    """What the SDK's sampler gives the completions of a prompt."""
    return [seed_of(PROMPTS * step + prompt, completion) for completion in range(GROUP)]


def loop(example: ModuleType, step: Callable[[int, Asked], list[list[float]]]) -> list[float]:
    """The example's questions -> the mean reward of each step; `step` samples, scores and trains."""
    means = []
    for number in range(1, STEPS + 1):
        rng = random.Random(number)
        rewards = [each for group in step(number, [example.problem(rng) for _ in range(PROMPTS)]) for each in group]
        means.append(sum(rewards) / len(rewards))
    return means


def check(found: tuple[list[float], Weights], expected: tuple[list[float], Weights]) -> None:
    assert found[0] == expected[0] and len(set(found[0])) > 1
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        np.testing.assert_allclose(found[1][name], weight, rtol=0, atol=1e-5)
    assert max(float(np.abs(weight).max()) for name, weight in expected[1].items() if "lora_B" in name) > 1e-3


def test_over_http(example: ModuleType, place: Place, tmp_path: Path) -> None:
    """Groups that the caller scored are posted as jobs, which keep the optimizer's moments from one to the next."""
    trained: list[str] = []
    with Client(place.url) as client:

        def step(number: int, asked: Asked) -> list[list[float]]:
            rewards, groups = [], []
            for i, (question, answer) in enumerate(asked):
                said = [client.sample([question], n=1, max_tokens=40, seed=seed)[0] for seed in seeds(number, i)]
                group = SampledGroup(messages=said[0].messages, completions=[c for g in said for c in g.completions])
                rewards.append([example.score(text, answer) for text in group.texts])
                groups.append(group.scored(rewards[-1]))
            job = client.train_grpo(
                groups,
                output_name="by-hand",
                learning_rate=example.ADAM.learning_rate,
                kl_coeff=0.0,
                anchor="old",
                correction="tis_token",
                correction_cap=5.0,
                reduction="sum",
                advantage_eps=1e-8,
            )
            trained.append(str(client.wait(job.job_id).adapter_version))
            return rewards

        means = loop(example, step)
    assert trained == [f"by-hand@{number}" for number in range(1, STEPS + 1)]
    check((means, weights(place.versions()[trained[-1]])), in_process(example, tmp_path))


def test_over_the_tinker_wire(
    example: ModuleType, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first step on a batch the example's loss has importance_sampling's gradient."""
    monkeypatch.setenv("TINKER_BASE_URL", place.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    monkeypatch.setattr(example, "ADAM", replace(example.ADAM, eps=EPS))
    tokenizer = load_tokenizer("starter")
    with closing(OverTheWire()) as wire:

        def step(number: int, asked: Asked) -> list[list[float]]:
            sampler = wire.trainer.save_weights_and_get_sampling_client().result()
            every, sampled = [], []
            for i, (question, answer) in enumerate(asked):
                message: Any = {"role": "user", "content": question}
                prompt = list(encode_prompt(Prompt(id="x", messages=(message,)), tokenizer).token_ids)
                said = [wire.sample(sampler, prompt, seed) for seed in seeds(number, i)]
                texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in said]
                every.append(given := [example.score(text, answer) for text in texts])
                if len(set(given)) > 1:
                    pairs = zip(said, compute_advantages(given), strict=True)
                    sampled += [(prompt, each, advantage) for each, advantage in pairs]
            wire.train(sampled, example.ADAM)
            return every

        means = loop(example, step)
        wire.trainer.save_weights_for_sampler("end").result()
    (end,) = (path for version, path in place.versions().items() if version.startswith("tinker-"))
    check((means, weights(end)), in_process(example, tmp_path))


class OverTheWire:
    """A client of the package."""

    def __init__(self) -> None:
        self.service = tinker.ServiceClient()
        self.trainer = self.service.create_lora_training_client(base_model="starter", rank=16, seed=0).result()

    def sample(self, sampler: Any, prompt: list[int], seed: int) -> Any:
        params = types.SamplingParams(max_tokens=40, seed=seed)
        return sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]

    def train(self, sampled: Sequence[tuple[list[int], Any, float]], adam: AdamParams) -> None:
        data = []
        for prompt, each, advantage in sampled:
            before, whole = [0.0] * (len(prompt) - 1), [*prompt, *each.tokens]
            values = {"logprobs": [*before, *each.logprobs]}
            values |= {"advantages": before + [advantage] * len(each.tokens), "target_tokens": whole[1:]}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=values))
        backward = self.trainer.forward_backward(data, "importance_sampling")
        self.trainer.optim_step(types.AdamParams(**asdict(adam))).result(), backward.result()

    def close(self) -> None:
        self.service.close("success").result()
