"""The command lines that start the processes of a run: torchrun's on one machine or several, or a Slurm job's script.

    one machine       python -m torch.distributed.run --standalone --nproc-per-node 8 -m groupwise run CONFIG ...
    several           the same on each of them with --nnodes, --node-rank, --master-addr, --master-port
    Slurm             a script for sbatch, in which srun starts torchrun once on each machine

Rank 0 is on the first machine; it samples and writes the run's directory. No restarts: what is lost is named, and the
run goes on when it is launched again with `resume: auto`.
"""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from groupwise.config.launch import World, world
from groupwise.config.run import RunConfig
from groupwise.errors import ConfigError, RankLostError
from groupwise.model.load import load_configured, resolve_device
from groupwise.run.assemble import open_learner

if TYPE_CHECKING:
    from groupwise.train.ranks import Ranks

NODE = '"$SLURM_NODEID"'


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What starts a run: for each machine its command, or one script for sbatch."""

    commands: tuple[tuple[str, ...], ...] = ()
    script: str | None = None

    def __str__(self) -> str:
        """As it is to be typed, or handed in."""
        return self.script or "".join(f"{shlex.join(command)}\n" for command in self.commands)


def launch_of(config: RunConfig, command: Sequence[str]) -> Launch:
    """How to start `groupwise *command` (`run`, the file and its overrides) in the processes that `config` asks for.

    Raises:
        ConfigError: `train.devices` is not set, or machines cannot share them evenly.
    """
    launcher, devices = config.launcher, config.train.devices
    if devices is None:
        raise ConfigError(
            "train.devices is not set: how many processes are to train together?",
            hint="append train.devices=8, or start a single one with groupwise run",
        )
    if devices % launcher.nodes:
        raise ConfigError(
            f"launcher.nodes = {launcher.nodes} machines cannot share train.devices = {devices} evenly",
            hint="give every machine as many processes as it has GPUs",
        )
    each = devices // launcher.nodes
    if launcher.kind == "slurm":
        return Launch(script=_slurm(config, command, each))
    if launcher.nodes == 1:
        return Launch(commands=((*_torchrun(each), "--standalone", *_groupwise(command)),))
    assert launcher.address is not None
    meeting = ("--master-addr", launcher.address, "--master-port", str(launcher.port))
    nodes = [("--nnodes", str(launcher.nodes), "--node-rank", str(node), *meeting) for node in range(launcher.nodes)]
    return Launch(commands=tuple((*_torchrun(each), *node, *_groupwise(command)) for node in nodes))


def _torchrun(processes: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--max-restarts", "0")


def _groupwise(command: Sequence[str]) -> tuple[str, ...]:
    return ("-m", "groupwise", *command)


def _slurm(config: RunConfig, command: Sequence[str], each: int) -> str:
    """A batch script. Every machine needs this Python and the configuration, at the same paths."""
    launcher = config.launcher
    wanted = {
        "--job-name": config.name,
        "--nodes": launcher.nodes,
        "--ntasks-per-node": 1,
        "--gpus-per-node": None if config.device == "cpu" else each,
        "--partition": launcher.partition,
        "--account": launcher.account,
        "--time": launcher.time,
        "--output": f"{config.name}-%j.log",
    }
    options = [*(f"{key}={value}" for key, value in wanted.items() if value is not None), *launcher.options]
    here = [*_torchrun(each), "--nnodes", str(launcher.nodes), "--master-port", str(launcher.port)]
    torchrun = f'{shlex.join(here)} --master-addr "$MASTER_ADDR" --node-rank {NODE} {shlex.join(_groupwise(command))}'
    on_each = "\n".join([*launcher.setup, f"exec {torchrun}"])
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "set -euo pipefail",
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_ADDR",
            f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(on_each)}",
            "",
        ]
    )


# ----------------------------------------------------------------------------------------------------------------------
# One run in several processes: rank 0 leads it as if it were alone, the others follow with their learners.
#
# torchrun --nproc-per-node 2 -m groupwise run config.yaml      # groupwise launch config.yaml train.devices=2
# ----------------------------------------------------------------------------------------------------------------------

R = TypeVar("R")


def on_all_ranks(config: RunConfig, lead: Callable[[Ranks | None], R]) -> R:
    """What `lead` returns, at every rank, though rank 0 alone calls it; in one process it is just called, with None.

    Raises:
        ConfigError: the configuration is for another number of processes, or none of them could do it.
        RankLostError: a rank is gone, or did not come in time.
        TrainingError: on the other ranks, for whatever ended rank 0.
    """
    here = world()
    _check(config, here)
    if here.size == 1:
        return lead(None)
    from groupwise.train.distributed import end
    from groupwise.train.ranks import join

    ranks = join(here, device=_device(config, here), deadline_s=config.train.deadline_s)
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
    from groupwise.train.distributed import follow

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gpu, sharded = ranks.device.type == "cuda", config.train.parallel == "fsdp"  # gpu-aware
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if gpu else "float32"
    base = load_configured(config, device="cpu" if sharded else str(ranks.device), dtype=dtype)
    learner = open_learner(config, base, threads=torch.get_num_threads(), ranks=ranks)
    torch.set_num_threads(learner.threads)
    return follow(learner)


def _check(config: RunConfig, here: World) -> None:
    devices = config.train.devices
    if devices is not None and devices != here.size:
        raise ConfigError(
            f"train.devices is {devices}, and {here.size} process{'es were' if here.size > 1 else ' was'} started",
            hint="start them with: groupwise launch CONFIG",
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
    """Of this process: the GPU with its number on this machine. Raises ConfigError where there are too few."""
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
