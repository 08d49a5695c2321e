"""The output of commands on stdout, as one JSON object (`--json`) or as text.

Numbers that are not finite are null in JSON. What a model wrote is shown as text, never interpreted (see `display`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from groupwise.cli.output import duration, finite, print_line, print_pairs
from groupwise.config.algo import CreditConfig
from groupwise.config.hub import model_path
from groupwise.config.run import RunConfig
from groupwise.config.teacher import TeacherConfig
from groupwise.config.yaml import inline
from groupwise.pictures import text_of
from groupwise.run.display import before_after_table, said, side_by_side
from groupwise.run.evaluate import Evaluation, PairedTest, compare
from groupwise.run.health_zeros import why_flat
from groupwise.store.adapters import AdapterStore
from groupwise.store.tracking import METRICS, read_metrics
from groupwise.tasks.transcript import visible
from groupwise.types import Prompt

if TYPE_CHECKING:
    from groupwise.model.memory import StepSize
    from groupwise.run.check import CheckReport, StepTrial
    from groupwise.run.config_file import LoadedRun
    from groupwise.run.loop import RunResult
    from groupwise.tasks.rows import RowCount

_TEXT_CHARS = 60  # of a completion in a table


# ---- run ----


def adapter_path(config: RunConfig, result: RunResult) -> Path | None:
    """Return where the trained policy is: an adapter version, or with `train.lora: null` the model; None without a
    step."""
    if config.train.lora is None:
        return result.run_dir / "model"
    return None if result.version.is_base else AdapterStore(result.run_dir / "adapters").path(result.version)


def run_as_json(config: RunConfig, result: RunResult) -> dict[str, Any]:
    path = adapter_path(config, result)
    return {
        "run_dir": str(result.run_dir),
        "version": str(result.version),
        "adapter": None if path is None else str(path),
        "steps": result.steps,
        "interrupted": result.interrupted,
        "out_of_patience": result.out_of_patience,
        "trained": result.trained,
        **({} if config.promote is None else {"promoted": result.promoted and str(result.promoted)}),
        "comparison": [{"metric": m, "before": finite(b), "after": finite(a)} for m, b, a in _rows(config, result)],
    }


def print_run(console: Console, config: RunConfig, result: RunResult, *, extremes: bool = False) -> None:
    """Print the closing page of a run: the table, completions side by side, with `extremes` the best and the worst
    after it, and what to do with the adapter."""
    console.print(before_after_table(_rows(config, result)))
    if config.eval is not None:
        for prompt, before, after in changed_first(result.before, result.after)[: config.eval.show]:
            answer = prompt.columns.get("answer")
            console.print()
            console.print(side_by_side(_asked(prompt), before, after, None if answer is None else str(answer)))
    if extremes:
        print_extremes(console, result)
    path = adapter_path(config, result)
    console.print()
    if result.interrupted:
        print_line(
            f"stopped after step {result.steps} of {config.train.steps}, as asked; everything is saved", console=console
        )
    elif result.out_of_patience and config.eval is not None:
        better = f"{config.eval.patience} evaluations in a row were no better than the best (eval.patience)"
        print_line(f"stopped after step {result.steps} of {config.train.steps}: {better}", console=console)
    print_line(f"run      {result.run_dir}", console=console)
    if not result.trained:
        print_line(f"adapter  none: nothing was trained, because {why_untrained(result)}", console=console)
        return
    if path is None:
        last = shlex.quote(f"{result.run_dir}@{result.newest.number}")
        print_line("adapter  none: no version was better than the base where they were evaluated", console=console)
        print_line(f"         the last one is {last}", console=console)
        return
    print_line(f"{'model  ' if config.train.lora is None else 'adapter'}  {path}  ({result.version})", console=console)
    if config.promote is not None:
        print_line(f"active   {result.promoted or 'as before: no version was promoted'}", console=console)
    for line in _next_steps(config, result, path):
        print_line(line, console=console)


def why_untrained(result: RunResult) -> str:
    """Return why no step changed the policy, as its last step tells it."""
    steps = [line for line in read_metrics(result.run_dir / METRICS) if line.get("rollout/groups_trained") is not None]
    if not steps:
        return "no step was finished"
    if any(line["rollout/groups_trained"] for line in steps):
        return f"no step could be applied (groupwise health {shlex.quote(str(result.run_dir))} says why)"
    return why_flat(steps[-1])


def _next_steps(config: RunConfig, result: RunResult, path: Path) -> list[str]:
    """Commands that can be pasted as they are."""
    run, saved = shlex.quote(str(result.run_dir)), shlex.quote(str(result.run_dir / "config.yaml"))
    refused = config.promote is not None and result.promoted is None  # then the run's name means no version
    policy = shlex.quote(f"{result.run_dir}@{result.version.number}") if refused else run
    trained = shlex.quote(f"model={path}") if config.train.lora is None else f"--adapter {policy}"
    lines = [
        "",
        "Next:",
        f"  groupwise chat {policy}",
        f"  groupwise ui {run}",
        f"  groupwise report {run}",
        f"  groupwise serve {policy}",
        f"  groupwise eval {saved} {trained}",
        f"  groupwise push {policy} --to OWNER/{config.name} --dry-run",
    ]
    if config.train.lora is None:
        return lines
    base = model_path(config.model)
    return [
        *lines,
        "With transformers and peft:",
        f"  model = {result.loaded_by}.from_pretrained({base!r})",
        f"  model = PeftModel.from_pretrained(model, {str(path)!r})",
    ]


_HELD_OUT = {"eval/loss": "held-out loss", "eval/accuracy": "held-out pairs whose chosen completion gained more"}


def _rows(config: RunConfig, result: RunResult) -> list[tuple[str, float, float]]:
    """Return before and after on held-out prompts and rows; without `eval`, the first and the last step's training
    reward, the cross-entropy of what was imitated, or the share of the pairs that are told apart."""
    lines = read_metrics(result.run_dir / METRICS)
    if config.eval is not None:
        rows = list[tuple[str, float, float]]()
        if losses := [line for line in lines if "eval/loss" in line]:
            least = min(losses, key=lambda line: _recorded(line, "eval/loss", missing=math.inf))
            first, after = losses[0], least if config.eval.best == "loss" else losses[-1]
            held_out = ((key, name) for key, name in _HELD_OUT.items() if key in after)
            rows = [(name, _recorded(first, key), _recorded(after, key)) for key, name in held_out]
        return rows + compare(result.before, result.after, by=config.eval.by)
    key, name = {
        "grpo": ("reward/mean", "training reward"),
        "sft": ("loss/cross_entropy", "cross-entropy"),
        "dpo": ("preference/accuracy", "pairs whose chosen completion gained more"),
    }[config.kind]
    values = [line[key] for line in lines if line.get(key) is not None]
    return [(f"{name}, first and last step", values[0], values[-1])] if values else []


def _recorded(line: Mapping[str, Any], key: str, *, missing: float = math.nan) -> float:
    """Return what a line of metrics says, which has null for a number that was not finite."""
    return missing if line.get(key) is None else line[key]


def overall_rows(config: RunConfig, result: RunResult) -> list[tuple[str, float, float]]:
    """Return the rows of the closing table that are means over all held-out prompts, not over some of them; all rows
    where there is no such."""
    modes = dict.fromkeys(f"{mode}/reward" for mode in result.after)
    rows = _rows(config, result)
    return [row for row in rows if row[0] in modes] or rows


def print_extremes(console: Console, result: RunResult) -> None:
    """Print the completions of the trained policy that were rewarded most and least, of those on held-out prompts."""
    sampled = result.after.get("sampled") or next(iter(result.after.values()), None)
    scored = [
        (rollout.reward, group.prompt, rollout)
        for group in (sampled.groups if sampled is not None else ())
        for rollout in group.rollouts
        if rollout.reward is not None
    ]
    for label, choose in (("best", max), ("worst", min)):
        if scored:
            reward, prompt, rollout = choose(scored, key=lambda each: each[0])
            lines = [Text(visible(_asked(prompt)), style="bold"), Text(), Text(visible(said(rollout)))]
            answer = prompt.columns.get("answer")
            told = f"reward {reward:.3g}" + ("" if answer is None else f", answer: {visible(str(answer))}")
            console.print(Panel(Group(*lines, Text(), Text(told, style="dim")), title=f"{label} after training"))


def changed_first(before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]) -> list[tuple[Prompt, str, str]]:
    """Return (prompt, text before, text after) for the first mode: those whose reward changed first, then in order."""
    if not after:
        return []
    mode = next(iter(after))
    pairs = [
        (old.prompt if old.prompt.messages is not None else new.prompt, old.rollouts[0], new.rollouts[0])
        for old, new in zip(before[mode].groups, after[mode].groups, strict=True)
    ]
    pairs.sort(key=lambda pair: pair[1].reward == pair[2].reward)  # stable
    return [(prompt, said(old), said(new)) for prompt, old, new in pairs]


def _asked(prompt: Prompt) -> str:
    """Return the prompt as one would read it: its text, or its last message; of an environment that failed, the
    case."""
    if prompt.messages is None:
        return prompt.text or ", ".join(f"{name}: {value}" for name, value in prompt.columns.items())
    return text_of(prompt.messages[-1].get("content"))


# ---- eval ----


def evaluation_as_json(result: Mapping[str, Evaluation], *, policy: str, by: str | None) -> dict[str, Any]:
    measured = [each.metrics(by=by) | each.details() for each in result.values()]
    metrics = {key: finite(value) for each in measured for key, value in each.items()}
    return {"policy": policy, "prompts": max(len(each.groups) for each in result.values()), "metrics": metrics}


def print_evaluation(console: Console, result: Mapping[str, Evaluation], *, policy: str, by: str | None) -> None:
    table = Table("prompts", box=None, pad_edge=False)
    for mode in result:
        table.add_column(mode, justify="right")
    metrics = [each.metrics(by=by) for each in result.values()]
    for keys in zip(*metrics, strict=True):
        what = keys[0].split("/", 2)[2].removesuffix("reward").rstrip("/") or "all"
        errors = [each.standard_error() if what == "all" else math.nan for each in result.values()]
        cells = (_cell(m[key], error) for m, key, error in zip(metrics, keys, errors, strict=True))
        table.add_row(Text(visible(what)), *cells)
    for measure in dict.fromkeys(measure for each in result.values() for measure in each.measures[1:]):
        table.add_row(measure, *(_measured(each, measure) for each in result.values()))
    print_line(
        f"mean reward of {policy} on {max(len(each.groups) for each in result.values())} prompts, ± standard error",
        console=console,
    )
    console.print(table)


def _measured(evaluation: Evaluation, measure: str) -> str:
    if measure not in evaluation.measures:
        return "-"
    return _cell(evaluation.measured(measure), evaluation.standard_error(measure))


def _cell(value: float, error: float = math.nan) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def tests_as_json(tests: Mapping[str, PairedTest]) -> dict[str, Any]:
    return {name: {key: finite(value) for key, value in asdict(test).items()} for name, test in tests.items()}


def print_tests(console: Console, tests: Mapping[str, PairedTest], *, policy: str, against: str) -> None:
    """Print how two policies differ on the same prompts."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "difference", "p", "won", "lost", "prompts"):
        table.add_column(column, justify="right" if column else "left")
    for name, test in tests.items():
        error = "" if math.isnan(test.standard_error) else f" ± {test.standard_error:.3f}"
        p_value = f"{test.p_value:.3f}" if test.p_value >= 0.001 else f"{test.p_value:.1e}"
        shares = (f"{test.won:.1%}", f"{test.lost:.1%}", str(test.prompts))
        table.add_row(name, f"{test.difference:+.3f}{error}", p_value, *shares)
    print_line(f"{policy} less {against}, prompt by prompt", console=console)
    console.print(table)


# ---- check ----


def check_as_json(report: CheckReport, loaded: LoadedRun) -> dict[str, Any]:
    return notes_as_json(loaded) | {
        "model": {"parameters": report.parameters, "trained": report.trained} | _where(report),
        "family": None if report.family is None else asdict(report.family),
        "step": asdict(report.step) | {"steps": report.plan.config.train.steps},
        "memory_bytes": asdict(report.memory) | {"total": report.memory.total, "available": report.available},
        "micro_tokens": report.micro_tokens,
        "longest_prompt": report.longest_prompt,
        "loss": {name: value for name, value in asdict(report.plan.loss).items() if value is not None},
        "advantage": report.plan.config.algo.model_dump(include=set(CreditConfig.model_fields)),
        "completions": [
            {
                "prompt": group.prompt.id,
                "text": said(rollout),
                "tokens": sum(len(turn.completion.token_ids) for turn in rollout.turns),
                "finish_reason": rollout.stop or rollout.completion.finish_reason.value,
                "reward": rollout.reward,
                "rewards": dict(rollout.rewards),
                "error": rollout.error,
            }
            for group in report.groups
            for rollout in group.rollouts
        ],
        "thoughts": None if report.thoughts is None else asdict(report.thoughts),
        "one_step": asdict(report.trained_step),
        "step_seconds": asdict(report.pace) | {"run": report.pace.of_run(report.plan.config)},
        "warnings": list(report.warnings),
    }


def print_check(console: Console, report: CheckReport, loaded: LoadedRun) -> None:
    config, step = report.plan.config, report.step
    for group in report.groups:
        console.print(Text(visible(_asked(group.prompt)), style="bold"))
        table = Table("reward", "completion", box=None, pad_edge=False, show_header=False)
        for rollout in group.rollouts:
            shown = _ends(" ".join(said(rollout).split()))
            none = "taught" if rollout.teacher and rollout.error is None else "failed"
            reward = f"  {none}" if rollout.reward is None else f"  {rollout.reward:6.3f}"
            table.add_row(reward, Text(visible(shown)))
        names = ("chosen", "rejected") if config.kind == "dpo" else ("learned",) * len(group.demonstrations)
        for name, shown in zip(names, group.demonstrations, strict=False):
            table.add_row(f"  {name}", Text(visible(_ends(" ".join(said(shown).split())))))
        console.print(table)
    where = " ".join(_where(report).values())
    loss, advantage = report.plan.loss, report.plan.config.algo
    factors = [
        (f.name, getattr(loss, f.name)) for f in fields(loss) if getattr(loss, f.name) not in (None, "none", 0.0)
    ]
    rows = (
        ("model", f"{config.model}: {report.parameters:,} parameters, {report.trained:,} of them trained; {where}"),
        *([] if report.family is None else [("it runs", str(report.family))]),
        ("a step", _a_step(config, step)),
        (
            "the run",
            f"{config.train.steps} steps, {config.train.steps * step.optimizer_steps:,} optimizer steps, "
            + _epochs(report),
        ),
        *(("" if index else "data", str(each)) for index, each in enumerate(_sources(report))),
        *([] if config.supervised else [("sampling", _pace(config))]),
        ("time", _time(report)),
        ("memory", _memory(report)),
        *(
            [("loss", _supervised_loss(config))]
            if config.supervised
            else [
                ("loss", f"{config.algo.policy_loss}: " + ", ".join(f"{name} {value}" for name, value in factors)),
                ("advantage", advantage.algorithm or f"{advantage.advantage}, {advantage.aggregation}"),
            ]
        ),
        *([] if report.thoughts is None else [("thoughts", str(report.thoughts))]),
        *([] if config.teacher is None else [("teacher", _teacher(config.teacher, report.trained_step.teacher))]),
        ("one step", _one_step(report.trained_step)),
        *([] if report.template is None else [("episodes", str(report.template))]),
    )
    console.print()
    print_pairs(rows, console=console)
    for warning in report.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), visible(warning)))
    for note in loaded.differs:
        console.print(Text.assemble((f"not as in {loaded.system}: ", "yellow"), visible(str(note))))
    if loaded.idle:
        print_line(
            f"no effect here: {', '.join(note.place.partition(' (')[0] for note in loaded.idle)}", console=console
        )
    if not report.warnings:
        print_line("nothing suspicious was found", console=console)


def _epochs(report: CheckReport) -> str:
    rows = report.plan.rows
    if rows is None:
        return f"{report.plan.config.train.steps * report.step.prompts:,} prompts, drawn from a stream"
    return f"{report.step.epochs:.3g} epochs of {rows:,} prompts"


def _sources(report: CheckReport) -> Sequence[RowCount]:
    """Return what each source came to, where there is more to say than how many prompts there are."""
    counts = report.plan.source.counts
    told = len(counts) > 1 or any(each.filtered or each.used < each.rows or not each.whole for each in counts)
    return counts if told else ()


def _supervised_loss(config: RunConfig) -> str:
    """Return what is minimised of what the dataset says."""
    if config.kind == "sft":
        return "cross-entropy on the dataset's own answers"
    return f"DPO on the dataset's pairs: {config.dpo.loss}, beta {config.dpo.beta:g}, reference {config.reference}"


def _teacher(teacher: TeacherConfig, told: Mapping[str, float]) -> str:
    """Say who the teacher is, and what it made of the trial completions."""
    name = teacher.base_url or teacher.model or teacher.adapter or "the policy itself"
    name += "" if teacher.context is None else f", with {teacher.context} in its prompt"
    if "teacher/demonstrations" in told:
        shown, tokens = told["teacher/demonstrations"], told["teacher/demonstrated_tokens"]
        return f"{name}: {shown:.0f} completions of its own, {tokens:.0f} tokens, are learned by cross-entropy"
    if "teacher/kl" not in told:
        return f"{name}: it had nothing to say of the trial completions"
    likeliest = "" if "teacher/agreement" not in told else f", {told['teacher/agreement']:.0%} of them its likeliest"
    return f"{name}: KL {told['teacher/kl']:.3g} nats a token, over {told['teacher/tokens']:.0f}{likeliest}"


def _one_step(tried: StepTrial) -> str:
    """Return what came of the step that was tried."""
    if tried.grad_norm is None:
        return "no completion could be trained on; published, loaded and sampled with"
    how = ", with made-up advantages, since all groups were equal" if tried.made_up else ""
    return f"trained (gradient norm {tried.grad_norm:.3g}{how}), published, loaded and sampled with"


def _a_step(config: RunConfig, step: StepSize) -> str:
    """Return what is sampled and trained in a step."""
    parts = {"minibatches": config.train.minibatches, "passes": config.train.passes}
    several = [f"{count} {name}" for name, count in parts.items() if count > 1]
    what = f"{step.prompts} prompt{_s(step.prompts)} x {config.group_size} = {step.completions:,} completions"
    row = "pair" if config.kind == "dpo" else "example"
    what = f"{step.prompts} {row}{_s(step.prompts)}" if config.supervised else what
    return (
        f"{what}, about {step.tokens:,} tokens (completions at most {step.max_tokens:,}); decoded in "
        f"{step.decode_waves} wave{_s(step.decode_waves)}, "
        f"{step.forwards} forward pass{'es' if step.forwards > 1 else ''}, "
        f"{step.optimizer_steps} optimizer step{_s(step.optimizer_steps)}"
        + (f" ({' x '.join(several)})" if several else "")
    )


def _time(report: CheckReport) -> str:
    """Return how long the run takes, by the trial step."""
    low, high = (duration(each) for each in report.pace.of_run(report.plan.config))
    sampling = " to ".join(dict.fromkeys(f"{each:.2g}" for each in report.pace.sampling))
    each = f"a step samples {sampling} s and trains {report.pace.training:.2g} s"
    return f"{low} to {high} here, as the trial goes: {each}; scoring and evaluations are not counted"


def _pace(config: RunConfig) -> str:
    """Return how far sampling runs ahead of training."""
    interval, staleness = config.rollout.weight_sync_interval, config.rollout.max_staleness
    if config.rollout.on_policy:
        return "on-policy: each step is sampled by the version that it trains"
    if not interval:
        return "by the first policy for the whole run"
    if staleness:
        newer = "; new versions take over what is under way" if config.rollout.in_flight_updates else ""
        return f"goes on while training does; groups are at most {staleness} step{_s(staleness)} old{newer}"
    return f"in windows of {interval} steps, each sampled by one version"


def notes_as_json(loaded: LoadedRun) -> dict[str, Any]:
    """Return in whose words the configuration is, and what of it does not act as it would there."""
    listed = {"no_effect": loaded.idle, "differs": loaded.differs, "not_here": loaded.refused}
    return {"system": loaded.system} | {
        name: [{"key": note.place, "why": note.text} for note in notes] for name, notes in listed.items()
    }


def origins_as_json(loaded: LoadedRun) -> dict[str, Any]:
    return {"origins": {key: {"value": value, "from": origin} for key, value, origin in loaded.origins()}}


def print_origins(console: Console, loaded: LoadedRun) -> None:
    """Print every effective value and where it comes from, and what of the file has no effect."""
    rows = [(key, inline(value), origin) for key, value, origin in loaded.origins()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, origin in rows:
        print_line(f"{key:<{widths[0]}}  {value:<{min(widths[1], _TEXT_CHARS)}}  {origin}", console=console)
    for note in loaded.idle:
        print_line(f"no effect here: {note}", console=console)


def _ends(text: str) -> str:
    """Return how a text begins and ends, where it is long: what is scored is mostly at its end."""
    half = (_TEXT_CHARS - 3) // 2
    return text if len(text) <= _TEXT_CHARS else f"{text[:half]} … {text[-half:]}"


def _where(report: CheckReport) -> dict[str, str]:
    kind = {} if report.quantization is None else {"quantization": report.quantization}
    return kind | {"dtype": report.dtype, "device": report.device}


def _memory(report: CheckReport) -> str:
    needed, lora = report.memory, report.plan.config.train.lora
    parts = {
        "process": needed.process,
        "weights": needed.weights,
        "this rank's part of them": needed.shards,
        "merged weights": needed.merged,
        "frozen reference": needed.reference,
        "teacher's weights": needed.teacher,
        "gradients and optimizer" if lora is None else "adapter and optimizer": needed.trained,
        "keys and values": needed.kv_cache,
        "vLLM in this process": needed.vllm,
        "activations": needed.activations,
    }
    listed = ", ".join(f"{name} {_size(value)}" for name, value in parts.items() if value)
    budget = report.plan.config.train.memory_gb
    limit = "" if budget is None else f", {_size(round(budget * 2**30))} allowed"
    passes = f"passes of at most {report.micro_tokens:,} tokens"
    return f"up to about {_size(needed.total)} of {_size(report.available)}{limit}, with {passes}: {listed}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _s(count: int) -> str:
    return "s" if count > 1 else ""
