"""The two sides of `step_vs_trl.py`: one of them, or the preparation of both, in a process of its own.

    python benchmarks/step_sides.py ROLE OPTIONS FOLDER        leaves FOLDER/result.json

Neither side is changed: what is timed is wrapped from outside. A step's time is the interval between the ends of two
steps, so everything that a step costs is in it. On Groupwise's side that is `loop.train` itself, with publishing the
adapter version and writing metrics and rollouts to disk; TRL logs and saves nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

RANK, ALPHA, LEARNING_RATE, MAX_GRAD_NORM = 16, 32, 1e-4, 1.0
PREPARE, GROUPWISE, TRL_GENERATE, TRL_CONTINUOUS = "prepare", "groupwise", "trl generate", "trl continuous batching"
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
    natural: bool = False  # the demo's own prompts, and completions that end where they end
    kl: float = 0.0  # weight of the KL to the base model in the loss (k3); 0 has no reference pass
    at_once: int | None = None  # completions in one forward of TRL's, at most; None: all
    checkpointing: bool = False  # TRL's
    device: str = "cpu"
    dtype: str = "float32"

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

    @property
    def on_gpu(self) -> bool:
        return self.case.device.startswith("cuda")

    def model_is_loaded(self) -> None:
        """From here on memory counts: the process's, or what torch has given out on the GPU."""
        if self.on_gpu:
            import torch

            self.loaded = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            self.loaded = resident()
            restart_peak()

    def peak(self) -> int:
        """The most bytes since then."""
        if self.on_gpu:
            import torch

            return torch.cuda.max_memory_allocated()
        return peak()

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
        if self.case.natural:
            if len(completions) != self.case.rows or max(map(len, completions)) > self.case.completion:
                sys.exit(f"{len(completions)} completions of at most {max(map(len, completions))} tokens: not the work")
            return
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
            "peak_mib": (self.peak() - self.loaded) / MIB,
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
    from groupwise.config.run import parse_config
    from groupwise.run import assemble, loop, open_base
    from groupwise.run.plan import make_plan
    from groupwise.run.stop_request import StopRequest
    from groupwise.run.training_run import TrainingRun
    from groupwise.store.rundir import open_run_dir
    from groupwise.store.tracking import open_trackers

    recorder = Recorder(case)
    config = parse_config(_groupwise_config(case, folder))
    load_configured = open_base.load_configured

    def load_and_say(*args: Any, **kwargs: Any) -> Any:
        base = load_configured(*args, **kwargs)
        recorder.model_is_loaded()
        return base

    open_base.load_configured = load_and_say
    plan = make_plan(config)
    with (
        open_run_dir(config) as (run_dir, _),
        assemble.open_components(plan) as parts,
        open_trackers(config.tracking, run_dir=run_dir, run_name=run_dir.name, resolved_config={}) as tracking,
    ):
        # completions go on to their last token, and groups of equal rewards are trained on: the peer does both
        parts.batches.params = replace(parts.batches.params, ignore_eos=not case.natural)
        parts.batches.keep_flat = True
        display: Any = StepEnds(recorder)
        running = TrainingRun(plan, parts, run_dir, tracking=tracking, display=display)
        _watch_groupwise(recorder, parts, running)
        asyncio.run(loop.train(running, None, stop=StopRequest()))
        return recorder.result(sum(p.numel() for p in parts.learner.parameters))


def _groupwise_config(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "model": case.model,
        "dtype": case.dtype,
        "device": case.device,
        "run_dir": str(folder),
        "folder": str(Path(__file__).parent.resolve()),
        "data": {"source": case.prompts_file, "shuffle": False, "raw": not case.natural},
        "rewards": ["step_sides:even_ids"],
        "scoring": {"workers": 0},
        "rollout": {
            "prompts_per_step": case.prompts,
            "group_size": case.group,
            "max_tokens": case.completion,
            "refill": 1.0,
            "batch_rows": max(256, case.rows),
        },
        "algo": {"kl": "k3", "kl_coeff": case.kl} if case.kl else {},
        "train": {
            "steps": case.warmup + case.steps,
            "learning_rate": LEARNING_RATE,
            "warmup_steps": 0,
            "max_grad_norm": MAX_GRAD_NORM,
            "lora": {"rank": RANK, "alpha": float(ALPHA)},
        },
    }


def _watch_groupwise(recorder: Recorder, parts: Any, running: Any) -> None:
    submit, step = parts.engine.submit, parts.learner.step

    def timed_submit(requests: Sequence[Any]) -> list[Any]:
        started, futures = time.perf_counter(), submit(requests)
        missing = set(range(len(futures)))

        def done(i: int) -> None:
            missing.discard(i)
            if not missing:
                recorder.add("generation", started)

        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: done(i))
        return futures

    def timed_step(samples: Sequence[Any], *args: Any, **kwargs: Any) -> Mapping[str, float]:
        started = time.perf_counter()
        metrics = step(samples, *args, **kwargs)
        recorder.add("training", started)
        recorder.grad_norms.append(metrics["optim/grad_norm"])
        if len(samples) != recorder.case.rows:
            sys.exit(f"{len(samples)} completions were trained on; agreed were {recorder.case.rows}")
        recorder.check_completions([s.prompt_ids for s in samples], [s.completion_ids for s in samples])
        return metrics

    parts.engine.submit, parts.learner.step = timed_submit, timed_step
    running.publish_and_sync = recorder.timed("publish", running.publish_and_sync)


class StepEnds:
    """A display that only notes when steps end."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def phase(self, name: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def health(self, events: Any, standing: Any) -> None:
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
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=getattr(torch, case.dtype)).to(case.device)
    recorder.model_is_loaded()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=even_ids,
        args=trl_config(case, folder, continuous=continuous),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    _watch_trl(recorder, trainer)
    trainer.train()
    return recorder.result(sum(p.numel() for p in trainer.model.parameters() if p.requires_grad))


def trl_config(case: Case, folder: Path, *, continuous: bool) -> Any:
    """TRL's arguments for this work."""
    from transformers.generation import ContinuousBatchingConfig
    from trl import GRPOConfig

    # completions of exactly this length; continuous batching has no such logits processor, so nothing is an end there
    options: dict[str, Any] = {} if case.natural else {"generation_kwargs": {"min_new_tokens": case.completion}}
    if continuous:  # a cache that fits this batch; by default it would take half of the machine's memory
        page = 32
        pages = case.rows * math.ceil((case.prompt + case.completion) / page + 1)
        tokens = max(case.prompts * case.group, min(8192, case.rows * case.prompt))
        named = "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
        cache = {named: page, "num_blocks": pages, "max_batch_tokens": tokens}
        options = {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": cache,
            "generation_kwargs": {} if case.natural else {"eos_token_id": None},
        }
    passes = next(n for n in range(case.rows // (case.at_once or case.rows), case.rows + 1) if case.rows % n == 0)
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=case.device == "cpu",
        bf16=case.dtype == "bfloat16",
        fp16=False,
        gradient_checkpointing=case.checkpointing,
        per_device_train_batch_size=case.rows // passes,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes,
        num_generations=case.group,
        max_completion_length=case.completion,
        temperature=1.0,
        beta=case.kl,
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
        trained, agreed = int(batch["completion_mask"].sum()), recorder.case.rows * recorder.case.completion
        if trained != agreed and not recorder.case.natural:
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


def prepare(case: Case, *, hidden: int, layers: int) -> dict[str, Any]:
    """Write the model, unless there is one, and prompts of exactly `case.prompt` tokens."""
    from subjects import write_model
    from transformers import AutoTokenizer

    if not Path(case.model).exists():
        context = max(1024, case.prompt + case.completion)
        write_model(Path(case.model), hidden=hidden, layers=layers, context=context)
    if case.natural:
        from groupwise.tasks.starter.tasks import prompts

        rows = prompts(["add", "sub"], style="think", n=case.prompts * (case.warmup + case.steps))
        Path(case.prompts_file).write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
        return {}
    tokenizer, digits = AutoTokenizer.from_pretrained(case.model), random.Random(0)
    with Path(case.prompts_file).open("w", encoding="utf-8") as file:
        for _ in range(case.prompts * (case.warmup + case.steps)):
            text = "".join(digits.choices("0123456789", k=case.prompt))
            if (length := len(tokenizer(text)["input_ids"])) != case.prompt:
                sys.exit(f"{case.prompt} digits are {length} tokens of this tokenizer; it must have one per digit")
            file.write(json.dumps({"prompt": text}) + "\n")
    return {}


def main(role: str, options: Mapping[str, Any], folder: Path) -> None:
    import torch

    case = Case(**options["case"])
    torch.set_num_threads(case.threads)
    if role == PREPARE:
        result = prepare(case, hidden=options["hidden"], layers=options["layers"])
    elif role == GROUPWISE:
        result = run_groupwise(case, folder)
    else:
        result = run_trl(case, folder, continuous=role == TRL_CONTINUOUS)
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
