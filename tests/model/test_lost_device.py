"""Which errors mean that a GPU is lost to the process: by their number, by their cause, and by asking the device."""

import pickle

import pytest
import torch

from cuda_errors import ASSERT, ILLEGAL_ADDRESS, INVALID_VALUE, NO_MEMORY, cuda_error
from groupwise.errors import DeviceLostError, EngineError
from groupwise.model.lost_device import lost_device, naming_a_lost_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("number", "lost"), [(ASSERT, True), (ILLEGAL_ADDRESS, True), (NO_MEMORY, False), (INVALID_VALUE, False)]
)
def test_the_number_says_whether_a_new_process_is_needed(number: int, lost: bool) -> None:
    found = lost_device(cuda_error(number), CPU)
    assert (found is not None) == lost
    if found is not None:
        assert (found.code, found.status, found.exit_code) == ("device_lost", 503, 75)
        assert pickle.loads(pickle.dumps(found)).retry_after == found.retry_after > 1


def test_the_cause_of_an_error_counts() -> None:
    error = EngineError("vLLM in this process has ended")
    error.__cause__ = cuda_error(ASSERT)
    assert lost_device(error, CPU) is not None
    assert lost_device(EngineError("it answered no"), GPU) is None  # nobody is asked for an error of ours


@pytest.mark.parametrize("works", [True, False])
def test_an_error_without_a_number_has_the_device_asked(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        asked.append(device)
        if not works:
            raise cuda_error(ILLEGAL_ADDRESS)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    triton = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert (lost_device(triton, GPU) is None) == works
    assert lost_device(triton, CPU) is None
    assert asked == [GPU]


def test_a_block_raises_it_in_place_of_what_came_of_it() -> None:
    with pytest.raises(DeviceLostError) as raised, naming_a_lost_device(CPU):
        raise cuda_error(ASSERT)
    assert isinstance(raised.value.__cause__, torch.AcceleratorError)
    with pytest.raises(ValueError, match="ours"), naming_a_lost_device(CPU):
        raise ValueError("ours")
