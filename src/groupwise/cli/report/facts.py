"""The report's tables: settings and totals, results before and after, differences between configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.run.record import RunRecord, leaves
from groupwise.server.rollout_view import duration

MAX_ROWS = 120  # of the table with all numbers
_ABSENT = "–"
_ERROR = "_stderr"  # ends the name of a metric's standard error


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One number before and after; `step` is where it was after."""

    title: str
    before: float
    after: float
    step: int


@dataclass(frozen=True, kw_only=True)
class HeldOutRow:
    """One mode or column of the evaluation: a cell (first, last, change, best step) a run, None where it has none."""

    title: str
    cells: tuple[HeldOutCell | None, ...]


@dataclass(frozen=True, kw_only=True)
class HeldOutCell:
    """The first, the last and the best of a run's evaluations; `error` is the standard error of the last."""

    first_step: int
    first: float
    last_step: int
    last: float
    best_step: int
    best: float
    error: float | None


@dataclass(frozen=True, kw_only=True)
class NumberTable:
    """A row a step and a column a metric; `every` tells how many steps lie between two rows."""

    label: str
    metrics: tuple[str, ...]
    rows: tuple[tuple[int, tuple[float | None, ...]], ...]
    every: int


def headlines(run: RunRecord) -> list[Headline]:
    """Held-out reward and pass@k by mode, or where nothing was held out the training reward of the first and the last
    step. Where the run keeps its best version (`eval.best`), after is that version's."""
    found, kept = [], kept_step(run)
    for metric in run.metrics:
        _, mode, what = metric.split("/") if metric.startswith("eval/") and metric.count("/") == 2 else ("", "", "")
        if (what == "reward" or what.startswith("pass@")) and (cell := _cell(run, metric)) is not None:
            at_kept = None if kept is None else dict(run.points(metric)).get(kept)
            step, after = (cell.last_step, cell.last) if kept is None or at_kept is None else (kept, at_kept)
            found.append(Headline(title=f"Held-out {what}, {mode}", before=cell.first, after=after, step=step))
    if not found and (cell := _cell(run, "reward/mean")) is not None:
        title = f"Training reward, steps {cell.first_step} and {cell.last_step}"
        found.append(Headline(title=title, before=cell.first, after=cell.last, step=cell.last_step))
    return found


def kept_step(run: RunRecord) -> int | None:
    """The step of the best version, where the run keeps that one instead of the last."""
    mode = run.setting("eval.best")
    cell = _cell(run, f"eval/{mode}/reward") if mode else None
    return None if cell is None else cell.best_step


def what_it_was(run: RunRecord) -> list[tuple[str, str]]:
    """(what, value): the settings and totals that one asks for first; what is not known is left out."""
    rows = [
        ("Steps", _steps(run)),
        ("Kept", None if (kept := kept_step(run)) is None else f"the best version, of step {kept}"),
        ("Time", _time(run)),
        ("Sampled", _sampled(run)),
        ("Model", _text(run.setting("model"))),
        ("Environment", _environment(run)),
        ("Prompts", _text(run.setting("data.source"))),
        ("Rewards", _rewards(run)),
        ("Algorithm", _algorithm(run)),
        ("A step", _batch(run)),
        ("Sampling", _sampling(run)),
        ("Learning rate", _rate(run)),
        ("Trained", _trained(run)),
        ("Seed", _text(run.setting("seed"))),
    ]
    return [(what, value) for what, value in rows if value]


def held_out_table(runs: Sequence[RunRecord]) -> list[HeldOutRow]:
    """Every evaluated mode and column, as far as any of the runs has it."""
    recorded = dict.fromkeys(metric for run in runs for metric in run.metrics if metric.startswith("eval/"))
    metrics = [metric for metric in recorded if not metric.endswith(_ERROR)]
    rows = []
    for metric in metrics:
        title = ", ".join(part for part in metric.split("/")[1:] if part != "reward")
        cells = tuple(_cell(run, metric) for run in runs)
        counted = metric.endswith("/failed")  # a count of what went wrong is worth a row where there is any
        if any(cell is not None and (cell.first or cell.last or not counted) for cell in cells):
            rows.append(HeldOutRow(title=title, cells=cells))
    return rows


def config_differences(runs: Sequence[RunRecord]) -> list[tuple[str, tuple[str, ...]]]:
    """(key, value in each run) where the values are not all equal."""
    flat = [dict(leaves(run.config)) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = [(key, tuple(_value(each, key) for each in flat)) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def number_table(run: RunRecord) -> NumberTable:
    """All that was recorded; of a long run, every so many steps and the last one."""
    metrics = tuple(run.metrics)
    every = -(-len(run.lines) // MAX_ROWS) or 1
    lines = list(run.lines[::every])
    if run.lines and lines[-1] is not run.lines[-1]:
        lines.append(run.lines[-1])
    rows = tuple((line["step"], tuple(_as_number(line.get(metric)) for metric in metrics)) for line in lines)
    return NumberTable(label=run.label, metrics=metrics, rows=rows, every=every)


def _cell(run: RunRecord, metric: str) -> HeldOutCell | None:
    points = [(step, value) for step, value in run.points(metric) if value is not None]
    if not points:
        return None
    best = max(points, key=lambda point: point[1])
    (first_step, first), (last_step, last) = points[0], points[-1]
    return HeldOutCell(
        first_step=first_step,
        first=first,
        last_step=last_step,
        last=last,
        best_step=best[0],
        best=best[1],
        error=dict(run.points(metric + _ERROR)).get(last_step),
    )


def _steps(run: RunRecord) -> str:
    planned = run.setting("train.steps")
    if not isinstance(planned, int) or planned <= run.steps:
        return f"{run.steps:,}"
    return f"{run.steps:,} of {planned:,}: stopped early, or still running"


def _time(run: RunRecord) -> str | None:
    steps, elapsed = run.total("time/step_s"), run.elapsed_s()
    if elapsed and elapsed > 0:
        return duration(elapsed) + (f", {duration(steps)} of it in steps" if steps and steps < elapsed else "")
    return None if steps is None else f"{duration(steps)} in steps"


def _sampled(run: RunRecord) -> str | None:
    completions, tokens = run.total("rollout/count"), run.total("rollout/tokens")
    if not completions:
        return None
    return f"{completions:,.0f} completions" + (f", {tokens:,.0f} tokens" if tokens else "")


def _environment(run: RunRecord) -> str | None:
    name = run.setting("env.environment") or run.setting("env.agent")
    turns = run.setting("env.max_turns")
    return None if name is None else f"{name}, at most {turns} turns"


def _rewards(run: RunRecord) -> str | None:
    rewards = run.setting("rewards")
    if not isinstance(rewards, list):
        return None
    return ", ".join(_reward(entry) for entry in rewards if isinstance(entry, Mapping))


def _reward(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("name") or str(entry.get("function", "?")).rpartition(":")[2])
    return name if entry.get("weight", 1.0) == 1.0 else f"{entry['weight']} × {name}"


def _algorithm(run: RunRecord) -> str | None:
    algo = run.setting("algo")
    if not isinstance(algo, Mapping) or "policy_loss" not in algo:
        return None
    changed = [f"{key} {value}" for key, value in algo.items() if key in _TOLD and value is not None]
    return ", ".join((str(algo["policy_loss"]), f"advantage {algo.get('advantage', _ABSENT)}", *changed))


_TOLD = (
    "surrogate",
    "clip_low",
    "clip_high",
    "kl",
    "kl_coeff",
    "kl_target",
    "correction",
    "reduction",
    "entropy_coeff",
)


def _batch(run: RunRecord) -> str | None:
    prompts, size = run.setting("rollout.prompts_per_step"), run.setting("rollout.group_size")
    if not isinstance(prompts, int) or not isinstance(size, int):
        return None
    return f"{prompts} prompts × {size} = {prompts * size:,} completions"


def _sampling(run: RunRecord) -> str | None:
    longest, temperature = run.setting("rollout.max_tokens"), run.setting("rollout.temperature")
    return None if longest is None else f"at most {longest} tokens, temperature {temperature}"


def _rate(run: RunRecord) -> str | None:
    rate, schedule = run.setting("train.learning_rate"), run.setting("train.schedule")
    return None if rate is None else f"{rate}, {schedule}"


def _trained(run: RunRecord) -> str | None:
    train = run.setting("train")
    if not isinstance(train, Mapping) or "lora" not in train:
        return None
    lora = train["lora"]
    if not isinstance(lora, Mapping):
        return "all weights"
    return f"LoRA, rank {lora.get('rank')}, alpha {lora.get('alpha')}"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _value(flat: Mapping[str, Any], key: str) -> str:
    return _ABSENT if key not in flat else "null" if flat[key] is None else str(flat[key])


def _as_number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None
