"""FSDP over models that each rank reads its parts of, on real processes over gloo: what one process trains, the bytes
of each rank, copies of the parts in groups of ranks (HSDP), and files that are written without a whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_cases import LORA, SPECS
from parallel_cases import RATE, UNEVEN, assert_alike, everything, near_policy, start, whole
from parts_cases import CPU, Settings, of_parts, read_parts, read_whole, save
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from groupwise.config.lora import LoraSpec
from groupwise.model.parts import NotInParts, open_parts
from groupwise.train.learner import Learner
from rank_pairs import on_ranks
from slow_cases import long_case, slow_but

SLOW = (pytest.mark.slow,)
DENSE = ("qwen3", "llama", "gemma3", "gpt2")  # with experts rounding alone chooses others, in ranks of either kind
FAMILIES = ("qwen3", "llama", "gemma3", "gpt2", "gpt_oss", "qwen3_moe", "deepseek_v3", "lfm2", "qwen3_5_text")
QUERIES = {"gpt2": "c_attn", "deepseek_v3": "q_b_proj"}  # where no q_proj makes them


def make_parts(directory, *, ranks, **options):
    return of_parts(directory, ranks=ranks, **options)


@pytest.mark.filterwarnings("ignore:.*in packed rows:UserWarning")
@pytest.mark.parametrize(
    ("lora", "family"),
    [
        *(pytest.param(LORA, each, id=f"lora-{each}", marks=pytest.mark.slow) for each in FAMILIES),
        *(pytest.param(None, each, id=f"all-{each}", marks=() if each == "qwen3" else SLOW) for each in DENSE),
    ],
)
def test_ranks_train_what_one_process_trains(make_base, make_samples, tmp_path: Path, lora, family: str) -> None:
    if lora is not None:
        lora = lora.model_copy(update={"targets": [QUERIES.get(family, "q_proj")]})
    place = save(make_base(family), tmp_path / "model")
    base = read_whole(place)
    samples = near_policy(base, make_samples(UNEVEN), lora=lora)

    def work(ranks):
        learner = start(make_parts, place, lora=lora, ranks=ranks)
        cut = [p for p in learner.model.parameters() if isinstance(p, DTensor)]
        held = sum(p.to_local().numel() for p in cut), sum(p.numel() for p in cut)
        return everything(learner, samples, steps_only=True), held, learner.base.hash, learner.packed

    alone = start(Learner, read_whole(place), lora=lora)
    seen = everything(alone, samples, steps_only=True)
    for found, held, hash, packed in on_ranks(work):
        assert_alike(found, seen)
        assert hash == base.hash and packed == alone.packed
        assert 0.3 < held[0] / held[1] < 0.7


@pytest.mark.parametrize(
    ("lora", "shard_size"),
    [long_case(None, 2), (LORA, 2), *(pytest.param(lora, 4, marks=pytest.mark.slow) for lora in (None, LORA))],
)
def test_copies_of_the_parts_in_groups_of_ranks(
    make_base, make_samples, tmp_path: Path, lora: LoraSpec | None, shard_size: int
) -> None:
    """HSDP, 2 x 2: gradients of all parameters and of an adapter are those of one process, to 1e-6 of their norm."""
    place = save(make_base("llama"), tmp_path / "model")
    samples = near_policy(read_whole(place), make_samples(UNEVEN), lora=None)

    def gradients(learner: Learner) -> list[torch.Tensor]:
        learner.forward_backward(samples, SPECS["grpo"])
        return [(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone() for p in learner.parameters]

    def work(ranks):
        learner = start(make_parts, place, lora=lora, ranks=ranks, shard_size=shard_size)
        cut = [p for p in learner.model.parameters() if isinstance(p, DTensor)]
        share = sum(p.to_local().numel() for p in cut) / sum(p.numel() for p in cut)
        found = gradients(learner)
        if lora is not None:
            learner.strategy._sum_gradients(learner.parameters)
            found = [p.grad.clone() for p in learner.parameters]
        learner.zero_grad()
        metrics = [learner.step(samples, SPECS["grpo"], learning_rate=RATE) for _ in range(5)]
        return share, found, metrics, whole(learner)

    alone = start(Learner, read_whole(place), lora=lora)
    want = gradients(alone)
    alone.zero_grad()
    metrics = [alone.step(samples, SPECS["grpo"], learning_rate=RATE) for _ in range(5)]
    for share, found, numbers, trained in on_ranks(work, size=4):
        assert share == pytest.approx(1 / shard_size, rel=0.15)
        for a, b in zip(found, want, strict=True):
            assert float((a - b).norm()) <= 1e-6 * float(b.norm())
        assert numbers == [pytest.approx(each, abs=1e-6) for each in metrics]
        for a, b in zip(trained, whole(alone), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", slow_but({"llama"}, of=("llama", "qwen3_moe")))
def test_a_model_is_written_without_one_that_is_whole(
    make_base, make_samples, tmp_path: Path, monkeypatch, family
) -> None:
    place = save(make_base(family), tmp_path / "model")
    monkeypatch.setattr("groupwise.train.gathered.WRITTEN_AT_ONCE", 1)
    (written := tmp_path / "written").mkdir()

    def work(ranks):
        learner = start(make_parts, place, lora=None, ranks=ranks)
        learner.step(make_samples(UNEVEN), SPECS["grpo"], learning_rate=RATE)
        learner.gather_weights()  # for nobody: there is no base
        learner.save_adapter(written)
        sent = dict[str, torch.Tensor]()
        learner.stream_weights(lambda name, tensor: sent.update({name: tensor.clone()}) if ranks.leads else None)
        return {name: p.full_tensor() for name, p in learner.model.named_parameters()}, sent

    (trained, sent), _ = on_ranks(work)
    found = read_whole(written)
    assert {name: torch.equal(p, trained[name]) for name, p in found.model.named_parameters()} == dict.fromkeys(
        trained, True
    )
    assert len(list(written.glob("*.safetensors"))) == 3  # two layers and the rest
    files = {name: each for file in written.glob("*.safetensors") for name, each in load_file(file).items()}
    assert files.keys() == load_file(place / "model.safetensors").keys()  # of experts, those that transformers read
    assert sent.keys() == files.keys() and all(torch.equal(sent[name], each) for name, each in files.items())
    assert found.eos_ids == read_whole(place).eos_ids


def test_what_cannot_be_read_in_parts_says_why(make_base, tmp_path: Path) -> None:
    place = save(make_base("qwen3"), tmp_path / "model")
    weights = load_file(place / "model.safetensors")
    read_parts(place)

    def why(tensors=weights, **changed) -> str:
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(NotInParts) as error:
            open_parts(replace(Settings(str(place)), **changed), device=CPU)
        return str(error.value)

    embeddings = weights["model.embed_tokens.weight"]
    assert "quantised" in why(quantization="int8")
    assert "lack model.norm.weight" in why({k: v for k, v in weights.items() if k != "model.norm.weight"})
    assert "two" in why(weights | {"lm_head.weight": embeddings + 1})
    assert "shape" in why(weights | {"model.norm.weight": torch.zeros(3)})
    save_file(weights | {"lm_head.weight": embeddings.clone()}, place / "model.safetensors", metadata={"format": "pt"})
    assert len(read_parts(place).origins) == len(weights)  # the same twice
    (place / "model.safetensors").unlink()
    with pytest.raises(NotInParts, match="safetensors"):
        read_parts(place)


@pytest.mark.parametrize("autocast", [None, long_case(torch.bfloat16)])
def test_a_checkpoint_of_copies_is_read_by_another_number_of_ranks(
    make_base, make_samples, tmp_path: Path, autocast
) -> None:
    """All parameters, also in mixed precision: four ranks with two copies, then two with one, then one process."""
    place = save(make_base("llama"), tmp_path / "model")
    samples = near_policy(read_whole(place), make_samples(UNEVEN), lora=None)
    (tmp_path / "four").mkdir()
    (tmp_path / "two").mkdir()

    def leg(learner: Learner, *, load: str | None, save: str | None):
        if load is not None:
            learner.load(tmp_path / load)
        learner.step(samples, SPECS["grpo"], learning_rate=RATE)
        if save is not None:
            learner.save(tmp_path / save)
        return whole(learner), learner.steps

    def cut(ranks, **files):
        size = 2 if ranks.size == 4 else None
        return leg(start(make_parts, place, lora=None, ranks=ranks, shard_size=size, autocast=autocast), **files)

    alone = start(Learner, read_whole(place), lora=None, autocast=autocast)
    on_ranks(lambda ranks: cut(ranks, load=None, save="four"), size=4)
    leg(alone, load=None, save=None)
    found = on_ranks(lambda ranks: cut(ranks, load="four", save="two"))
    want = leg(alone, load=None, save=None)
    last = leg(start(Learner, read_whole(place), lora=None, autocast=autocast), load="two", save=None)
    end = leg(alone, load=None, save=None)
    atol = 1e-6 if autocast is None else 2.5 * RATE  # of 16 bits: a few steps of Adam may go another way
    for (weights, steps), (expected, counted) in [*((each, want) for each in found), (last, end)]:
        assert steps == counted
        for a, b in zip(weights, expected, strict=True):
            assert float((a - b).abs().max()) <= atol
            assert float((a - b).norm()) <= (1e-6 if autocast is None else 0.02) * float(b.norm())
