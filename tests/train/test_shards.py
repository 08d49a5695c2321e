"""FSDP2 on two real processes over gloo: the adapter, or the model, that one process makes; and checkpoints that go on
with another number of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_cases import LORA, SPECS, parameters
from parallel_cases import RATE, UNEVEN, Seen, assert_alike, everything, near_policy, start, whole, with_strategy
from torch.distributed.tensor import DTensor

from groupwise.errors import ConfigError, StorageError
from groupwise.model.layouts import FLEX
from groupwise.recorded import RoutedExperts, RoutingShape
from groupwise.train.data_parallel import DataParallel
from groupwise.train.fully_sharded import FullySharded
from groupwise.train.learner import Learner
from groupwise.types import Sample
from rank_pairs import Pair, on_ranks
from wording import raises

fsdp_learner = with_strategy(FullySharded)
ARCHITECTURES = ("llama", "gemma3", "gpt2", "gpt_oss", "llama4_text", "lfm2", "qwen3_5_text")


@pytest.mark.parametrize(
    "lora", [pytest.param(LORA, id="lora"), pytest.param(None, id="all parameters", marks=pytest.mark.slow)]
)
def test_ranks_train_what_one_process_trains(make_base, make_samples, lora) -> None:
    samples = near_policy(make_base(), make_samples(UNEVEN), lora=lora)

    def run(make, **options):
        learner = start(make, make_base(), lora=lora, **options)
        return everything(learner, samples), learner

    def work(ranks):
        seen, learner = run(fsdp_learner, ranks=ranks)
        cut = [p for p in learner.model.parameters() if isinstance(p, DTensor)]
        held = sum(p.to_local().numel() for p in cut), sum(p.numel() for p in cut)
        return seen, held, {p.device.type for p in learner.base.model.parameters()}

    alone, _ = run(Learner)
    (first, held, base), (second, held_too, base_too) = on_ranks(work)
    assert_alike(first, alone)
    assert_alike(second, alone)
    assert held[0] + held_too[0] == held[1] and 0.4 < held[0] / held[1] < 0.6
    assert base == {"cpu"} and base_too == {"meta"}  # rank 0 samples with it


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*cannot be trained in packed rows:UserWarning")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_architectures_checkpointing_and_dropout(make_base, make_samples, architecture) -> None:
    """What is not the Qwen3 of the other tests: untied heads, windows, another attention, sinks, padded rows,
    recurrent layers; and activations made twice."""
    lora = LORA.model_copy(update={"targets": ["c_attn"] if architecture == "gpt2" else ["q_proj"]})
    samples = make_samples(UNEVEN)

    def run(make, **options):
        base = make_base(architecture)
        learner = start(make, base, lora=lora, gradient_checkpointing=architecture != "gpt2", **options)
        return [learner.step(samples, SPECS["grpo with k3"], learning_rate=RATE) for _ in range(2)], whole(learner)

    (metrics, alone), found = run(Learner), on_ranks(lambda ranks: run(fsdp_learner, ranks=ranks))
    for theirs, parameters_ in found:
        assert theirs == [pytest.approx(each, abs=1e-6) for each in metrics]
        for a, b in zip(parameters_, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_weights_are_gathered_for_the_engine_and_saved_as_a_model(make_base, make_samples, tmp_path: Path) -> None:
    samples = near_policy(make_base(), make_samples(UNEVEN), lora=None)

    def work(ranks):
        learner = start(fsdp_learner, make_base(), lora=None, ranks=ranks)
        learner.step(samples, SPECS["grpo"], learning_rate=RATE)
        learner.gather_weights()
        learner.save_adapter(tmp_path)
        learner.forward(samples)  # and it goes on
        trained = whole(learner)
        return not ranks.leads or list(map(torch.equal, trained, learner.base.model.parameters()))

    equal, _ = on_ranks(work)
    assert len(equal) > 10 and all(equal)
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "tokenizer.json").exists()


@pytest.mark.slow
def test_two_ranks_one_and_two_again_are_one_run(make_base, make_samples, tmp_path: Path) -> None:
    """Full-parameter training, a checkpoint after each leg, read by another number of processes."""
    samples = near_policy(make_base(), make_samples(UNEVEN), lora=None)

    def leg(make, *, load: str | None, save: str, **options):
        learner = start(make, make_base(), lora=None, **options)
        if load is not None:
            learner.load(tmp_path / load)
        for _ in range(2):
            learner.step(samples, SPECS["dapo with entropy"], learning_rate=RATE, minibatches=2)
        learner.save(tmp_path / save)
        return whole(learner), learner.steps, learner.shuffle.getstate()

    for name in ("alone", "one", "two", "three"):
        (tmp_path / name).mkdir()
    leg(Learner, load=None, save="alone")
    leg(Learner, load="alone", save="alone")
    alone = leg(Learner, load="alone", save="alone")

    on_ranks(lambda ranks: leg(fsdp_learner, load=None, save="one", ranks=ranks))
    assert (tmp_path / "one" / "shards" / "__1_0.distcp").stat().st_size > 10_000  # of rank 1, its parts
    assert not (tmp_path / "one" / "learner.safetensors").exists()
    leg(Learner, load="one", save="two")
    found = on_ranks(lambda ranks: leg(fsdp_learner, load="two", save="three", ranks=ranks))
    for weights, *counters in found:
        assert counters == list(alone[1:])
        for a, b in zip(weights, alone[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    wider = on_ranks(lambda ranks: leg(fsdp_learner, load="three", save="alone", ranks=ranks)[1:], size=3)
    assert [steps for steps, _ in wider] == [alone[1] + 4] * 3


def test_a_damaged_checkpoint_is_said_to_be_one(make_base, tmp_path: Path) -> None:
    on_ranks(lambda ranks: start(fsdp_learner, make_base(), lora=None, ranks=ranks).save(tmp_path))
    before = parameters(learner := Learner(make_base(), lora=None))
    (tmp_path / "shards" / "__1_0.distcp").write_bytes(b"")
    with raises(StorageError, words=False):
        learner.load(tmp_path)
    (tmp_path / "shards" / ".metadata").unlink()
    with raises(StorageError, words=False):
        learner.load(tmp_path)
    assert [p.shape for p in before] == [p.shape for p in learner.parameters]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lora": LORA, "cpu_offload": True}, "moves weights off a GPU"), ({"lora": None}, "frozen copy of the model")],
)
def test_what_cannot_be_is_refused(make_base, options, message) -> None:
    def work(ranks):
        fsdp_learner(make_base(), ranks=ranks, **options).keep_reference()

    for error in Pair(work).results():
        assert isinstance(error, ConfigError) and message in error.message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*in packed rows:UserWarning")
@pytest.mark.parametrize("strategy", [DataParallel, FullySharded])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_adapters_of_experts_with_routing_replay(make_base, make_samples, strategy, family: str) -> None:
    """Two ranks train what one process trains, with the experts that were recorded of two of four groups, which here
    are not those that the routers choose. The shares of those are means over micro-batches, which are cut otherwise."""
    lora = LORA.model_copy(update={"targets": ["all-linear", "experts"]})
    samples, shape = near_policy(make_base(family), make_samples(UNEVEN), lora=lora), make_base(family).routing
    recorded = [experts_of(sample, shape) if len(sample.prompt_ids) in (3, 5) else None for sample in samples]
    samples = [replace(sample, routed_experts=each) for sample, each in zip(samples, recorded, strict=True)]

    def run(make, samples, **options) -> list[Seen]:
        learner = start(make, make_base(family), lora=lora, **options)
        return everything(learner, samples, steps_only=True)

    def comparable(seen: list[Seen]) -> list[Seen]:
        shares = ("router/recorded_frac", "router/mismatch_frac")
        return [replace(s, numbers={key: v for key, v in s.numbers.items() if key not in shares}) for s in seen]

    alone = run(Learner, samples)
    assert 0.3 < alone[0].numbers["router/recorded_frac"] < 1 and alone[0].numbers["router/mismatch_frac"] > 0.3
    anew = run(Learner, [replace(sample, routed_experts=None) for sample in samples])
    assert max(float((a - b).abs().max()) for a, b in zip(alone[0].parameters, anew[0].parameters, strict=True)) > 1e-3
    for seen in on_ranks(lambda ranks: run(with_strategy(strategy), samples, ranks=ranks)):
        assert_alike(comparable(seen), comparable(alone))


def experts_of(sample: Sample, shape: RoutingShape) -> RoutedExperts:
    """Any experts, of every token but the last; where samples begin alike, the same."""
    ids = (*sample.prompt_ids, *sample.completion_ids)
    size = (shape.layers, shape.experts)
    scores = [np.random.default_rng(ids[: t + 1]).random(size) for t in range(len(ids) - 1)]
    return RoutedExperts.of(np.array(scores).argsort(-1)[..., : shape.chosen])


def test_ranks_attend_as_rank_0_found_that_it_can(make_base, monkeypatch) -> None:
    """It alone has the model on its GPU before the model is cut; the others would find none, and take many times the
    memory."""

    def work(ranks):
        found = None if ranks.leads else "it needs a CUDA GPU, and the model is on 'cpu'"
        monkeypatch.setattr("groupwise.train.learner.why_not_flex", lambda model, **options: found)
        learner = start(fsdp_learner, make_base(), lora=LORA, attention="flex", ranks=ranks)
        return learner.layouts is FLEX, learner.why_not_flex

    assert on_ranks(work) == [(True, None), (True, None)]
