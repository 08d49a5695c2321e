"""The command line: `groupwise demo | init | run | check | chat | serve | ui | report | ...`.

`PANELS` is what there is, in the order of a user's day. Commands with their own file: `demo`, `init`, `chat`,
`serve`, `doctor`; what reads the directories of runs is in `runs`, what talks to a server in `remote`, adapters, here
or on a server, in `adapters`, rewards and environments in `checks`.

Data goes to stdout, progress and messages to stderr; `--json` prints one object instead of text. What a user can cause
ends with a message that says what to do and with the error's exit code (see `errors`), without a traceback unless
`--debug` asks for it. Modules are imported inside the commands: `groupwise --help` must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli import adapters as cli_adapters
from groupwise.cli import chat as cli_chat
from groupwise.cli import demo as cli_demo
from groupwise.cli import envs as cli_envs
from groupwise.cli import feedback as cli_feedback
from groupwise.cli import improve as cli_improve
from groupwise.cli import init as cli_init
from groupwise.cli import keys as cli_keys
from groupwise.cli import learn as cli_learn
from groupwise.cli import logs as cli_logs
from groupwise.cli import remote as cli_remote
from groupwise.cli import rewards as cli_rewards
from groupwise.cli import runs as cli_runs
from groupwise.cli import serve as cli_serve
from groupwise.cli.frame import EXIT_CODES, OPTIONS, AsJson, CommandGroup, Debug, Set, examples, quiet_libraries
from groupwise.cli.launch import add_launch
from groupwise.cli.output import json_alone, print_json, say, stdout
from groupwise.cli.profiles import add_profiles
from groupwise.cli.push import command as cli_push
from groupwise.cli.ui import add_ui
from groupwise.cli.vllm import add_vllm
from groupwise.config.world import world
from groupwise.errors import AdapterNotFoundError, ConfigError, Interrupted, TrainingError
from groupwise.platform import check_device, importing

if TYPE_CHECKING:
    from groupwise.config.run import RunConfig
    from groupwise.run.check import CheckReport
    from groupwise.run.config_file import LoadedRun
    from groupwise.run.plan import RunPlan

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="The run's YAML or TOML file, a RUN whose configuration it is to have, or aitraining's flags.",
        show_default=False,
    ),
]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, such as train.steps=10.", show_default=False),
]

FLAGS = {"help_option_names": ["-h", "--help"], "ignore_unknown_options": True}  # --rl-env-module and others

PANELS = {
    "Begin": ("demo", "init", "run", "check"),
    "Look at a run, and use it": ("chat", "serve", "ui", "report", "health", "eval", "push"),
    "Rewards, environments and logs of your own": ("rewards", "env", "logs", "improve"),
    "A live server": ("rollouts", "train", "feedback", "learn", "adapters", "keys"),
    "More machines, other systems, this machine": (
        "launch",
        "vllm-serve",
        "import",
        "doctor",
        "profiles",
    ),
}


class Commands(CommandGroup):
    """All commands, in the panels and the order of `PANELS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        panel_of = {name: panel for panel, names in PANELS.items() for name in names}
        order = {name: at for at, name in enumerate(panel_of)}
        self.commands = dict(sorted(self.commands.items(), key=lambda item: order.get(item[0], 99)))
        for name, command in self.commands.items():
            command.rich_help_panel = panel_of[name]  # pyright: ignore[reportAttributeAccessIssue]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


app = typer.Typer(epilog=EXIT_CODES, **{**OPTIONS, "cls": Commands})

cli_demo.add_to(app)

cli_init.add_to(app)

cli_remote.add_to(app)
app.add_typer(cli_feedback.app, name="feedback")
app.add_typer(cli_learn.app, name="learn")
app.add_typer(cli_keys.app, name="keys")

app.add_typer(cli_logs.app, name="logs")
cli_improve.add_to(app)

cli_chat.add_to(app)

add_launch(app)

cli_runs.add_to(app)

cli_push.add_to(app)

add_ui(app)

add_profiles(app)

add_vllm(app)

cli_serve.add_to(app)

app.add_typer(cli_adapters.app, name="adapters")

app.add_typer(cli_rewards.rewards_app, name="rewards")

app.add_typer(cli_envs.envs_app, name="env")


def main() -> None:
    """Run the `groupwise` command."""
    app(prog_name="groupwise")


def _show_version(value: bool) -> None:
    if value:
        from groupwise import __version__

        print(f"groupwise {__version__}")
        raise typer.Exit


@app.callback()
def groupwise(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """GRPO post-training you can start on a laptop and keep when you have a cluster."""


# ---- the run and what belongs to it ----
@app.command(
    context_settings=FLAGS,
    epilog=examples(
        "groupwise run my_run.yaml",
        "groupwise run my_run.yaml train.steps=20 algo.policy_loss=dapo",
        "groupwise run my_run.yaml --sweep seed=0,1,2 --sweep train.learning_rate=1e-5,3e-5",
        "groupwise run baseline.yaml shaped.yaml train.steps=20",
        "groupwise run --model Qwen/Qwen3-0.6B --rl-env-module my_envs.hotel --rl-env-class HotelEnv --peft",
    ),
)
def run(
    config: Config,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|KEY=VALUE",
            help="More files, and overrides, such as train.steps=10, for all of them.",
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="KEY=A,B,...", help="A run for each value, or each pair of values; may be repeated."
        ),
    ] = None,
    set_: Set = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train as CONFIG says; Ctrl-C finishes the step, saves and evaluates. Several files, or --sweep, are several runs,
    trained together over one base model (docs/sweeps.md).

    CONFIG may also be Axolotl's, TRL's or prime-rl's; overrides are in its own words (docs/migrating.md). In its place
    aitraining's flags name an environment: --rl-env-module, --rl-env-class, --rl-env-config and the others.
    """
    from groupwise.engine.vllm.installed import check_installed
    from groupwise.run.sweep_words import read_runs
    from groupwise.store.rundir import check_place

    words = [config, *(overrides or ()), *(set_ or ())]
    runs = {each.label: _runnable(each.loaded) for each in read_runs(words, sweep or ())}
    for each in runs.values():
        check_device(each.device)
        check_place(each)
        check_installed(each)
    if len(runs) > 1:
        from groupwise.cli.sweep import run_several

        return run_several(runs, as_json=as_json)
    (loaded,) = runs.values()
    from groupwise.run.plan import make_plan

    plan = _plan(loaded, make_plan)
    from groupwise.cli.print import print_run, run_as_json, why_untrained

    with importing():
        from groupwise.run.loop import run_loop as train

    with json_alone(as_json):
        result = train(loaded, plan=plan)
    if world().leads:
        print_json(run_as_json(loaded, result)) if as_json else print_run(stdout(), loaded, result)
    if result.interrupted:
        raise typer.Exit(Interrupted.exit_code)
    if world().leads and not result.trained:
        say(f"error: nothing was trained, because {why_untrained(result)}")
        raise typer.Exit(TrainingError.exit_code)


@app.command(
    context_settings=FLAGS,
    epilog=examples(
        "groupwise check my_run.yaml",
        "groupwise check my.yaml --json",
        "groupwise check axolotl.yaml --origins",
        "groupwise check my_run.yaml --gpus 1x80",
    ),
)
def check(
    config: Config,
    overrides: Overrides = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="Only show every effective value and where it comes from; tries nothing.")
    ] = False,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="NxGIB",
            help="Say what the run would choose and take on such GPUs (1x80); needs only the model's config.json.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines that have such GPUs (with --gpus).")] = 1,
    set_: Set = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Try CONFIG out: load everything, score a few completions, train one step; keeps nothing."""
    loaded = _read(config, overrides, set_)
    if gpus is not None:
        return _check_gpus(loaded.config, gpus, nodes=nodes, as_json=as_json)
    from groupwise.cli.print import check_as_json, notes_as_json, origins_as_json, print_check, print_origins
    from groupwise.config.stages import stage_config, stage_names

    if origins:
        print_json(notes_as_json(loaded) | origins_as_json(loaded)) if as_json else print_origins(stdout(), loaded)
    else:
        from groupwise.engine.vllm.installed import check_installed
        from groupwise.run.plan import plan_or_all_problems

        if loaded.incomplete:
            loaded.runnable()
        check_installed(loaded.config)
        plan = _plan(loaded.config, plan_or_all_problems)
        from groupwise.run.check import check as try_out

        def tried(run: RunConfig, plan: RunPlan | None) -> CheckReport:
            with json_alone(as_json):
                phase, family = (lambda phase: say(f"{phase} ...")), (lambda row: say(str(row)))
                return try_out(run, plan=plan, on_phase=phase, on_family=family)

        stages = {}
        for number, name in enumerate(stage_names(loaded.config)):
            say(f"stage {name}:")
            stages[name] = tried(stage_config(loaded.config, number), None)
            if not as_json:
                print_check(stdout(), stages[name], replace(loaded, config=stages[name].plan.config))
        if stages:
            say("the run itself, tried with the policy that its stages begin with:")
        report = tried(loaded.config, plan)
        if as_json:
            of_stages = {name: check_as_json(each, loaded) for name, each in stages.items()}
            print_json(check_as_json(report, loaded) | ({"stages": of_stages} if stages else {}))
        else:
            print_check(stdout(), report, loaded)
    try:
        loaded.runnable()
    except ConfigError as error:  # what `run` refuses comes last, and --json stays one object
        say(f"error: {error}")
        raise typer.Exit(error.exit_code) from None


@app.command(
    name="import",
    context_settings=FLAGS,
    epilog=examples(
        "groupwise import axolotl.yaml -o native.yaml",
        "groupwise import --from aitraining --model Qwen/Qwen3-0.6B --rl-num-generations 8 --peft",
    ),
)
def import_(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE [KEY=VALUE]...", help="The file, and overrides in its words.", show_default=False),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="SYSTEM", help="axolotl, trl, unsloth, aitraining or prime-rl; default: its look."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write it there.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Turn a run of Axolotl, TRL, Unsloth, prime-rl or aitraining into one of Groupwise, with where each value came
    from.

    With `--from aitraining` the rest of the line may be its flags in place of a file.
    """
    from groupwise.run.importing import import_run, written

    loaded = import_run(arguments or [], system=system)
    from groupwise.cli.print import notes_as_json

    text = written(loaded, out)
    if as_json:
        print_json(notes_as_json(loaded) | {"yaml": text})
    elif out is None:
        print(text, end="")
    for note in (*loaded.refused, *loaded.differs):
        say(f"note: {note}")


@app.command(
    name="eval",
    context_settings=FLAGS,
    epilog=examples(
        "groupwise eval my_run.yaml",
        "groupwise eval arithmetic",
        "groupwise eval my_run.yaml --adapter runs/arithmetic-20260101T120000Z/arithmetic@80",
        "groupwise eval my_run.yaml --adapter arithmetic@80 --against arithmetic@40",
        "groupwise eval --adapter arithmetic@80 --suite lm-eval --tasks arc_easy,gsm8k --limit 200",
    ),
)
def eval_(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="As of `run`; of a RUN its policy is measured. --suite needs none with --adapter.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="ADAPTER",
            help="RUN_DIR/NAME@N, RUN_DIR (its active version), NAME@N of the newest run, a PEFT directory, or "
            "hf://OWNER/NAME; default: the policy of RUN, or with a file the base model.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="ADAPTER",
            help="Also evaluate this one (base: the model alone) on the same prompts, and test the difference.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option("--mode", metavar="MODE", help="greedy or sampled; may be repeated; default: eval.modes."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(metavar="SUITE", help="lm-eval or inspect: run its tasks instead, and keep what they say."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(metavar="A,B", help="Of --suite: its tasks, by its names.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Of --suite: most samples of each task.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Of lm-eval: ask by the chat template.")] = False,
    include_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of lm-eval: a folder with tasks of your own.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="Of --suite: the Python that has it; default: this one.")
    ] = None,
    suite_args: Annotated[
        str | None, typer.Option(metavar="ARGS", help="Of --suite: more words for its command line.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Of --suite: where its files go.")] = None,
    set_: Set = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure the mean reward of the base model or an adapter on CONFIG's evaluation prompts; pass@k and maj@k where
    eval.k is more. With --against a second one's, and whether they differ: a paired test over the prompts. With --suite
    tasks of lm-eval or inspect-ai in their place (docs/evaluation.md)."""
    of_suite = {
        "--tasks": tasks,
        "--limit": limit,
        "--chat": chat,
        "--include-path": include_path,
        "--python": python,
        "--suite-args": suite_args,
        "--output": output,
    }
    own = {"--against": against, "--mode": mode}
    for option, given in (of_suite if suite is None else own).items():
        if given:
            without = "--suite SUITE" if suite is None else "evaluations on CONFIG's prompts, without --suite"
            raise ConfigError(f"{option} is for {without}", hint="leave one of the two out")
    run = None if config is None or adapter is not None else _run_named(config)
    if run is not None:
        config, adapter = str(run / "config.yaml"), config
    loaded = None if config is None and suite is not None else _load(_given(config), overrides, set_)
    if suite is not None:
        from groupwise.cli.suite import evaluate_by_suite

        return evaluate_by_suite(
            suite,
            config=loaded,
            adapter=adapter,
            tasks=tuple(filter(None, (tasks or "").split(","))),
            limit=limit,
            chat=chat,
            folder=include_path,
            python=python,
            arguments=suite_args,
            output=output,
            as_json=as_json,
        )
    assert loaded is not None
    _evaluate(loaded, adapter=adapter, against=against, modes=tuple(mode or ()), as_json=as_json)


def _run_named(text: str) -> Path | None:
    """Return the run whose policy `text` names; None where it is a file, or nothing that is known."""
    from groupwise.config.yaml import names_file
    from groupwise.store.locate import UNTRAINED, find_policy

    if names_file(text):
        return None
    try:
        return find_policy(text).run_dir
    except AdapterNotFoundError as error:
        if error.kind == UNTRAINED:
            raise
        return None


def _given(config: str | None) -> str:
    if config is None:
        raise ConfigError("CONFIG is missing", hint="groupwise eval my_run.yaml, or --suite SUITE with --adapter RUN")
    return config


def _evaluate(
    loaded: RunConfig, *, adapter: str | None, against: str | None, modes: tuple[str, ...], as_json: bool
) -> None:
    """Evaluate on the configuration's prompts, by its rewards."""
    from groupwise.run.evaluate import checked_modes
    from groupwise.run.plan import make_plan
    from groupwise.store.locate import find_version

    checked_modes(loaded, modes)
    adapters = [adapter] if against is None else [adapter, against]
    for each in adapters:
        find_version(each)
    plan = _plan(loaded, make_plan)
    from groupwise.cli.print import evaluation_as_json, print_evaluation, print_tests, tests_as_json
    from groupwise.run.eval_adapter import assess
    from groupwise.run.evaluate import paired_tests

    with json_alone(as_json):
        first, *other = assess(loaded, plan=plan, adapters=adapters, modes=modes, note=say)
    by = None if loaded.eval is None else loaded.eval.by
    tests = paired_tests(first.evaluations, other[0].evaluations) if other else {}
    if as_json:
        shown = evaluation_as_json(first.evaluations, policy=first.policy, by=by)
        for each in other:
            shown["against"] = evaluation_as_json(each.evaluations, policy=each.policy, by=by)
            shown["paired"] = tests_as_json(tests)
        print_json(shown)
        return
    for each in (first, *other):
        print_evaluation(stdout(), each.evaluations, policy=each.policy, by=by)
    for each in other:
        print_tests(stdout(), tests, policy=first.policy, against=each.policy)


@app.command()
def doctor(
    untested: Annotated[
        bool, typer.Option("--untested", help="Name the places of this package that have never run: those for a GPU.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Look whether everything is here that a run needs; exits with 1 if not."""
    if untested:
        return _show_untested(as_json)
    quiet_libraries()
    from rich.text import Text

    from groupwise.cli.doctor import examine

    styles = {"ok": "green", "warn": "yellow", "fail": "red", "absent": "dim"}
    console, findings = stdout(), []
    leads = world().leads
    for finding in examine():
        findings.append(finding)
        if not as_json and leads:
            console.print(
                Text.assemble((f"{finding.status:<7}", styles[finding.status]), f"{finding.name}: {finding.detail}"),
                soft_wrap=True,
            )
            if finding.remedy:
                console.print(f"       -> {finding.remedy}", markup=False, soft_wrap=True)
    failed = [finding.name for finding in findings if finding.status == "fail"]
    if as_json and leads:
        print_json({"ok": not failed, "checks": [vars(finding) for finding in findings]})
    if failed:
        raise typer.Exit(1)


def _show_untested(as_json: bool) -> None:
    from groupwise.cli.untested import places

    if as_json:
        return print_json({"places": [vars(place) for place in places()]})
    for place in places():
        print(f"groupwise/{place.file}:{place.first}-{place.last}  {place.what}")
    say("none of this has run on a GPU; on a machine that has one, `make gpu` in a clone tries it")


# ---- shared ----
def _check_gpus(config: RunConfig, gpus: str, *, nodes: int, as_json: bool) -> None:
    """Say what a run would choose and take on these GPUs. Ends with ConfigError's exit code where it does not fit."""
    from groupwise.cli.print_fit import fit_as_json, print_fit
    from groupwise.run.gpu_fit import Cards, fit

    quiet_libraries()
    found = fit(config, Cards.parse(gpus, nodes=nodes))
    print_json(fit_as_json(found)) if as_json else print_fit(stdout(), found)
    if not found.fits:
        raise typer.Exit(ConfigError.exit_code)


def _load(path: str, overrides: Sequence[str] | None, more: Sequence[str] | None) -> RunConfig:
    """Return the run; what of a file comes out otherwise than in the system that it was written for is said first."""
    return _runnable(_read(path, overrides, more))


def _runnable(loaded: LoadedRun) -> RunConfig:
    config = loaded.runnable()
    for note in loaded.differs:
        say(f"not as in {loaded.system}: {note}")
    return config


def _plan(config: RunConfig, make: Callable[[RunConfig], RunPlan]) -> RunPlan | None:
    """Return the run's plan, whose mistakes are found before torch is imported, which takes seconds. None under
    torchrun, where one process of several makes it."""
    check_device(config.device)
    plan = make(config) if world().size == 1 else None
    quiet_libraries()
    return plan


def _read(path: str, overrides: Sequence[str] | None, more: Sequence[str] | None) -> LoadedRun:
    from groupwise.run.importing import read_words

    return read_words([path, *(overrides or ()), *(more or ())])
