"""Print what a run would choose and take on GPUs that are not here (`groupwise check FILE --gpus 1x80`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from groupwise.cli.output import duration, print_pairs, say
from groupwise.run.gpu_fit import GpuFit


def fit_as_json(found: GpuFit) -> dict[str, Any]:
    low, high = found.hours
    return {
        "gpus": asdict(found.cards),
        "fits": found.fits,
        "parameters": found.parameters,
        "trained": found.trained,
        "learners": found.learners,
        "samplers": found.samplers,
        "attention": found.attention,
        "micro_tokens": found.micro_tokens,
        "rows": found.rows,
        "vllm_share": found.vllm_share,
        "vllm_sleeps": found.vllm_sleeps,
        "longest_prompt": found.prompt,
        "memory_bytes": asdict(found.needed) | {"total": found.needed.total, "available": found.available},
        "hours": [low, high],
        "step_seconds": list(found.step_seconds),
        "controller_seconds": found.controller,
    }


def print_fit(console: Console, found: GpuFit) -> None:
    config, cards = found.config, found.cards
    train, assumed = config.train, " (assumed: rollout.max_prompt_tokens is not set)" if found.assumed else ""
    parts = {name.replace("_", " "): size for name, size in asdict(found.needed).items() if size}
    listed = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in sorted(parts.items(), key=lambda each: -each[1]))
    who = f"{found.learners} train" + (f", {found.samplers} sample (vLLM)" if found.samplers else "")
    if found.learners > 1 and found.rows:
        who += "; the first samples, and the others wait meanwhile (with engine: vllm another one does)"
    sampling = f"local engine, {found.rows} completions at once at their longest"
    if config.engine == "vllm":
        share = found.vllm_share
        sampling = "vLLM" if share is None else f"vLLM on the same GPU, vllm.gpu_memory_utilization {share:g}"
        sampling += ", asleep while it trains" if found.vllm_sleeps else ""
    sampling = "none: what the dataset says is learned" if config.never_samples else sampling
    low, high = found.hours
    time = f"{low:,.0f} to {high:,.0f} hours" if high >= 1 else f"{duration(3600 * low)} to {duration(3600 * high)}"
    verdict = "fits" if found.fits else "does not fit"
    machines = f"{cards.nodes} x " if cards.nodes > 1 else ""
    rows = [
        ("model", f"{config.model}: {_counted(found.parameters)} parameters, {_counted(found.trained)} trained"),
        ("GPUs", f"{machines}{cards.count} x {cards.gib:g} GiB: {who}"),
        ("sampling", sampling),
        (
            "training",
            f"attention {found.attention}, micro-batches of {found.micro_tokens:,} tokens"
            + (", gradient checkpointing" if train.gradient_checkpointing else "")
            + f"; prompts of at most {found.prompt:,} tokens{assumed}",
        ),
        (
            "memory",
            f"{verdict}: {found.needed.total / 2**30:.1f} of {found.available / 2**30:.1f} GiB in the worst batch: "
            f"{listed}",
        ),
    ]
    if found.fits:
        measured = f"{time} for {train.steps} steps on H100s, from what was measured on one (docs/performance.md); "
        rows.append(("time", f"{measured}the lower end is for completions of a quarter of rollout.max_tokens"))
    if found.controller and cards.total > 1:
        rows.append(("rank 0", _controller(found)))
    print_pairs(rows, console=console)
    if not found.fits:
        say(f"error: the run does not fit {machines}{cards.count} x {cards.gib:g} GiB: {_smaller(found)}")


def _controller(found: GpuFit) -> str:
    """Return what rank 0's processor does in the longest step, and what part of it that is."""
    seconds = sum(found.controller.values())
    listed = ", ".join(f"{name} {each:.2g}" for name, each in sorted(found.controller.items(), key=lambda x: -x[1]))
    share = seconds / (found.step_seconds[1] + seconds)
    return (
        f"{seconds:.2g} s of one core in a step of {found.most_tokens:,} tokens ({share:.1%} of it), as measured: "
        f"{listed}; {found.most_tokens / seconds:,.0f} tokens/s at most"
    )


def _counted(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e8 else f"{parameters / 1e6:.1f}M"


def _smaller(found: GpuFit) -> str:
    """Return what would make a run smaller: of the largest parts as many as are together what is too much."""
    checkpointed = "" if found.config.train.gradient_checkpointing else "set train.gradient_checkpointing: true, or "
    nf4 = "" if found.weights_nf4 is None else f"set quantization: nf4 ({found.weights_nf4 / 2**30:.1f} GiB), or "
    ways = {
        "kv_cache": "lower rollout.cache_gb, rollout.batch_rows or rollout.max_tokens",
        "activations": f"{checkpointed}lower train.micro_tokens or rollout.max_tokens",
        "weights": f"{nf4}take a smaller model, or GPUs with more memory",
        "trained": "train an adapter (train.lora), or of a lower rank",
        "shards": "use more GPUs (train.parallel: fsdp)",
    }
    if found.vllm_share == 0:
        return "training leaves too little for vLLM; use engine: local, or give vLLM a GPU of its own"
    train = found.config.train
    if train.parallel == "fsdp" and train.shard_size is not None and train.shard_size < found.learners:
        shared = f"share a copy among more GPUs (train.shard_size: {found.learners}), or "
        ways |= {name: f"{shared}{ways[name]}" for name in ("shards", *(["trained"] if train.lora is None else []))}
    sizes, said, left = asdict(found.needed), list[str](), found.needed.total - found.available
    for name in sorted((name for name in ways if sizes.get(name)), key=lambda name: -sizes[name]):
        if left > 0:
            said.append(ways[name])
            left -= sizes[name]
    return "; ".join(said)
