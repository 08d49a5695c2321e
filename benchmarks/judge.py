"""Does a policy learn from a judge of the whole group, beside the true reward, and what do the judge's biases cost?

    python benchmarks/judge.py [--seeds 0 1] [--steps 40] [--judges true noisy ...] [--json judge.json] [a.b=c ...]

The main arithmetic job, whose true reward is known (the final number is right), is trained on what
`groupwise.rewards.group_judge:group_judge` gives. No model of the size that runs here can judge, so the judge is an
oracle that is made worse: a server that speaks OpenAI's chat API over HTTP, sees the reference answer, and gives a
right reply 4 points more than a wrong one, plus normal noise, plus what it has for a place or for length. That shows
what such faults do to training; it does not show how good a model is as a judge.

    true          the true reward, without a judge
    noisy         noise of 2 points, two votes
    place         noise of 1 point and up to 8 for the place that a reply is shown at; one vote in the group's order
    shuffled      the same judge, two votes: shuffled, and turned round
    length        noise of 1 point and 6 more for every 40 characters; two votes
    long          the same with 20 more for every 40 characters

Prints a line a run: held-out accuracy before and after, and over the training rollouts the agreement (of the pairs of
completions of which one is right and one wrong, the share that the judge orders so; a tie counts half), the votes'
disagreement, preferences, and the completions' length.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import permutations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from groupwise.config.run import load_config
from groupwise.rewards.text import exact_match
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics

LOWEST, HIGHEST = -20, 40
RIGHT = 4.0  # points
RUBRIC = "A reply is good if its final number is the reference answer."
CHECKED = {"function": "groupwise.rewards.text:exact_match", "name": "right", "args": {"after": "</think>"}}


@dataclass(frozen=True)
class Faults:
    """What a judge adds to the truth, in points: noise (standard deviation), for the first place against the last, for
    40 characters. And how it is asked."""

    noise: float
    place: float = 0.0
    length: float = 0.0
    votes: int = 2
    shuffle: bool = True


JUDGES = {
    "true": None,
    "noisy": Faults(noise=2.0),
    "place": Faults(noise=1.0, place=8.0, votes=1, shuffle=False),
    "shuffled": Faults(noise=1.0, place=8.0),
    "length": Faults(noise=1.0, length=6.0),
    "long": Faults(noise=1.0, length=20.0),
}


def main() -> int:
    options = parse_options()
    runs: list[dict[str, Any]] = []
    for seed in options.seeds:
        for name in options.judges:
            runs.append({"judge": name, "seed": seed, **job(name, seed, options)})
            print(
                json.dumps({key: value for key, value in runs[-1].items() if key != "curve"}),
                file=sys.stderr,
                flush=True,
            )
            if options.json is not None:
                options.json.write_text(json.dumps({"steps": options.steps, "runs": runs}, indent=1))
    report(runs)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/arithmetic.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--judges", nargs="+", choices=JUDGES, default=list(JUDGES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the configuration")
    return parser.parse_args()


# ---- the judge ----


def answer_to(body: dict[str, Any], faults: Faults) -> str:
    """The oracle's verdict on the replies of one request, with its faults. The same request gets the same answer."""
    mark = re.search(r"The mark is (\w+);", body["messages"][0]["content"])
    parts = re.findall(
        rf"^--- ([\w ]+) {mark and mark[1]}\n(.*?)\n--- end of \1 {mark and mark[1]}$",
        body["messages"][1]["content"],
        re.MULTILINE | re.DOTALL,
    )
    gold = dict(parts).get("reference answer", "")
    replies = [text for name, text in parts if name.startswith("reply ")]
    dice = random.Random(hashlib.sha256(json.dumps(body).encode()).hexdigest())
    scores = {}
    for place, text in enumerate(replies):
        (right,) = exact_match([text], [gold], after="</think>")
        share = place / (len(replies) - 1) if len(replies) > 1 else 0.5
        score = RIGHT * (right or 0.0) + dice.gauss(0, faults.noise)
        score += faults.place * (1 - share) + faults.length * len(text) / 40
        scores[str(place + 1)] = min(HIGHEST, max(LOWEST, score))
    return json.dumps({"scores": scores})


@contextmanager
def judge(faults: Faults) -> Iterator[str]:
    """The base URL of a running judge."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body of an answer are sent as one

        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["content-length"]))
            content = answer_to(json.loads(asked), faults)
            usage = {"prompt_tokens": len(asked) // 4, "completion_tokens": len(content) // 4}
            said = json.dumps({"choices": [{"message": {"content": content}}], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


# ---- a run ----


def job(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run -> its accuracies and what the judge did in it."""
    faults = JUDGES[name]
    if faults is None:
        return trained(name, seed, options, [CHECKED])
    with judge(faults) as url:
        asked = {"base_url": url, "model": f"oracle-{name}", "api_key_env": None, "rubric": RUBRIC}
        votes = {"votes": faults.votes, "shuffle": faults.shuffle, "scale": [LOWEST, HIGHEST]}
        judged = {"function": "groupwise.rewards.group_judge:group_judge", "name": "judge", "args": asked | votes}
        return trained(name, seed, options, [judged, {**CHECKED, "weight": 0}])


def trained(name: str, seed: int, options: argparse.Namespace, rewards: list[dict[str, Any]]) -> dict[str, Any]:
    own = [
        f"seed={seed}",
        f"name=judge-{name}-{seed}",
        f"train.steps={options.steps}",
        f"rewards={json.dumps(rewards)}",
    ]
    config = load_config(options.config, ["output_dir=runs/judge", "scoring.workers=0", *own, *options.overrides])
    started = time.monotonic()
    result = run_loop(config)
    steps = [each for each in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in each]
    last = max(int(each.name[5:11]) for each in (result.run_dir / "evaluations").glob("step_*.sampled.jsonl"))
    accuracy = {
        f"{mode} {when}": held_out(result.run_dir, step, mode)
        for mode in ("greedy", "sampled")
        for when, step in (("before", 0), ("after", last))
    }
    return {
        **accuracy,
        "agreement": agreement(result.run_dir) if len(rewards) > 1 else 1.0,
        **{
            each: mean(steps, f"reward/judge/log/{each}")
            for each in ("disagreement", "prefers_earlier", "prefers_longer")
        },
        "length before": mean(steps[:3], "rollout/len_mean"),
        "length after": mean(steps[-3:], "rollout/len_mean"),
        "curve": [each.get("reward/right/mean") for each in steps],
        "wall_s": time.monotonic() - started,
    }


def held_out(run_dir: Path, step: int, mode: str) -> float:
    """The mean true reward of an evaluation."""
    path = run_dir / "evaluations" / f"step_{step:06d}.{mode}.jsonl"
    groups = [group for line in path.read_text().splitlines() if "rollouts" in (group := json.loads(line))]
    return statistics.fmean(each["rewards"]["right"] for group in groups for each in group["rollouts"])


def mean(steps: list[dict[str, Any]], key: str) -> float | None:
    values = [each[key] for each in steps if each.get(key) is not None]
    return statistics.fmean(values) if values else None


def agreement(run_dir: Path) -> float | None:
    """Of the pairs of a group of which one completion is right and one wrong, the share that the judge orders so."""
    ordered: list[float] = []
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            given = [each["rewards"] for each in json.loads(line)["rollouts"] if each["error"] is None]
            for one, other in permutations(given, 2):
                if one["right"] > other["right"]:
                    ordered.append(0.5 if one["judge"] == other["judge"] else float(one["judge"] > other["judge"]))
    return statistics.fmean(ordered) if ordered else None


def report(runs: list[dict[str, Any]]) -> None:
    """A line a run."""
    columns = [key for key in runs[-1] if key != "curve"]
    table = Table(*columns)
    for run in runs:
        table.add_row(*(f"{v:.3f}" if isinstance(v := run.get(key), float) else str(v) for key in columns))
    Console(width=200).print(table)


if __name__ == "__main__":
    sys.exit(main())
