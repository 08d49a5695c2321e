"""What does each process hold of a model whose weights are cut? Counted bytes of every rank, while it reads its parts
and while it trains; and a plan for models and machines that are not here.

    python benchmarks/fsdp_memory.py [--ranks 4] [--hidden 768 --layers 12] [--all-parameters] [--shard-size 2]
    python benchmarks/fsdp_memory.py --plan 70b --nodes 8 --gpus 8

The first makes a random model (150M parameters unless told otherwise), writes it, and has processes over gloo read it
in parts and train some steps; `counted_bytes` counts. Beside the peak stands what may be there at once:

    parts       the rank's own, and of what is trained gradients and moments
    reading     parts, one part more (a file's slice, before it is copied), and the largest parameter where its
                constructor makes it
    training    parts, what stays gathered (embeddings, norm, LM head), of this again or of a layer twice as much
                (FSDP2 copies what comes into the weights), and what one process needs beside its weights for the
                rank's share of a batch

It exits with 1 where a peak is more. The plan cuts a model of that shape with torch's fake process group, one rank of
each place, and counts the parts that it gets: no weights are anywhere.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from counted_bytes import CountedBytes
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from groupwise.algo.loss import resolve_loss
from groupwise.config.chat import ChatConfig
from groupwise.config.lora import LoraSpec
from groupwise.config.world import World
from groupwise.model.backbone import unsplit_layers
from groupwise.model.load import LoadedModel, empty_model, load_model, load_tokenizer
from groupwise.model.parts import open_parts
from groupwise.train.fully_sharded import FullySharded
from groupwise.train.learner import Learner
from groupwise.train.ranks import Ranks, join
from groupwise.types import Sample

CPU, MIB, GB = torch.device("cpu"), 1 << 20, 10**9
SLACK = 2 * MIB  # indices, masks, losses, and what of a pass stands while a layer is gathered
SHAPES: dict[str, Any] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


@dataclass(frozen=True)
class Settings:
    """Of a configuration, what says how its model is loaded."""

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    quantization: str | None = None
    cast_lm_head: str = "auto"
    chat: ChatConfig = field(default_factory=ChatConfig)
    folder: Path = Path()


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of a rank: its parts, the most while it read them and while it trained, and what these may be."""

    rank: int
    parts: int
    reading: int
    may_read: int
    training: int
    may_train: int


def samples_of(count: int, length: int) -> list[Sample]:
    return [
        Sample(
            prompt_ids=tuple(range(1, 9)),
            completion_ids=tuple((7 * i + t) % 90 + 1 for t in range(length)),
            mask=(1,) * length,
            advantage=(-1.0) ** i,
            behaviour_logprobs=(-3.0,) * length,
        )
        for i in range(count)
    ]


def bytes_of(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def units(model: PreTrainedModel) -> tuple[int, int]:
    """Return bytes of the largest decoder layer, and of everything that is in none."""
    sizes = [bytes_of(layer.parameters()) for layer in unsplit_layers(model).values()]
    return max(sizes), bytes_of(model.parameters()) - sum(sizes)


def beside_weights(base: LoadedModel, samples: list[Sample], *, lora: LoraSpec | None) -> int:
    """Return the bytes that one process needs for a step beside weights, gradients and moments."""
    learner = Learner(base, lora=lora, attention="merged", threads=1)
    with CountedBytes() as counted:
        for tensor in (*learner.model.parameters(), *learner.model.buffers()):
            counted.note(tensor)
        there = counted.now
        counted.restart()
        learner.forward_backward(samples, resolve_loss("grpo"))
        return counted.peak - there - bytes_of(learner.parameters)


def held(
    ranks: Ranks, directory: Path, samples: list[Sample], *, lora: LoraSpec | None, shard_size: int | None, beside: int
) -> Held:
    """Return what a rank holds of a model, reading its parts and training three steps."""
    with CountedBytes() as counted:
        parts = open_parts(Settings(str(directory)), device=CPU)
        strategy = FullySharded(ranks, parts=parts, shard_size=shard_size)
        read = strategy.tree(parts.base, all_parameters=lora is None)[1]
        reading = counted.peak
        largest = max(each.numel() * each.element_size() for each in read.parameters())
        mine = bytes_of(p.to_local() for p in read.parameters() if isinstance(p, DTensor)) + bytes_of(read.buffers())
        slice_ = max(bytes_of([p.to_local()]) for p in read.parameters() if isinstance(p, DTensor))
        layer, rest = units(read)
        strategy.tree = lambda base, *, all_parameters: (base, read)  # type: ignore[method-assign]
        learner = Learner(parts.base, lora=lora, strategy=strategy, attention="merged", threads=1)
        counted.restart()
        for _ in range(3):
            learner.step(samples, resolve_loss("grpo"), learning_rate=1e-4)
        training = counted.peak
    trained = bytes_of(p.to_local() if isinstance(p, DTensor) else p for p in learner.parameters)
    kept = 4 * trained if lora is not None else 3 * trained  # an adapter itself; gradients and moments
    gradients = layer + rest if lora is None else 0  # whole ones of a layer and of the rest, before they are cut
    return Held(
        rank=ranks.rank,
        parts=mine + kept,
        reading=reading,
        may_read=mine + slice_ + largest + SLACK,
        training=training,
        may_train=mine + kept + rest + max(rest, 2 * layer) + gradients + beside + SLACK,
    )


def on_ranks(size: int, work: Any) -> list[Any]:
    """Return what `work(ranks)` returns in each of `size` forks."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    queue: Any = context.SimpleQueue()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
        ranks = join(World(rank=rank, size=size, local_rank=rank, local_size=size), device=CPU, deadline_s=300)
        queue.put(work(ranks))
        ranks.close()

    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(f"a rank ended with {process.exitcode}")
    return [queue.get() for _ in range(size)]


def write_model(directory: Path, *, hidden: int, layers: int, vocabulary: int) -> None:
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    load_tokenizer("starter").save_pretrained(directory)


# -- the plan ----------------------------------------------------------------------------------------------------------


def plan(name: str, *, world: int, shard_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (rank, bytes of its parts, of the largest layer, of what is in none) of a model in bfloat16."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = LlamaConfig(
        **SHAPES[name],
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    for rank in sorted({0, shard_size - 1, world - 1}):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        model = empty_model(config, dtype=torch.bfloat16)
        layer, rest = units(model)
        copies = world // shard_size
        names = {"mesh_dim_names": ("replicate", "shard")} if copies > 1 else {}
        mesh = init_device_mesh("cpu", (copies, shard_size) if copies > 1 else (shard_size,), **names)
        for module in unsplit_layers(model).values():
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        parameters: Any = list(model.parameters())
        yield rank, bytes_of(p.to_local() for p in parameters), layer, rest
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shard-size", type=int, default=None)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50000)
    parser.add_argument("--all-parameters", action="store_true")
    parser.add_argument("--plan", choices=[*SHAPES])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8)
    options = parser.parse_args()
    if options.plan:
        world = options.nodes * options.gpus
        for size in sorted({options.gpus, world}):
            for rank, parts, layer, rest in plan(options.plan, world=world, shard_size=size):
                gathered = rest + max(rest, 2 * layer)
                print(
                    f"{options.plan} in bfloat16, {world} ranks, shared by {size}: rank {rank} has "
                    f"{parts / GB:.2f} GB, gathers {gathered / GB:.2f}: {(parts + gathered) / GB:.2f} GB"
                )
        return 0
    lora = None if options.all_parameters else LoraSpec(rank=8, alpha=16)
    samples = samples_of(2 * options.ranks, 12)
    with TemporaryDirectory() as folder:
        place = Path(folder)
        write_model(place, hidden=options.hidden, layers=options.layers, vocabulary=options.vocabulary)
        base = load_model(folder, device="cpu", dtype="float32")
        whole, beside = bytes_of(base.model.parameters()), beside_weights(base, samples[:2], lora=lora)
        layer, rest = units(base.model)
        del base
        found = on_ranks(
            options.ranks,
            lambda ranks: held(ranks, place, samples, lora=lora, shard_size=options.shard_size, beside=beside),
        )
    print(
        f"whole {whole / MIB:.1f} MiB, a layer {layer / MIB:.1f}, in none {rest / MIB:.1f}; a pass {beside / MIB:.1f}"
    )
    print("rank    parts  reading <= may   training <= may   (MiB)")
    for each in sorted(found, key=lambda each: each.rank):
        numbers = (each.parts, each.reading, each.may_read, each.training, each.may_train)
        print(f"{each.rank:4}" + "".join(f"{number / MIB:10.1f}" for number in numbers))
    return int(any(each.reading > each.may_read or each.training > each.may_train for each in found))


if __name__ == "__main__":
    sys.exit(main())
