"""What does rank 0 spend on a token that others sample and train? Processor seconds of each part of a step.

    python benchmarks/controller.py                               16 groups of 16 completions of about 800 tokens
    python benchmarks/controller.py --ranks 512 --json found.json
    python benchmarks/controller.py --quick                       does it run?

Rank 0 takes in what vLLM's servers answer, has it scored, computes advantages and metrics, writes the rollouts down,
sends the step to the other ranks and packs its own share. All of that is done here, by the code of a run, on one batch;
what needs a GPU is replaced by what was recorded: a process answers as vLLM 0.32's `/v1/completions` does, the same
each time, and no pass is run on what is packed. Another process follows over gloo as a rank does.

A part is timed by the processor time of this process, all its threads, over the whole batch: the least of `--rounds`.
What another rank spends to read the order, on a processor of its own, stands below. Tokens are completion tokens;
they are as frequent as words are (Zipf), of a vocabulary of 151,643, lengths are log-normal, and a tenth of the
log-probabilities are above -0.0001, as of a policy that is sure of much.

`tokens/s` is how many tokens a second one core can see to that does nothing else, all parts one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from groupwise.algo.credit import with_advantages
from groupwise.algo.metrics import rollout_metrics, sample_metrics
from groupwise.algo.samples import samples_of
from groupwise.config.algo import AdvantageConfig
from groupwise.config.world import World
from groupwise.engine.vllm.answers import Sampled
from groupwise.engine.vllm.client import VllmServer, sampling_body
from groupwise.engine.vllm.engine import completion_of
from groupwise.engine.vllm.server import free_port
from groupwise.model.chat import closing_ids
from groupwise.model.packing import count_loss_tokens, count_sequences, micro_batches
from groupwise.rewards.base import score
from groupwise.rewards.call import RewardFunction
from groupwise.store.tracking import Tracking
from groupwise.tasks.rollout_sources import group_of
from groupwise.train.data_parallel import order_bytes
from groupwise.train.orders import read_order
from groupwise.train.ranks import Ranks, join
from groupwise.train.shares import shares
from groupwise.types import Prompt, RolloutGroup, Sample, SamplingParams, SamplingRequest

VOCABULARY = END = 151_643
MICRO_TOKENS, MOST = 16_384, 4
PARTS = {  # in the order of a step
    "answers": "HTTP and JSON of vLLM's answers",
    "texts": "completions, with their texts",
    "scores": "groups and their rewards",
    "rollouts": "rollouts written",
    "samples": "advantages and samples",
    "metrics": "metrics of the step",
    "order": "an order made of the samples",
    "sent": "the order sent",
    "packed": "its own share packed",
}
FOLLOWER = "follower"  # on a processor of its own
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What is recorded: a request for each group, and the answer to it, as bytes."""

    prompts: tuple[Prompt, ...]
    answers: tuple[bytes, ...]
    group: int
    tokens: int

    @property
    def bodies(self) -> list[dict[str, Any]]:
        params = SamplingParams(max_tokens=32_768)
        options = {"n": self.group, "max_tokens": 32_768, "eos_ids": (END,)}
        return [sampling_body(prompt.token_ids, params, seed=at, **options) for at, prompt in enumerate(self.prompts)]


def recorded(*, groups: int, group: int, prompt: int, completion: float, spread: float) -> Batch:
    """Draw a batch: completions of these lengths in the mean, and what vLLM answers."""
    rng = np.random.default_rng(0)
    prompts, answers, tokens = [], [], 0
    for number in range(groups):
        ids = rng.integers(0, VOCABULARY, prompt).tolist()
        lengths = rng.lognormal(math.log(completion) - spread**2 / 2, spread, group)
        choices = [choice_of(rng, index, int(min(each, MOST * completion)) + 1) for index, each in enumerate(lengths)]
        tokens += sum(len(each["token_ids"]) for each in choices)
        prompts.append(Prompt(id=str(number), text="a prompt", token_ids=tuple(ids)))
        answer = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "base", "choices": choices}
        answers.append(json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode())
    return Batch(prompts=tuple(prompts), answers=tuple(answers), group=group, tokens=tokens)


def choice_of(rng: np.random.Generator, index: int, tokens: int) -> dict[str, Any]:
    """Return one choice, with all that vLLM says of it and nobody reads."""
    ids = [*(rng.zipf(1.2, tokens - 1) % VOCABULARY).tolist(), END]
    logprobs = (-np.exp(rng.normal(-4, 4, tokens).clip(max=3.5))).astype("float32").tolist()
    texts = [word_of(id) for id in ids]
    told = {
        "text_offset": [7 * at for at in range(tokens)],
        "token_logprobs": logprobs,
        "tokens": texts,
        "top_logprobs": [{text: x} for text, x in zip(texts, logprobs, strict=True)],
    }
    return {
        "index": index,
        "text": "".join(texts),
        "logprobs": told,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


def word_of(id: int) -> str:
    return "<|end|>" if id == END else f" {id:x}"


def tokenizer_of() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer as large as Qwen3's, which only decodes."""
    words = {word_of(id).replace(" ", "Ġ"): id for id in range(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


# -- what stands for the servers and the other ranks -------------------------------------------------------------------


def serve(batch: Batch, end: Connection) -> None:
    """A process that answers request number n with answer number n."""
    answers = {hash(prompt.token_ids): answer for prompt, answer in zip(batch.prompts, batch.answers, strict=True)}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = answers[hash(tuple(asked["prompt"]))]
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # all of a step's requests come at once

    server = Server(("127.0.0.1", 0), Handler)
    end.send(server.server_address[1])
    server.serve_forever()


def follow(port: int, orders: int, end: Connection) -> None:
    """A rank that reads orders, and says what each cost it."""
    ranks = joined(1, port)
    for _ in range(orders):
        order = ranks.next_order()
        began = time.process_time()
        read_order(order)
        end.send(time.process_time() - began)
    ranks.close()


def joined(rank: int, port: int) -> Ranks:
    torch.set_num_threads(1)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    with patch.dict(os.environ, told):
        return join(World(rank=rank, size=2, local_rank=rank), device=torch.device("cpu"), deadline_s=120.0)


@contextmanager
def beside(work: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Another process that does this meanwhile, and the end of a pipe to it."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=work, args=(*args, theirs), daemon=True)
    process.start()
    try:
        yield mine
    finally:
        process.kill()
        process.join()


# -- a step ------------------------------------------------------------------------------------------------------------


def cheap(completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward whatever is of an even length: it costs next to nothing, and differs within a group."""
    return [float(len(each) % 2) for each in completions]


class Clock:
    """Counts the processor seconds of each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}

    def __call__(self, part: str, work: Callable[[], T]) -> T:
        began = time.process_time()
        result = work()
        self.seconds[part].append(time.process_time() - began)
        return result


class Step:
    """One step of rank 0 on a batch, part by part; `ranks` is how many share the batch out."""

    def __init__(self, batch: Batch, url: str, leader: Ranks, follower: Connection, place: Path, *, ranks: int):
        self.batch, self.leader, self.follower, self.ranks = batch, leader, follower, ranks
        self.server, self.tracking = VllmServer(url, request_timeout_s=60.0), Tracking(place, trl_names=False)
        self.tokenizer = tokenizer_of()
        self.ends, self.follows = closing_ids(self.tokenizer), list[float]()
        self.loop = asyncio.new_event_loop()

    def run(self, number: int, clock: Clock) -> None:
        sampled = clock("answers", lambda: self.loop.run_until_complete(self._answers()))
        played = clock("texts", lambda: self._groups(sampled))
        scored = clock("scores", lambda: self.loop.run_until_complete(self._scored(played)))
        weighed, samples = clock("samples", lambda: self._samples(scored))
        clock("rollouts", lambda: self.tracking.rollouts(number, weighed))
        clock("metrics", lambda: self._metrics(scored, weighed, samples))
        order = clock("order", lambda: order_bytes("step", (samples,), {"learning_rate": 1e-5}))
        clock("sent", lambda: self.leader.send_order(order))
        self.follows.append(self.follower.recv())
        clock("packed", lambda: self._packed(samples))

    async def _answers(self) -> list[list[Sampled]]:
        return await asyncio.gather(*(self.server.complete("base", body) for body in self.batch.bodies))

    def _groups(self, sampled: Sequence[Sequence[Sampled]]) -> list[RolloutGroup]:
        groups = []
        for prompt, mine in zip(self.batch.prompts, sampled, strict=True):
            request = SamplingRequest(prompt_ids=prompt.token_ids)
            said = [completion_of(each, request, self.tokenizer, ends=self.ends) for each in mine]
            groups.append(group_of(prompt, said))
        return groups

    async def _scored(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        return await score(groups, [RewardFunction(name="cheap", function=cheap, args={})])

    def _samples(self, groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], list[Sample]]:
        weighed = with_advantages(groups, AdvantageConfig())
        return weighed, samples_of(weighed)

    def _metrics(
        self, sampled: Sequence[RolloutGroup], weighed: Sequence[RolloutGroup], samples: Sequence[Sample]
    ) -> None:
        turns = [turn for group in sampled for each in group.rollouts for turn in each.turns]
        ages = [(0, len(turn.completion.token_ids)) for turn in turns]
        rollout_metrics(sampled, trained=weighed, advantage=AdvantageConfig(), used=sampled, token_ages=ages)
        sample_metrics(samples)

    def _packed(self, samples: Sequence[Sample]) -> None:
        """As `Learner.forward_backward` does before its passes."""
        assert count_loss_tokens(samples) == self.batch.tokens
        assert count_sequences(samples) == len(samples)
        mine = [samples[row] for row in shares(samples, self.ranks)[0]]
        for each in micro_batches(mine, token_budget=MICRO_TOKENS):
            assert each.behaviour_is_finite and each.behaviour_N is not None
            assert len(each.advantages_N) == len(each.target_N)

    def close(self) -> None:
        self.loop.run_until_complete(self.server.close())
        self.tracking.close()
        self.loop.close()


def measure(batch: Batch, *, ranks: int, rounds: int) -> dict[str, float]:
    """Return microseconds a token of each part, and of a follower."""
    clock, port = Clock(), free_port("127.0.0.1")
    with (
        beside(serve, batch) as server,
        beside(follow, port, rounds + 1) as follower,
        tempfile.TemporaryDirectory() as place,
    ):
        leader = joined(0, port)
        url = f"http://127.0.0.1:{server.recv()}"
        step = Step(batch, url, leader, follower, Path(place), ranks=ranks)
        for number in range(rounds + 1):
            step.run(number, clock)
        step.close()
        leader.close()
    seconds = {part: min(each[1:]) for part, each in clock.seconds.items()} | {FOLLOWER: min(step.follows[1:])}
    return {part: each / batch.tokens * 1e6 for part, each in seconds.items()}


def table_of(found: dict[str, float], batch: Batch, *, ranks: int) -> Table:
    """Microseconds a token by part, and how many tokens a second that makes."""
    title = f"{len(batch.prompts)} x {batch.group} completions, {batch.tokens:,} tokens, {ranks} ranks"
    table = Table("part", title=title, caption="processor microseconds a completion token")
    table.add_column("rank 0", justify="right")
    for part, words in PARTS.items():
        table.add_row(words, f"{found[part]:.3f}")
    table.add_section()
    whole = total_of(found)
    table.add_row("all of it", f"{whole:.3f}")
    table.add_row("tokens/s", f"{1e6 / whole:,.0f}")
    table.add_row("a follower reads the order", f"{found[FOLLOWER]:.3f}")
    return table


def total_of(found: dict[str, float]) -> float:
    """Return what the parts come to."""
    return sum(found[part] for part in PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--completion", type=float, default=800.0)
    parser.add_argument("--spread", type=float, default=0.7)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.groups, options.group, options.completion, options.rounds = 2, 4, 60.0, 1
    names = ("groups", "group", "prompt", "completion", "spread")
    batch = recorded(**{name: getattr(options, name) for name in names})
    found = measure(batch, ranks=options.ranks, rounds=options.rounds)
    Console(width=100).print(table_of(found, batch, ranks=options.ranks))
    if options.json is not None:
        options.json.write_text(json.dumps({"tokens": batch.tokens, "ranks": options.ranks, "us": found}))


if __name__ == "__main__":
    main()
