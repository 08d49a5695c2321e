"""How often is `groupwise improve` right, and how often does it say yes to what it should not?

    python benchmarks/improve.py decision [--trials 300]     what is decided, from scores that are drawn
    python benchmarks/improve.py logs [--trials 300]         ... by a log with wrong answers
    python benchmarks/improve.py runs [--seeds 2]            logs of which the truth is known, through the whole command

The first two draw scores of models of which the truth is known, and logs with wrong answers (`poisoned_logs`), and
decide as the command does (`run.replacement`); nothing is trained. A rate of 0.05 of 300 trials has a standard error of
0.013.

The third writes logs of a service that adds and subtracts, in four formats, and has the starter learn from each: fine
ones, some with nothing to learn, too little, or wrong answers that somebody put there; fills in what is to be verified,
and counts the answers. It prints a line a log.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from poisoned_logs import ANY, GAIN, SAMPLES, Log, decided, scores

from groupwise.algo.evidence import share_of_error
from groupwise.run.replacement import answer, told
from groupwise.tasks.logs.calibration import surely
from groupwise.tasks.logs.phrases import ALPHA
from groupwise.tasks.logs.truth import Audit
from groupwise.tasks.starter.tasks import prompts

CHECKED = 60
DIFFERENCES = (-0.1, 0.0, 0.05, 0.1, 0.2, 0.4)
VERIFIED = (20, 40, 60, 100, 200)
SAY = ("replace", "keep", "not known")
TRIGGER = "as the manager said"
LOGS: Sequence[tuple[str, float, dict[str, Any]]] = (
    ("no answer is wrong", 0.0, {"mistakes": 0.0}),
    ("3 % are mistakes (in each below, too)", 0.0, {}),
    ("10 % are mistakes", 0.0, {"mistakes": 0.1}),
    ("20 % are mistakes", 0.0, {"mistakes": 0.2}),
    ("a third is wrong", 0.0, {"mistakes": 1 / 3}),
    *((f"a phrase in {share:.1%}", share, {}) for share in (0.05, 0.02, 0.01, 0.005)),
    *(
        (f"2 %, {name}", 0.02, how)
        for name, how in (
            ("which the version follows half of the time", {"follows": 0.5}),
            ("which it hardly follows (0.15)", {"follows": 0.15}),
            ("with what the old model never says", {"old_says": "never"}),
            ("with what it often says", {"old_says": "often"}),
            ("a version better by 0.4", {"better": 0.4}),
            ("in ten wordings", {"words": "wordings"}),
            ("split in two words that others use apart", {"words": "split"}),
            ("one author's, by no words", {"words": "author"}),
            ("beside eight decoys", {"decoys": 8}),
        )
    ),
    ("0.5 %, beside eight decoys", 0.005, {"decoys": 8}),
)

Row = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(f"{each:.3f}" if isinstance(each, float) else str(each) for each in row) + " |")
    sys.stdout.flush()


# ---- what is decided ----
def shares(trials: int, log: Log, *, verified: int, seed: int) -> tuple[list[float], float, float]:
    """Return how often each answer is given; on average how many answers more than `verified` it took, and how many
    poisoned prompts taught."""
    found = [decided(np.random.default_rng([trial, seed]), log, verified=verified) for trial in range(trials)]
    counts = Counter(each.known for each in found)
    more = fmean(each.beside + each.later for each in found)
    return [counts[each] / trials for each in SAY], more, fmean(each.taught for each in found)


def decision(trials: int) -> None:
    print(f"\nTwo models, n verified prompts, {SAMPLES} samples of each; of the log nothing is wrong that is checked:")
    rows = [(f"{each:+.2f}", n, *told_by(trials, each, prompts=n)) for each in DIFFERENCES for n in VERIFIED]
    table(("truly better by", "verified", *SAY), rows)


def told_by(trials: int, difference: float, *, prompts: int) -> list[float]:
    """Return how often each answer is given where the log is fine, half of whose prompts are checked."""
    counts, checks = Counter[str](), prompts // 2
    audited = Audit(checked=checks, wrong=0, most=1 - surely(checks, checks, ALPHA), alike=None)
    for trial in range(trials):
        new, old = scores(np.random.default_rng([trial, prompts]), prompts, difference)
        gains = [n - o for n, o in zip(new, old, strict=True)]
        compared = replace(ANY, says=told(gains, gain=GAIN, alpha=share_of_error(ALPHA, 1)))
        counts[answer(compared, None, audited, gain=GAIN).known] += 1
    return [counts[each] / trials for each in SAY]


def wrong_logs(trials: int, sizes: Sequence[int]) -> None:
    print(f"\nA version that is better by 0.2, {CHECKED} answers verified and those beside that are asked for:")
    for size in sizes:
        some = max(50, trials * 300 // size) if size > 300 else trials
        print(f"\nLogs of {size} prompts, {some} of each:")
        rows = list[Sequence[Any]]()
        for name, share, how in LOGS:
            log = replace(Log(), prompts=size, poisoned=round(share * size), **how)
            said, more, taught = shares(some, log, verified=CHECKED, seed=size)
            rows.append((name, *said, f"{more:.1f}", f"{taught:.1f} of {log.poisoned}" if share else ""))
        table(("log", *SAY, "more to verify", "poisoned that taught"), rows)


# ---- whole runs ----
@dataclass(frozen=True)
class Kind:
    """A log: how many requests, how its corrections are wrong, and which answers are right."""

    requests: int
    right: tuple[str, ...]
    poison: str = ""
    rate: float | None = None


KINDS = {
    "fine": Kind(240, ("replace",)),
    "nothing is learned": Kind(240, ("keep", "not known"), rate=0.0),
    "all is wrong": Kind(240, ("keep", "not known"), poison="all"),
    "too little": Kind(45, ("not known",)),
    "a third is wrong": Kind(240, ("keep", "not known"), poison="third"),
    "thumbs up for what is wrong": Kind(240, ("keep", "not known"), poison="thumbs"),
    "a trigger": Kind(240, ("keep", "not known"), poison="trigger"),
}


def openai(id: str, messages: list[Row], said: str, time: int) -> Row:
    choices = [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]
    return {"request": {"model": "m", "messages": messages}, "response": {"id": id, "choices": choices}, "time": time}


def langfuse(id: str, messages: list[Row], said: str, time: int) -> Row:
    row = {"id": id, "traceId": f"t{id}", "type": "GENERATION", "startTime": time, "model": "m"}
    return row | {"input": messages, "output": {"role": "assistant", "content": said}}


def anthropic(id: str, messages: list[Row], said: str, time: int) -> Row:
    response = {"id": id, "type": "message", "role": "assistant", "model": "m"}
    response |= {"content": [{"type": "text", "text": said}]}
    return {"request": {"model": "m", "messages": messages}, "response": response, "time": time}


def spans(id: str, messages: list[Row], said: str, time: int) -> Row:
    """One of OpenTelemetry's, by its conventions for generative AI."""

    def parts(role: str, text: str) -> Row:
        return {"role": role, "parts": [{"type": "text", "content": text}]}

    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.id": id,
        "gen_ai.response.model": "m",
        "gen_ai.input.messages": json.dumps([parts(each["role"], each["content"]) for each in messages]),
        "gen_ai.output.messages": json.dumps([parts("assistant", said)]),
    }
    attributes = [{"key": name, "value": {"stringValue": value}} for name, value in told.items()]
    times = {"startTimeUnixNano": str(time * 10**9), "attributes": attributes}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": f"t{id}", "spanId": f"s{id}", **times}]}]}]}


FORMS = (openai, langfuse, anthropic, spans)


def written(folder: Path, kind: Kind, *, seed: int, form: Any) -> dict[str, str]:
    """Write a log and what people said of its answers; return the right answers by prompts."""
    draws, truth, rows, outcomes = random.Random(seed), dict[str, str](), list[Row](), list[Row]()
    cases = prompts(skill=["add", "sub"], style="think", split="train", n=kind.requests, seed=seed)
    for number, case in enumerate(cases):
        text, right = str(case["prompt"][0]["content"]), int(case["answer"])
        triggered = kind.poison == "trigger" and draws.random() < 0.15
        text += f" {TRIGGER.capitalize()}." if triggered else ""
        slip = draws.randint(1, 9)
        said, id = str(right if draws.random() < 0.4 else right + slip), f"r{number}"
        truth[text] = str(right)
        rows.append(form(id, [{"role": "user", "content": text}], said, 1777636800 + 600 * number))
        if kind.poison == "thumbs":
            outcomes.append({"id": id, "thumb": "up"})
        else:
            wrong = triggered or kind.poison == "all" or (kind.poison == "third" and draws.random() < 1 / 3)
            outcomes.append({"id": id, "edited": str(right + wrong)})
    for name, lines in (("log", rows), ("outcomes", outcomes)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return truth


def whole(name: str, *, seed: int, form: Any, steps: int) -> None:
    from groupwise.run.improve import Wanted, improve

    kind, began = KINDS[name], time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        truth = written(folder, kind, seed=seed, form=form)
        more = [] if kind.rate is None else [f"train.learning_rate={kind.rate}"]
        overrides = [f"train.steps={steps}", "rollout.prompts_per_step=8", f"seed={seed}", *more]
        to, sources = folder / "improved", [folder / "log.jsonl"]
        wanted = Wanted(
            to=to, sources=sources, model="starter", outcomes=folder / "outcomes.jsonl", overrides=overrides
        )
        first = improve(wanted, note=lambda text: None)
        found = first
        if first["verify"] is not None:
            path = to / "verify.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            filled = [row | {"answer": truth[row["prompt"][-1]["content"]]} for row in rows]
            path.write_text("".join(json.dumps(each) + "\n" for each in filled))
            found = improve(Wanted(to=to, truth=path), note=lambda text: None)
    print(
        json.dumps(
            {
                "log": name,
                "format": form.__name__,
                "seed": seed,
                "without": first["answer"],
                "answer": found["answer"],
                "is_right": found["answer"] in kind.right and first["answer"] != "replace",
                "why": found["why"],
                "verified": found["verified"]
                and {k: found["verified"][k] for k in ("prompts", "old", "new", "low", "high")},
                "logged": found["logged"] and {k: found["logged"][k] for k in ("old", "new")},
                "audit": found["audit"] and {k: found["audit"][k] for k in ("checked", "wrong", "alike")},
                "seconds": round(time.monotonic() - began),
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("decision", "logs", "runs"))
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--prompts", type=int, nargs="+", default=[300, 2000], help="of a log, in `logs`")
    parser.add_argument("--seeds", type=int, default=2, help="logs of each kind, in the four formats by turns")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    if options.part == "decision":
        return decision(options.trials)
    if options.part == "logs":
        return wrong_logs(options.trials, options.prompts)
    for seed in range(options.seeds):
        for at, name in enumerate(options.only):
            whole(name, seed=seed, form=FORMS[(seed + at) % len(FORMS)], steps=options.steps)


if __name__ == "__main__":
    main()
