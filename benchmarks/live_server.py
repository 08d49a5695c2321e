"""The live server, measured over HTTP alone on the starter model.

    python benchmarks/live_server.py                  all of it (about 17 minutes on two cores)
    python benchmarks/live_server.py learn latency    parts of it

    learn       rounds of batch -> score -> train -> wait: mean reward on fresh prompts; once with rollout ids (training
                uses exactly what was sampled), once posting only text and reward
    latency     chat requests one after another, idle and while jobs train and swap: p50 and p99, errors, swaps
    shadow      the same requests by turns with and without a version in the shadow that answers each once more
    batch       16 prompts x 16 completions in one request, against the same 256 sampled one by one
    peer        the same chat requests to `transformers serve` and to us, by turns (`pip install transformers[serving]`)
                `--hogs 0 1 2 4`: and beside so many processes that only count (busy.py)

Each part starts a server of its own (`groupwise serve`) with an empty state directory. `--json FILE` keeps everything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from busy import hogs
from rich.console import Console
from rich.table import Table

from groupwise import Client
from groupwise.tasks.starter.tasks import prompts as arithmetic

PROMPTS, GROUP, FRESH, MAX_TOKENS = 32, 8, 128, 40
TRAINING = {"learning_rate": 3e-3, "kl_coeff": 0.0, "output_name": "arithmetic"}

console = Console(stderr=True)


# -- servers -----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def process(command: list[str], url: str, *, ready: str, log: Path, seconds: float = 600) -> Iterator[None]:
    """Run a server until the block ends; it is ready when `url + ready` answers 200."""
    with log.open("w") as file:
        running = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        deadline = time.monotonic() + seconds
        while not answers(url + ready):
            if running.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(command)} did not become ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield
    finally:
        running.terminate()
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()


def answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=2).status_code == 200
    except httpx2.HTTPError:
        return False


@contextmanager
def groupwise_server(**settings: Any) -> Iterator[Client]:
    with tempfile.TemporaryDirectory(prefix="live-server-") as folder:
        port = free_port()
        model = settings.pop("model", "starter")
        (config := Path(folder) / "server.yaml").write_text(json.dumps(settings))
        command = [str(Path(sys.executable).with_name("groupwise")), "serve", model, "--port", str(port)]
        command += ["--config", str(config)]
        url = f"http://127.0.0.1:{port}"
        with (
            process([*command, "--state-dir", folder], url, ready="/ready", log=Path(folder) / "server.log"),
            Client(url) as client,
        ):
            yield client


# -- the task ----------------------------------------------------------------------------------------------------------


class Task:
    """Sums and differences to be thought through; a reply is right when the number behind its thoughts is."""

    def __init__(self, *, seed: int):
        rows = list(arithmetic(skill=["add", "sub"], style="think", split="train", n=4000, seed=seed))
        random.Random(seed).shuffle(rows)
        self._rows = iter(rows)

    def draw(self, count: int) -> list[tuple[list[dict[str, str]], str]]:
        """(messages, answer) of prompts that were not drawn before."""
        rows = [next(self._rows) for _ in range(count)]
        return [(row["prompt"], row["answer"]) for row in rows]


def reward(text: str, answer: str) -> float:
    return float(text.rpartition("</think>")[2].strip() == answer)


# -- learn -------------------------------------------------------------------------------------------------------------


def learn(*, rounds: int, text_only: bool, seed: int = 0) -> dict[str, Any]:
    """The loop of someone with a verifier and an HTTP client."""
    task, means, started = Task(seed=seed), [], time.monotonic()
    with groupwise_server() as client:
        ready = time.monotonic()

        def fresh() -> float:
            cases = task.draw(FRESH)
            groups = client.sample([m for m, _ in cases], n=1, max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
            return statistics.mean(reward(g.texts[0], answer) for g, (_, answer) in zip(groups, cases, strict=True))

        means.append(fresh())
        for number in range(1, rounds + 1):
            cases = task.draw(PROMPTS)
            groups = client.sample([m for m, _ in cases], n=GROUP, max_tokens=MAX_TOKENS, temperature=1.0)
            scored = []
            for group, (messages, answer) in zip(groups, cases, strict=True):
                rewards = [reward(text, answer) for text in group.texts]
                if text_only:
                    pairs = zip(group.texts, rewards, strict=True)
                    scored.append({"messages": messages, "completions": [{"text": t, "reward": r} for t, r in pairs]})
                else:
                    scored.append(group.scored(rewards))
            job = client.train_grpo(scored, **TRAINING)
            client.wait(job.job_id, timeout=120)
            if number % 5 == 0 or number == rounds:
                means.append(fresh())
                console.print(f"  round {number}: mean reward on {FRESH} fresh prompts {means[-1]:.1%}", style="dim")
    spent = time.monotonic() - ready
    return {"text_only": text_only, "rounds": rounds, "means": means, "seconds": spent, "startup": ready - started}


# -- latency -----------------------------------------------------------------------------------------------------------


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}


def chats(client: Client, count: int, *, seed: int, until: Callable[[], bool] = lambda: True) -> list[float]:
    """Seconds of short chats, one after another: at least `count`, and on until `until` says so."""
    asked, seconds = Task(seed=seed).draw(256), []
    while len(seconds) < count or not until():
        messages, _ = asked[len(seconds) % len(asked)]
        began = time.monotonic()
        client.chat(messages, max_tokens=16, temperature=0.0)
        seconds.append(time.monotonic() - began)
    return seconds


def latency(*, requests: int, swaps: int) -> dict[str, Any]:
    """Chat while idle; then chat while another client keeps jobs coming."""
    with groupwise_server() as client:
        chats(client, 20, seed=1)
        idle = chats(client, requests, seed=2)
        done: list[str] = []
        enough = threading.Event()
        trainer = threading.Thread(target=keep_training, args=(client.url, done, enough))
        trainer.start()
        try:
            busy = chats(client, requests, seed=3, until=lambda: len(done) >= swaps)
        finally:
            enough.set()
            trainer.join()
        active = client.health().active_version
    return {
        "idle": quantiles(idle),
        "busy": quantiles(busy),
        "requests": len(busy),
        "errors": 0,  # an error would have ended the run
        "swaps": len(done),
        "active": active,
    }


def keep_training(url: str, done: list[str], enough: threading.Event) -> None:
    """Submit jobs of 32 groups, one after another."""
    task = Task(seed=9)
    with Client(url) as client:
        cases = task.draw(PROMPTS)
        groups = client.sample([m for m, _ in cases], n=GROUP, max_tokens=MAX_TOKENS)
        rewards = [[reward(text, answer) for text in g.texts] for g, (_, answer) in zip(groups, cases, strict=True)]
        while not enough.is_set():
            posted = [group.scored(values) for group, values in zip(groups, rewards, strict=True)]
            job = client.train_grpo(posted, **TRAINING, iterations=4)
            done.append(client.wait(job.job_id, timeout=300).adapter_version or "")


# -- shadow ------------------------------------------------------------------------------------------------------------


def shadow(*, requests: int, rounds: int = 3) -> dict[str, Any]:
    """Chats with and without a shadow that answers every one of them once more; the model in it is the same."""
    sides: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(prefix="live-server-") as folder:
        rows = [{"prompt": messages, "answer": answer} for messages, answer in Task(seed=6).draw(16)]
        (held_out := Path(folder) / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        gate = {"prompts": {"source": str(held_out)}, "rewards": ["groupwise.rewards.text:exact_match"], "margin": 1.0}
        gate["shadow"] = {"share": 1.0, "rewards": [], "requests": 10_000}
        with groupwise_server(gate=gate) as client:
            chats(client, 20, seed=1)
            for number in range(rounds):
                sides["without"] += chats(client, requests, seed=10 + number)
                put_into_shadow(client)
                sides["with"] += chats(client, requests, seed=10 + number)
                counts = shadow_counts(client.url)
                httpx2.post(f"{client.url}/v1/learn/reject").raise_for_status()
    return {**{name: quantiles(seconds) for name, seconds in sides.items()}, "requests": rounds * requests, **counts}


def put_into_shadow(client: Client) -> None:
    """Have a version on trial that is as its base is."""
    group = client.sample([Task(seed=9).draw(1)[0][0]], n=4, max_tokens=8)[0]
    options = {**TRAINING, "learning_rate": 0.0, "base_adapter": "base"}
    client.wait(client.train_grpo([group.scored([0.0, 0.0, 1.0, 1.0])], **options).job_id, timeout=120)
    deadline = time.monotonic() + 60
    while httpx2.get(f"{client.url}/v1/learn").json()["trial"] is None:
        if time.monotonic() > deadline:
            sys.exit("no trial began")
        time.sleep(0.1)


def shadow_counts(url: str) -> dict[str, int]:
    """Answers of the shadow so far, by what became of them."""
    found = re.findall(
        r'^groupwise_shadow_requests_total\{result="(\w+)"\} (\d+)', httpx2.get(f"{url}/metrics").text, re.M
    )
    return {result: int(count) for result, count in found}


# -- batch -------------------------------------------------------------------------------------------------------------


def batch(*, prompts: int = 16, n: int = 16) -> dict[str, Any]:
    """One request for prompts x n, against as many requests for one; equal lengths, so that the work is equal."""
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "ignore_eos": True}
    with groupwise_server() as client:
        asked = [messages for messages, _ in Task(seed=4).draw(prompts)]
        client.sample(asked, n=n, **options)
        together, alone = [], []
        for _ in range(3):
            began = time.monotonic()
            client.sample(asked, n=n, **options)
            together.append(time.monotonic() - began)
            began = time.monotonic()
            for messages in asked:
                for _ in range(n):
                    client.chat(messages, **options)
            alone.append(time.monotonic() - began)
    tokens = prompts * n * MAX_TOKENS
    together_s, alone_s = statistics.median(together), statistics.median(alone)
    return {"together_tok_s": tokens / together_s, "alone_tok_s": tokens / alone_s, "ratio": alone_s / together_s}


# -- the peer ----------------------------------------------------------------------------------------------------------


def peer(*, requests: int, neighbours: Sequence[int] = (0,), clients: int = 16) -> dict[str, Any]:
    """Greedy chats to `transformers serve` and to us, by turns, idle and beside each number of `neighbours` that keep a
    core busy: one at a time, and from 16 clients at once.

    Both have the same weights in float32, so most replies must be the same; how many are is part of the result.
    """
    from groupwise.config.run import STARTER_DIR

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("transformers")), "serve", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--device", "cpu", "--dtype", "float32", str(STARTER_DIR)]
    beside: dict[int, dict[str, Any]] = {}
    replies: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="live-server-") as folder, groupwise_server() as client:
        log = Path(folder) / "transformers.log"
        with process(command, url, ready="/health", log=log):
            sides = {"groupwise": (client.url, "starter"), "transformers": (url, str(STARTER_DIR))}
            for count in (0, *neighbours):  # the first round warms both up
                beside[count] = {}
                for name, (address, model) in sides.items():
                    with hogs(count):
                        beside[count][name], replies[name] = one_side(
                            address, model, requests=requests, clients=clients
                        )
    same = [mine == theirs for mine, theirs in zip(*replies.values(), strict=True)]
    return {"beside": beside, "requests": requests, "clients": clients, "same_replies": statistics.mean(same)}


def one_side(url: str, model: str, *, requests: int, clients: int) -> tuple[dict[str, float], list[str]]:
    """Latency of chats one after another, tokens per second of the same from several clients, and the replies."""
    asked = [messages for messages, _ in Task(seed=5).draw(requests)]

    def ask(http: httpx2.Client, messages: list[dict[str, str]]) -> tuple[str, int]:
        body = {"model": model, "messages": messages, "max_tokens": 32, "temperature": 0.0}
        answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        return answer["choices"][0]["message"]["content"] or "", answer["usage"]["completion_tokens"]

    def ask_every(first: int) -> None:
        with httpx2.Client(base_url=url, timeout=300) as http:  # connections are kept, as clients keep them
            tokens.extend(ask(http, messages)[1] for messages in asked[first::clients])

    seconds, replies, tokens = [], [], []
    with httpx2.Client(base_url=url, timeout=300) as http:
        for messages in asked:
            began = time.monotonic()
            replies.append(ask(http, messages)[0])
            seconds.append(time.monotonic() - began)
    threads = [threading.Thread(target=ask_every, args=(first,)) for first in range(clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.monotonic() - began
    if len(tokens) != requests:  # a thread's error does not end the run by itself
        sys.exit(f"{requests - len(tokens)} of {requests} requests to {url} failed")
    return {**quantiles(seconds), "tok_s": sum(tokens) / spent}, replies


# -- the page ----------------------------------------------------------------------------------------------------------


def show(results: dict[str, Any]) -> None:
    table = Table("measure", "result", title="The live server (starter model)")
    for run in results.get("learn", []):
        curve = " ".join(f"{mean:.0%}" for mean in run["means"])
        posted = "text only" if run["text_only"] else "rollout ids"
        table.add_row(f"learn, {posted}", f"{curve} in {run['rounds']} rounds and {run['seconds']:.0f} s")
    if "latency" in results:
        r = results["latency"]
        for q in ("p50", "p99"):
            idle, busy = r["idle"][q] * 1e3, r["busy"][q] * 1e3
            table.add_row(f"chat {q}, idle -> training", f"{idle:.1f} -> {busy:.1f} ms ({busy / idle:.2f}x)")
        table.add_row("... requests, swaps, errors", f"{r['requests']}, {r['swaps']}, {r['errors']}")
    if "shadow" in results:
        r = results["shadow"]
        for q in ("p50", "p99"):
            without, beside = r["without"][q] * 1e3, r["with"][q] * 1e3
            table.add_row(
                f"chat {q}, without -> with a shadow", f"{without:.1f} -> {beside:.1f} ms ({beside / without:.2f}x)"
            )
        table.add_row(
            "... requests of each; answered once more, dropped", f"{r['requests']}; {r['answered']}, {r['dropped']}"
        )
    if "batch" in results:
        r = results["batch"]
        table.add_row("16 x 16 in one request", f"{r['together_tok_s']:.0f} tok/s, {r['ratio']:.1f}x one by one")
    if "peer" in results:
        for count, sides in results["peer"]["beside"].items():
            ours, theirs = sides["groupwise"], sides["transformers"]
            place = f"beside {count} hogs" if count else "idle"
            table.add_row(
                f"{place}, p50 against transformers serve",
                f"{ours['p50'] * 1e3:.1f} vs {theirs['p50'] * 1e3:.1f} ms ({theirs['p50'] / ours['p50']:.1f}x)",
            )
            table.add_row(
                f"{place}, 16 clients against transformers serve",
                f"{ours['tok_s']:.0f} vs {theirs['tok_s']:.0f} tok/s ({ours['tok_s'] / theirs['tok_s']:.1f}x)",
            )
        same = results["peer"]["same_replies"]
        table.add_row("... replies that are the same", f"{same:.0%} of {results['peer']['requests']}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="learn, latency, shadow, batch, peer; default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--requests", type=int, default=500, help="of latency, idle and busy each, at least; of shadow, a round"
    )
    parser.add_argument("--swaps", type=int, default=3, help="of latency, while it is busy; at least")
    parser.add_argument("--peer-requests", type=int, default=100, help="one at a time, and again from 16 clients")
    parser.add_argument("--hogs", nargs="+", type=int, default=[0], metavar="N", help="of peer: busy neighbours")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    known = ["learn", "latency", "shadow", "batch", "peer"]
    parts = args.parts or known
    if unknown := set(parts) - set(known):
        parser.error(f"no part {sorted(unknown)}; there are {known}")
    results: dict[str, Any] = {}
    for part in parts:
        console.print(part)
        if part == "learn":
            results["learn"] = [learn(rounds=args.rounds, text_only=text_only) for text_only in (False, True)]
        elif part == "latency":
            results["latency"] = latency(requests=args.requests, swaps=args.swaps)
        elif part == "shadow":
            results["shadow"] = shadow(requests=args.requests)
        else:
            results[part] = batch() if part == "batch" else peer(requests=args.peer_requests, neighbours=args.hogs)
    show(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
