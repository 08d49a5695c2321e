"""Base weights that several processes share: mapped, the same numbers, tied as before, and nobody's private memory."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from groupwise.config.lora import LoraSpec
from groupwise.model.load import load_model, weights_hash
from groupwise.store.mapped_weights import is_mapped, map_weights
from groupwise.train.learner import Learner

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list its mappings")


def kilobytes_of_its_own(path: Path) -> int:
    """What of a mapped file this process has a copy of, from the kernel's own books."""
    text = Path("/proc/self/smaps").read_text()
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    mine = [block for block in blocks if str(path) in block.split("\n", 1)[0]]
    assert mine
    return sum(int(size) for block in mine for size in re.findall(r"^Private_Dirty: +(\d+)", block, re.MULTILINE))


@pytest.mark.parametrize("architecture", ["qwen3", "llama"], ids=["tied", "untied"])
def test_weights_are_the_same_and_nobodys_own(make_base, make_samples, tmp_path, architecture):
    base = make_base(architecture, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in base.model.named_parameters()}
    lora = LoraSpec(rank=2, alpha=4.0, targets=["k_proj"])
    expected = Learner(base, lora=lora).forward(make_samples(((5, (4, 6)),)))
    assert not is_mapped(base.model)
    assert map_weights(base, tmp_path)
    (path,) = tmp_path.iterdir()
    assert is_mapped(base.model) and weights_hash(base.model) == base.hash
    for name, parameter in base.model.named_parameters():
        assert torch.equal(parameter, before[name]) and not parameter.requires_grad
    head, embedding = base.model.get_output_embeddings().weight, base.model.get_input_embeddings().weight
    assert (head.data_ptr() == embedding.data_ptr()) == (architecture == "qwen3")
    learner = Learner(base, lora=lora)
    samples = make_samples(((5, (4, 6)),))
    assert learner.forward(samples)[0] == pytest.approx(expected[0], abs=1e-5, nan_ok=True)
    learner.forward_backward_supervised(samples)
    learner.optim_step(learning_rate=0.1)
    assert kilobytes_of_its_own(path) == 0


def test_a_model_in_another_type_than_its_file_is_written_once(tmp_path):
    """The starter's file is bfloat16: run in bfloat16 it is mapped as it is, in float32 from a copy."""
    own = load_model("starter", device="cpu", dtype="bfloat16")
    assert is_mapped(own.model) and map_weights(own, tmp_path) and not list(tmp_path.iterdir())
    first = load_model("starter", device="cpu", dtype="float32")
    assert not is_mapped(first.model) and map_weights(first, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == f"base-{first.hash[:32]}-float32.safetensors"
    written = path.stat()
    second = load_model("starter", device="cpu", dtype="float32")
    assert map_weights(second, tmp_path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


@pytest.mark.parametrize("damage", ["truncated", "rubbish", "other values", "other names"])
def test_a_file_that_is_not_of_this_model_is_written_anew(make_base, tmp_path, damage):
    from safetensors.torch import save_file

    base = make_base("qwen3", dtype=torch.float32)
    map_weights(base, tmp_path)
    (path,) = tmp_path.iterdir()
    good, tensors = path.read_bytes(), {name: t.clone() for name, t in load_file(path).items()}
    spoiled = tmp_path / "spoiled"
    if damage == "truncated":
        spoiled.write_bytes(good[:-8])
    elif damage == "rubbish":
        spoiled.write_bytes(b"rubbish")
    else:
        key = next(iter(tensors))
        tensors["other" if damage == "other names" else key] = tensors.pop(key) + 1
        save_file(tensors, spoiled)
    os.replace(spoiled, path)
    again = make_base("qwen3", dtype=torch.float32)
    assert map_weights(again, tmp_path) and is_mapped(again.model)
    assert path.read_bytes() == good and weights_hash(again.model) == again.hash


def test_the_weights_of_other_models_are_removed(make_base, tmp_path):
    map_weights(make_base("qwen3", dtype=torch.float32), tmp_path)
    other = make_base("qwen3", dtype=torch.float32, seed=1)
    map_weights(other, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"base-{other.hash[:32]}-float32.safetensors"]


def test_where_nothing_can_be_written_the_process_keeps_its_own(make_base, tmp_path, caplog):
    (tmp_path / "file").write_text("not a directory")
    base = make_base("qwen3", dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        assert not map_weights(base, tmp_path / "file")
    assert "not shared" in caplog.text and weights_hash(base.model) == base.hash
