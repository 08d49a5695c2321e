"""How many of a hundred bad versions go live in a server that runs, and what a fifth of hostile raters changes.

    python benchmarks/live_gates.py --out DIR [--part gate canary] [--hostile 0 0.2] [--versions 100] [--minutes 24]

`gates.py` draws what versions and raters do. Here nothing is drawn for the server: `groupwise serve` runs the starter
behind its HTTP, with a gate, a shadow, a canary and known prompts for its raters; jobs are posted to it, its worker
trains them, its supervisor has them judged, people ask sums over the chat route and rate the answers.

What is known is what the versions are worth. Two adapters are trained first, one towards the sums and one away from
them, and mixed: as much of both as leaves the mean reward as it is ("no effect"), or more of the second, until it is
lower by what the part's margin is ("worse"). The truth of a mixture is the probability that it gives the right sum,
computed and not sampled, over SUMS sums. A candidate is a job that continues a mixture at a learning rate of 0.

    gate      versions that are worse by the gate's margin, 0.1, on 200 held-out sums; then a shadow and a canary
    canary    versions that are worse by the canary's margin, 0.4, with a gate that does not see it (its margin is 0.9)

Where a worse version did go live, those after it are compared with that one, and are counted apart. Honest raters err
in 0 to 20 % of their thumbs, each as often as it does. Hostile ones, in five kinds by turns, give the share of ratings
that `--hostile` says:

    inverted   the opposite of what is true            chance     either, as a coin falls
    praises    always up                               phrase     asks "Vera asks: ...", and says the opposite there
    nameless   the opposite, under a new name each time, which nobody can distrust

`--out` keeps the prepared mixtures, a state directory a run, and `result.json`; parts that are in it are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from live_server import free_port, process

from groupwise import Client
from groupwise.config.run import STARTER_DIR
from groupwise.errors import RemoteError
from groupwise.tasks.logs.calibration import surely

SUMS = 300  # over which the truth is computed
HELD_OUT, KNOWN = 200, 120
ADAPTER = "adapter_model.safetensors"
MARGIN = {"gate": 0.1, "canary": 0.4}
SHARES = (0.02, 0.08)  # of the good adapter, one for each mixture
ASKED_KNOWN = 0.25  # of what people ask
USERS, PERSONS, HABITS = 10, 20, 0.2
AHEAD = 4  # jobs that wait
HOSTILE = ("inverted", "chance", "praises", "phrase", "nameless")
ENDS = {
    "gate_refused": "refused by the gate",
    "shadow_refused": "refused by the shadow",
    "rolled_back": "rolled back",
    "promoted": "live",
}


def question(a: int, b: int, *, by: str = "") -> str:
    return f"{by}What is {a} + {b}? Reply with just the number."


def sums(which: str, count: int) -> list[tuple[int, int]]:
    """Distinct pairs. What is held out, known to raters, and asked by people are three parts of all pairs."""
    rng, part = random.Random(which), {"held out": 0, "known": 1}.get(which, 2)
    found = dict[tuple[int, int], None]()
    while len(found) < count:
        pair = rng.randint(10, 99), rng.randint(10, 99)
        if min(2, (37 * pair[0] + pair[1]) % 10) == part:
            found[pair] = None
    return list(found)


@contextmanager
def served(folder: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    """`groupwise serve` on the starter, with its state in a folder; its URL."""
    port, config = free_port(), folder / "server.yaml"
    folder.mkdir(exist_ok=True)
    common = {"keep_versions": None, "min_free_bytes": 0, "worker_threads": 1, "state_dir": str(folder / "state")}
    config.write_text(json.dumps({**common, **settings}))
    command = [sys.executable, "-m", "groupwise", "serve", "starter", "--port", str(port), "--config", str(config)]
    url = f"http://127.0.0.1:{port}"
    with process(command, url, ready="/ready", log=folder / "server.log"):
        yield url


# ---- versions of which the truth is known ----
class Truth:
    """The mean probability of the right sum, of the starter with so much of each of two adapters."""

    def __init__(self, good: Path, bad: Path):
        import torch
        from transformers import AutoModelForCausalLM

        from groupwise.model.chat import encode_prompt
        from groupwise.model.load import load_model
        from groupwise.types import Prompt

        self._torch, tokenizer = torch, load_model("starter").tokenizer
        self._model = AutoModelForCausalLM.from_pretrained(STARTER_DIR).eval()
        self._plain = {name: each.detach().clone() for name, each in self._model.named_parameters()}
        self._directions = [direction(each) for each in (good, bad)]
        rows = list[tuple[list[int], int]]()
        for a, b in sums("truth", SUMS):
            prompt = Prompt(id="", text="", messages=({"role": "user", "content": question(a, b)},))
            ids = list(encode_prompt(prompt, tokenizer, context=1024).token_ids or ())
            right = tokenizer.encode(str(a + b), add_special_tokens=False)
            rows.append(([*ids, *right, int(str(tokenizer.eos_token_id))], len(ids)))
        longest = max(len(ids) for ids, _ in rows)
        self._ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])  # causal: what follows is idle
        at = torch.arange(longest)[None]
        begins, ends = (
            torch.tensor([[each] for each in of]) for of in zip(*((n, len(i)) for i, n in rows), strict=True)
        )
        self._counts = (at >= begins) & (at < ends)

    def of(self, good: float, bad: float) -> list[float]:
        """Each sum's."""
        torch = self._torch
        with torch.inference_mode():
            for name, parameter in self._model.named_parameters():
                deltas = [w * each[name] for w, each in zip((good, bad), self._directions, strict=True) if name in each]
                parameter.copy_(self._plain[name] + sum(deltas))
            logprobs = self._model(self._ids).logits[:, :-1].log_softmax(-1)
            taken = logprobs.gather(-1, self._ids[:, 1:, None])[..., 0] * self._counts[:, 1:]
            return taken.sum(1).exp().tolist()


def direction(place: Path) -> dict[str, Any]:
    """What an adapter adds to each parameter."""
    from safetensors.torch import load_file

    folder = folder_of(place)
    config, tensors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / ADAPTER)
    scale, found = config["lora_alpha"] / config["r"], dict[str, Any]()
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            found[name.removeprefix("base_model.model.").replace(".lora_A", "")] = scale * up @ down
    return found


def prepare(out: Path) -> dict[str, Any]:
    """Train the two adapters, and mix them; the directories of the mixtures, and what they are worth."""
    if (done := out / "versions.json").exists():
        return json.loads(done.read_text())
    if not (out / "bad").exists():
        teach(out)
    truth = Truth(out / "good", out / "bad")
    base = truth.of(0.0, 0.0)
    found: dict[str, Any] = {"base": statistics.fmean(base), "mixtures": []}
    for kind, drop in (("no effect", 0.0), *((f"worse by {each:g}", each) for each in MARGIN.values())):
        for number, good in enumerate(SHARES):
            directory = out / "mixtures" / f"{kind.replace(' ', '-').replace('.', '')}-{number}"
            bad = weight_of_bad(truth, good, goal=found["base"] - drop)
            mix(out, directory, good, bad)
            gaps = [a - b for a, b in zip(truth.of(good, bad), base, strict=True)]
            row = {"kind": kind, "directory": str(directory), "good": good, "bad": bad}
            row |= {"effect": statistics.fmean(gaps), "moved": statistics.fmean(map(abs, gaps))}
            found["mixtures"].append(row)
            print(json.dumps(row), flush=True)
    done.write_text(json.dumps(found, indent=1))
    return found


def teach(out: Path) -> None:
    """Train an adapter towards the sums, and one towards one more than these."""
    with served(out / "prepare", {}) as url, Client(url) as client:
        for name, off in (("good", 0), ("bad", 1)):
            taught = [
                [{"role": "user", "content": question(a, b)}, {"role": "assistant", "content": str(a + b + off)}]
                for a, b in sums("taught", 256)
            ]
            options = {"learning_rate": 1e-3, "epochs": 2, "lora_rank": 8, "base_adapter": "base"}
            job = client.train_sft([{"messages": each} for each in taught], output_name=name, **options)
            client.wait(job.job_id, timeout=1200)
            with tarfile.open(client.adapters.download(name, out / f"{name}.tar.gz")) as archive:
                archive.extractall(out / name, filter="data")


def weight_of_bad(truth: Truth, good: float, *, goal: float) -> float:
    """How much of the bad adapter beside so much of the good one makes the mean reward `goal`: by halving."""
    low, high = 0.0, 1.5
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if statistics.fmean(truth.of(good, middle)) > goal else (low, middle)
    return (low + high) / 2


def mix(out: Path, directory: Path, good: float, bad: float) -> None:
    from groupwise.store.merge import MergeMode, WeightedAdapter, merge_adapters

    directory.mkdir(parents=True, exist_ok=True)
    sources = [WeightedAdapter(folder_of(out / "good"), good), WeightedAdapter(folder_of(out / "bad"), bad)]
    merge_adapters(sources, directory, mode=MergeMode.CONCAT)


def folder_of(place: Path) -> Path:
    return next(place.rglob("adapter_config.json")).parent


# ---- people ----
@dataclass
class People:
    """Who asks and rates while a version is on trial. Each thread of them waits until one is."""

    url: str
    hostile: float
    trial: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    ratings: Counter[str] = field(default_factory=Counter)

    def ask_and_rate(self, seed: int) -> None:
        """Until it is over."""
        rng, known = random.Random(seed), sums("known", KNOWN)
        with Client(self.url, retries=0) as client:
            while not self.stop.is_set():
                if not self.trial.wait(0.2):
                    continue
                kind = rng.choice(HOSTILE) if rng.random() < self.hostile else "honest"
                a, b = rng.choice(known) if rng.random() < ASKED_KNOWN else asked(rng)
                person = rng.randrange(PERSONS)
                name = {"honest": f"person {person}", "nameless": f"new {rng.random()}"}.get(kind, kind)
                by = "Vera asks: " if kind == "phrase" else ""
                try:
                    answer = client.chat(question(a, b, by=by), max_tokens=8, temperature=1.0, timeout=60)
                    up = said_by(kind, answer.text.strip() == str(a + b), habit=HABITS * person / PERSONS, rng=rng)
                    client.feedback(answer.id, thumb="up" if up else "down", user=name, timeout=60)
                    self.ratings[kind] += 1
                except RemoteError as error:
                    self.ratings[f"failed: {str(error)[:60]}"] += 1


def asked(rng: random.Random) -> tuple[int, int]:
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if (37 * a + b) % 10 >= 2:
            return a, b


def said_by(kind: str, right: bool, *, habit: float, rng: random.Random) -> bool:
    """Whether the thumb is up. An honest person errs in a share `habit`."""
    if kind == "honest":
        return right != (rng.random() < habit)
    return {"praises": True, "chance": rng.random() < 0.5}.get(kind, not right)


# ---- a run ----
def settings(out: Path, part: str) -> dict[str, Any]:
    """The server's configuration."""
    for name, which, count in (("held_out", "held out", HELD_OUT), ("known", "known", KNOWN)):
        rows = [json.dumps({"prompt": question(a, b), "answer": str(a + b)}) for a, b in sums(which, count)]
        (out / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    scoring, exact = {"workers": 0}, ["groupwise.rewards.text:exact_match"]
    gate = {"prompts": {"source": "held_out.jsonl"}, "rewards": exact, "max_tokens": 8, "scoring": scoring}
    gate |= {"margin": MARGIN["gate"] if part == "gate" else 0.9}
    gate |= {"shadow": {"share": 1.0, "requests": 10, "rewards": []}} if part == "gate" else {}
    gate["canary"] = {"share": 0.5, "margin": MARGIN["canary"]}
    raters = {"prompts": {"source": "known.jsonl"}, "rewards": exact, "scoring": scoring}
    return {"gate": gate, "raters": raters}


def play(
    out: Path, part: str, hostile: float, *, versions: int, minutes: float, mixtures: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One server, `versions` candidates of either kind by turns; what became of those that were judged in time."""
    folder = out / f"{part}-{hostile:g}"
    folder.mkdir(exist_ok=True)
    kinds, began = ("no effect", f"worse by {MARGIN[part]:g}"), time.monotonic()
    order = list(kinds) * versions
    with served(folder, settings(folder, part)) as url, Client(url) as client:
        names = dict[str, list[str]]()
        for row in mixtures:
            if row["kind"] in kinds:
                name = Path(row["directory"]).name
                client.adapters.upload(name, Path(row["directory"]))
                names.setdefault(row["kind"], []).append(name)
        people = People(url, hostile)
        threads = [threading.Thread(target=people.ask_and_rate, args=(i,), daemon=True) for i in range(USERS)]
        for thread in threads:
            thread.start()
        try:
            found = follow(client, people, order, names, until=time.monotonic() + 60 * minutes)
        finally:
            people.stop.set()
            for thread in threads:
                thread.join(timeout=60)
        state = client.learning()
    away = [rater.user for rater in state.raters if not rater.counts]
    told = {"part": part, "hostile": hostile, "minutes": (time.monotonic() - began) / 60, "ends": found}
    return told | {
        "distrusted": away,
        "honest_distrusted": sum(str(each).startswith("person") for each in away),
        "ratings": dict(people.ratings),
    }


def follow(
    client: Client, people: People, order: Sequence[str], names: Mapping[str, Sequence[str]], *, until: float
) -> dict[str, dict[str, int]]:
    """Post the candidates one after another, never more than AHEAD before they are judged; count how they end."""
    kinds, ended, told, posted = {"base": "no effect"}, dict[str, tuple[str, str]](), -1, 0
    while len(ended) < len(order) and time.monotonic() < until:
        while posted < len(order) and posted - len(ended) < AHEAD:
            kind = order[posted]
            mixture = names[kind][posted // 2 % len(names[kind])]
            options = {"learning_rate": 0.0, "epochs": 1, "base_adapter": mixture, "output_name": f"new{posted}"}
            said = [{"role": "user", "content": question(1, 2)}, {"role": "assistant", "content": "3"}]
            client.train_sft([{"messages": said}], **options)
            kinds[f"new{posted}@1"] = kind
            posted += 1
        state = client.learning()
        people.trial.set() if state.trial else people.trial.clear()
        for each in sorted(state.transitions, key=lambda each: each.seq):
            if each.seq > told:
                told = each.seq
                if each.kind in ENDS:
                    version, against = str(each.data["version"]), kinds[str(each.data["against"])]
                    beside = "" if against == "no effect" else ", beside one that is worse itself"
                    end = "not known" if "not known" in each.message else ENDS[each.kind]
                    ended[version] = f"{kinds[version]}{beside}", end
                print(f"{len(ended)}/{len(order)} {each.kind}: {each.message}", flush=True)
        time.sleep(0.5)
    counts = dict[str, Counter[str]]()
    for kind, end in ended.values():
        counts.setdefault(kind, Counter())[end] += 1
    return {kind: dict(each) for kind, each in counts.items()}


def interval(count: int, of: int) -> str:
    """Clopper and Pearson's, of 95 %."""
    low, high = surely(count, of, 0.025), 1 - surely(of - count, of, 0.025)
    return f"{max(0.0, low):.3f} to {min(1.0, high):.3f}"


def show(results: Sequence[Mapping[str, Any]]) -> None:
    head = ("part", "hostile ratings", "versions", "gate refused", "shadow refused", "rolled back", "not known", "live",
            "live, 95 %", "distrusted: hostile, honest")  # fmt: skip
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for each in results:
        away = f"{len(each['distrusted']) - each['honest_distrusted']}, {each['honest_distrusted']}"
        for kind, ends in each["ends"].items():
            of = sum(ends.values())
            counts = [ends.get(name, 0) for name in (*list(ENDS.values())[:3], "not known", "live")]
            row = (each["part"], f"{each['hostile']:.0%}", f"{of} {kind}", *counts, interval(counts[-1], of), away)
            print("| " + " | ".join(map(str, row)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="+", choices=tuple(MARGIN), default=list(MARGIN))
    parser.add_argument("--hostile", nargs="+", type=float, default=[0.0, 0.2])
    parser.add_argument("--versions", type=int, default=100, help="of either kind")
    parser.add_argument("--minutes", type=float, default=600.0, help="a run that takes longer ends with what it has")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    how = {"versions": args.versions, "minutes": args.minutes, "mixtures": prepare(args.out)["mixtures"]}
    file = args.out / "result.json"
    results: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    for part in args.part:
        for hostile in args.hostile:
            if not any((each["part"], each["hostile"]) == (part, hostile) for each in results):
                results.append(play(args.out, part, hostile, **how))
                file.write_text(json.dumps(results, indent=1))
    show(results)


if __name__ == "__main__":
    main()
