"""The `tinker` package against `groupwise serve`: it warms up and learns sums, goes on after SIGKILL, and trains the
adapter that the SDK trains in process. A few minutes."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from wording import raises

pytest.importorskip("tinker", "0.38")

import tinker

from crash.place import Place, a_place
from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.model.chat import encode_prompt
from groupwise.model.load import LoadedModel, load_model
from groupwise.sdk.datums import Datum
from groupwise.sdk.trainer import AdamParams, TrainingService
from groupwise.tasks.starter.tasks import supervised_conversations
from groupwise.types import PolicyVersion, Prompt, SamplingParams, SamplingRequest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
types: Any = tinker.types

Sampled = list[list[tuple[list[int], list[float]]]]  # of each prompt, the completions: tokens, log-probabilities


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A server in a process of its own, which can be killed and started again."""
    with a_place(tmp_path, settings=("tinker=true",)) as place:
        place.start()
        place.await_ready()
        monkeypatch.setenv("TINKER_BASE_URL", place.url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-local")
        yield place


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return load_model("starter")


def problems(step: int, count: int) -> list[tuple[str, int]]:
    rng = random.Random(step)
    pairs = [(rng.randint(10, 999), rng.randint(10, 99)) for _ in range(count)]
    return [(f"What is {a} + {b}? Think step by step.", a + b) for a, b in pairs]


def prompts_of(base: LoadedModel, asked: Sequence[tuple[str, int]]) -> list[tuple[int, ...]]:
    messages = [({"role": "user", "content": question},) for question, _ in asked]
    return [encode_prompt(Prompt(id="x", messages=m), base.tokenizer).token_ids for m in messages]  # type: ignore[arg-type]


def scored(
    base: LoadedModel, asked: Sequence[tuple[str, int]], prompts: Sequence[Sequence[int]], sampled: Sampled
) -> tuple[list[tuple[list[int], dict[str, list[float]]]], float]:
    """Datums of importance_sampling, with r - mean as advantage, and the mean reward."""
    data, rewards = [], []
    for (_, answer), prompt, group in zip(asked, prompts, sampled, strict=True):
        texts = [base.tokenizer.decode(tokens, skip_special_tokens=True) for tokens, _ in group]
        numbers = [re.findall(r"-?\d+", str(text)) for text in texts]
        given = [float(bool(found) and int(found[-1]) == answer) for found in numbers]
        rewards += given
        for (tokens, logprobs), reward in zip(group, given, strict=True):
            before = [0.0] * (len(prompt) - 1)
            advantage = reward - sum(given) / len(given)
            whole = [*prompt, *tokens]
            values = {"target_tokens": whole[1:], "logprobs": before + logprobs}
            data.append((whole[:-1], {**values, "advantages": before + [advantage] * len(tokens)}))
    return data, sum(rewards) / len(rewards)


class OverTheWire:
    """A policy trained through the package."""

    def __init__(self, *, rank: int = 8, path: str | None = None):
        self.service = tinker.ServiceClient()
        if path is None:
            self.trainer = self.service.create_lora_training_client(base_model="starter", rank=rank, seed=0).result()
        else:
            self.trainer = self.service.create_training_client_from_state_with_optimizer(path).result()

    def sample(self, prompts: Sequence[Sequence[int]], n: int, seed: int) -> Sampled:
        sampler = self.trainer.save_weights_and_get_sampling_client().result()
        futures = [
            sampler.sample(types.ModelInput.from_ints(list(p)), n, types.SamplingParams(max_tokens=40, seed=seed + i))
            for i, p in enumerate(prompts)
        ]
        return [[(list(s.tokens), list(s.logprobs)) for s in future.result().sequences] for future in futures]

    def train(self, data: Sequence[Any], loss: str, learning_rate: float) -> None:
        made = [types.Datum(model_input=types.ModelInput.from_ints(t), loss_fn_inputs=v) for t, v in data]
        backward = self.trainer.forward_backward(made, loss)
        stepped = self.trainer.optim_step(types.AdamParams(learning_rate=learning_rate, eps=1e-8))
        backward.result(), stepped.result()

    def close(self) -> None:
        """End the session."""
        self.service.close("success").result()


class InProcess:
    """The same policy trained by the SDK."""

    def __init__(self, base: LoadedModel, directory: Path):
        self.service = TrainingService(base)
        self.policy = self.service.create_training_client(lora=LoraSpec(rank=8, alpha=32.0), seed=0)
        self.engine, self._directory, self._number = LocalEngine(base, max_rows=256), directory, 0

    def sample(self, prompts: Sequence[Sequence[int]], n: int, seed: int) -> Sampled:
        self._number += 1
        version = PolicyVersion("mine", self._number)
        directory = self._directory / str(self._number)
        directory.mkdir(parents=True)
        self.service.submit(lambda: self.policy.learner.save_adapter(directory)).result()
        self.engine.load(version, directory)
        params = [SamplingParams(max_tokens=40, seed=seed + i) for i in range(len(prompts))]
        groups = self.engine.generate(
            [
                SamplingRequest(prompt_ids=tuple(p), params=q, n=n, version=version)
                for p, q in zip(prompts, params, strict=True)
            ]
        )
        return [[(list(c.token_ids), list(np.float32(c.logprobs).tolist())) for c in group] for group in groups]

    def train(self, data: Sequence[Any], loss: str, learning_rate: float) -> None:
        made = [Datum(model_input=t, loss_fn_inputs=v) for t, v in data]
        self.policy.forward_backward(made, loss)
        self.policy.optim_step(AdamParams(learning_rate=learning_rate, eps=1e-8)).result()

    def close(self) -> None:
        self.service.close()
        self.engine.close()


def reinforce(policy: Any, base: LoadedModel, *, steps: range, prompts: int, each: int = 8) -> list[float]:
    """The loop -> mean rewards."""
    rewards = []
    for step in steps:
        asked = problems(step, prompts)
        ids = prompts_of(base, asked)
        data, reward = scored(base, asked, ids, policy.sample(ids, each, 1000 * step))
        policy.train(data, "importance_sampling", 3e-3)
        rewards.append(reward)
    return rewards


def test_warm_up_then_reinforcement_raises_the_reward_over_a_kill(place: Place, base: LoadedModel) -> None:
    policy = OverTheWire()
    conversations = [c for c in supervised_conversations(1, 4000) if "step by step" in str(c["messages"])][:64]
    losses = []
    for _ in range(2):
        rows = [conversation_datum(base, c["messages"]) for c in conversations]
        made = [types.Datum(model_input=types.ModelInput.from_ints(t), loss_fn_inputs=v) for t, v in rows]
        backward = policy.trainer.forward_backward(made, "cross_entropy")
        policy.trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        losses.append(backward.result().metrics["loss:sum"])
    assert losses[1] < losses[0]
    rewards = reinforce(policy, base, steps=range(1, 9), prompts=16)
    saved = policy.trainer.save_state("half").result().path
    lost = reinforce(policy, base, steps=range(9, 10), prompts=16)
    place.kill_server()
    place.await_no_worker()
    place.start()
    place.await_ready()
    with raises(tinker.NotFoundError):
        policy.close()
    with closing(OverTheWire(path=saved)) as again:
        assert reinforce(again, base, steps=range(9, 10), prompts=16) == lost  # the lost step again, to the last digit
        rewards += lost + reinforce(again, base, steps=range(10, 19), prompts=16)
    print([round(reward, 3) for reward in rewards])
    before, after = sum(rewards[:2]) / 2, sum(rewards[-4:]) / 4
    assert after > before + 0.2, rewards


def conversation_datum(base: LoadedModel, messages: Sequence[Any]) -> tuple[list[int], dict[str, list[float]]]:
    prompt = encode_prompt(Prompt(id="x", messages=tuple(messages[:1])), base.tokenizer).token_ids
    answer = base.tokenizer.encode(messages[1]["content"], add_special_tokens=False)
    whole = [*prompt, *answer]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return whole[:-1], {"target_tokens": whole[1:], "weights": weights}


def test_a_loop_over_the_wire_makes_the_adapter_that_it_makes_in_process(
    place: Place, base: LoadedModel, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    with closing(OverTheWire()) as wire, closing(InProcess(base, tmp_path / "mine")) as mine:
        rewards = [reinforce(policy, base, steps=range(1, 5), prompts=8) for policy in (wire, mine)]
        assert rewards[0] == rewards[1]
        assert wire.trainer.save_weights_for_sampler("end").result().path
        (tmp_path / "end").mkdir()
        mine.policy.learner.save_adapter(tmp_path / "end")
    (theirs,) = place.state.glob("adapters/tinker-*/v*")
    ours, other = (load_file(next(each.glob("*.safetensors"))) for each in (tmp_path / "end", theirs))
    assert ours.keys() == other.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], other[name], atol=1e-5)


def test_two_clients_at_once_get_what_each_alone_would(place: Place, base: LoadedModel) -> None:
    asked = problems(1, 16)
    ids = prompts_of(base, asked)

    def rows(seed: int) -> list[Any]:
        rng = random.Random(seed)
        return [
            ([*p, *p[:5]], {"target_tokens": [*p[1:], *p[:6]], "weights": [rng.random()] * (len(p) + 5)}) for p in ids
        ]

    def losses(seed: int) -> list[float]:
        made = [types.Datum(model_input=types.ModelInput.from_ints(t), loss_fn_inputs=v) for t, v in rows(seed)]
        with closing(OverTheWire()) as policy:
            found = []
            for _ in range(5):
                backward = policy.trainer.forward_backward(made, "cross_entropy")
                policy.trainer.optim_step(types.AdamParams(learning_rate=1e-3))
                found.append(backward)
            return [each.result().metrics["loss:sum"] for each in found]

    alone = [losses(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(losses, (1, 2)))
    np.testing.assert_allclose(alone, together, rtol=1e-5)
