"""Two clients of the Tinker API at once, beside one alone, on one server.

    python benchmarks/tinker_clients.py --json clients.json
    python benchmarks/tinker_clients.py --quick                # does it run?

    supervised      fixed batches: forward_backward and optim_step, both sent before their answers are awaited
    reinforcement   a snapshot, `--prompts` x `--group` completions sampled from it, scored, one step on them

Each client is a process of its own with the unmodified `tinker` package, which trains an adapter of its own over the
starter (`groupwise serve --tinker`, float32). A round is client A alone, client B alone, and both at once, with the
same work; the ratio is the seconds of both at once over the mean of the two alone. The adapters that the clients end
with are read from the server's store: those of `supervised` must be the ones that each client got alone, to 1e-5.
Those of `reinforcement` are compared as well, and shown: where completions of other clients are in the same batch, a
log-probability may be rounded otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from live_server import free_port, process
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

RANK, MOST_APART = 8, 1e-5
console = Console(stderr=True)


@dataclass(frozen=True)
class Work:
    """What one client does."""

    kind: str
    steps: int
    prompts: int
    group: int
    max_tokens: int


# -- a client, in a process of its own ---------------------------------------------------------------------------------


def client(work: Work, *, seed: int) -> None:
    """Make a model, say so, wait for a line, train, and print when it began and ended, and what was saved."""
    import tinker

    from groupwise.model.load import load_tokenizer

    tokenizer = load_tokenizer("starter")
    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(base_model="starter", rank=RANK, seed=seed).result()
    step = {"supervised": supervised, "reinforcement": reinforcement}[work.kind]
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    waiting: list[Any] = []
    for number in range(work.steps):
        waiting += step(trainer, tokenizer, work, random.Random(f"{seed}/{number}"))
    for each in waiting:
        each.result()
    ended = time.monotonic()
    path = trainer.save_weights_for_sampler("end").result().path
    service.close("success").result()
    print(json.dumps({"began": began, "ended": ended, "path": path}), flush=True)


def supervised(trainer: Any, tokenizer: Any, work: Work, rng: random.Random) -> list[Any]:
    """One step on sums and their answers; its answers are awaited at the end."""
    data = []
    for question, answer in problems(rng, work.prompts * work.group):
        prompt, reply = encode(tokenizer, question), tokenizer.encode(f"{answer}", add_special_tokens=False)
        whole = [*prompt, *reply]
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(reply)
        data.append(datum(whole, weights=weights))
    return train(trainer, data, "cross_entropy", 1e-3)


def reinforcement(trainer: Any, tokenizer: Any, work: Work, rng: random.Random) -> list[Any]:
    """Sample from a snapshot, score, and one step on the advantages."""
    from tinker import types

    sampler = trainer.save_weights_and_get_sampling_client().result()
    asked = problems(rng, work.prompts)
    prompts = [encode(tokenizer, question) for question, _ in asked]
    params = types.SamplingParams(max_tokens=work.max_tokens, seed=rng.randrange(1 << 30))
    sampling = [sampler.sample(types.ModelInput.from_ints(prompt), work.group, params) for prompt in prompts]
    data = []
    for (_, answer), prompt, sampled in zip(asked, prompts, sampling, strict=True):
        sequences = sampled.result().sequences
        rewards = [score(tokenizer.decode(each.tokens, skip_special_tokens=True), answer) for each in sequences]
        for each, reward in zip(sequences, rewards, strict=True):
            before = [0.0] * (len(prompt) - 1)
            advantages = before + [reward - statistics.mean(rewards)] * len(each.tokens)
            data.append(datum([*prompt, *each.tokens], logprobs=[*before, *each.logprobs], advantages=advantages))
    return train(trainer, data, "importance_sampling", 1e-3)


def train(trainer: Any, data: Sequence[Any], loss: str, learning_rate: float) -> list[Any]:
    from tinker import types

    adam = types.AdamParams(learning_rate=learning_rate, eps=1e-8)
    return [trainer.forward_backward(data, loss), trainer.optim_step(adam)]


def datum(tokens: Sequence[int], **values: Sequence[float]) -> Any:
    from tinker import types

    inputs = {"target_tokens": list(tokens[1:]), **values}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def problems(rng: random.Random, count: int) -> list[tuple[str, int]]:
    pairs = [(rng.randint(10, 999), rng.randint(10, 99)) for _ in range(count)]
    return [(f"What is {a} + {b}? Think step by step.", a + b) for a, b in pairs]


def encode(tokenizer: Any, question: str) -> list[int]:
    from groupwise.model.chat import encode_prompt
    from groupwise.types import Prompt

    return list(encode_prompt(Prompt(id="x", messages=({"role": "user", "content": question},)), tokenizer).token_ids)


def score(text: str, answer: int) -> float:
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == answer)


# -- one alone, and two at once ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """When a client began and ended, and the adapter that it ended with."""

    began: float
    ended: float
    adapter: dict[str, np.ndarray]


def run(url: str, state: Path, work: Work, seeds: Sequence[int]) -> list[Ran]:
    """Clients of these seeds, released together once all have their models."""
    command = [sys.executable, __file__, "--client", json.dumps(asdict(work)), "--seed"]
    env = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    clients = [subprocess.Popen([*command, str(seed)], **pipes) for seed in seeds]
    for each in clients:
        assert each.stdout.readline() == "ready\n", "a client did not come so far"
    for each in clients:
        each.stdin.write("go\n")
        each.stdin.flush()
    found = []
    for each in clients:
        said = json.loads(each.communicate()[0])
        found.append(Ran(said["began"], said["ended"], adapter_of(state, said["path"])))
    return found


def adapter_of(state: Path, path: str) -> dict[str, np.ndarray]:
    """The weights of a tinker:// path."""
    from groupwise.bridges.tinker.checkpoints import TinkerCheckpoints
    from groupwise.store.adapters import AdapterStore
    from groupwise.types import PolicyVersion

    version = TinkerCheckpoints(state / "tinker").find(path).version
    assert version is not None
    directory = AdapterStore(state / "adapters").path(PolicyVersion.parse(version))
    return load_file(directory / "adapter_model.safetensors")


def seconds(ran: Sequence[Ran]) -> float:
    return max(each.ended for each in ran) - min(each.began for each in ran)


def apart(one: Ran, other: Ran) -> float:
    """The largest difference between two adapters."""
    assert one.adapter.keys() == other.adapter.keys()
    return max(float(np.abs(one.adapter[name] - other.adapter[name]).max()) for name in one.adapter)


def measure(url: str, state: Path, work: Work, *, rounds: int) -> dict[str, Any]:
    """Rounds of A alone, B alone, both. The first client of a server warms it up and is not counted."""
    run(url, state, work, [0])
    alone_s, both_s, differences = [], [], []
    for number in range(rounds):
        seeds = [2 * number + 1, 2 * number + 2]
        alone = [run(url, state, work, [seed])[0] for seed in seeds]
        both = run(url, state, work, seeds)
        alone_s.append(statistics.mean(seconds([each]) for each in alone))
        both_s.append(seconds(both))
        differences += [apart(one, other) for one, other in zip(alone, both, strict=True)]
        console.print(f"  {work.kind}: alone {alone_s[-1]:.2f} s, both {both_s[-1]:.2f} s", style="dim")
        if work.kind == "supervised" and max(differences) > MOST_APART:
            sys.exit(f"a client at once with another got an adapter {max(differences):g} from the one it got alone")
    ratios = [both / one for one, both in zip(alone_s, both_s, strict=True)]
    return {
        **asdict(work),
        "alone_s": alone_s,
        "both_s": both_s,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "adapters_apart": max(differences),
    }


@contextmanager
def tinker_server(folder: Path) -> Iterator[tuple[str, Path]]:
    port, state = free_port(), folder / "state"
    command = [str(Path(sys.executable).with_name("groupwise")), "serve", "starter", "--tinker", "--port", str(port)]
    command += ["--state-dir", str(state), "--dtype", "float32", "--device", "cpu", "--set", "min_free_bytes=0"]
    url = f"http://127.0.0.1:{port}"
    with process(command, url, ready="/ready", log=folder / "server.log"):
        yield url, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["supervised", "reinforcement"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="one short round of each: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        return client(Work(**json.loads(options.client)), seed=options.seed)
    if options.quick:
        options.rounds, options.steps, options.prompts, options.group = 1, 2, 4, 4

    results, cores = [], len(os.sched_getaffinity(0))
    for kind in options.kinds:
        work = Work(kind, options.steps, options.prompts, options.group, options.max_tokens)
        with tempfile.TemporaryDirectory(prefix="tinker-clients-") as folder, tinker_server(Path(folder)) as place:
            results.append(measure(*place, work, rounds=options.rounds))
    table = Table("work", "one alone", "two at once", "ratio", "adapters apart", title=f"Two clients on {cores} cores")
    for each in results:
        alone, both = statistics.median(each["alone_s"]), statistics.median(each["both_s"])
        far = f"{each['adapters_apart']:.1e}"
        table.add_row(each["kind"], f"{alone:.2f} s", f"{both:.2f} s", f"{each['ratio']:.2f}", far)
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps({"cores": cores, "results": results}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
