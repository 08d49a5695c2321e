"""What does a model cost that cannot run packed? Rollouts and train steps, packed, plain, and of TRL, by turns.

    python benchmarks/plain.py                  a Qwen3 of 25M parameters and a Qwen3-Next of 17M
    python benchmarks/plain.py --quick          does it run?

Where a model's packed forward is not its own (`model.packed_check`), it is sampled by its own forward and cache, and
trained in padded rows. The factor is measured on models that can run both ways, a Qwen3 and a Qwen3-Next (gated delta
nets, attention in every fourth layer, experts): one engine and one learner are told that they cannot run packed. Beside
both stands a step of TRL's `GRPOTrainer` on the same weights, whose rollouts are transformers' `generate`.

All sides run in one process with one thread, in float32 on the CPU, in turns: after each step of TRL's, a step of each
of ours, with the same LoRA (rank 16, what all-linear is here), prompts of equal length, and completions of exactly
`completion` tokens. A step is `rollout` (sampling the batch) and `train` (one optimizer step on it; of TRL, all that is
not generation); scoring and publishing are left out of ours. Medians of --steps turns, in seconds of the clock and of
the processor, which a busy machine changes less; the load average is printed before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from step_sides import ALPHA, LEARNING_RATE, RANK, Case, even_ids, prepare, trl_config
from step_vs_trl import machine
from subjects import parameters_of, save_adapter, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3NextConfig

from groupwise.algo.loss import resolve_loss
from groupwise.config.run import STARTER_DIR, LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel, load_model
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Sample, SamplingParams, SamplingRequest

VERSION = PolicyVersion("bench", 1)
PHASES = ("rollout", "train")
MODELS = ("qwen3", "qwen3_next")


@dataclass
class Times:
    """Of one side, by phase: (seconds of the clock, seconds of the processor) of each turn."""

    of: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.of[phase].append((time.perf_counter() - wall, time.process_time() - cpu))

    def medians(self, *, warmup: int) -> dict[str, dict[str, float]]:
        """{phase: {wall, cpu}} without the turns that only warm up."""
        return {
            phase: {
                name: statistics.median(turn[i] for turn in turns[warmup:]) for i, name in enumerate(("wall", "cpu"))
            }
            for phase, turns in self.of.items()
        }


class Ours:
    """Groupwise's engine and learner, packed, or told that they are plain."""

    def __init__(self, base: LoadedModel, adapter: Path, case: Case, *, plain: bool, opened: ExitStack):
        self.case, self.times, self._turn = case, Times(), 0
        with warnings.catch_warnings(), ExitStack() as forced:
            warnings.simplefilter("ignore")
            if plain:
                for room in ("engine.local", "train.learner"):
                    forced.enter_context(patch(f"groupwise.{room}.why_not_packed", lambda model: "it is told so"))
            self.engine = opened.enter_context(closing(LocalEngine(base, max_rows=case.rows, threads=1, lanes=1)))
            self.learner = Learner(base, lora=LoraSpec(rank=RANK, alpha=float(ALPHA)), threads=1)
        if self.engine.packed == plain or self.learner.packed == plain:
            sys.exit(f"this model is not to run {'packed' if plain else 'plain'} here")
        self.engine.load(VERSION, adapter)
        self.loss = resolve_loss("grpo")

    def step(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Sample a batch, and train on it."""
        self._turn += 1
        params = SamplingParams(max_tokens=self.case.completion, seed=self._turn, ignore_eos=True)
        asked = [SamplingRequest(prompt_ids=ids, params=params, n=self.case.group, version=VERSION) for ids in prompts]
        with self.times.timed("rollout"):
            groups = self.engine.generate(asked)
        samples = [
            Sample(
                prompt_ids=each.prompt_ids,
                completion_ids=c.token_ids,
                mask=(1,) * len(c.token_ids),
                behaviour_logprobs=c.logprobs,
                advantage=1.0 if i % 2 else -1.0,
            )
            for each, group in zip(asked, groups, strict=True)
            for i, c in enumerate(group)
        ]
        if {len(sample.completion_ids) for sample in samples} != {self.case.completion}:
            sys.exit("completions are not as long as was agreed")
        with self.times.timed("train"):
            metrics = self.learner.step(samples, self.loss, learning_rate=LEARNING_RATE)
        if not 0 < metrics["optim/grad_norm"] < float("inf"):
            sys.exit(f"the gradient's norm is {metrics['optim/grad_norm']}")


def run_in_turns(case: Case, sides: Mapping[str, Ours], folder: Path) -> Times:
    """TRL's trainer, after each of whose steps each of `sides` makes one. -> TRL's times."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    rows = [json.loads(line) for line in Path(case.prompts_file).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(case.model)
    ids = [tuple(tokenizer(row["prompt"])["input_ids"]) for row in rows]
    trainer: Any = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32),
        reward_funcs=even_ids,
        args=trl_config(case, folder, continuous=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=next(iter(sides.values())).learner.lora,
    )
    trained = {sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)}
    trained |= {sum(p.numel() for p in side.learner.parameters) for side in sides.values()}
    if len(trained) > 1:
        sys.exit(f"the sides train {sorted(trained)} parameters: not the same work")
    times, generate, started = Times(), trainer._generate_single_turn, (0.0, 0.0)

    def timed_generate(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        with times.timed("rollout"):
            result = generate(prompt_ids, *args, **kwargs)
        if {len(completion) for completion in result[0]} != {case.completion}:
            sys.exit("TRL's completions are not as long as was agreed")
        return result

    class InTurns(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal started
            started = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended, (wall, cpu) = (time.perf_counter(), time.process_time()), times.of["rollout"][-1]
            times.of["train"].append((ended[0] - started[0] - wall, ended[1] - started[1] - cpu))
            first = (state.global_step - 1) * case.prompts
            order = list(sides.values()) if state.global_step % 2 else list(sides.values())[::-1]
            for side in order:
                side.step(ids[first : first + case.prompts])

    trainer._generate_single_turn = timed_generate
    trainer.add_callback(InTurns())
    trainer.train()
    return times


def write_hybrid(directory: Path, *, small: bool) -> None:
    """A Qwen3-Next with random weights: three layers of gated delta nets to one of attention, four experts of which two
    are used."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(STARTER_DIR)
    config = Qwen3NextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64 if small else 384,
        num_hidden_layers=4 if small else 8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=6,
        linear_num_value_heads=6,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        moe_intermediate_size=192,
        shared_expert_intermediate_size=384,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One model: medians by side and phase."""
    model = folder / "model"
    case = Case(
        prompt=options.prompt,
        completion=options.completion,
        group=options.group,
        prompts=options.prompts,
        warmup=1,
        steps=options.steps,
        threads=1,
        model=str(model),
        prompts_file=str(folder / "prompts.jsonl"),
    )
    if name == "qwen3":
        write_model(model, hidden=64 if options.quick else 512, layers=2 if options.quick else 9)
    else:
        write_hybrid(model, small=options.quick)
    prepare(case, hidden=0, layers=0)
    base = load_model(str(model), device="cpu", dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_adapter(base, _made(folder / "adapter"))
    ways = {"packed": False, "plain": True}
    with ExitStack() as opened:
        sides = {way: Ours(base, folder / "adapter", case, plain=plain, opened=opened) for way, plain in ways.items()}
        trl = run_in_turns(case, sides, folder)
        every = {way: side.times for way, side in sides.items()} | {"TRL": trl}
    medians = {way: times.medians(warmup=case.warmup) for way, times in every.items()}
    return {"model": name, "parameters": parameters_of(base), "sides": medians, "ratios": ratios(medians)}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def ratios(medians: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each side to the first, by phase and kind of seconds; `step` is both phases together."""
    first = next(iter(medians.values()))

    def total(side: Mapping[str, Mapping[str, float]], kind: str) -> float:
        return sum(side[phase][kind] for phase in PHASES)

    kinds: Sequence[str] = ("wall", "cpu")
    return {
        way: {f"{phase} {kind}": side[phase][kind] / first[phase][kind] for phase in PHASES for kind in kinds}
        | {f"step {kind}": total(side, kind) / total(first, kind) for kind in kinds}
        for way, side in medians.items()
    }


def show(console: Console, found: Mapping[str, Any]) -> None:
    """A line for each side."""
    table = Table("side", "rollout s", "(cpu)", "train s", "(cpu)", "times the first: rollout", "train", "step")
    for way, side in found["sides"].items():
        seconds = [f"{side[phase][kind]:.2f}" for phase in PHASES for kind in ("wall", "cpu")]
        times = [f"{found['ratios'][way][f'{phase} cpu']:.2f}" for phase in (*PHASES, "step")]
        table.add_row(way, *seconds, *times)
    console.print(f"{found['model']}, {found['parameters'] / 1e6:.0f}M parameters (ratios of processor seconds)")
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    for option, default in (("prompt", 64), ("completion", 48), ("group", 8), ("prompts", 4), ("steps", 5)):
        parser.add_argument(f"--{option}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="tiny models and one step: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.prompt, options.completion, options.group, options.prompts, options.steps = 8, 6, 2, 2, 1
    return options


def main() -> None:
    options, console = arguments(), Console()
    torch.set_num_threads(1)
    before, found = os.getloadavg()[0], []
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            found.append(measure(name, options, Path(folder)))
        show(console, found[-1])
    load = {"before": before, "after": os.getloadavg()[0]}
    console.print(f"load average {load['before']:.1f} before, {load['after']:.1f} after, {os.cpu_count()} cores")
    if options.json:
        shape = {name: getattr(options, name) for name in ("prompt", "completion", "group", "prompts", "steps")}
        result = {"machine": machine(1), "load": load, **shape, "models": found}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
