"""What is done for a server on GPUs, in the order in which vLLM's side of it wants that; NCCL and the GPU are replaced
here. What vLLM makes of what it is told is in tests/vllm_server, gloo in test_vllm_transfer."""

from __future__ import annotations

import base64
import pickle
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groupwise.engine.vllm import links
from groupwise.errors import EngineError
from wording import raises

CPU = torch.device("cpu")
ID = bytes(range(128))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What NCCL is asked for, in order."""
    done: list[tuple[Any, ...]] = []
    stream = SimpleNamespace(synchronize=lambda: done.append(("wait",)), wait_stream=lambda other: None)
    fake = SimpleNamespace(
        unique_id=lambda: ID,
        init_rank=lambda size, id, rank: done.append(("init", size, id, rank)) or "comm",
        all_reduce=lambda inputs, streams, comms: done.append(("sum", inputs[0].numel(), comms)),
        broadcast=lambda inputs, streams, comms: done.append(("send", inputs[0].tolist(), comms)),
    )
    monkeypatch.setattr(links, "nccl", fake)
    monkeypatch.setattr(links, "PACKED_BYTES", 1 << 16)  # a quarter of a gigabyte takes seconds to be shared
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu-7"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: done.append(("collect",)))
    return done


def chunk(*values: int) -> links.Chunk:
    packed = torch.tensor(values, dtype=torch.uint8)
    return links.Chunk(packed, ["a"], [torch.uint8], [packed.shape], [len(values)])


def test_nccl_begins_with_the_sum_that_vllms_workers_begin_with(done) -> None:
    link = links.NcclLink("http://gpu1:8000", 2, device=CPU, timeout_s=5.0)
    told = link.meeting()
    assert base64.b64decode(told.pop("nccl_unique_id_b64"), validate=True) == ID
    expected = {"rank_offset": 1, "world_size": 3, "packed": True, "packed_num_buffers": 2}
    assert told == {**expected, "packed_buffer_size_bytes": links.PACKED_BYTES}
    link.join()
    link.send(chunk(1, 2))
    assert done == [("init", 3, ID, 0), ("sum", 1, ["comm"]), ("wait",), ("send", [1, 2], ["comm"]), ("wait",)]


def test_a_group_that_is_given_up_is_used_no_more(done) -> None:
    link = links.NcclLink("http://gpu1:8000", 1, device=CPU, timeout_s=5.0)
    link.abort()  # before anybody was met
    assert link._comm is None


def test_ipc_shows_one_buffer_for_all_chunks_of_a_version(done) -> None:
    link = links.IpcLink("http://127.0.0.1:8000", 1, device=CPU, timeout_s=5.0)
    assert link.meeting() == {"packed": True}
    told = [link.described(chunk(1, 2, 3)), link.described(chunk(4, 5))]
    assert told[0]["tensor_sizes"] == [3] and told[1]["tensor_sizes"] == [2]
    shown = [pickle.loads(base64.b64decode(each["ipc_handles_pickled"])) for each in told]
    assert [list(each) for each in shown] == [["gpu-7"], ["gpu-7"]]
    assert link._buffer is not None and link._buffer[:3].tolist() == [4, 5, 3]  # vLLM copies before it answers
    link.rest()
    assert link._buffer is None and done[-1] == ("collect",)
    with raises(EngineError):
        links.IpcLink("http://127.0.0.1:8000", 2, device=CPU, timeout_s=5.0)


def test_what_blocks_for_ever_holds_up_no_end_of_the_process() -> None:
    over = threading.Event()
    future = links.in_thread(over.wait)
    (thread,) = [each for each in threading.enumerate() if each.name == "groupwise-weights" and each.daemon]
    future.cancel()
    over.set()
    thread.join(10.0)
    assert not thread.is_alive() and future.cancelled()
    with pytest.raises(ZeroDivisionError):
        links.in_thread(lambda: 1 // 0).result(10.0)
