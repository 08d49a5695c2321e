"""`groupwise launch CONFIG`: start a run in several processes, on one machine or many, or show how.

groupwise launch my.yaml train.devices=8              # torchrun, here
groupwise launch my.yaml --print                      # only show the command lines, or the Slurm script
groupwise launch my.yaml --doctor                     # would it work? versions, GPUs, storage, clocks, network
groupwise launch my.yaml launcher.kind=slurm          # hand it to sbatch
groupwise launch my.yaml launcher.kind=ray            # learners, engines and workers as actors of Ray
groupwise launch my.yaml --node 1                     # of several machines without Slurm: this is the second
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.frame import AsJson, Debug, Set, examples
from groupwise.cli.output import print_json, say, stdout
from groupwise.errors import ConfigError, GroupwiseError, Interrupted

if TYPE_CHECKING:
    from groupwise.config.run import RunConfig


def add_launch(app: typer.Typer) -> None:
    """Make the command part of `groupwise`."""
    app.command(
        context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True},
        epilog=examples(
            "groupwise launch my_run.yaml train.devices=2",
            "groupwise launch my.yaml train.devices=16 launcher.kind=slurm launcher.nodes=2 --print",
        ),
    )(launch)


def launch(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides, such as train.devices=8.", show_default=False),
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="Show what would be run, and run nothing.")] = False,
    node: Annotated[int, typer.Option(min=0, help="Of several machines without Slurm: which one this is, from 0.")] = 0,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="Start the processes, and have them look whether they can train together.")
    ] = False,
    set_: Set = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Start CONFIG in `train.devices` processes, with torchrun or as a Slurm job, or as actors of Ray (`launcher`)."""
    from groupwise.run.importing import read_words
    from groupwise.run.launch import launch_of

    words = [config, *(overrides or ()), *(set_ or ())]
    loaded = read_words(words).runnable()
    if loaded.launcher.kind == "ray":
        if doctor or node:
            raise ConfigError("--doctor and --node do not go with launcher.kind ray, which starts all there is itself")
        return _on_ray(loaded, show=show, as_json=as_json)
    plan = launch_of(loaded, ("doctor",) if doctor else ("run", *words))
    if as_json:
        return print_json({"commands": [list(command) for command in plan.commands], "script": plan.script})
    if show:
        return print(plan, end="")
    if plan.script is not None:
        return _submit(plan.script)
    if node >= len(plan.commands):
        raise ConfigError(f"--node {node}: launcher.nodes is {len(plan.commands)}, and they are counted from 0")
    command = plan.commands[node]
    os.execv(command[0], command)  # signals and the exit code are torchrun's


def _on_ray(config: RunConfig, *, show: bool, as_json: bool) -> None:
    """Run it, or print the bundles that Ray is to reserve."""
    from groupwise.cli.print import print_run
    from groupwise.run.loop import run_loop
    from groupwise.run.ray import roles_of, supervise

    if show or as_json:
        bundles = [dict(bundle) for bundle in roles_of(config).bundles]
        return print_json({"bundles": bundles}) if as_json else print(*bundles, sep="\n")
    result = supervise(config, run_loop, say=say)
    print_run(stdout(), config, result)
    if result.interrupted:
        raise typer.Exit(Interrupted.exit_code)


def _submit(script: str) -> None:
    try:
        done = subprocess.run(["sbatch"], input=script, text=True, check=False)
    except FileNotFoundError:
        hint = "run it where Slurm is, or hand in what --print shows"
        raise ConfigError("there is no sbatch on this machine", hint=hint) from None
    if done.returncode:
        raise GroupwiseError(f"sbatch refused the job (exit code {done.returncode})", hint="--print shows the script")
    say("the job is queued; its log is where #SBATCH --output says")
