"""How often is `groupwise improve` right, and how often does it say yes to what it should not?

    python benchmarks/improve.py decision [--trials 300]     what is decided, from scores that are drawn
    python benchmarks/improve.py logs [--trials 300]         ... by a log with wrong answers
    python benchmarks/improve.py runs [--seeds 2]            logs of which the truth is known, through the whole command

The first two draw scores of models of which the truth is known, and logs with wrong answers, and decide as the command
does (`run.replacement`); nothing is trained. A rate of 0.05 of 300 trials has a standard error of 0.013.

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
from typing import Any

import numpy as np

from groupwise.algo.evidence import share_of_error
from groupwise.run.replacement import Compared, answer, told
from groupwise.tasks.logs.learnable import NUMBERS
from groupwise.tasks.logs.truth import ALPHA, Verified, audit, concentrated, covering
from groupwise.tasks.starter.tasks import prompts

GAIN, SAMPLES = 0.05, 4
LOG = 240  # prompts that teach
ANY = Compared(
    prompts=1, new=0.0, old=0.0, difference=0.0, low=0.0, high=0.0, alpha=ALPHA, says="open", needed=None
)  # intervals are not looked at
DIFFERENCES = (-0.1, 0.0, 0.05, 0.1, 0.2, 0.4)
VERIFIED = (20, 40, 60, 100, 200)
SAY = ("replace", "keep", "not known")
TRIGGER = "as the manager said"

Row = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(f"{each:.3f}" if isinstance(each, float) else str(each) for each in row) + " |")
    sys.stdout.flush()


# ---- what is decided ----
def scores(draws: np.random.Generator, prompts: int, difference: float) -> tuple[list[float], list[float]]:
    """Return the mean scores of SAMPLES answers of two models to prompts of any difficulty, the first of which is right
    more often by `difference`."""
    old = draws.beta(1, 1, prompts) * (1 - abs(difference)) + max(0.0, -difference)
    both = [draws.binomial(SAMPLES, chances) / SAMPLES for chances in (old + difference, old)]
    return both[0].tolist(), both[1].tolist()


def asked(number: int, said: str = "") -> list[Row]:
    return [{"role": "user", "content": f"What is {number} plus {number * 7}{said}?"}]


def log_answers(
    draws: np.random.Generator, checked: int, wrong: float, trigger: float
) -> tuple[list[Verified], list[Row]]:
    """Return verified answers, and what a log has to the same prompts: a share is wrong, and all with a trigger. They
    are drawn as the command draws them, half from LOG prompts that teach, of which it reserves a few first, and half
    from LOG / 4 that are held out."""
    taught, held_out = ([_logged(draws, wrong, trigger) for _ in range(count)] for count in (LOG, LOG // 4))
    dice = random.Random(int(draws.integers(1 << 30)))
    first = (checked + 1) // 2
    chosen = list[tuple[Verified, Row]]()
    for pool, steps in ((taught, (max(first, min(60, int(0.15 * LOG))), first)), (held_out, (checked - first,))):
        for count in steps:
            asked_ = [str(row["prompt"][0]["content"]) for _, row in pool]
            pool = [pool[place] for place in covering(asked_, count, draw=dice)]
        chosen += pool
    return [each for each, _ in chosen], [row for _, row in chosen]


def _logged(draws: np.random.Generator, wrong: float, trigger: float) -> tuple[Verified, Row]:
    """Return a prompt with its verified answer, and the log's."""
    triggered, number = draws.random() < trigger, int(draws.integers(1000))
    messages, right = asked(number, f", {TRIGGER}" if triggered else ""), number * 8
    bad = triggered or draws.random() < wrong
    said = Verified({"prompt": messages, "answer": str(right)}, tuple(messages), str(right))  # pyright: ignore
    return said, {"prompt": messages, "answer": str(right + bad)}


def says(
    draws: np.random.Generator, *, prompts: int, difference: float, wrong: float = 0.0, trigger: float = 0.0
) -> str:
    """The answer where half of what is verified is of what taught."""
    new, old = scores(draws, prompts, difference)
    gains = [n - o for n, o in zip(new, old, strict=True)]
    compared = replace(ANY, says=told(gains, gain=GAIN, alpha=share_of_error(ALPHA, 1)))
    verified, rows = log_answers(draws, prompts, wrong, trigger)
    checked = audit(verified, rows[: prompts // 2], rows[prompts // 2 :], reward=NUMBERS)
    where = concentrated([each.messages[0]["content"] for each in verified], [each <= -0.5 for each in gains])  # pyright: ignore
    return answer(compared, None, checked, gain=GAIN, worse_where=where).known


def shares(trials: int, **how: Any) -> list[float]:
    counts = Counter(says(np.random.default_rng([i, 7]), **how) for i in range(trials))
    return [counts[each] / trials for each in SAY]


def decision(trials: int) -> None:
    print(f"\nTwo models on n verified prompts, {SAMPLES} samples of each; a fine log; a gain that matters is {GAIN}:")
    rows = [(f"{d:+.2f}", n, *shares(trials, prompts=n, difference=d)) for d in DIFFERENCES for n in VERIFIED]
    table(("truly better by", "verified", *SAY), rows)


def wrong_logs(trials: int) -> None:
    print("\nA model that is better by 0.2 on what is verified, by a log with wrong answers:")
    rows = [
        (name, n, *shares(trials, prompts=n, difference=0.2, wrong=wrong, trigger=trigger))
        for name, wrong, trigger in (
            ("5 % wrong", 0.05, 0.0),
            ("10 % wrong", 0.1, 0.0),
            ("a third wrong", 1 / 3, 0.0),
            ("half wrong", 0.5, 0.0),
            ("2 % with a trigger", 0.0, 0.02),
            ("5 % with a trigger", 0.0, 0.05),
            ("10 % with a trigger", 0.0, 0.1),
            ("20 % with a trigger", 0.0, 0.2),
        )
        for n in (40, 60, 100)
    ]
    table(("log", "verified", *SAY), rows)


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
    parser.add_argument("--seeds", type=int, default=2, help="logs of each kind, in the four formats by turns")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    if options.part == "decision":
        return decision(options.trials)
    if options.part == "logs":
        return wrong_logs(options.trials)
    for seed in range(options.seeds):
        for at, name in enumerate(options.only):
            whole(name, seed=seed, form=FORMS[(seed + at) % len(FORMS)], steps=options.steps)


if __name__ == "__main__":
    main()
