"""The command lines are what a shell and torchrun take apart again: run, not only looked at."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli_project import cli
from groupwise.config.run import RunConfig, parse_config
from groupwise.errors import ConfigError
from groupwise.run import launch
from groupwise.run.launch import launch_of
from groupwise.run.ranks import on_all_ranks
from wording import raises

RUN = ("run", "my config.yaml", "train.devices=4", "name=it's", 'rewards=["a b"]')


def config(*, devices: int | None = 4, launcher: object = "torchrun", **more: object) -> RunConfig:
    needed = {"data": {"source": "rows.jsonl"}, "rewards": ["m:f"]}
    return parse_config(needed | {"train": {"devices": devices}, "launcher": launcher} | more)


def test_one_machine() -> None:
    (command,) = launch_of(config(), RUN).commands
    assert command[:3] == (sys.executable, "-m", "torch.distributed.run")
    assert command[command.index("--nproc-per-node") + 1] == "4" and "--standalone" in command
    assert command[-len(RUN) - 2 :] == ("-m", "groupwise", *RUN)


def test_what_is_printed_can_be_typed() -> None:
    plan = launch_of(config(), RUN)
    assert tuple(shlex.split(str(plan))) == plan.commands[0]


def test_several_machines_by_hand() -> None:
    commands = launch_of(config(launcher={"nodes": 2, "address": "one", "port": 1234}), RUN).commands
    assert [command[command.index("--node-rank") + 1] for command in commands] == ["0", "1"]
    for command in commands:
        assert command[command.index("--nproc-per-node") + 1] == "2" and "--standalone" not in command
        assert command[command.index("--master-addr") + 1] == "one"
        assert command[command.index("--master-port") + 1] == "1234"


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_batch_script_starts_torchrun_on_every_machine(tmp_path: Path, monkeypatch) -> None:
    """sbatch is a shell, srun one that runs what it is given on two machines, and Python says what it was given."""
    program(tmp_path, "scontrol", '#!/bin/sh\ntest "$*" = "show hostnames node[1-2]" && printf "node1\\nnode2\\n"\n')
    program(
        tmp_path,
        "srun",
        '#!/bin/sh\ntest "$1" = --kill-on-bad-exit=1 || exit 9\nshift\nfor i in 0 1; do SLURM_NODEID=$i "$@"; done\n',
    )
    said = "import json, os, sys; print(json.dumps([os.environ.get('SET_UP'), *sys.argv[1:]]))"
    python = program(tmp_path, "the python", f'#!/bin/sh\nexec "{sys.executable}" -c "{said}" "$@"\n')
    monkeypatch.setattr(launch.sys, "executable", str(python))
    slurm = {
        "kind": "slurm",
        "nodes": 2,
        "setup": ["export SET_UP='a b'"],
        "time": "1:00:00",
        "options": ["--exclusive"],
    }
    script = launch_of(config(launcher=slurm), RUN).script
    assert script is not None

    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[1-2]"}
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first[0] == "a b" and first[-len(RUN) - 2 :] == ["-m", "groupwise", *RUN]
    assert first[first.index("--master-addr") + 1] == "node1" and first[first.index("--nproc-per-node") + 1] == "2"
    assert [each[each.index("--node-rank") + 1] for each in (first, second)] == ["0", "1"]

    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--time=1:00:00", "--exclusive"} <= set(asked)
    assert not any("partition" in option or "account" in option for option in asked)
    on_cpus = launch_of(config(launcher=slurm, device="cpu"), RUN).script
    assert on_cpus is not None and "--gpus-per-node" not in on_cpus


@pytest.mark.parametrize(
    "settings",
    [
        {"devices": None},
        {"devices": 3, "launcher": {"nodes": 2, "address": "one"}},
        {"engine": "vllm", "vllm": {"mode": "colocate"}},
        {"launcher": "mpi"},
        {"launcher": {"nodes": 2}},
        {"launcher": {"address": "one"}},
        {"launcher": {"partition": "gpu"}},
        {"launcher": {"kind": "slurm", "address": "one"}},
        {"launcher": {"kind": "slurm", "options": ["exclusive"]}},
        {"launcher": {"kind": "slurm", "time": "soon"}},
    ],
)
def test_what_cannot_be_started_is_refused(settings) -> None:
    with raises(ConfigError):
        launch_of(config(**settings), RUN)


def test_the_command_shows_or_hands_in(project, tmp_path: Path, monkeypatch) -> None:
    words = ("launch", str(project.config), "train.devices=2")
    shown = cli(*words, "--print")
    assert shown.exit_code == 0 and "--nproc-per-node 2" in shown.stdout and shown.stdout.endswith("train.devices=2\n")
    asked = json.loads(cli(*words, "--doctor", "--json").stdout)
    assert asked["script"] is None and asked["commands"][0][-1] == "doctor"
    assert "launcher.nodes is 1" in cli(*words, "--node", "1").stderr

    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no sbatch" in cli(*words, "launcher=slurm").stderr
    shell = f"#!{shutil.which('sh', path='/bin:/usr/bin')}\n"
    program(tmp_path, "sbatch", shell + "read first; test \"$first\" = '#!/bin/bash'\n")
    assert cli(*words, "launcher=slurm").exit_code == 0
    program(tmp_path, "sbatch", shell + "exit 3\n")
    assert "sbatch refused the job (exit code 3)" in cli(*words, "launcher=slurm").stderr


def test_vllm_in_the_process_of_one_of_several_is_refused_before_anything_waits(monkeypatch) -> None:
    """As torchrun starts it by hand; in one process it is taken."""
    colocated = config(engine="vllm", vllm={"mode": "colocate"})
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        on_all_ranks(colocated.model_copy(update={"train": colocated.train.model_copy(update={"devices": 2})}), repr)
    assert caught.value.field == "vllm.mode"
    monkeypatch.delenv("WORLD_SIZE")
    alone = colocated.model_copy(update={"train": colocated.train.model_copy(update={"devices": None})})
    assert on_all_ranks(alone, lambda ranks: "led") == "led"


def test_processes_that_make_no_groups_for_a_sequence_are_refused_before_anything_waits() -> None:
    together = config(train={"context_parallel_size": 2})
    with pytest.raises(ConfigError) as caught:
        on_all_ranks(together, repr)
    assert caught.value.field == "train.context_parallel_size"
    with pytest.raises(ConfigError) as caught:
        config(train={"devices": 3, "context_parallel_size": 2})
    assert caught.value.field == "train.context_parallel_size"
