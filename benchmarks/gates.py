"""How often do the decisions err that stand between a model and a bad version, and how often do they see a good one?

    python benchmarks/gates.py [--trials 1000] [--only gate looks ...] [--quick]

Simulates what is decided about, and decides with the functions that runs and servers decide with; nothing is trained.
Prints the tables of docs/gates.md, a part at a time:

    gate      one look at held-out prompts (`gate`, `promote`), 10 to 400 of them, beside a percentile bootstrap
    looks     many versions looking at the same prompts
    yardstick a better version after a hundred that were compared with the luckiest of them
    trials    the shadow and the canary
    habits    the canary, where few persons rate much
    live      a hundred versions through gate and canary, with raters of whom a fifth is hostile
    best      what `eval.best` reports of the version that it chose
    health    every health rule, in runs of which nothing is wrong, and where something is

A rate of 0.05 that is measured in 1000 trials has a standard error of 0.007.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from groupwise.algo.evidence import p_at_most, share_of_error
from groupwise.config.learn import CanaryConfig, ShadowConfig
from groupwise.run.health import HealthMonitor
from groupwise.run.health_rules import RULES
from groupwise.server.policies import Pair, Trial
from groupwise.server.raters import dishonest
from groupwise.server.trials import Ratings, in_turns, judge_canary, judge_shadow, ratings_needed
from groupwise.types import PolicyVersion

ALPHA = 0.05
Random = np.random.Generator
Draw = Callable[[Random, int, float], np.ndarray]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(f"{each:.3f}" if isinstance(each, float) else str(each) for each in row) + " |")
    sys.stdout.flush()


def rate(trials: int, happens: Callable[[Random], bool], *seed: int) -> float:
    return sum(happens(np.random.default_rng([*seed, i])) for i in range(trials)) / trials


# ---- one look ----
# Differences of two versions on n prompts, with this mean.


def only_losses(random: Random, n: int, mean: float) -> np.ndarray:
    """A version that answers as before, but for prompts that it loses (or wins)."""
    return np.sign(mean) * (random.random(n) < abs(mean))


def three_in_ten(random: Random, n: int, mean: float) -> np.ndarray:
    """Right and wrong answers, of which three in ten differ."""
    return random.choice([-1.0, 0.0, 1.0], p=[0.15 - mean / 2, 0.7, 0.15 + mean / 2], size=n)


def of_four(random: Random, n: int, mean: float) -> np.ndarray:
    """Means of four answers to prompts of any difficulty."""
    hard = random.beta(1, 1, n) * (1 - abs(mean)) + max(0.0, -mean)
    return (random.binomial(4, hard + mean) - random.binomial(4, hard)) / 4


def rare(random: Random, n: int, mean: float) -> np.ndarray:
    """Rewards from -10 to 1 of which one in many is -10: the mean is a share of the range, 11."""
    return (
        np.where(random.random(n) < -mean, -11.0, 0.0) if mean < 0 else random.normal(11 * mean, 0.3, n).clip(-11, 11)
    )


SHAPES: Mapping[str, tuple[Draw, float]] = {
    "only losses": (only_losses, 1.0),
    "3 in 10 differ": (three_in_ten, 1.0),
    "means of 4": (of_four, 1.0),
    "rare -10": (rare, 11.0),
}


def passes(differences: np.ndarray, margin: float, *, alpha: float = ALPHA, width: float = 1.0) -> bool:
    """The test of `run.verdict.judge`."""
    return p_at_most(differences.tolist(), -margin * width, worst=-width) <= alpha


def bootstrap_passes(random: Random, differences: np.ndarray, margin: float, width: float) -> bool:
    """The percentile bootstrap of 500 draws, as a comparison."""
    values, counts = np.unique(differences, return_counts=True)
    means = random.multinomial(len(differences), counts / len(differences), size=500) @ values / len(differences)
    return bool(np.quantile(means, ALPHA) >= -margin * width)


def gate(trials: int) -> None:
    margin = 0.05
    print(
        f"\nMargin {margin} of the range, confidence 95 %: a version that is worse by the margin should pass in 0.050."
    )
    rows = []
    for name, (draw, width) in SHAPES.items():
        for n in (10, 30, 50, 100, 200, 400):
            worse, equal, better = (
                rate(trials, lambda r, m=mean, n=n, d=draw, w=width: passes(d(r, n, m), margin, width=w), n, k)
                for k, mean in enumerate((-margin, 0.0, margin))
            )
            naive = rate(trials, lambda r, n=n, d=draw, w=width: bootstrap_passes(r, d(r, n, -margin), margin, w), n, 9)
            rows.append((name, n, worse, naive, equal, better))
    table(
        (
            "how they differ",
            "prompts",
            "worse by the margin: passes",
            "... by a bootstrap",
            "equally good: passes",
            "better by the margin: passes",
        ),
        rows,
    )


# ---- many looks ----
def looks(trials: int) -> None:
    margin = 0.05
    print(f"\nVersions that are all worse by the margin, {margin}, each judged on the same prompts (3 in 10 differ).")
    rows = []
    ways: Mapping[str, Callable[[int, int], float]] = {
        "the full error for each": lambda look, of: ALPHA,
        "equal shares (`promote`)": lambda look, of: ALPHA / of,
        "shares for any number of versions (`gate`)": lambda look, of: share_of_error(ALPHA, look),
    }
    for versions, n in ((20, 100), (20, 400), (100, 400)):
        for name, part in ways.items():

            def any_passes(random: Random, n: int = n, versions: int = versions, part: Any = part) -> bool:
                return any(
                    passes(three_in_ten(random, n, -margin), margin, alpha=part(k, versions))
                    for k in range(1, versions + 1)
                )

            last = part(versions, versions)
            better = rate(trials, lambda r, n=n, a=last: passes(three_in_ten(r, n, 0.1), margin, alpha=a), n, 1)
            rows.append((f"{versions} on {n}", name, rate(trials // 4, any_passes, n, versions), better))

        def confirmed(random: Random, n: int = n, versions: int = versions) -> bool:
            got = 0
            for _ in range(versions):
                if passes(three_in_ten(random, n, -margin), margin):
                    got += 1
                    if passes(three_in_ten(random, n, -margin), margin, alpha=share_of_error(ALPHA, got)):
                        return True
            return False

        def late(random: Random, n: int = n, versions: int = versions) -> bool:
            seen = 1 + random.binomial(versions - 1, ALPHA)
            return passes(three_in_ten(random, n, 0.1), margin) and passes(
                three_in_ten(random, n, 0.1), margin, alpha=share_of_error(ALPHA, seen)
            )

        rows.append(
            (
                f"{versions} on {n}",
                f"`confirm` on {n} more prompts",
                rate(trials // 4, confirmed, n),
                rate(trials, late, n),
            )
        )
    table(
        ("versions, prompts", "error of each test", "a worse version passes", "a last version, better by 0.1, passes"),
        rows,
    )


def yardstick(trials: int) -> None:
    print("\nA version better by 0.05 on 200 prompts, margin 0.05, after 100 versions as good as the first.")
    n, margin = 200, 0.05

    def compared(random: Random, *, again: bool) -> bool:
        chance = random.beta(1, 1, n) * 0.95
        best = max((random.random(n) < chance for _ in range(100)), key=lambda did: did.sum())
        old = random.random(n) < chance if again else best
        new = random.random(n) < chance + 0.05
        return passes(new.astype(float) - old, margin)

    rows = [
        ("the old samples of the luckiest version", rate(trials, lambda r: compared(r, again=False), 1)),
        ("new samples of it, for each test", rate(trials, lambda r: compared(r, again=True), 1)),
        ("(the first version, without any before it)", rate(trials, lambda r: compared(r, again=True), 2)),
    ]
    table(("compared with", "it passes"), rows)


# ---- trials ----
def thumbs(random: Random, count: int, *, share: float, new: float, old: float) -> tuple[Ratings, Ratings]:
    """Thumbs as they come, until the new version has `count`."""
    is_new = np.zeros(0, dtype=bool)
    while is_new.sum() < count:
        is_new = np.append(is_new, random.random(int(2 * count / share)) < share)
    is_new = is_new[: int(np.flatnonzero(is_new)[count - 1]) + 1]
    up = random.random(len(is_new)) < np.where(is_new, new, old)
    rated = [(i, bool(which), float(vote)) for i, (which, vote) in enumerate(zip(is_new, up, strict=True))]
    return [(i, vote) for i, which, vote in rated if which], [(i, vote) for i, which, vote in rated if not which]


def canary_ends(mine: Ratings, others: Ratings, config: CanaryConfig) -> tuple[str, int]:
    """What becomes of it, looked at after every fifth rating, and after how many."""
    for count in range(5, len(mine) + 5, 5):
        until = mine[min(count, len(mine)) - 1][0]
        outcome, reason = judge_canary(
            mine[:count], [each for each in others if each[0] <= until], config=config, minutes=1
        )
        if outcome != "go on":
            return "not known" if reason.startswith("not known") else outcome, min(count, len(mine))
    raise AssertionError("it has an end")


def trials_of(trials: int) -> None:
    rows, trials = [], trials // 4
    for config in (CanaryConfig(), CanaryConfig(share=0.5), CanaryConfig(margin=0.1)):
        needed = ratings_needed(config)
        for old, new in (
            (0.5, 0.5),
            (0.9, 0.9),
            (0.6, 0.7),
            (0.6, 0.6 - config.margin / 2),
            (0.6, 0.6 - config.margin),
        ):
            ends = [
                canary_ends(
                    *thumbs(np.random.default_rng([i, 3]), needed, share=config.share, new=new, old=old), config
                )
                for i in range(trials)
            ]
            counts = Counter(outcome for outcome, _ in ends)
            shares = [counts[each] / trials for each in ("promote", "roll back", "not known")]
            name = f"{config.margin:g} at {config.share:.0%}, at most {needed} ratings"
            rows.append((name, f"{old:g}", f"{new:g}", *shares, round(sum(n for _, n in ends) / trials)))
    print("\nThe canary: up votes of the active version and of the new one.")
    head = ("canary", "active", "new", "goes live", "rolled back", "not known", "ratings, mean")
    table(head, rows)

    shadow, version, active = ShadowConfig(), PolicyVersion("a", 2), PolicyVersion("a", 1)

    def shadowed(random: Random, mean: float, count: int) -> bool:
        differ = three_in_ten(random, count, mean)
        pairs = [Pair(rewards=(max(0.0, each), max(0.0, -each)), tokens=(5, 5)) for each in differ]
        trial = Trial(version=version, against=active, share=0.1, since=0.0, stage="shadow", pairs=pairs)
        config = shadow.model_copy(update={"requests": count})
        return judge_shadow(trial, config=config, scored=True)[0] == "promote"

    rows = [
        (count, *(rate(trials, lambda r, m=m, c=count: shadowed(r, m, c), count) for m in (-0.2, -0.1, 0.0, 0.1)))
        for count in (50, 200)
    ]
    print("\nThe shadow, margin 0.2: how often a version passes, by how much its rewards differ.")
    table(("pairs", "-0.2", "-0.1", "0", "+0.1"), rows)


def raters(trials: int) -> None:
    config, counts = {"honest": 0.7, "confidence": 0.99}, (10, 20, 50, 100, 200, 400)

    def found(agrees: float) -> list[float]:
        """How many of the raters are distrusted by each count."""
        by = Counter[int]()
        for i in range(trials):
            agreed = list(np.random.default_rng([i, 9]).random(counts[-1]) < agrees)
            first = next((count for count in counts if dishonest(agreed[:count], **config)), None)
            by.update(count for count in counts if first is not None and first <= count)
        return [by[count] / trials for count in counts]

    print("\nRaters: how many are distrusted, by how many known prompts they have rated.")
    rows = [(f"{agrees:.2f}", *found(agrees)) for agrees in (0.9, 0.8, 0.7, 0.6, 0.5, 0.25, 0.1, 0.0)]
    table(("agrees with the rewards", *map(str, counts)), rows)


def habits(trials: int) -> None:
    """Persons who rate by habit: half like 5 % of what they get, half 95 %; a worse version is liked less by each."""
    rows, trials, canary = [], trials // 5, CanaryConfig(share=0.5, margin=0.4)

    def end(random: Random, persons: int, run: int, drop: float, *, each: bool) -> str:
        likes, config = random.permutation([0.05, 0.95] * (persons // 2)), canary.model_copy(update={"ratings": 400})
        met, length = random.random(persons) < canary.share, run or 10  # where persons meet one version alone
        said: dict[bool, list[tuple[int, float, tuple[str, str | None]]]] = {True: [], False: []}
        for came in range(0, 100_000, length):
            who = int(random.integers(persons))
            is_new = bool(random.random() < canary.share) if run else bool(met[who])
            chance = likes[who] * (1 - 2 * drop if is_new else 1)
            name = ("", None) if each else ("", str(who))
            said[is_new] += [(came + i, float(random.random() < chance), name) for i in range(length)]
            if came % (8 * length) == 0:
                outcome, reason = judge_canary(
                    *in_turns(*said.values()), config=config, minutes=1e6 if came >= 4000 else 1
                )
                if outcome != "go on":
                    return "not known" if reason.startswith("not known") else outcome
        raise AssertionError("it has an end")

    for persons, run in ((20, 1), (20, 10), (200, 10), (20, 0)):
        for each, words in ((True, "each rating counts"), (False, "ratings in a row count once")):
            ends = [
                [end(np.random.default_rng([i, persons, run]), persons, run, drop, each=each) for i in range(trials)]
                for drop in (0.0, canary.margin)
            ]
            shares = [of.count(what) / trials for of in ends for what in ("promote", "roll back")]
            met = f"{run} in a row" if run else "all for one version"
            rows.append((f"{persons}, {met}", words, *shares))
    print(f"\nPersons with habits, margin {canary.margin:g} at {canary.share:.0%}, at most 4000 ratings:")
    head = ("raters, ratings", "counted", "equally good: goes live", "rolled back", "worse by the margin: goes live")
    table((*head, "rolled back"), rows)


HOSTILE: Mapping[str, Callable[[Random, bool, float], float]] = {
    "none": lambda random, is_new, vote: vote,
    "inverted": lambda random, is_new, vote: 1 - vote,
    "always up for the new": lambda random, is_new, vote: float(is_new),
    "always down for the new": lambda random, is_new, vote: float(not is_new),
    "always up": lambda random, is_new, vote: 1.0,
    "random": lambda random, is_new, vote: float(random.random() < 0.5),
}


def live(trials: int) -> None:
    print(
        "\nOf 100 versions that come one after another, those that go live, of those that passed the gate before: 400"
    )
    print(
        "prompts, margin 0.05, 3 in 10 answers differ; then the default canary. A fifth of the ratings is hostile, and"
    )
    print("the active version has 60 % of thumbs up.")
    rows, canary = [], CanaryConfig()
    needed, repeats = ratings_needed(canary), max(1, trials // 100)
    for name, lie in HOSTILE.items():
        row: list[Any] = [name]
        for effect in (0.0, -0.05, -0.2, 0.1):
            gated = went = 0
            for repeat in range(repeats):
                random = np.random.default_rng([repeat, 5])
                for look in range(1, 101):
                    if not passes(three_in_ten(random, 400, effect), 0.05, alpha=share_of_error(ALPHA, look)):
                        continue
                    gated += 1
                    mine, others = (
                        [(i, lie(random, side, vote) if random.random() < 0.2 else vote) for i, vote in each]
                        for side, each in zip(
                            (True, False),
                            thumbs(random, needed, share=canary.share, new=0.6 + effect, old=0.6),
                            strict=True,
                        )
                    )
                    went += canary_ends(mine, others, canary)[0] == "promote"
            row.append(f"{went / repeats:.1f} of {gated / repeats:.1f}")
        rows.append(row)
    table(("hostile ratings", "no effect", "worse by 0.05", "worse by 0.2", "better by 0.1"), rows)


# ---- the best version ----
def best(trials: int) -> None:
    rows = []
    for n, versions in ((64, 10), (64, 20), (256, 20)):
        chosen, again = [], []
        for i in range(trials):
            random = np.random.default_rng([i, n])
            chance = random.beta(1, 1, n)
            scores = (random.random((versions, n)) < chance).mean(axis=1)
            chosen.append(scores.max() - chance.mean())
            again.append((random.random(n) < chance).mean() - chance.mean())
        rows.append((n, versions, float(np.mean(chosen)), float(np.mean(again))))
    print("\nEqual versions: the reported mean reward less the true one, of the version with the best evaluation.")
    table(("prompts", "evaluations", "error of the evaluation that chose it", "error when evaluated again"), rows)


# ---- health ----
STEPS, EVERY, PROMPTS, GROUP, HELD_OUT = 200, 20, 32, 8, 128
Metrics = dict[str, float]
LEARNS = {  # the share of right answers at first and at last, and in how many steps most of it is learned
    "learns quickly": (0.35, 0.9, 60.0),
    "learns slowly": (0.3, 0.7, 200.0),
    "few right answers": (0.06, 0.2, 150.0),
    "does not change": (0.7, 0.7, 1.0),
}


def healthy(random: Random, learns: str) -> list[Metrics]:
    """The metrics of a run of which nothing is wrong: 32 prompts a step, groups of 8, 128 held-out prompts."""
    first, last, steps = LEARNS[learns]
    held_out, lines = random.beta(1, 1, HELD_OUT), list[Metrics]()
    for step in range(STEPS + 1):
        skill = first + (last - first) * (1 - math.exp(-step / steps))
        if step:
            hard = random.beta(4 * skill, 4 * (1 - skill), PROMPTS)
            right = random.binomial(GROUP, hard)
            even = float(np.mean((right == 0) | (right == GROUP)))
            mean = float(right.mean() / GROUP)
            length = 40 + 8 * skill + random.normal(0, 1.5)
            lines.append(
                {
                    "reward/mean": mean,
                    "reward/frac_zero_std": min(0.7, even),
                    "reward/frac_best": float(np.mean(right == GROUP) / max(even, 1e-9)) if even else 0.0,
                    "reward/max": 1.0,
                    "reward/right/mean": mean,
                    "reward/right/part": mean,
                    "reward/right/noise": random.binomial(40, 0.02) / 40,
                    "reward/right/share": random.uniform(0.4, 0.6),
                    "rollout/len_mean": length,
                    "rollout/truncated_frac": random.binomial(256, 0.03) / 256,
                    "rollout/error_frac": random.binomial(256, 0.005) / 256,
                    "rollout/excluded_frac": 0.0,
                    "rollout/top_token_frac": random.uniform(0.1, 0.2),
                    "rollout/frac_same": random.binomial(PROMPTS, 0.2) / PROMPTS,
                    "rollout/groups_trained": float(random.binomial(PROMPTS, 0.6)),
                    "rollout/staleness_max": 0.0,
                    "rollout/selection_len": random.normal(0, 0.005),
                    "rollout/selection_reward": abs(random.normal(0, 0.02)),
                    "loss/policy": random.normal(0, 1e-3),
                    "loss/entropy": 0.3 + 0.4 * math.exp(-step / 60) + random.normal(0, 0.02),
                    "loss/clip_frac": random.binomial(5000, 0.01) / 5000,
                    "loss/kl": abs(random.normal(0.02, 0.02)),
                    "kl/mean": abs(random.normal(0.03 * skill, 0.02)) * (50 if random.random() < 0.02 else 1),
                    "optim/lr": 1e-5,
                    "optim/grad_norm": random.lognormal(-1, 0.6),
                    "optim/refused": 0.0,
                    "mismatch/logprob_diff_mean": abs(random.normal(0.003, 0.001)),
                    "mismatch/dropped_tokens": 0.0,
                    "mismatch/ratio_min": random.uniform(0.4, 0.9),
                    "mismatch/capped_frac": random.binomial(5000, 0.01) / 5000,
                    "sampling/kept_mass": random.uniform(0.95, 1.0),
                    "data/too_long_frac": random.binomial(PROMPTS, 0.01) / PROMPTS,
                    "env/failed_frac": random.binomial(256, 0.01) / 256,
                    "env/tool_error_frac": random.binomial(256, 0.1) / 256,
                    "env/tool_calls": random.uniform(1, 2),
                    "env/tools": 2.0,
                    "env/limit_frac": random.binomial(256, 0.1) / 256,
                    "preference/chosen_gain": random.normal(0.02, 0.02),
                    "preference/margin": random.uniform(0, 0.5),
                    "preference/accuracy": random.uniform(0.55, 0.9),
                    "teacher/kl": abs(random.normal(0.5, 0.1)),
                    "final/logprob_drop": random.normal(0.0, 0.03),
                    "time/sync_s": random.uniform(0.1, 0.5),
                }
            )
        if step % EVERY == 0:
            lines.append(evaluation(random, held_out ** ((1 - skill) / skill), skill + random.normal(0, 0.03)))
    return lines


def evaluation(random: Random, chances: np.ndarray, trained_by: float | None = None) -> Metrics:
    did = random.random(len(chances)) < chances
    beside = {} if trained_by is None else {"eval/sampled/training_reward": trained_by}
    error = float(did.std(ddof=1) / math.sqrt(len(did)))
    return {"eval/sampled/reward": float(did.mean()), "eval/sampled/reward_stderr": error, **beside}


def evaluated(levels: Sequence[float], *, rises: bool = False) -> Callable[[Random], list[Metrics]]:
    """Evaluations of a policy that solves these shares of held-out prompts; with `rises` the trained reward rises."""

    def series(random: Random) -> list[Metrics]:
        prompts = random.beta(1, 1, HELD_OUT)
        return [
            evaluation(random, prompts ** ((1 - p) / p), 0.5 + 0.05 * i + random.normal(0, 0.01) if rises else None)
            for i, p in enumerate(levels)
        ]

    return series


def means(levels: Sequence[float], metric: str = "reward/mean", **others: float) -> Callable[[Random], list[Metrics]]:
    """Steps with this mean reward, as noisy as 32 prompts in groups of 8 make it, and other metrics as they are."""

    def series(random: Random) -> list[Metrics]:
        drawn = [random.binomial(GROUP, random.beta(4 * p, 4 * (1 - p), PROMPTS)).mean() / GROUP for p in levels]
        return [{metric: float(each), **others} for each in drawn]

    return series


def steady(count: int = 40, **metrics: float | tuple[float, float]) -> Callable[[Random], list[Metrics]]:
    """Steps with these values, or drawn from normal distributions with these means and standard deviations; `__` in a
    name is a `/`."""

    def series(random: Random) -> list[Metrics]:
        return [
            {
                name.replace("__", "/"): float(random.normal(*value)) if isinstance(value, tuple) else value
                for name, value in metrics.items()
            }
            for _ in range(count)
        ]

    return series


def joined(*series: Callable[[Random], list[Metrics]]) -> Callable[[Random], list[Metrics]]:
    """Several series, step by step; short ones end earlier."""

    def all_of(random: Random) -> list[Metrics]:
        parts = [each(random) for each in series]
        return [
            {name: value for part in parts if i < len(part) for name, value in part[i].items()}
            for i in range(max(map(len, parts)))
        ]

    return all_of


def line(first: float, last: float, count: int = 40) -> list[float]:
    return np.linspace(first, last, count).tolist()


def lengths(first: float, last: float, count: int = 40, **others: float) -> Callable[[Random], list[Metrics]]:
    return lambda random: [
        {
            "rollout/len_mean": length + random.normal(0, 0.03 * length),
            **{k.replace("__", "/"): v for k, v in others.items()},
        }
        for length in line(first, last, count)
    ]


SICK: Mapping[str, tuple[str, Callable[[Random], list[Metrics]]]] = {
    "env.failed": ("10 % of episodes fail", steady(env__failed_frac=(0.1, 0.02))),
    "env.tool_errors": ("70 % of tool calls fail", steady(env__tool_error_frac=(0.7, 0.1))),
    "env.no_calls": ("no tool call in 40 steps", steady(env__tool_calls=0.0, env__tools=2.0)),
    "policy.fell_apart": (
        "reward falls from 0.3 to 0.01, no completion ends",
        joined(
            means([0.3] * 5 + [0.01] * 20),
            lambda r: [{"rollout/truncated_frac": 0.05 + 0.9 * (i > 4)} for i in range(25)],
        ),
    ),
    "policy.fell_silent": (
        "reward falls from 0.3 to 0.01, completions a tenth as long",
        joined(means([0.3] * 5 + [0.01] * 20), lambda r: [{"rollout/len_mean": 50 if i < 5 else 5} for i in range(25)]),
    ),
    "preference.unlikely": (
        "chosen completions lose 0.3 nats",
        steady(preference__chosen_gain=(-0.3, 0.05), preference__margin=0.2),
    ),
    "preference.no_signal": ("half of the pairs are ordered correctly", steady(preference__accuracy=(0.5, 0.03))),
    "reward.stuck_zero": ("mean reward stays at 0.02", means([0.02] * 60)),
    "reward.exploited": (
        "one reward falls from 0.5 to 0.1, the total rises",
        joined(
            means(line(0.5, 0.1, 60), "reward/right/part"),
            lambda r: [{"reward/mean": 0.5 + 0.01 * i + r.normal(0, 0.01)} for i in range(60)],
        ),
    ),
    "reward.silent": ("one reward is always 0", steady(reward__form__mean=0.0)),
    "reward.error_rate": ("10 % of scores fail", steady(rollout__error_frac=(0.1, 0.02))),
    "reward.not_applicable": ("half of the completions have no score", steady(rollout__excluded_frac=(0.5, 0.05))),
    "teacher.unlike": ("teacher and policy differ by 3 nats a token", steady(teacher__kl=(3.0, 0.3))),
    "reward.gamed": (
        "held-out reward falls from 0.7 to 0.4, the trained reward rises",
        evaluated(line(0.7, 0.4, 8), rises=True),
    ),
    "reward.hack_suspect": (
        "twice as long after 40 steps, held-out reward flat",
        joined(lengths(40, 90), steady(40, eval__sampled__reward=0.5)),
    ),
    "reward.noise": ("30 % of equal completions get different rewards", steady(reward__right__noise=(0.3, 0.05))),
    "reward.dominated": ("one reward has a share of 0.05", steady(reward__form__share=(0.05, 0.01))),
    "reward.falling": ("reward falls from 0.6 to 0.25 in 40 steps", means(line(0.6, 0.25))),
    "reward.lost": ("reward falls from 0.7 to 0.3 in 60 steps", means([*line(0.3, 0.7, 40), *line(0.7, 0.3, 60)])),
    "reward.flat": (
        "reward stays at 0.5 for 120 steps",
        joined(means([0.5] * 120), steady(120, reward__frac_zero_std=0.2, optim__lr=1e-5)),
    ),
    "eos.missing": ("no completion ends", steady(rollout__truncated_frac=1.0)),
    "len.clipped": ("40 % of completions are cut", steady(rollout__truncated_frac=(0.4, 0.03))),
    "env.limits": ("limits end 95 % of episodes", steady(env__limit_frac=(0.95, 0.02))),
    "len.monotone_max": ("twice as long after 30 steps, 15 % cut", lengths(40, 80, 30, rollout__truncated_frac=0.15)),
    "len.collapse": ("a quarter as long after 25 steps, reward flat", joined(lengths(60, 15, 25), means([0.4] * 25))),
    "policy.one_token": ("87 % of tokens are one token", steady(rollout__top_token_frac=(0.87, 0.02))),
    "entropy.collapse": ("entropy 0.005 nats", steady(loss__entropy=(0.005, 0.001))),
    "entropy.high": (
        "entropy 2 nats, rising",
        lambda r: [{"loss/entropy": 2 + 0.01 * i + r.normal(0, 0.03)} for i in range(60)],
    ),
    "kl.high": ("KL 0.8 nats", steady(kl__mean=(0.8, 0.1))),
    "kl.exploded": ("KL 20 nats", steady(loss__kl=(20.0, 3.0))),
    "policy.destroyed": ("trained tokens lose 0.4 nats", steady(1, final__logprob_drop=(0.4, 0.03))),
    "clip.high": ("40 % of tokens clipped", steady(loss__clip_frac=(0.4, 0.03))),
    "eval.regress": (
        "held-out reward falls from 0.7 to 0.5 in 8 evaluations",
        evaluated([0.5, 0.6, 0.7, *line(0.7, 0.5, 8)]),
    ),
    "group.solved": (
        "90 % of groups solved",
        joined(
            means(line(0.4, 0.97, 60)), steady(60, reward__frac_zero_std=0.9, reward__frac_best=0.95, reward__max=1.0)
        ),
    ),
    "group.same_answer": ("65 % of groups give one answer", steady(rollout__frac_same=(0.65, 0.05))),
    "group.zero_std": ("90 % of groups have equal rewards", steady(reward__frac_zero_std=(0.9, 0.03))),
    "adv.skip_ratio": (
        "half of the steps have no group",
        lambda r: [{"rollout/groups_trained": float(r.random() < 0.5)} for _ in range(40)],
    ),
    "data.too_long": ("20 % of prompts are too long", steady(data__too_long_frac=(0.2, 0.05))),
    "grad.nan": ("one step refused", steady(1, optim__refused=1.0)),
    "loss.nan": ("one loss is not a number", steady(1, loss__policy=math.nan)),
    "grad.explode": ("a gradient norm of 30", steady(optim__grad_norm=(30.0, 5.0))),
    "grad.zero_streak": ("the gradient is 0", steady(optim__grad_norm=0.0)),
    "lr.zero": ("learning rate 0", steady(optim__lr=0.0)),
    "mismatch.logp": ("0.2 nats a token", steady(mismatch__logprob_diff_mean=(0.2, 0.03))),
    "mismatch.on_policy": (
        "0.05 nats a token, on-policy",
        steady(mismatch__logprob_diff_mean=(0.05, 0.005), rollout__staleness_max=0.0),
    ),
    "mismatch.dropped": ("three tokens dropped", steady(1, mismatch__dropped_tokens=3.0)),
    "sampling.kept_mass": ("40 % of the mass kept", steady(sampling__kept_mass=(0.4, 0.03))),
    "is.min": ("a ratio of 0.05", steady(mismatch__ratio_min=(0.05, 0.01))),
    "is.clipped_frac": ("30 % of tokens capped", steady(mismatch__capped_frac=(0.3, 0.03))),
    "staleness.max": ("12 steps stale", steady(rollout__staleness_max=12.0)),
    "selection.short": ("trained completions 5 % shorter", steady(rollout__selection_len=(-0.05, 0.01))),
    "selection.long": ("trained completions 5 % longer", steady(rollout__selection_len=(0.05, 0.01))),
    "selection.reward": ("trained rewards off by 0.2 deviations", steady(rollout__selection_reward=(0.2, 0.03))),
    "sync.slow": ("a sync takes 8 s", steady(time__sync_s=(8.0, 1.0))),
}


def found(lines: Iterable[Metrics]) -> dict[str, str]:
    """The rules that ever held, and the worst that each was."""
    monitor, severity = HealthMonitor(), dict[str, str]()
    for step, metrics in enumerate(lines, 1):
        for event in monitor.step(step, metrics):
            if event.finding is not None and event.kind in ("began", "worse"):
                severity[event.finding.id] = event.finding.severity
    return severity


def health(trials: int) -> None:
    runs, sick = max(10, trials // 10), max(20, trials // 10)
    alarms = {
        learns: [found(healthy(np.random.default_rng([i, k]), learns)) for i in range(runs)]
        for k, learns in enumerate(LEARNS)
    }
    rows = []
    for rule in RULES:
        name, series = SICK[rule.id]
        power = sum(rule.id in found(series(np.random.default_rng([i, 9]))) for i in range(sick)) / sick
        false = [sum(rule.id in each for each in of) / runs for of in alarms.values()]
        errors = max(sum(each.get(rule.id) == "error" for each in of) / runs for of in alarms.values())
        rows.append((f"`{rule.id}`", *(f"{each:.2f}" for each in (*false, errors)), name, f"{power:.2f}"))
    print(f"\nShares of {runs} healthy runs of {STEPS} steps in which a rule ever held, and of {sick} sick ones:")
    table(("rule", *LEARNS, "as an error, at most", "fault", "found"), rows)
    rest = [sum(any(id != "reward.flat" for id in each) for each in of) / runs for of in alarms.values()]
    print(f"\nAny rule but `reward.flat`: {', '.join(f'{each:.2f}' for each in rest)}")


PARTS: Mapping[str, Callable[[int], None]] = {
    "gate": gate,
    "looks": looks,
    "yardstick": yardstick,
    "trials": trials_of,
    "raters": raters,
    "habits": habits,
    "live": live,
    "best": best,
    "health": health,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="does it run?")
    options = parser.parse_args()
    for name in options.only:
        began = time.monotonic()
        PARTS[name](40 if options.quick else options.trials)
        print(f"\n({name}: {time.monotonic() - began:.0f} s)", file=sys.stderr)


if __name__ == "__main__":
    main()
