"""Copies tensors from the host to the device without waiting for it, and back, waiting once.

A copy from ordinary memory to a GPU ends when the GPU has done all that it was asked for before: the host waits, and
starts nothing meanwhile. From pinned memory, which the GPU reads by itself, the copy is one more thing that it is asked
for. So what is worked out in Python (token ids, lengths, places in a packed row) goes to the device by `on_device`, and
by nothing else. torch keeps pinned memory for the next copy, and until this one is done.

What comes back has to be waited for. Of many tensors `on_host` waits once and not for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_OF_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.long: np.int64}


def on_device(
    values: Sequence[Any] | np.ndarray | Tensor, device: torch.device | str, dtype: torch.dtype | None = None
) -> Tensor:
    """Numbers of the host, of any shape, on the device; a tensor of the CPU is not copied where it stays there."""
    if isinstance(values, np.ndarray) and dtype in _OF_NUMPY:  # or torch would make a tensor of the array's type first
        values = values.astype(_OF_NUMPY[dtype], copy=False)
    x = values.to(dtype or values.dtype) if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":  # gpu-seen below: copies from pinned memory
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the host's memory, without gradients, under the same names: side by side in one copy for each type of
    numbers and device, so that the device needs as much memory again meanwhile."""
    alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, x in tensors.items():
        alike.setdefault((x.dtype, x.device), []).append(name)
    found = dict[str, Tensor]()
    for names in alike.values():
        every = [tensors[name].detach() for name in names]
        parts = torch.cat([x.reshape(-1) for x in every]).to("cpu").split([x.numel() for x in every])
        found |= {name: part.view(x.shape) for name, x, part in zip(names, every, parts, strict=True)}
    return {name: found[name] for name in tensors}
