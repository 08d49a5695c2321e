"""Hardware profiles: named sets of limits (sequence length, rows, dtype) that fit a kind of machine.

    cpu-small        the starter and models of up to a few hundred million parameters
    gpu-24g-lora     an adapter over a 16-bit base on a GPU of 24 GB; likewise 48g, 80g, 141g
    gpu-80g-full     every parameter, in float32 with 16-bit products; likewise 141g

A profile chooses device, type, the longest sequence, tokens of a forward and backward pass and completions decoded at
once. `training_shape_id` names the trainer's and the engine's, `ref_training_shape_id` that of its own reference.
Without a name the largest that this machine holds is taken. No torch here until the machine is looked at.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from groupwise.errors import ConfigError
from groupwise.platform import memory_bytes

SLACK = 0.9  # GPUs and machines have a little less memory than their name says


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """Describes a hardware profile: `memory_gb` is the device memory that it needs; `trains` is "lora", "full" or "any"
    (both)."""

    name: str
    device: Literal["cpu", "cuda"]
    memory_gb: int
    dtype: Literal["float32", "bfloat16"]
    trains: Literal["lora", "full", "any"]
    max_seq_len: int
    micro_tokens: int  # of one forward and backward pass
    batch_rows: int  # completions decoded at once
    mixed_precision: bool = False  # products in bfloat16 over float32 weights
    gradient_checkpointing: bool = False

    def fits(self, machine: Machine) -> bool:
        """Return whether this machine has the device and the memory."""
        return self.device in machine.memory_gb and machine.memory_gb[self.device] >= SLACK * self.memory_gb

    def trains_with(self, *, lora: bool) -> bool:
        """Return whether the profile is for training an adapter (`lora`), or all parameters."""
        return self.trains in ("any", "lora" if lora else "full")


@dataclass(frozen=True)
class Machine:
    """Memory in GB (10^9 bytes) by device: "cpu", and "cuda" where there is one."""

    memory_gb: Mapping[str, float]

    @classmethod
    def here(cls) -> Machine:
        """Return the machine this runs on. Loads torch."""
        import torch

        memory = {"cpu": memory_bytes() / 1e9}
        if torch.cuda.is_available():  # gpu-only: its memory
            memory["cuda"] = torch.cuda.get_device_properties(0).total_memory / 1e9
        return cls(memory)


def _cpu(name: str, memory: int, *, length: int, rows: int) -> HardwareProfile:
    return HardwareProfile(
        name=name,
        device="cpu",
        memory_gb=memory,
        dtype="float32",
        trains="any",
        max_seq_len=length,
        micro_tokens=max(length, 8192),
        batch_rows=rows,
    )


def _gpu(memory: int, trains: Literal["lora", "full"], *, length: int, rows: int) -> HardwareProfile:
    full = trains == "full"
    return HardwareProfile(
        name=f"gpu-{memory}g-{trains}",
        device="cuda",
        memory_gb=memory,
        dtype="float32" if full else "bfloat16",
        trains=trains,
        max_seq_len=length,
        micro_tokens=length,
        batch_rows=rows,
        mixed_precision=full,
        gradient_checkpointing=True,
    )


_ALL = (
    _cpu("cpu-small", 2, length=4096, rows=128),
    _cpu("cpu-large", 64, length=16384, rows=256),
    _gpu(24, "lora", length=8192, rows=64),
    _gpu(48, "lora", length=16384, rows=128),
    _gpu(80, "lora", length=32768, rows=256),
    _gpu(141, "lora", length=65536, rows=512),
    _gpu(80, "full", length=16384, rows=128),
    _gpu(141, "full", length=32768, rows=256),
)
PROFILES: Mapping[str, HardwareProfile] = MappingProxyType({profile.name: profile for profile in _ALL})


def find_profile(name: str, *, machine: Machine, option: str = "training_shape_id") -> HardwareProfile:
    """Return the profile of this name, for `option` of a configuration.

    Raises:
        ConfigError: there is none, or this machine does not hold it.
    """
    if name not in PROFILES:
        near = difflib.get_close_matches(name, PROFILES, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{option} {name!r} does not exist; {meant}valid: {', '.join(PROFILES)}")
    if not (profile := PROFILES[name]).fits(machine):
        has = ", ".join(f"{device} {memory:.0f} GB" for device, memory in machine.memory_gb.items())
        fitting = ", ".join(each.name for each in _ALL if each.fits(machine)) or "none"
        raise ConfigError(
            f"{option} {name!r} needs {profile.memory_gb} GB on {profile.device}; this machine has {has}",
            hint=f"profiles that fit here: {fitting} (groupwise profiles)",
        )
    return profile


def choose_profile(*, lora: bool, machine: Machine) -> HardwareProfile:
    """Return the largest profile for this training that the machine holds, a GPU's before a CPU's."""
    fitting = [each for each in _ALL if each.trains_with(lora=lora) and each.fits(machine)]
    best = max(fitting, key=lambda each: (each.device == "cuda", each.memory_gb), default=None)  # gpu-aware
    return best or PROFILES["cpu-small"]
