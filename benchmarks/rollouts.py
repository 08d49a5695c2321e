"""How fast is a rollout? The local engine against transformers' `generate`, with the same adapter, in one run.

    python benchmarks/rollouts.py                        the starter and a model of 25M parameters
    python benchmarks/rollouts.py --models 150M          a larger one
    python benchmarks/rollouts.py --dtypes int8          with rounded weights besides (`rollout.dtype`)
    python benchmarks/rollouts.py --quick                does it run?

Both sides are given the same token ids, the same LoRA adapter (rank 16, all linear layers, no zeros; PEFT's files),
temperature and number of threads, and hand back token ids, text and the log-probability of every sampled token under
the distribution that it was drawn from. 16 prompts x 16 completions,

    equal    of 64 tokens each
    tailed   of lengths drawn from a log-normal, cut off at --longest: most are short, a few are very long

In the second case lengths stand for where a completion would have ended by itself, so nobody knows them beforehand.
`generate` decodes a batch until its longest row is done; what a row has beyond its own end is thrown away and not
counted. The engine is measured twice: with a request, and so a prompt, per completion, since `max_tokens` is of a
request (`requests`), and with groups whose rows end each at its own length, as they do in training (`groups`).

`generate` is run as well as it can be: all rows at once and smaller batches, one thread and all, the adapter as PEFT
applies it and, with `--merged`, merged into the weights. Each way is tried in each case, on a part of the rows if the
batch is smaller, and the fastest is what is compared with.

Neither end-of-turn ids nor `min_new_tokens` are in play, which would cost `generate` time and change its distribution.
Stops with an error unless both sides return exactly the tokens asked for, their greedy tokens are equal (but for ties
in float32), and the log-probabilities that each reports agree with a forward of the PEFT model. Tokens a second are of
useful tokens; medians of `--repeats`, sides by turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from step_vs_trl import machine
from subjects import load, parameters_of, random_ids, save_adapter

from groupwise.engine.cpu_weights import KINDS
from groupwise.engine.local import LocalEngine
from groupwise.model.chat import decode
from groupwise.model.load import LoadedModel
from groupwise.types import Completion, PolicyVersion, SamplingParams, SamplingRequest

VERSION = PolicyVersion("bench", 1)
TIE, CLOSE = 1e-4, 2e-3  # nats: tokens as likely as each other in float32; log-probabilities that are the same
ROUGHLY = 1.0  # nats: log-probabilities of rounded weights
SHORT = 2.0  # seconds of a trial that is worth another
TAIL, SPREAD = 8, 1.0  # the longest over the median; the log-normal's sigma

Row = tuple[tuple[int, ...], tuple[float, ...]]  # token ids and their log-probabilities


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both sides do: row i goes on from `prompts[i // group]` for `lengths[i]` tokens."""

    name: str
    prompts: Sequence[tuple[int, ...]]
    group: int
    lengths: Sequence[int]
    temperature: float

    def first(self, rows: int) -> Work:
        """The part of it that is its first groups, at least `rows` rows."""
        prompts = -(-rows // self.group)
        return replace(self, prompts=self.prompts[:prompts], lengths=self.lengths[: prompts * self.group])

    def check(self, rows: Sequence[Row]) -> None:
        """Exit unless these are exactly the tokens that were asked for."""
        got = [len(ids) for ids, _ in rows]
        if got != list(self.lengths) or any(len(ids) != len(logprobs) for ids, logprobs in rows):
            sys.exit(f"{self.name}: {sum(got)} tokens in {len(got)} rows came back; asked were {sum(self.lengths)}")


def tailed_lengths(rows: int, *, longest: int, seed: int = 0) -> list[int]:
    """Log-normal lengths around `longest` / TAIL, cut off at 1 and `longest`, in no order."""
    draw = random.Random(seed)
    return [max(1, min(longest, round(longest / TAIL * draw.lognormvariate(0, SPREAD)))) for _ in range(rows)]


# -- Groupwise ---------------------------------------------------------------------------------------------------------


def by_requests(engine: LocalEngine, work: Work, seed: int) -> list[Row]:
    """Requests of equal lengths are groups; of different ones, a request per completion."""
    if len(set(work.lengths)) == 1:
        requests = [_request(work, prompt, work.lengths[0], work.group, seed + p) for p, prompt in _numbered(work)]
    else:
        requests = [
            _request(work, work.prompts[i // work.group], length, 1, seed + i) for i, length in enumerate(work.lengths)
        ]
    return [_row(completion) for completions in engine.generate(requests) for completion in completions]


def by_groups(engine: LocalEngine, work: Work, seed: int) -> list[Row]:
    """Groups whose rows end each at its own length: the limit of a row is set when it begins."""
    limits: dict[int, list[int]] = {}
    every = [lane.decoder.rows for lane in engine._lanes]

    def add_with_limits(rows: Any, job: Any, n: int, **where: Any) -> None:
        first, started = rows.active, job.started
        type(rows).add(rows, job, n, **where)
        rows.on_host.limit[first : first + n] = limits[job.seed][started : started + n]

    requests = []
    for p, prompt in _numbered(work):
        lengths = list(work.lengths[p * work.group : (p + 1) * work.group])
        limits[seed + p] = lengths
        requests.append(_request(work, prompt, max(lengths), work.group, seed + p))
    for rows in every:
        rows.add = partial(add_with_limits, rows)
    try:
        return [_row(completion) for completions in engine.generate(requests) for completion in completions]
    finally:
        for rows in every:
            del rows.add


def _numbered(work: Work) -> list[tuple[int, tuple[int, ...]]]:
    return list(enumerate(work.prompts))


def _request(work: Work, prompt: tuple[int, ...], length: int, n: int, seed: int) -> SamplingRequest:
    params = SamplingParams(max_tokens=length, temperature=work.temperature, seed=seed, ignore_eos=True)
    return SamplingRequest(prompt_ids=prompt, params=params, n=n, version=VERSION)


def _row(completion: Completion) -> Row:
    return completion.token_ids, completion.logprobs


# -- transformers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """`generate` with a PEFT model: rows at once, threads, and whether the adapter is merged."""

    batch: int
    threads: int
    merged: bool = False

    def __str__(self) -> str:
        return f"generate, {self.batch} rows, {self.threads} threads" + (", merged" if self.merged else "")

    def run(self, model: PeftModel, base: LoadedModel, work: Work) -> list[Row]:
        before, rows = torch.get_num_threads(), []
        torch.set_num_threads(self.threads)
        try:
            for start in range(0, len(work.lengths), self.batch):
                rows += _generated(model, base, work, slice(start, start + self.batch))
        finally:
            torch.set_num_threads(before)
        return rows


@torch.inference_mode()
def _generated(model: PeftModel, base: LoadedModel, work: Work, at: slice) -> list[Row]:
    """One batch, decoded until its longest row is done."""
    lengths = work.lengths[at]
    prompts = [work.prompts[i // work.group] for i in range(at.start, at.start + len(lengths))]
    ids = torch.tensor(prompts, device=model.device)
    how: dict[str, Any] = {"do_sample": False}
    if work.temperature:
        how = {"do_sample": True, "temperature": work.temperature, "top_k": 0, "top_p": 1.0}
    out: Any = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max(lengths),
        use_cache=True,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=base.tokenizer.pad_token_id,
        **how,
    )
    token_BT = out.sequences[:, ids.shape[1] :]
    each = [
        scores_BV.gather(1, token_B[:, None])[:, 0].float() - scores_BV.float().logsumexp(-1)
        for scores_BV, token_B in zip(out.scores, token_BT.T, strict=True)
    ]
    tokens, logprobs = token_BT.tolist(), torch.stack(each, 1).tolist()
    rows = [(tuple(t[:n]), tuple(lp[:n])) for t, lp, n in zip(tokens, logprobs, lengths, strict=True)]
    for token_ids, _ in rows:
        decode(token_ids, base.tokenizer)  # the engine hands over text too
    return rows


# -- the same work -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def logprobs_of(model: PeftModel, prompt: tuple[int, ...], ids: tuple[int, ...], temperature: float) -> torch.Tensor:
    """[T, V] by one forward of the PEFT model over prompt and completion."""
    logits: torch.Tensor = model(input_ids=torch.tensor([[*prompt, *ids]], device=model.device), use_cache=False).logits
    return (logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)).log_softmax(-1).cpu()


def check_logprobs(model: PeftModel, work: Work, rows: Sequence[Row], who: str, close: float = CLOSE) -> float:
    """The largest difference, in a few rows, between what `who` reported and a forward. Exits if it is not `close`."""
    gap = 0.0
    for i in range(0, len(rows), max(1, len(rows) // 8)):
        ids, reported = rows[i]
        exact_TV = logprobs_of(model, work.prompts[i // work.group], ids, work.temperature)
        exact_T = exact_TV.gather(1, torch.tensor(ids)[:, None])[:, 0]
        gap = max(gap, float((exact_T - torch.tensor(reported)).abs().max()))
    if not gap < close:
        sys.exit(f"{work.name}: the log-probabilities of {who} are {gap:.2g} nats off a forward of the PEFT model")
    return gap


def check_greedy(model: PeftModel, work: Work, ours: Sequence[Row], theirs: Sequence[Row]) -> int:
    """How many rows part at a tie. Exits if greedy tokens differ anywhere else."""
    ties = 0
    for i, ((mine, _), (other, _)) in enumerate(zip(ours, theirs, strict=True)):
        if mine == other:
            continue
        ties, at = ties + 1, next(t for t, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
        exact_V = logprobs_of(model, work.prompts[i // work.group], mine[: at + 1], 1.0)[at]
        if abs(float(exact_V[mine[at]] - exact_V[other[at]])) > TIE:
            sys.exit(f"greedy tokens of row {i} differ at {at}: {mine[at]} and {other[at]}")
    return ties


# -- measuring ---------------------------------------------------------------------------------------------------------

Side = Callable[[int], list[Row]]  # seed -> rows


def seconds_of(side: Side, work: Work, seed: int) -> tuple[float, list[Row]]:
    """One run, checked."""
    started = time.perf_counter()
    rows = side(seed)
    seconds = time.perf_counter() - started
    work.check(rows)
    return seconds, rows


def trials(run: Callable[[Peer, Work], list[Row]], work: Work, options: argparse.Namespace) -> dict[Peer, float]:
    """Useful tokens a second of every way to run `generate`, fastest first. Threads are tried at one batch size."""
    rows, tried = len(work.lengths), dict[Peer, float]()

    def attempt(peer: Peer) -> None:
        part = work.first(max(peer.batch, rows // 4))
        seconds = seconds_of(lambda seed: run(peer, part), part, 0)[0]
        if seconds < SHORT:  # the first runs of a process are slow
            seconds = min(seconds, seconds_of(lambda seed: run(peer, part), part, 0)[0])
        tried[peer] = sum(part.lengths) / seconds

    def best() -> Peer:
        return max(tried, key=lambda peer: tried[peer])

    smallest, *larger = sorted({min(batch, rows) for batch in (*options.batches, rows)})
    for threads in sorted({1, options.threads}):
        attempt(Peer(smallest, threads))
    for batch in larger:
        attempt(Peer(batch, best().threads))
    if options.merged:
        attempt(replace(best(), merged=True))
    return dict(sorted(tried.items(), key=lambda item: -item[1]))


def compare(
    base: LoadedModel,
    engine: LocalEngine,
    model: PeftModel,
    work: Work,
    options: Any,
    *,
    rounded: Mapping[str, LocalEngine] = MappingProxyType({}),
) -> dict[str, Any]:
    """All sides by turns; seconds, tokens a second, ratios. `rounded` are engines with other types of weights."""

    def peer_rows(peer: Peer, work: Work) -> list[Row]:
        if not peer.merged:
            return peer.run(model, base, work)
        model.merge_adapter()
        try:
            return peer.run(model, base, work)
        finally:
            model.unmerge_adapter()

    tried = trials(peer_rows, work, options)
    best = next(iter(tried))
    sides: dict[str, Side] = {"requests": lambda seed: by_requests(engine, work, seed)}
    if len(set(work.lengths)) > 1:
        sides["groups"] = lambda seed: by_groups(engine, work, seed)
    for kind, other in rounded.items():
        sides[kind] = partial(by_groups if "groups" in sides else by_requests, other, work)
    sides["generate"] = lambda seed: peer_rows(best, work)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    processor: dict[str, list[float]] = {name: [] for name in sides}  # seconds of all threads
    gaps: dict[str, float] = {}
    for name, side in sides.items():
        if name != "generate":  # it has been warmed up by the trials
            seconds_of(side, work, 0)
    for repeat in range(options.repeats):
        for name in list(sides) if repeat % 2 == 0 else list(reversed(sides)):
            started = time.process_time()
            took, rows = seconds_of(sides[name], work, 1000 * repeat)
            seconds[name].append(took)
            processor[name].append(time.process_time() - started)
            if not repeat:
                gaps[name] = check_logprobs(model, work, rows, name, ROUGHLY if name in rounded else CLOSE)
    about = {"peer": str(best), "trials_tokens_per_s": {str(peer): rate for peer, rate in tried.items()}}
    return measured(work, seconds, gaps) | about | {"processor_seconds": processor}


def measured(work: Work, seconds: Mapping[str, Sequence[float]], gaps: Mapping[str, float]) -> dict[str, Any]:
    """A case as it is printed and written: by side its seconds, useful tokens a second, and how far log-probabilities
    are from a forward."""
    useful = sum(work.lengths)
    return {
        "case": work.name,
        "tokens": useful,
        "longest": max(work.lengths),
        "seconds": seconds,
        "tokens_per_s": {side: useful / statistics.median(took) for side, took in seconds.items()},
        "logprob_gap": gaps,
    }


def cases(base: LoadedModel, options: argparse.Namespace) -> tuple[Work, list[Work]]:
    """The greedy check, and what is measured."""
    prompts = [random_ids(options.prompt, seed=p) for p in range(options.prompts)]
    rows = options.prompts * options.group
    lengths = {
        "equal": [options.completion] * rows,
        "tailed": tailed_lengths(rows, longest=options.longest),
    }
    works = [
        Work(name=name, prompts=prompts, group=options.group, lengths=each, temperature=options.temperature)
        for name, each in lengths.items()
    ]
    greedy = [options.completion] * len(prompts)
    return Work(name="greedy", prompts=prompts, group=1, lengths=greedy, temperature=0.0), works


def measure(name: str, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Every case with one model."""
    base = load(name)
    base.model.generation_config.eos_token_id = None  # nothing ends a completion but its length
    rows = options.prompts * options.group
    engine = LocalEngine(base, max_rows=rows)
    rounded = {kind: LocalEngine(base, max_rows=rows, dtype=kind) for kind in options.dtypes}
    with tempfile.TemporaryDirectory(prefix="rollouts-") as folder:
        save_adapter(base, Path(folder))
        for each in (engine, *rounded.values()):
            each.load(VERSION, Path(folder))
        model: Any = PeftModel.from_pretrained(base.model, folder).eval()  # in place; the engine's modules are its own
    results = []
    try:
        greedy, works = cases(base, options)
        ours = by_requests(engine, greedy, 0)
        ties = check_greedy(model, greedy, ours, Peer(len(ours), options.threads).run(model, base, greedy))
        console.print(f"{name}: {len(ours)} greedy rows are equal; {ties} of them part at a tie in float32")
        for work in works:
            result = compare(base, engine, model, work, options, rounded=rounded)
            results.append({"model": name, "parameters": parameters_of(engine._base), **result})
            for peer, rate in result["trials_tokens_per_s"].items():
                console.print(f"  {work.name}, trial: {peer}: {rate:,.0f} tokens/s", style="dim")
    finally:
        for each in (engine, *rounded.values()):
            each.close()
    return results


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """A line per model, case and side; a ratio is the engine's rate over that of `generate`."""
    table = Table("model", "case", "side", title="Rollouts", caption="useful tokens a second, medians")
    for heading in ("seconds", "CPU s, least", "tokens/s", "ratio", "gap"):
        table.add_column(heading, justify="right")
    for result in results:
        rates = result["tokens_per_s"]
        for i, (side, rate) in enumerate(rates.items()):
            where = [result["model"], f"{result['case']}, {result['tokens']} tokens"] if i == 0 else ["", ""]
            label = result["peer"] if side == "generate" else f"Groupwise, {side}"
            ratio = "" if side == "generate" else f"{rate / rates['generate']:.2f}x"
            seconds, least = statistics.median(result["seconds"][side]), min(result["processor_seconds"][side])
            gap = f"{result['logprob_gap'][side]:.1g}"
            table.add_row(*where, label, f"{seconds:.2f}", f"{least:.2f}", f"{rate:,.0f}", ratio, gap)
        table.add_section()
    return table


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["starter", "25M"], help="starter, 25M, 150M or HIDDENxLAYERS")
    numbers = {"prompts": 16, "group": 16, "prompt": 64, "completion": 64, "longest": 160, "repeats": 5}
    for name, default in {**numbers, "threads": torch.get_num_threads()}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[16, 64], help="of `generate`, besides all rows at once"
    )
    parser.add_argument(
        "--dtypes", nargs="*", default=[], choices=sorted(KINDS), help="also measure the engine with rounded weights"
    )
    parser.add_argument("--merged", action="store_true", help="also try `generate` with merged weights")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the starter, few and short completions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    options = parser.parse_args()
    if options.quick:
        options.models, options.prompts, options.group, options.completion = ["starter"], 4, 4, 16
        options.longest, options.repeats, options.batches = 48, 2, [8]
    return options


def main() -> None:
    options, console, results = parse_options(), Console(width=110), []
    torch.set_num_threads(options.threads)
    about = machine(options.threads)
    console.print("  ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True, highlight=False)
    for name in options.models:
        results += measure(name, options, console)
    console.print(table_of(results))
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
