"""One GRPO step: Groupwise and TRL's GRPOTrainer side by side, in time and in peak memory.

    python benchmarks/step_vs_trl.py                       both default shapes
    python benchmarks/step_vs_trl.py --shape 128,64,8      prompts of 128 tokens, completions of 64, groups of 8
    python benchmarks/step_vs_trl.py --quick               a smoke run

Every measurement is a process of its own, and the two sides take turns, so that neither inherits the other's memory or
the machine's mood. Both load the same weights from the same directory and get the same prompts, group size, reward,
LoRA, AdamW, learning rate, float32, temperature, number of threads, and one optimizer step per batch. Neither is
changed: what is timed is wrapped from outside, and both step times are the interval between the ends of two steps,
so everything that a step costs is in them. On Groupwise's side that is `loop.train` itself, with publishing the
adapter version and writing metrics and rollouts to disk; TRL logs and saves nothing.

`generation` is token ids in, token ids out. `training` is forward, backward, clipping and AdamW. `other` is the rest:
tokenising, decoding, rewards, advantages, data loading, and publishing and tracking where there is any.

Peak memory is the highest resident size of the process from the moment its imports are done and its model is loaded,
minus the resident size at that moment.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PADDED_TOKENS = 20_480  # about as many tokens as a default step has when every prompt is repeated for its group
RANK, ALPHA, LEARNING_RATE, MAX_GRAD_NORM = 16, 32, 1e-4, 1.0
PREPARE, GROUPWISE, TRL_GENERATE, TRL_CONTINUOUS = "prepare", "groupwise", "trl generate", "trl continuous batching"
PHASES = ("step", "generation", "training", "publish", "other")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """What both sides do: `prompts` groups of `group` completions a step, of `prompt` + `completion` tokens each."""

    prompt: int
    completion: int
    group: int
    prompts: int
    warmup: int
    steps: int
    threads: int
    model: str
    prompts_file: str

    @property
    def rows(self) -> int:
        return self.prompts * self.group


@dataclass
class Recorder:
    """What one process measures. `ends` are the times at which steps ended; the lists have an entry per step."""

    case: Case
    ends: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    loaded: int = 0

    def model_is_loaded(self) -> None:
        """From here on memory counts."""
        self.loaded = resident()
        restart_peak()

    def add(self, name: str, started: float) -> None:
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.add(name, started)
            return result

        return wrapper

    def check_completions(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
        """Exit unless one step's generation did the agreed work."""
        lengths = {len(ids) for ids in prompts}, {len(ids) for ids in completions}, len(completions)
        agreed = {self.case.prompt}, {self.case.completion}, self.case.rows
        if lengths != agreed:
            sys.exit(f"prompt lengths, completion lengths and completions are {lengths}; agreed were {agreed}")

    def result(self, trainable: int) -> dict[str, Any]:
        """Phases in seconds per measured step. Exits unless every step had a usable gradient."""
        if not all(math.isfinite(norm) and norm > 0 for norm in self.grad_norms):
            sys.exit(f"gradient norms are {self.grad_norms}; each must be finite and not zero")
        first = self.case.warmup
        step = [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)][first - 1 :]
        phases = {name: values[first:] for name, values in self.seconds.items()}
        for name, values in phases.items():
            assert len(values) == self.case.steps == len(step), f"{name}: {len(values)} times, {len(step)} steps"
        phases["other"] = [s - g - t for s, g, t in zip(step, phases["generation"], phases["training"], strict=True)]
        return {
            "step": step,
            **phases,
            "peak_mib": (peak() - self.loaded) / MIB,
            "loaded_mib": self.loaded / MIB,
            "grad_norms": self.grad_norms,
            "rewards": self.rewards,
            "trainable_parameters": trainable,
        }


def resident() -> int:
    """Bytes in memory now (where /proc is missing: the most there ever were)."""
    return _status("VmRSS") or _maxrss()


def peak() -> int:
    """The most bytes in memory since `restart_peak` (where /proc is missing: since the start)."""
    return _status("VmHWM") or _maxrss()


def restart_peak() -> None:
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _status(key: str) -> int:
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


def _maxrss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def even_ids(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The reward of both sides: how many of a completion's token ids are even."""
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]


# -- the sides, each in a process of its own ---------------------------------------------------------------------------


def run_groupwise(case: Case, folder: Path) -> dict[str, Any]:
    """`loop.train` for warm-up and measured steps."""
    from groupwise import assemble, loop
    from groupwise.config import parse_config
    from groupwise.interrupt import StopRequest
    from groupwise.tracking import open_trackers

    recorder = Recorder(case)
    config = parse_config(_groupwise_config(case, folder))
    load_model = assemble.load_model

    def load_and_say(*args: Any, **kwargs: Any) -> Any:
        base = load_model(*args, **kwargs)
        recorder.model_is_loaded()
        return base

    assemble.load_model = load_and_say
    plan = assemble.make_plan(config)
    run_dir = loop.open_run_dir(config)
    parts = assemble.open_parts(plan)
    # completions go on to their last token, and groups of equal rewards are trained on: the peer does both
    parts.collector.params = replace(parts.collector.params, ignore_eos=True)
    parts.collector.keep_flat = True
    _watch_groupwise(recorder, parts, loop)
    with open_trackers(config.tracking, run_dir=run_dir, run_name=run_dir.name, resolved_config={}) as tracking:
        display: Any = StepEnds(recorder)
        asyncio.run(loop.train(plan, parts, run_dir, tracking=tracking, display=display, stop=StopRequest()))
    parts.engine.close()
    return recorder.result(sum(p.numel() for p in parts.learner.parameters))


def _groupwise_config(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "model": case.model,
        "dtype": "float32",
        "device": "cpu",
        "run_dir": str(folder),
        "folder": str(Path(__file__).parent.resolve()),
        "data": {"source": case.prompts_file, "shuffle": False},
        "rewards": ["step_vs_trl:even_ids"],
        "rollout": {
            "prompts_per_step": case.prompts,
            "group_size": case.group,
            "max_tokens": case.completion,
            "refill": 1.0,
            "batch_rows": max(256, case.rows),
        },
        "train": {
            "steps": case.warmup + case.steps,
            "learning_rate": LEARNING_RATE,
            "warmup_steps": 0,
            "max_grad_norm": MAX_GRAD_NORM,
            "lora": {"rank": RANK, "alpha": float(ALPHA)},
        },
    }


def _watch_groupwise(recorder: Recorder, parts: Any, loop: Any) -> None:
    sample, step = parts.engine.sample, parts.learner.step

    async def timed_sample(requests: Sequence[Any]) -> list[list[Any]]:
        started = time.perf_counter()
        completions_PG = await sample(requests)
        recorder.add("generation", started)
        ids = [c.token_ids for completions_G in completions_PG for c in completions_G]
        recorder.check_completions([request.prompt_ids for request in requests], ids)
        return completions_PG

    def timed_step(samples: Sequence[Any], *args: Any, **kwargs: Any) -> Mapping[str, float]:
        started = time.perf_counter()
        metrics = step(samples, *args, **kwargs)
        recorder.add("training", started)
        recorder.grad_norms.append(metrics["optim/grad_norm"])
        if len(samples) != recorder.case.rows:
            sys.exit(f"{len(samples)} completions were trained on; agreed were {recorder.case.rows}")
        return metrics

    parts.engine.sample, parts.learner.step = timed_sample, timed_step
    loop.publish_and_swap = recorder.timed("publish", loop.publish_and_swap)


class StepEnds:
    """A display that only notes when steps end."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def phase(self, name: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._recorder.ends.append(time.perf_counter())
        self._recorder.rewards.append(metrics["reward/mean"])


def run_trl(case: Case, folder: Path, *, continuous: bool) -> dict[str, Any]:
    """`GRPOTrainer.train` for warm-up and measured steps."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    recorder = Recorder(case)
    rows = [json.loads(line) for line in Path(case.prompts_file).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(case.model)
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    recorder.model_is_loaded()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=even_ids,
        args=_trl_config(case, folder, continuous=continuous),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    _watch_trl(recorder, trainer)
    trainer.train()
    return recorder.result(sum(p.numel() for p in trainer.model.parameters() if p.requires_grad))


def _trl_config(case: Case, folder: Path, *, continuous: bool) -> Any:
    from trl import GRPOConfig

    # completions of exactly this length; continuous batching has no such logits processor, so nothing is an end there
    options: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": case.completion}}
    if continuous:  # a cache that fits this batch; by default it would take half of the machine's memory
        page = 32
        pages = case.rows * math.ceil((case.prompt + case.completion) / page + 1)
        tokens = max(case.prompts * case.group, min(8192, case.rows * case.prompt))
        cache = {"page_size": page, "num_blocks": pages, "max_batch_tokens": tokens}
        options = {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": cache,
            "generation_kwargs": {"eos_token_id": None},
        }
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=case.rows,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=case.group,
        max_completion_length=case.completion,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        optim="adamw_torch_fused",
        max_steps=case.warmup + case.steps,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )


def _watch_trl(recorder: Recorder, trainer: Any) -> None:
    from transformers import TrainerCallback

    started = 0.0

    class StepTimes(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal started
            started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            recorder.ends.append(time.perf_counter())
            in_step = recorder.ends[-1] - started
            recorder.seconds.setdefault("training", []).append(in_step - sampled_and_scored[-1])

    generate, sample_and_score = trainer._generate_single_turn, trainer._generate_and_score_completions
    clip, sampled_and_scored = trainer.accelerator.clip_grad_norm_, []

    def timed_generate(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = generate(prompt_ids, *args, **kwargs)
        recorder.add("generation", began)
        recorder.check_completions(prompt_ids, result[0])
        return result

    def timed_sample_and_score(inputs: Any) -> Any:
        began = time.perf_counter()
        batch = sample_and_score(inputs)
        sampled_and_scored.append(time.perf_counter() - began)
        recorder.rewards.append(trainer._metrics["train"]["reward"][-1])
        if int(batch["completion_mask"].sum()) != recorder.case.rows * recorder.case.completion:
            sys.exit("TRL masked completion tokens that were to be trained on")
        return batch

    def noted_clip(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        recorder.grad_norms.append(float(norm))
        return norm

    trainer._generate_single_turn = timed_generate
    trainer._generate_and_score_completions = timed_sample_and_score
    trainer.accelerator.clip_grad_norm_ = noted_clip
    trainer.add_callback(StepTimes())


# -- the workspace -----------------------------------------------------------------------------------------------------


def prepare(case: Case, folder: Path, *, hidden: int, layers: int) -> dict[str, Any]:
    """Write the model, unless there is one, and prompts of exactly `case.prompt` tokens."""
    import torch
    from transformers import AutoTokenizer

    from groupwise.model import STARTER_DIR
    from groupwise.starter.build import BuildSpec, new_model

    if not Path(case.model).exists():
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(STARTER_DIR)
        new_model(BuildSpec(hidden_size=hidden, layers=layers, context_length=4096), tokenizer).save_pretrained(
            case.model
        )
        tokenizer.save_pretrained(case.model)
    tokenizer, digits = AutoTokenizer.from_pretrained(case.model), random.Random(0)
    with Path(case.prompts_file).open("w", encoding="utf-8") as file:
        for _ in range(case.prompts * (case.warmup + case.steps)):
            text = "".join(digits.choices("0123456789", k=case.prompt))
            if (length := len(tokenizer(text)["input_ids"])) != case.prompt:
                sys.exit(f"{case.prompt} digits are {length} tokens of this tokenizer; it must have one per digit")
            file.write(json.dumps({"prompt": text}) + "\n")
    return {}


def child(role: str, options: Mapping[str, Any], folder: Path) -> None:
    """One process: do `role` and leave `folder`/result.json."""
    import torch

    case = Case(**options["case"])
    torch.set_num_threads(case.threads)
    if role == PREPARE:
        result = prepare(case, folder, hidden=options["hidden"], layers=options["layers"])
    elif role == GROUPWISE:
        result = run_groupwise(case, folder)
    else:
        result = run_trl(case, folder, continuous=role == TRL_CONTINUOUS)
    (folder / "result.json").write_text(json.dumps(result))


# -- taking turns ------------------------------------------------------------------------------------------------------


def spawn(role: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run `role` in a fresh process. Raises RuntimeError with the end of its output if it fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(case.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    options = json.dumps({"case": asdict(case), "hidden": args.hidden, "layers": args.layers})
    with tempfile.TemporaryDirectory(prefix="step_vs_trl-") as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", role, options, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{role} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        return json.loads((Path(folder) / "result.json").read_text())


def compare(case: Case, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Both sides by turns. TRL generates in the way that is faster here, which two short runs find out."""
    spawn(PREPARE, case, args)
    trials, errors = {}, {}
    for role in (TRL_GENERATE, TRL_CONTINUOUS):
        console.print(f"  trying {role}", style="dim")
        try:
            trials[role] = statistics.median(spawn(role, replace(case, warmup=1, steps=2), args)["step"])
        except RuntimeError as error:
            errors[role] = str(error)
    if not trials:
        raise RuntimeError("\n".join(errors.values()))
    best = min(trials, key=lambda role: trials[role])
    runs: dict[str, list[dict[str, Any]]] = {GROUPWISE: [], best: []}
    for repeat in range(args.repeats):
        for role in (GROUPWISE, best) if repeat % 2 == 0 else (best, GROUPWISE):
            runs[role].append(spawn(role, case, args))
            median = statistics.median(runs[role][-1]["step"])
            console.print(f"  {role}: {median:.3f} s a step, peak {runs[role][-1]['peak_mib']:.0f} MiB", style="dim")
    adapters = {run["trainable_parameters"] for each in runs.values() for run in each}
    if len(adapters) > 1:
        raise RuntimeError(f"the two sides train adapters of different sizes: {sorted(adapters)} parameters")
    return {"case": asdict(case), "trl": best, "trl_trials_s": trials, "trl_errors": errors, "runs": runs}


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians: of all measured steps of all repeats, and of the repeats' peaks."""
    names = [name for name in PHASES if name in runs[0]]
    medians = {name: statistics.median(x for run in runs for x in run[name]) for name in names}
    return medians | {"peak_mib": statistics.median(run["peak_mib"] for run in runs)}


def table_of(results: Sequence[Mapping[str, Any]]) -> Table:
    """A line per shape and side; ratios are TRL's number over Groupwise's."""
    table = Table("shape", "side", title="One GRPO step", caption="median seconds; peak above the loaded model in MiB")
    for heading in (*PHASES, "peak MiB"):
        table.add_column(heading, justify="right")
    for result in results:
        case, sides = result["case"], {role: summary(runs) for role, runs in result["runs"].items()}
        shape = f"P={case['prompt']} C={case['completion']} G={case['group']}, {case['prompts']} prompts"
        for role, values in sides.items():
            numbers = [f"{values[name]:.3f}" if name in values else "-" for name in PHASES]
            table.add_row(shape if role == GROUPWISE else "", role, *numbers, f"{values['peak_mib']:.0f}")
        ours, theirs = sides[GROUPWISE], sides[result["trl"]]
        ratios = [f"{theirs[name] / ours[name]:.2f}x" if name in theirs else "" for name in PHASES]
        table.add_row("", "ratio", *ratios, f"{theirs['peak_mib'] / ours['peak_mib']:.2f}x", style="bold")
        table.add_section()
    return table


def machine(threads: int) -> dict[str, Any]:
    """What the numbers depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    packages = ("torch", "transformers", "peft", "trl", "groupwise")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "python": platform.python_version(), **versions}


def arguments() -> argparse.Namespace:
    head = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=head, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    shape = "prompt tokens, completion tokens, group size and, if not the default, prompts a step; can be repeated"
    parser.add_argument("--shape", action="append", metavar="P,C,G[,PROMPTS]", help=shape)
    parser.add_argument("--model", help="a model directory; without it, a new Qwen3 of the starter's architecture")
    parser.add_argument("--hidden", type=int, default=192, help="of the new model: hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4, help="of the new model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch threads of each side")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a process that do not count, at least 1")
    parser.add_argument("--steps", type=int, default=5, help="steps of a process that count")
    parser.add_argument("--quick", action="store_true", help="a smoke run: one small shape, one repeat, two steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    args = parser.parse_args()
    if args.quick:
        args.shape, args.repeats, args.warmup, args.steps = args.shape or ["16,8,4,2"], 1, 1, 2
    if args.warmup < 1:
        parser.error("--warmup is the steps that do not count; the first never does, so give 1 or more")
    return args


def case_of(shape: str, args: argparse.Namespace, folder: Path) -> Case:
    """`P,C,G` or `P,C,G,PROMPTS`; the default is as many prompts as make a step of PADDED_TOKENS, 8 at the most."""
    numbers = [int(number) for number in shape.split(",")]
    if len(numbers) not in (3, 4) or min(numbers) < 1:
        sys.exit(f"--shape {shape!r} is not valid; write P,C,G or P,C,G,PROMPTS, as in 64,32,8")
    prompt, completion, group = numbers[:3]
    prompts = numbers[3] if len(numbers) == 4 else min(8, max(1, PADDED_TOKENS // (group * (prompt + completion))))
    return Case(
        prompt=prompt,
        completion=completion,
        group=group,
        prompts=prompts,
        warmup=args.warmup,
        steps=args.steps,
        threads=args.threads,
        model=args.model or str(folder / "model"),
        prompts_file=str(folder / "prompts.jsonl"),
    )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
    args, console, results = arguments(), Console(), []
    about = machine(args.threads)
    console.print("  ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="step_vs_trl-") as folder:
        for shape in args.shape or ["64,32,8", "512,64,16"]:
            console.print(shape, highlight=False)
            results.append(compare(case_of(shape, args, Path(folder)), args, console))
    for result in results:
        trials = ", ".join(f"{role} {seconds:.3f} s" for role, seconds in result["trl_trials_s"].items())
        failed = "".join(f"; {role} does not run here" for role in result["trl_errors"])
        console.print(f"TRL's ways to generate, a step: {trials}{failed}", highlight=False)
    console.print(table_of(results))
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
