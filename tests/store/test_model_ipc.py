"""Base weights that another process uses in place: all but CUDA IPC itself, whose handles are only written and read.

The other process is `ipc_peer.py`; memory travels as shared memory of the CPU, through the interface that a GPU's does.
"""

from __future__ import annotations

import base64
import inspect
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from forked import ONE_SERVER, forked
from groupwise.config.lora import LoraSpec
from groupwise.errors import ModelError
from groupwise.model.load import LoadedModel, load_model, weights_hash
from groupwise.run import job_queue, worker
from groupwise.store import cuda_ipc as model_ipc
from groupwise.store.cuda_ipc import CudaIpc, attach_weights, offer_weights
from groupwise.train.learner import Learner
from groupwise.types import Sample
from ipc_peer import SharedMemory
from processes import becomes
from wording import raises


@pytest.fixture
def base(model_dir: Path) -> LoadedModel:
    return load_model(str(model_dir), device="cpu", dtype="float32")


@contextmanager
def peer(model_dir: Path, offer: Path, folder: Path) -> Iterator[Path]:
    """`ipc_peer.py` in a folder of its own."""
    folder.mkdir()
    with forked("ipc_peer", model_dir, offer, str(os.getpid()), folder=folder):
        yield folder


def says(peer: Path, *, line: int = 0) -> dict[str, Any]:
    """What it says, by the number of the line, once it is there."""

    def said() -> list[str]:
        path = peer / "stdout"
        return path.read_text().splitlines(keepends=True) if path.exists() else []

    assert becomes(lambda: len(said()) > line and said()[line].endswith("\n"), within_s=120), peer
    return json.loads(said()[line])


# --- two processes ---


@ONE_SERVER
def test_another_process_computes_with_the_very_same_weights(
    base: LoadedModel, model_dir: Path, tmp_path: Path
) -> None:
    offer = tmp_path / "weights.json"
    assert offer_weights(base, offer, transport=SharedMemory())
    assert offer.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [offer]
    embedding = base.model.get_input_embeddings().weight
    sample = Sample(prompt_ids=(3, 1, 4), completion_ids=(1, 5), mask=(1, 1))
    (expected,) = Learner(base, lora=LoraSpec(rank=2, alpha=4.0, targets=["k_proj"])).forward([sample])
    with peer(model_dir, offer, tmp_path / "one") as process, peer(model_dir, offer, tmp_path / "two") as next_worker:
        for each in (process, next_worker):  # a worker that starts again attaches to what was offered once
            seen = says(each)
            assert seen["hash"] == base.hash and seen["trained"] and seen["tied"]
            assert seen["logprobs"] == pytest.approx(expected, abs=1e-5)
        assert weights_hash(base.model) == base.hash  # their training wrote nothing here
        embedding.data.flatten()[0] += 1.0
        (process / "again").touch()
        seen = says(process, line=1)
    assert seen["first"] == float(embedding.flatten()[0]) and seen["hash"] != base.hash


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        ("pid", "pid"),
        ("base_hash", "base_hash"),
        ("format", "format"),
        ("missing", "parameters"),
        ("no file", "unreadable"),
        ("rubbish", "unreadable"),
        ("other values", "values"),
    ],
)
def test_what_is_not_this_model_or_not_of_the_parent_is_refused(
    base: LoadedModel, model_dir: Path, tmp_path: Path, spoil: str, kind: str
) -> None:
    """In this process: `attach_weights` refuses before, or right after, it has attached."""
    offer = tmp_path / "weights.json"
    assert offer_weights(base, offer, transport=SharedMemory())
    written = json.loads(offer.read_text())
    if spoil == "missing":
        written["tensors"].popitem()
    elif spoil == "other values":
        base.model.get_input_embeddings().weight.data.mul_(2.0)
    elif spoil in written:
        written[spoil] = 1 if spoil != "format" else 2
    offer.write_text("{" if spoil == "rubbish" else json.dumps(written))
    if spoil == "no file":
        offer.unlink()
    mine = load_model(str(model_dir), device="cpu", dtype="float32")
    with raises(ModelError, kind=kind, words=spoil not in ("pid", "base_hash")):  # two hashes or pids
        attach_weights(mine, offer, parent=os.getpid(), transport=SharedMemory())


@pytest.mark.parametrize(
    ("key", "value", "kind"), [("shape", [1], "shape"), ("dtype", "float16", "shape"), ("name", "/gone", "handle")]
)
def test_a_parameter_that_does_not_fit_is_named(
    base: LoadedModel, model_dir: Path, tmp_path: Path, key: str, value: object, kind: str
) -> None:
    offer = tmp_path / "weights.json"
    offer_weights(base, offer, transport=SharedMemory())
    written = json.loads(offer.read_text())
    name = list(written["tensors"])[2]
    written["tensors"][name][key] = value
    if key == "shape":
        written["tensors"][name]["stride"] = [1]
    offer.write_text(json.dumps(written))
    mine = load_model(str(model_dir), device="cpu", dtype="float32")
    with raises(ModelError, kind=kind) as refused:
        attach_weights(mine, offer, parent=os.getpid(), transport=SharedMemory())
    assert name in str(refused.value)


# --- what is offered where ---


def test_nothing_is_offered_of_a_model_on_the_cpu(base: LoadedModel, tmp_path: Path) -> None:
    assert not offer_weights(base, tmp_path / "weights.json") and not list(tmp_path.iterdir())


class Broken:
    """A transport that does not get its memory anywhere."""

    def export(self, tensor: torch.Tensor) -> dict[str, Any]:
        raise RuntimeError("CUDA error: invalid argument")

    def attach(self, handle: dict[str, Any]) -> torch.Tensor:
        raise RuntimeError("CUDA error: invalid device context")


def test_what_cannot_be_exported_is_said_and_not_offered(base: LoadedModel, tmp_path: Path, caplog) -> None:
    offer = tmp_path / "weights.json"
    assert offer_weights(base, offer, transport=SharedMemory())
    with caplog.at_level(logging.WARNING):
        assert not offer_weights(base, offer, transport=Broken())
    assert "copy of its own: CUDA error: invalid argument" in caplog.text and not offer.exists()


def test_where_nothing_can_be_written_nothing_is_offered(base: LoadedModel, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    assert not offer_weights(base, tmp_path / "file" / "weights.json", transport=SharedMemory())
    assert "not shared" in caplog.text


# --- the worker ---


class Gpu:
    """Of a machine with one: `auto` is `cuda`, and what cannot be attached is loaded in its place, here on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: object):
        self.died_by: list[object] = []
        monkeypatch.setattr(job_queue, "resolve_device", lambda device: torch.device("cuda"))
        monkeypatch.setattr(job_queue, "resolve_dtype", lambda dtype, device: torch.float32)
        monkeypatch.setattr(worker, "_die_with_parent", lambda parent, by: self.died_by.append(by))
        monkeypatch.setattr(model_ipc, "CudaIpc", lambda: transport)


def options(model_dir: Path, offer: Path | None) -> Any:
    arguments = ["--state", "s", "--model", str(model_dir), "--device", "cpu", "--dtype", "float32"]
    return worker._options(arguments if offer is None else [*arguments, "--weights", str(offer)])


def test_a_worker_on_a_gpu_attaches_and_then_dies_with_its_server_at_once(
    base: LoadedModel, model_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    gpu, offer = Gpu(monkeypatch, SharedMemory()), tmp_path / "weights.json"
    offer_weights(base, offer, transport=SharedMemory())
    heartbeat = job_queue.LeaseHeartbeat(None)  # pyright: ignore[reportArgumentType]
    loaded = worker._load(options(model_dir, offer), heartbeat, os.getpid())
    base.model.get_input_embeddings().weight.data.mul_(2.0)
    assert torch.equal(loaded.model.get_input_embeddings().weight, base.model.get_input_embeddings().weight)
    assert (gpu.died_by, heartbeat.patience_s) == ([worker.signal.SIGKILL], 0.0)


@pytest.mark.parametrize("offered", [True, False])
def test_a_worker_that_cannot_attach_says_so_and_loads_a_copy(
    base: LoadedModel, model_dir: Path, tmp_path: Path, monkeypatch, caplog, offered: bool
) -> None:
    gpu, offer = Gpu(monkeypatch, Broken()), tmp_path / "weights.json"
    if offered:
        offer_weights(base, offer, transport=SharedMemory())
    heartbeat = job_queue.LeaseHeartbeat(None)  # pyright: ignore[reportArgumentType]
    loaded = worker._load(options(model_dir, offer), heartbeat, os.getpid())
    assert loaded.hash == base.hash and gpu.died_by == [] and heartbeat.patience_s == job_queue.PARENT_GRACE_S
    assert "has a copy of its own on the GPU" in caplog.text


def test_a_worker_to_which_nothing_is_offered_loads_in_silence(model_dir: Path, monkeypatch, caplog) -> None:
    Gpu(monkeypatch, Broken())
    worker._load(options(model_dir, None), job_queue.LeaseHeartbeat(None), os.getpid())  # pyright: ignore[reportArgumentType]
    assert not caplog.text


# --- CUDA's handles ---


def test_a_handle_of_cuda_keeps_all_that_torch_needs_and_is_plain_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: what `reduce_tensor` would answer is put in its place, and what would be rebuilt is looked at."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    values: dict[str, Any] = {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([2, 3]),
        "tensor_stride": (3, 1),
        "tensor_offset": 4,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.bfloat16,
        "storage_device": 0,
        "storage_handle": bytes(range(64)),
        "storage_size_bytes": 4096,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"/torch_1_2_3",
        "ref_counter_offset": 7,
        "event_handle": b"\x00\xff" * 32,
        "event_sync_required": True,
    }
    assert list(values) == names  # of the torch that is installed
    rebuilt: list[dict[str, Any]] = []

    def rebuild_cuda_tensor(**arguments: Any) -> torch.Tensor:
        rebuilt.append(arguments)
        return torch.empty(2, 3)

    rebuild_cuda_tensor.__signature__ = inspect.signature(reductions.rebuild_cuda_tensor)  # type: ignore[attr-defined]
    monkeypatch.setattr(model_ipc, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    monkeypatch.setattr(model_ipc, "reduce_tensor", lambda tensor: (rebuild_cuda_tensor, tuple(values.values())))
    handle = json.loads(json.dumps(CudaIpc().export(torch.empty(2, 3))))
    assert base64.b64decode(handle["storage_handle"]["bytes"]) == values["storage_handle"]
    CudaIpc().attach(handle)
    assert rebuilt == [values | {"tensor_size": (2, 3)}]


def test_a_tensor_that_torch_would_not_send_by_cuda_is_refused() -> None:
    with raises(RuntimeError):
        CudaIpc().export(torch.empty(2))
