"""The command lines that start the processes of a run: torchrun's on one machine or several, or a Slurm job's script.

    one machine       python -m torch.distributed.run --standalone --nproc-per-node 8 -m groupwise run CONFIG ...
    several           the same on each of them with --nnodes, --node-rank, --master-addr, --master-port
    Slurm             a script for sbatch, in which srun starts torchrun once on each machine

Rank 0 is on the first machine; it samples and writes the run's directory. No restarts: what is lost is named, and the
run continues when it is launched again with `resume: auto`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.config.run import RunConfig, check_processes
from groupwise.errors import ConfigError

NODE = '"$SLURM_NODEID"'


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The commands that start a run: one for each machine, or one script for sbatch."""

    commands: tuple[tuple[str, ...], ...] = ()
    script: str | None = None

    def __str__(self) -> str:
        """Return it as it is to be typed, or handed in."""
        return self.script or "".join(f"{shlex.join(command)}\n" for command in self.commands)


def launch_of(config: RunConfig, command: Sequence[str]) -> Launch:
    """Return how to start `groupwise *command` (`run`, the file and its overrides) in the processes that `config` asks
    for.

    Raises:
        ConfigError: `train.devices` is not set, or machines cannot share them evenly, or as `check_processes`.
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
    check_processes(config, devices)
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


def _sampling_gpus(config: RunConfig) -> int:
    """Return how many GPUs of each machine vLLM's servers are to have: those of `vllm.servers`; without it the server
    of a run shares that of the first learner, unless `launcher.options` ask for more."""
    vllm, nodes = config.vllm, config.launcher.nodes
    if config.engine != "vllm" or not vllm.starts_servers or vllm.servers is None:
        return 0
    return -(-vllm.servers // nodes) * vllm.tensor_parallel_size


def _slurm(config: RunConfig, command: Sequence[str], each: int) -> str:
    """Return a batch script. Every machine needs this Python and the configuration, at the same paths."""
    launcher = config.launcher
    wanted = {
        "--job-name": config.name,
        "--nodes": launcher.nodes,
        "--ntasks-per-node": 1,
        "--gpus-per-node": None if config.device == "cpu" else each + _sampling_gpus(config),
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
