"""From the host to the device, without waiting for it.

A copy from ordinary memory to a GPU ends when the GPU has done all that it was asked for before: the host waits, and
starts nothing meanwhile. From pinned memory, which the GPU reads by itself, the copy is one more thing that it is asked
for. So what is worked out in Python (token ids, lengths, places in a packed row) goes to the device by `on_device`, and
by nothing else. torch keeps pinned memory for the next copy, and until this one is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_device(
    values: Sequence[Any] | np.ndarray | Tensor, device: torch.device | str, dtype: torch.dtype | None = None
) -> Tensor:
    """Numbers of the host, of any shape, on the device; a tensor of the CPU is not copied where it stays there."""
    x = values.to(dtype or values.dtype) if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":  # gpu-only below: copies from pinned memory
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
