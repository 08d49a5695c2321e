"""Does it learn tasks that nobody here wrote? Five generators of reasoning-gym and two games of textarena.

    python benchmarks/curves.py                       # what is not in docs/curves.json yet; may be killed at any time
    python benchmarks/curves.py --only lcm --seeds 0  # a part of it
    python benchmarks/curves.py --table --plot        # from what is there

    seeds      a run of `run_loop` for each task and seed; held-out accuracy before and after, greedy and sampled
    shuffled   the same with the rewards dealt at random within each group, for seed 0. Must not gain.
    baseline   what no model is needed for: always the commonest answer, or random legal moves

The starter knows some of these tasks a little. Of the others it is first shown solved examples (`LESSONS`), games with
random legal moves: once, for all of them, with `tools/starter.py lesson`. A task's accuracy is the share of completions
that its own score calls perfect (1), for games the share that is won. No held-out problem is in the training prompts or
in the lesson. Everything is in OUT.json: evaluations, curves, wall and processor time. Exits 1 if the seeds of a task
did not gain more than noise explains, or a control did.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ablation import one_thread, span

from groupwise import platform as machine
from groupwise.bridges.reasoning_gym.problems import Problems
from groupwise.bridges.reasoning_gym.reward import score_answer
from groupwise.bridges.textarena import HELD_OUT, TextArenaGame
from groupwise.config.data import DatasetConfig
from groupwise.config.run import parse_config
from groupwise.rewards.scorer import Scorer
from groupwise.store.files import locked, replace
from groupwise.store.tracking import read_metrics
from groupwise.types import Message, RolloutGroup

ROOT = Path(__file__).parent.parent
HELD_OUT_PROBLEMS, HELD_OUT_GAMES = 192, 128
TRAINING, EVALUATION, SHOWN = 0, 1, 2  # `data.seed` of the generators
SHOWN_GAMES = 1_000_000  # the seeds of the lesson's games begin here; those of training are small, see HELD_OUT
SAMPLES = 2  # completions of each held-out problem in mode sampled; games are played once
NOISE = 3.0  # standard errors of a difference from which it is more than noise

# ----------------------------------------------------------------------------------------------------------------------
# The tasks.
# ----------------------------------------------------------------------------------------------------------------------

RANDOM_NIM = {"opponent": "curves:random_nim"}


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What the starter is shown before it trains: `EXAMPLES` solved problems of each of these generators of
    reasoning-gym, and as many games of textarena with random legal moves, by name with their parameters."""

    generators: dict[str, dict[str, Any]]
    games: dict[str, dict[str, Any]]
    steps: int  # of the optimizer


EXAMPLES = 1500
LESSONS = {  # by the name of the model that comes of it
    "taught": Lesson(
        generators={
            "spell_backward": {"min_word_len": 3, "max_word_len": 5},
            "number_filtering": {
                "min_numbers": 3,
                "max_numbers": 4,
                "min_decimals": 0,
                "max_decimals": 0,
                "min_value": 0,
                "max_value": 99,
            },
            "rotate_matrix": {"min_n": 2, "max_n": 2, "max_rotations": 3},
            "word_sequence_reversal": {"min_words": 2, "max_words": 4},
            "needle_haystack": {"min_num_statements": 2, "max_num_statements": 3},
            "letter_counting": {"min_words": 2, "max_words": 4},
            "caesar_cipher": {"min_words": 1, "max_words": 1, "max_rotation": 3},
            "syllogism": {},
            "leg_counting": {"min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 5},
            "calendar_arithmetic": {"tasks": ["weekday_offset"], "offset_upper_bound": 7},
            "count_bits": {"max_n": 255},
            "ransom_note": {"max_magazine_length": 6, "max_note_length": 3},
            "chain_sum": {"max_terms": 3, "max_digits": 2},
            "products": {"max_terms": 2, "min_digits": 1, "max_digits": 2},
            "binary_alternation": {"min_n": 3, "max_n": 5},
        },
        games={
            "GuessTheNumber-v0": {"max_number": 20, "max_turns": 5},
            "Nim-v0": {"piles": [2, 3, 4], **RANDOM_NIM},
        },
        steps=700,
    ),
    "taught-2": Lesson(
        generators={
            "color_cube_rotation": {"min_rotations": 1, "max_rotations": 1},
            "family_relationships": {"min_family_size": 4, "max_family_size": 6},
            "syllogism": {"invalid_ratio": 0.5},
            "complex_arithmetic": {
                "min_real": -9,
                "max_real": 9,
                "min_imag": -9,
                "max_imag": 9,
                "operations": ["+", "-"],
                "operations_weights": [0.5, 0.5],
            },
            "gcd": {"max_value": 99},
            "number_sequence": {"min_terms": 4, "max_terms": 4, "max_complexity": 1},
        },
        games={"GuessTheNumber-v0": {"max_number": 8, "max_turns": 3}, "Secretary-v0": {"N": 5}},
        steps=600,
    ),
}
SUMS = {  # of two numbers of two digits
    "max_terms": 2,
    "min_digits": 2,
    "max_digits": 2,
    "operators": ["+", "-"],
    "allow_parentheses": False,
    "allow_negation": False,
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One curve: a generator or a game, who learns it, and what of a run's configuration is its own."""

    name: str
    parameters: dict[str, Any]
    model: str = "taught"  # one of `LESSONS`, or "starter", as it ships
    max_tokens: int = 8
    steps: int = 80
    prompts: int = 16
    learning_rate: float = 2.0e-3
    cut_moves_count: bool = False  # whether a game goes on when a move is cut at `max_tokens`, and does not end with 0

    @property
    def is_game(self) -> bool:
        return self.name in MOVES

    @property
    def lesson(self) -> Lesson | None:
        return LESSONS.get(self.model)


TASKS = {
    each.name: each
    for each in (
        Task(name="basic_arithmetic", parameters=SUMS, model="starter"),
        Task(name="chain_sum", parameters={"max_terms": 2, "max_digits": 2}),
        Task(name="syllogism", parameters=LESSONS["taught-2"].generators["syllogism"], model="taught-2"),
        Task(name="rotate_matrix", parameters={"min_n": 2, "max_n": 2, "max_rotations": 10}, max_tokens=12),
        Task(name="number_filtering", parameters=LESSONS["taught"].generators["number_filtering"], max_tokens=24),
        Task(
            name="Nim-v0",
            parameters={"piles": [1, 2, 2], **RANDOM_NIM},
            steps=60,
            prompts=4,
            learning_rate=1.0e-3,
            cut_moves_count=True,
        ),
        Task(
            name="Secretary-v0",
            parameters={"N": 3},
            model="taught-2",
            max_tokens=12,
            steps=80,
            prompts=8,
        ),
    )
}


def settings(task: Task, *, seed: int, work: Path) -> dict[str, Any]:
    """The configuration of a run, as a file of YAML would have it."""
    common = {
        "name": f"{task.name.lower()}-{seed}",
        "model": str(work / task.model) if task.lesson else "starter",
        "seed": seed,
        "device": "cpu",
        "dtype": "float32",
        "output_dir": str(work / "runs"),
        "folder": str(Path(__file__).parent),  # where `random_nim` is
        "rollout": {"prompts_per_step": task.prompts, "group_size": 8, "max_tokens": task.max_tokens},
        "train": {
            "steps": task.steps,
            "learning_rate": task.learning_rate,
            "schedule": "linear",
            "lora": {"rank": 16, "alpha": 32},
        },
    }
    if task.is_game:
        args = {**task.parameters, "eval_episodes": HELD_OUT_GAMES}
        env = {
            "environment": f"textarena:{task.name}",
            "args": args,
            "max_turns": 16,
            "workers": 1,
            "lockstep": True,
            "stop_at_cut": not task.cut_moves_count,  # where losing is worth -1, an end by a limit would pay
        }
        return {**common, "env": env, "eval": {"every": 0}}  # an evaluation plays as many games as ten steps
    return {
        **common,
        "data": {"source": "reasoning-gym", "tasks": {task.name: task.parameters}, "seed": TRAINING},
        "rewards": ["reasoning-gym"],
        "eval": {"every": 20, "k": SAMPLES, "data": {"source": str(held_out_file(task, work))}},
        "scoring": {"timeout_s": 60.0},  # on a busy machine importing the package takes longer than the default's 5 s
    }


def problems(name: str, parameters: dict[str, Any], *, seed: int, size: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a generator: `prompt`, `answer` and what its score reads."""
    tasks = {name: parameters}
    for _, row in Problems(DatasetConfig(source="reasoning-gym", tasks=tasks, seed=seed, size=size)).rows():
        yield row


# ----------------------------------------------------------------------------------------------------------------------
# Held-out problems: in a file, without those that are in the training prompts or in the lesson.
# ----------------------------------------------------------------------------------------------------------------------


def held_out_file(task: Task, work: Path) -> Path:
    return work / "held_out" / f"{task.name}.jsonl"


def write_held_out(task: Task, work: Path) -> None:
    """Problems of another seed that are neither trained on nor shown, none twice. Raises ValueError where there are
    fewer than `HELD_OUT_PROBLEMS`, or where what was written is scored otherwise than what was made."""
    known = {row["prompt"] for row in problems(task.name, task.parameters, seed=TRAINING)}
    if task.lesson:
        shown = task.lesson.generators[task.name]
        known |= {row["prompt"] for row in problems(task.name, shown, seed=SHOWN, size=EXAMPLES)}
    rows: list[dict[str, Any]] = []
    for row in problems(task.name, task.parameters, seed=EVALUATION, size=20 * HELD_OUT_PROBLEMS):
        if len(rows) < HELD_OUT_PROBLEMS and row["prompt"] not in known:
            known.add(row["prompt"])
            rows.append(json.loads(json.dumps(row, default=str)))
    if len(rows) < HELD_OUT_PROBLEMS:
        raise ValueError(f"{task.name} has only {len(rows)} problems that are not trained on; widen its parameters")
    for row in rows:
        columns: dict[str, Any] = {name: [value] for name, value in row.items() if name not in ("prompt", "level")}
        if score_answer([row["answer"]], **columns, log_metric=lambda name, value: None) != [1.0]:
            raise ValueError(f"{task.name} does not take its own answer, {row['answer']!r} to {row['prompt']!r}")
    path = held_out_file(task, work)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, "".join(json.dumps(row) + "\n" for row in rows))


def baseline(task: Task, work: Path) -> float:
    """The accuracy of always the commonest held-out answer, or of random legal moves in the held-out games."""
    if task.is_game:
        dice = random.Random(0)
        rewards = [played(task.name, task.parameters, HELD_OUT + number, dice)[1] for number in range(HELD_OUT_GAMES)]
        return statistics.fmean(reward == 1.0 for reward in rewards)
    rows = [json.loads(line) for line in held_out_file(task, work).read_text(encoding="utf-8").splitlines()]
    return Counter(row["answer"] for row in rows).most_common(1)[0][1] / len(rows)


# ----------------------------------------------------------------------------------------------------------------------
# Games with random legal moves: what is shown of them, the opponent, and the baseline.
# ----------------------------------------------------------------------------------------------------------------------


def nim_moves(heard: str, own: Sequence[str] = ()) -> list[str]:
    """The legal moves in Nim, by what the player has heard."""
    piles = re.findall(r"pile (\d): (\d+)", heard.rpartition("Current Pile")[2])
    return [f"[{pile} {taken}]" for pile, size in piles for taken in range(1, int(size) + 1)]


def random_nim(heard: str) -> str:
    """The opponent. Draws from the global generator, whose state is the episode's."""
    return random.choice(nim_moves(heard))


def guesses(heard: str, own: Sequence[str] = ()) -> list[str]:
    """The numbers that were not guessed before."""
    bounds = re.search(r"between (\d+) and (\d+)", heard)
    assert bounds is not None
    return [move for number in range(int(bounds[1]), int(bounds[2]) + 1) if (move := f"[{number}]") not in own]


def choices(heard: str, own: Sequence[str] = ()) -> list[str]:
    """To take the value that is shown, or to see the next."""
    return ["[accept]", "[continue]"]


MOVES: dict[str, Callable[[str, Sequence[str]], list[str]]] = {
    "GuessTheNumber-v0": guesses,
    "Nim-v0": nim_moves,
    "Secretary-v0": choices,
}


def played(name: str, parameters: dict[str, Any], seed: int, dice: random.Random) -> tuple[list[Message], float]:
    """A game with random legal moves: its messages, and its reward."""
    game = TextArenaGame(name, folder=str(Path(__file__).parent), **parameters)
    told = heard = game.reset({"seed": seed}, 0)
    own, messages = list[str](), list[Message]()
    while True:
        own.append(dice.choice(MOVES[name](heard, own)))
        answer = Message(role="assistant", content=own[-1])
        messages += [Message(role="user", content=told), answer]
        result = game.step(answer)
        if result.done:
            return messages, float(result.reward or 0.0)
        told = str(result.messages[0].get("content"))
        heard = f"{heard}\n{told}"


# ----------------------------------------------------------------------------------------------------------------------
# The lesson.
# ----------------------------------------------------------------------------------------------------------------------


def conversations(lesson: Lesson) -> list[dict[str, Any]]:
    """What the starter is shown: solved problems, and games with random legal moves."""
    shown = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": str(row["answer"])}]
        for name, parameters in lesson.generators.items()
        for row in problems(name, parameters, seed=SHOWN, size=EXAMPLES)
    ]
    dice = random.Random(5)
    shown += [
        played(name, parameters, SHOWN_GAMES + number, dice)[0]
        for name, parameters in lesson.games.items()
        for number in range(EXAMPLES)
    ]
    return [{"messages": messages} for messages in shown]


def teach(work: Path, name: str) -> dict[str, float]:
    """Make the model of a lesson, if it is not there. Returns what it cost."""
    lesson, cost = LESSONS[name], work / f"{name}.json"
    if not cost.exists():
        shown = conversations(lesson)
        chats = work / f"{name}.jsonl"
        chats.write_text("".join(json.dumps(each) + "\n" for each in shown), encoding="utf-8")
        command = ["tools/starter.py", "lesson", str(chats.resolve()), "--out", str((work / name).resolve())]
        before, started = _spent(), time.monotonic()
        subprocess.run([sys.executable, *command, "--steps", str(lesson.steps)], cwd=ROOT, check=True)
        took = {"cpu_s": _spent() - before, "wall_s": time.monotonic() - started, "steps": lesson.steps}
        replace(cost, json.dumps({**took, "conversations": len(shown)}))
    return json.loads(cost.read_text(encoding="utf-8"))


def _spent() -> float:
    """Processor seconds of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


# ----------------------------------------------------------------------------------------------------------------------
# A run.
# ----------------------------------------------------------------------------------------------------------------------


class Dealt(Scorer):
    """The same rewards, of environments too, dealt at random to the completions of a group. In an evaluation, where a
    group is one prompt's, no mean changes."""

    dice = random.Random(0)

    async def __call__(self, group: RolloutGroup) -> RolloutGroup:
        from dataclasses import replace as changed

        scored = await super().__call__(group)
        given = [(each.reward, each.rewards, each.error) for each in scored.rollouts]
        self.dice.shuffle(given)
        pairs = zip(scored.rollouts, given, strict=True)
        return changed(scored, rollouts=tuple(changed(r, reward=a, rewards=b, error=c) for r, (a, b, c) in pairs))


def job(configuration: dict[str, Any], shuffled: bool) -> dict[str, Any]:
    """One run -> its evaluations, its curves, what it cost."""
    from groupwise.run import assemble
    from groupwise.run.loop import run_loop

    if shuffled:
        assemble.Scorer = Dealt
    before, started = _spent(), time.monotonic()
    result = run_loop(parse_config(configuration))
    records = list(read_metrics(result.run_dir / "metrics.jsonl"))
    return {
        "cpu_s": _spent() - before,
        "wall_s": time.monotonic() - started,
        "before": {mode: _measured(each) for mode, each in result.before.items()},
        "after": {mode: _measured(each) for mode, each in result.after.items()},
        "reward": [[m["step"], round(m["reward/mean"], 4)] for m in records if "reward/mean" in m],
        "accuracy": [[step, round(each.measured("pass@1"), 4)] for step, each in _sampled(result.run_dir, records)],
    }


def _sampled(run_dir: Path, records: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Any]]:
    """The evaluations of a run in mode sampled, with their steps."""
    from groupwise.run.evaluate import load_evaluations

    for step in (record["step"] for record in records if "eval/sampled/reward" in record):
        yield step, load_evaluations(run_dir, step)["sampled"]


def _measured(evaluation: Any) -> dict[str, float]:
    names = {"accuracy": "pass@1", "reward": "reward"}
    means = {name: evaluation.measured(measure) for name, measure in names.items()}
    return means | {f"{name}_stderr": evaluation.standard_error(measure) for name, measure in names.items()}


def wanted(options: argparse.Namespace, work: Path) -> dict[str, tuple[Task, dict[str, Any], bool]]:
    """The runs that were asked for, by name: every task with the first seed, the controls (of seed 0), then the other
    seeds."""
    chosen = [task for task in TASKS.values() if not options.only or options.only in task.name]
    first, *others = options.seeds
    order = [(task, first, False) for task in chosen]
    order += [(task, 0, True) for task in chosen if 0 in options.seeds]
    order += [(task, seed, False) for seed in others for task in chosen]
    return {
        f"{task.name}, {'shuffled' if shuffled else f'seed {seed}'}": (
            task,
            _overridden(settings(task, seed=seed, work=work), options.overrides),
            shuffled,
        )
        for task, seed, shuffled in order
    }


def _overridden(configuration: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for text in overrides:
        keys, _, value = text.partition("=")
        section = configuration
        *path, last = keys.split(".")
        for key in path:
            section = section.setdefault(key, {})
        section[last] = json.loads(value)
    return configuration


def fingerprint(configuration: dict[str, Any]) -> str:
    """Tells runs of other settings apart; where files are kept is none."""
    where = ("output_dir", "folder", "model")
    told = json.dumps({key: value for key, value in configuration.items() if key not in where}, sort_keys=True)
    told = told.replace(f'"{Path(configuration["output_dir"]).parent}/', '"')
    return hashlib.blake2b(told.encode(), digest_size=6).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# The results: one file, written after each run; the table and the plot are made from it.
# ----------------------------------------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any]:
    """What is there; with nothing, empty results."""
    empty: dict[str, Any] = {"machine": {}, "lessons": {}, "baselines": {}, "runs": {}}
    return empty | (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})


def run_missing(options: argparse.Namespace) -> None:
    """Make the runs that were asked for and are not in OUT.json with these settings, and write each as it ends."""
    path = options.out.with_suffix(".json")
    results = load(path)
    runs = wanted(options, options.work)
    missing = {
        name: each for name, each in runs.items() if results["runs"].get(name, {}).get("of") != fingerprint(each[1])
    }
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are in {path}", file=sys.stderr, flush=True)
    if not missing:
        return
    options.work.mkdir(parents=True, exist_ok=True)
    one_thread()  # here, for the lesson and for processes that import torch before they are told
    for name in sorted({task.model for task, *_ in missing.values() if task.lesson}):
        record(options, {"lessons": {name: teach(options.work, name)}})
    for task in {task.name: task for task, *_ in missing.values()}.values():
        if not task.is_game:
            write_held_out(task, options.work)
        record(options, {"baselines": {task.name: baseline(task, options.work)}})
    host = {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    record(options, {"machine": host})
    with ProcessPoolExecutor(
        options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1, initializer=_die_with_parent
    ) as pool:
        jobs = {pool.submit(job, each[1], each[2]): name for name, each in missing.items()}
        for done in as_completed(jobs):
            name = jobs[done]
            outcome = {"of": fingerprint(missing[name][1]), **done.result()}
            record(options, {"runs": {name: outcome}})
            print(f"{name}: {outcome['after']}", file=sys.stderr, flush=True)


def record(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Put `found` into OUT.json, section by section, and leave what another invocation put there."""
    path = options.out.with_suffix(".json")
    with locked(options.work):
        results = load(path)
        for section, entries in found.items():
            results[section] |= entries
        replace(path, json.dumps(results, indent=1) + "\n")


def _die_with_parent() -> None:
    machine.die_with_parent(signal.SIGKILL)


def _processor() -> str:
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"model name\s*: (.+)", described)
    return found.group(1) if found else platform.processor() or platform.machine()


def seeds_of(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for each, run in results["runs"].items() if each.startswith(f"{name}, seed ")]


def table(results: dict[str, Any]) -> list[str]:
    """Markdown: accuracy before and after, means over the seeds with the smallest and the largest."""
    lines = [
        "| task | model | baseline | sampled before | sampled after | greedy before | greedy after "
        "| shuffled rewards, sampled | processor s a run |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS.values():
        if not (runs := seeds_of(results, task.name)):
            continue
        cells = [
            span([run[when][mode]["accuracy"] for run in runs])
            for mode in ("sampled", "greedy")
            for when in ("before", "after")
        ]
        control = results["runs"].get(f"{task.name}, shuffled")
        moved = [control[when]["sampled"]["accuracy"] for when in ("before", "after")] if control else []
        told = " -> ".join(f"{each:.1%}" for each in moved)
        cpu = statistics.fmean(run["cpu_s"] for run in runs)
        head = f"| {task.name} | {task.model} | {results['baselines'][task.name]:.1%} "
        lines.append(f"{head}| {' | '.join(cells)} | {told} | {cpu:.0f} |")
    return lines


def plot(results: dict[str, Any], path: Path) -> None:
    """A panel a task: held-out accuracy at temperature 1 over steps, a line a seed, the control and the baseline; thin,
    the mean reward of the training rollouts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    named = [task for task in TASKS.values() if seeds_of(results, task.name)]
    figure, axes = plt.subplots(2, math.ceil((len(named) + 1) / 2), figsize=(13, 6.2), squeeze=False)
    panels = list(axes.flat)
    for panel, task in zip(panels, named, strict=False):
        for name in sorted(results["runs"]):
            task_name, _, kind = name.partition(", ")
            if task_name == task.name:
                _draw(panel, results["runs"][name], kind)
        panel.axhline(results["baselines"][task.name], color="k", linewidth=0.8, linestyle=":", label="baseline")
        panel.set(title=f"{task.name} ({task.model})")
    for panel in panels[len(named) :]:
        panel.axis("off")
    if named:
        panels[len(named)].legend(*panels[0].get_legend_handles_labels(), loc="center", fontsize=11)
    figure.supxlabel("step")
    figure.supylabel("held-out accuracy at temperature 1; thin: mean training reward")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def _draw(panel: Any, run: dict[str, Any], kind: str) -> None:
    shuffled = kind == "shuffled"
    color = "0.5" if shuffled else f"C{kind.rpartition(' ')[2]}"
    panel.plot(
        *zip(*run["accuracy"], strict=True),
        label=f"{kind} rewards" if shuffled else kind,
        color=color,
        linestyle="--" if shuffled else "-",
        marker="o",
        markersize=4,
    )
    steps, rewards = zip(*run["reward"], strict=True)
    smoothed = [statistics.fmean(rewards[max(0, i - 7) : i + 1]) for i in range(len(rewards))]
    panel.plot(steps, smoothed, color=color, linewidth=0.8, alpha=0.5)


def gain(runs: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The mean gain of sampled accuracy over runs, and its standard error."""
    pairs = [(run["before"]["sampled"], run["after"]["sampled"]) for run in runs]
    errors = [each["accuracy_stderr"] for pair in pairs for each in pair]
    mean = statistics.fmean(after["accuracy"] - before["accuracy"] for before, after in pairs)
    return mean, math.hypot(*errors) / len(runs)


def verdict(results: dict[str, Any]) -> list[str]:
    """What is not as it should be: seeds that gained no more than noise explains, a control that gained more."""
    wrong = []
    for task in TASKS.values():
        control = results["runs"].get(f"{task.name}, shuffled")
        for kind, runs in (("seeds", seeds_of(results, task.name)), ("shuffled", [control] if control else [])):
            if not runs:
                continue
            mean, error = gain(runs)
            if (mean > NOISE * error) == (kind == "shuffled"):
                wrong.append(
                    f"{task.name}, {kind}: sampled accuracy gained {mean:+.1%}, of a standard error of {error:.1%}"
                )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="tasks whose name contains this")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/curves", help="OUT.json and OUT.png")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/curves", help="for the taught models and the runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a thread each")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    parser.add_argument("--plot", action="store_true", help="only draw OUT.png from what is there")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of every configuration")
    options = parser.parse_args()
    options.out, options.work = options.out.resolve(), options.work.resolve()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not (options.table or options.plot):
        run_missing(options)
    results = load(options.out.with_suffix(".json"))
    if options.table or not options.plot:
        print("\n".join(table(results)))
    if options.plot or not options.table:
        plot(results, options.out.with_suffix(".png"))
    wrong = verdict(results)
    print("\n".join(wrong) or "every task gained, and no control did", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
