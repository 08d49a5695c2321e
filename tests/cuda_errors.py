"""Errors of a CUDA device as torch raises them: the class, and `cudaError_t`'s number as an attribute."""

from __future__ import annotations

import torch

ASSERT, ILLEGAL_ADDRESS, NO_MEMORY, INVALID_VALUE = 710, 700, 2, 1


def cuda_error(number: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError(f"CUDA error: number {number}\nCUDA kernel errors might be reported later ...")
    setattr(error, "error_code", number)  # noqa: B010 - torch sets it in C++, and its stubs do not have it
    return error
