"""Is the estimate of a micro-batch's memory right? Estimated beside measured bytes, for several models and shapes.

    python benchmarks/memory.py [--only adapter] [--quick] [--device cuda]

One forward and backward pass of a full micro-batch, each case in a process of its own. `live` is the most bytes that
torch's CPU allocator had given out at once, by its own account (torch.profiler, profile_memory; on a GPU
`torch.cuda.max_memory_allocated`); `resident` is how much the process grew at its peak, which the system's allocator
and the kernels' own buffers have a part in; `weights` are the bytes of all parameters as they are stored, and `process`
is all memory of the process at its peak. Weights, gradients of earlier passes and optimizer states are there before and
are in neither. Exits with 1 where the estimate is more than 10 % off a live peak of more than 100 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from step_sides import MIB, peak, resident, restart_peak
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.model.activations import ModelSize, PackedShape, Training, activation_bytes
from groupwise.model.attention import SharedPrompts
from groupwise.model.backbone import is_lean
from groupwise.model.load import LoadedModel, load_model, wrap_model
from groupwise.model.packing import MicroBatch, micro_batches
from groupwise.model.quantized import product_bytes
from groupwise.train.learner import Learner
from groupwise.types import Sample

TOLERANCE, LARGE = 0.10, 100_000_000
WHOLE = 1 << 22  # tokens: everything is one micro-batch
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}
LARGEST = "qwen3 0.6B"


@dataclass(frozen=True, kw_only=True)
class Case:
    """`shape` is prompts, prompt tokens, completion tokens, group size; uneven completions are 1 to so many long."""

    name: str
    model: str = "qwen3 25M"
    dtype: torch.dtype = torch.float32
    shape: tuple[int, int, int, int] = (2, 128, 128, 8)
    rank: int | None = 16
    dropout: float = 0.0
    checkpointing: bool = False
    uneven: bool = False
    quantization: str | None = None


def cases() -> Iterator[Case]:
    for on in (False, True):
        mark = ", checkpointed" if on else ""
        for shape in ((32, 26, 64, 8), (8, 64, 256, 8)):
            yield Case(name=f"starter{mark}", model="starter", shape=shape, checkpointing=on)
        for shape in ((2, 128, 128, 8), (8, 64, 32, 8), (1, 512, 64, 16), (1, 300, 400, 4), (4, 600, 20, 4)):
            yield Case(name=f"adapter{mark}", shape=shape, checkpointing=on)
        yield Case(name=f"adapter, uneven{mark}", shape=(4, 128, 256, 8), uneven=True, checkpointing=on)
        yield Case(name=f"adapter, 16 bits{mark}", dtype=torch.bfloat16, checkpointing=on)
        yield Case(name=f"adapter, 16 bits{mark}", dtype=torch.bfloat16, shape=(1, 512, 64, 16), checkpointing=on)
        yield Case(name=f"adapter, dropout{mark}", dropout=0.1, checkpointing=on)
        yield Case(name=f"adapter, Llama{mark}", model="llama 25M", checkpointing=on)
        for shape in ((2, 128, 128, 8), (1, 512, 64, 16)):
            yield Case(name=f"all parameters{mark}", rank=None, shape=shape, checkpointing=on)
    for kind in (None, "int8", "nf4"):
        yield Case(
            name=f"0.6B, {kind or 'bfloat16'}, checkpointed",
            model=LARGEST,
            dtype=torch.bfloat16,
            shape=(1, 128, 256, 4),
            checkpointing=True,
            quantization=kind,
        )


def base_of(case: Case, device: str) -> LoadedModel:
    starter = load_model("starter", device=device, dtype=str(case.dtype).removeprefix("torch."))
    if case.model == "starter":
        return starter
    if case.model == LARGEST:
        return saved_base(case, device)
    config = (Qwen3Config if case.model.startswith("qwen3") else LlamaConfig)(**SIZES)
    model = AutoModelForCausalLM.from_config(config).to(device=starter.device, dtype=case.dtype)
    return wrap_model(model, starter.tokenizer, name=case.model)


def saved_base(case: Case, device: str) -> LoadedModel:
    """Random weights in Qwen3-0.6B's shape, made and saved by another process, loaded as a run would load them."""
    with TemporaryDirectory() as folder:
        make = f"import subjects, pathlib; subjects.save_shape('0.6B', pathlib.Path({folder!r}), dtype='bfloat16')"
        subprocess.run([sys.executable, "-c", make], check=True, capture_output=True, cwd=Path(__file__).parent)
        kind = str(case.dtype).removeprefix("torch.")
        return load_model(folder, device=device, dtype=kind, quantization=case.quantization)


def samples_of(case: Case) -> list[Sample]:
    """Random tokens, advantages and lengths."""
    prompts, prompt, completion, group = case.shape
    draw, samples = random.Random(0), []
    for _ in range(prompts):
        start = tuple(draw.choices(range(1000), k=prompt))
        for _ in range(group):
            said = tuple(draw.choices(range(1000), k=draw.randint(1, completion) if case.uneven else completion))
            mask, logprobs = (1,) * len(said), (-1.0,) * len(said)
            samples.append(
                Sample(
                    prompt_ids=start,
                    completion_ids=said,
                    mask=mask,
                    advantage=draw.gauss(0, 1),
                    behaviour_logprobs=logprobs,
                )
            )
    return samples


def shape_of(batch: MicroBatch) -> PackedShape:
    layout = batch.layout
    assert isinstance(layout, SharedPrompts)
    return PackedShape(
        tokens=len(batch.input_ids_S),
        loss_tokens=len(batch.target_N),
        prompts=layout.P,
        prompt_tokens=layout.split,
        longest_prompt=layout.L,
        prompt_cells=layout.P * layout.L,
        longest_completion=layout.C,
        completion_cells=layout.P * layout.G * layout.C,
    )


def live_peak(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes given out at once while `work` runs, of those that it asked for."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events: Any = profile.profiler
    changes = [(e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def measure(case: Case, device: str = "cpu") -> dict[str, int]:
    """In this process."""
    torch.set_num_threads(1)
    base, samples, loss = base_of(case, device), samples_of(case), resolve_loss("grpo")
    lora = None if case.rank is None else LoraSpec(rank=case.rank, dropout=case.dropout)
    learner = Learner(base, lora=lora, micro_tokens=WHOLE, gradient_checkpointing=case.checkpointing)
    learner.forward_backward(samples[:1], loss)  # makes the gradients
    before = resident()
    restart_peak()
    learner.forward_backward(samples, loss)
    most = peak()
    grown = most - before
    (batch,) = micro_batches(samples, token_budget=WHOLE, device=base.device)
    value_bytes = base.model.dtype.itemsize
    stored = sum(parameter.numel() * parameter.itemsize for parameter in base.model.parameters())
    size = ModelSize.of(base.model.config, parameters=0, value_bytes=value_bytes, lean=is_lean(base.model))
    training = Training(rank=case.rank, dropout=case.dropout > 0, checkpointing=case.checkpointing)
    return {
        "weights": stored,
        "process": most,
        "estimate": activation_bytes(size, shape_of(batch), training) + product_bytes(base.model),
        "live": live_peak(lambda: learner.forward_backward(samples, loss), base.device),
        "resident": grown,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="every third case")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    listed = list(cases())
    if options.case is not None:
        print(json.dumps(measure(listed[options.case], options.device)))
        return 0
    heads = f"{'weights':>9}{'process':>9}{'estimate':>10}{'live':>8}{'off by':>8}{'resident':>10}{'off by':>8}"
    print(f"{'':32}{'P, L, C, G':>18}{heads}  (MiB)")
    wrong = 0
    for i, case in list(enumerate(listed))[:: 3 if options.quick else 1]:
        if options.only not in case.name:
            continue
        command = [sys.executable, __file__, "--case", str(i), "--device", options.device]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(result.stdout.splitlines()[-1])
        live, grown = (found["estimate"] / found[key] - 1 for key in ("live", "resident"))
        wrong += abs(live) > TOLERANCE and found["live"] > LARGE
        row = [f"{found[key] / MIB:.0f}" for key in ("estimate", "live", "resident", "weights", "process")]
        shape = ", ".join(map(str, case.shape))
        print(
            f"{case.name:32}{shape:>18}{row[3]:>9}{row[4]:>9}{row[0]:>10}{row[1]:>8}{live:>+8.1%}{row[2]:>10}{grown:>+8.1%}",
            flush=True,
        )
    print("all within 10 %" if not wrong else f"{wrong} off by more than 10 %")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
