"""One run in several processes: rank 0 leads it as if it were alone, the others follow with their learners.

torchrun --nproc-per-node 2 -m groupwise run config.yaml      # groupwise launch config.yaml train.devices=2
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import torch

from groupwise.config.run import RunConfig, check_processes
from groupwise.config.world import World, world
from groupwise.errors import ConfigError, RankLostError
from groupwise.model.load import resolve_device
from groupwise.model.lost_device import naming_a_lost_device
from groupwise.run.assemble import open_learner
from groupwise.run.open_base import open_base

if TYPE_CHECKING:
    from groupwise.train.ranks import Ranks

R = TypeVar("R")


def on_all_ranks(config: RunConfig, lead: Callable[[Ranks | None], R]) -> R:
    """Return what `lead` returns, at every rank, though rank 0 alone calls it; in one process it is just called, with
    None.

    Raises:
        ConfigError: the configuration is for another number of processes, or none of them could do it.
        RankLostError: a rank is gone, or did not come in time.
        TrainingError: on the other ranks, for whatever ended rank 0.
        DeviceLostError: the process's GPU is lost to it.
    """
    here = world()
    check_started(config, here)
    if here.size == 1:
        with naming_a_lost_device(resolve_device(config.device)):
            return lead(None)
    device = _device(config, here)
    with naming_a_lost_device(device):
        return _on_several(config, here, device, lead)


def _on_several(config: RunConfig, here: World, device: torch.device, lead: Callable[[Ranks | None], R]) -> R:
    """See `on_all_ranks`, for more than one process."""
    from groupwise.train.orders import end
    from groupwise.train.ranks import join

    ranks = join(here, device=device, deadline_s=config.train.deadline_s)
    try:
        if not here.leads:
            return _follow(config, ranks)
        try:
            result = lead(ranks)
        except RankLostError:
            raise
        except Exception as error:
            with suppress(RankLostError):
                end(ranks, error=error)
            raise
        end(ranks, result)
        return result
    finally:
        ranks.close()


def _follow(config: RunConfig, ranks: Ranks) -> R:  # pyright: ignore[reportInvalidTypeVarUse]
    """Be one of the others. Ctrl-C reaches all processes, and is rank 0's to answer."""
    from groupwise.train.orders import follow

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    base, parts = open_base(config, ranks)
    learner = open_learner(config, base, threads=torch.get_num_threads(), ranks=ranks, parts=parts)
    torch.set_num_threads(learner.threads)
    return follow(learner)


def check_started(config: RunConfig, here: World) -> None:
    """Raise ConfigError where as many processes as were started cannot train as the configuration says."""
    devices = config.train.devices
    if devices is not None and devices != here.size:
        raise ConfigError(
            f"train.devices is {devices}, and {here.size} process{'es were' if here.size > 1 else ' was'} started",
            hint="start them with: groupwise launch CONFIG",
        )
    check_processes(config, here.size)
    if here.size % (size := config.train.context_parallel_size):
        raise ConfigError(
            f"train.context_parallel_size is {size}, and {here.size} process{'es were' if here.size > 1 else ' was'} "
            "started, which do not make groups of that size",
            hint=f"start a multiple of {size}, as with: groupwise launch CONFIG train.devices={size}",
            field="train.context_parallel_size",
        )
    if here.size == 1 and config.train.cpu_offload:
        raise ConfigError(
            "train.cpu_offload acts with several processes only", hint="set it to false, or launch several"
        )
    if here.size > 1 and config.device.startswith("cuda:"):
        raise ConfigError(
            f"device is {config.device!r}, which all {here.size} processes would share", hint="set device: cuda"
        )


def _device(config: RunConfig, here: World) -> torch.device:
    """Return the device of this process: the GPU with its number on this machine. Raises ConfigError where there are
    too few."""
    device = resolve_device(config.device)
    if device.type == "mps" and here.size > 1:  # gpu-only: gloo does not exchange tensors of Apple's GPUs
        return torch.device("cpu")
    if device.type != "cuda":  # gpu-only below: a GPU for each process
        return device
    if here.local_rank >= (there := torch.cuda.device_count()):
        raise ConfigError(
            f"process {here.local_rank} of this machine has no GPU: torch sees {there}",
            hint="start as many processes on each machine as it has GPUs",
        )
    device = torch.device("cuda", here.local_rank)
    torch.cuda.set_device(device)
    return device
