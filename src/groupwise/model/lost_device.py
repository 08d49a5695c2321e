"""Tells whether a GPU computes nothing more in this process, after an error that only a new process gets over.

A kernel that reads where it must not, a failed assertion in one, an uncorrectable error of memory: CUDA then answers
every later call of the process with the same error, and what the process had on the GPU cannot be read any more
(cudaError_t in CUDA's runtime: "the process must be terminated and relaunched"). Memory that ran out, or a wrong
argument, is not of that kind. HIP has the same numbers.

    lost_device             an error -> `DeviceLostError`, which has exit code 75, or None: the device continues
    naming_a_lost_device    the same for a block of code
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from groupwise.errors import DeviceLostError, GroupwiseError

LOST = frozenset(
    {
        214,  # cudaErrorECCUncorrectable
        220,  # cudaErrorNvlinkUncorrectable
        226,  # cudaErrorContained
        700,  # cudaErrorIllegalAddress
        702,  # cudaErrorLaunchTimeout
        709,  # cudaErrorContextIsDestroyed
        710,  # cudaErrorAssert
        714,  # cudaErrorHardwareStackError
        715,  # cudaErrorIllegalInstruction
        716,  # cudaErrorMisalignedAddress
        717,  # cudaErrorInvalidAddressSpace
        718,  # cudaErrorInvalidPc
        719,  # cudaErrorLaunchFailure
    }
)


def lost_device(error: BaseException, device: torch.device) -> DeviceLostError | None:
    """Return a DeviceLostError for `error` if `device` is lost to this process; None if it still computes.

    An error whose number (`torch.AcceleratorError`) does not say so, such as one of Triton's or cuBLAS's, has the
    device asked.
    """
    if isinstance(error, DeviceLostError):
        return error
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "error_code", None) in LOST and isinstance(cause, torch.AcceleratorError):
            return _named(cause, device)
        cause = cause.__cause__
    if isinstance(error, GroupwiseError):
        return None
    if device.type != "cuda":  # gpu-only below: a device that is lost says so whatever it is asked
        return None
    try:
        torch.cuda.synchronize(device)
    except torch.AcceleratorError as again:
        return _named(again, device)
    return None


@contextmanager
def naming_a_lost_device(device: torch.device) -> Iterator[None]:
    """Raise DeviceLostError in place of any error inside the block after which `device` is lost."""
    try:
        yield
    except Exception as error:
        if (lost := lost_device(error, device)) is None or lost is error:
            raise
        raise lost from error


def _named(error: BaseException, device: torch.device) -> DeviceLostError:
    return DeviceLostError(
        f"{device} is lost to this process, which must be replaced by a new one: {str(error).splitlines()[0]}",
        hint="start it again, a run with resume=auto: what was saved is whole. If it comes again with the same work, "
        "CUDA_LAUNCH_BLOCKING=1 names the operation; `dmesg | grep -i xid` names a GPU that is broken",
        retry_after=30.0,
    )
