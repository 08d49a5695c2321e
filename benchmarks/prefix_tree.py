"""What does a prefix tree bring in training? Forked episodes with it and without, one forward and backward pass.

    python benchmarks/prefix_tree.py [--episodes 8] [--segments 4] [--shared 600] [--said 100] [--model starter]

One group of `--episodes` on a prompt of `--shared` tokens. The template rewrites history, so that each turn is a
segment of its own: it begins like the one before, keeps half of the `--said` tokens sampled there and goes on with as
many. With the tree each of these tokens is computed once; without, only equal prompts are shared. `--groups 8
--segments 1` are single turns of several groups with a common system prompt of `--shared` tokens. Each side runs in a
process of its own; prints packed tokens, seconds (median of `--passes` after one) and peak MiB above the loaded model.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time

import torch
from step_sides import MIB, peak, resident, restart_peak

from groupwise.algo import prefixes
from groupwise.algo.loss import resolve_loss
from groupwise.model.load import load_model
from groupwise.model.packing import micro_batches
from groupwise.train.learner import Learner
from groupwise.types import Sample


def samples_of(options: argparse.Namespace) -> list[Sample]:
    """The segments of all episodes, with random tokens and advantages."""
    g = torch.Generator().manual_seed(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 1000, (n,), generator=g).tolist())

    samples, system = [], ids(options.shared)
    for _ in range(options.groups):
        prompt = (*system, *ids(20))
        for _ in range(options.episodes):
            history, advantage = prompt, float(torch.randn((), generator=g))
            for _ in range(options.segments):
                said = ids(options.said)
                samples.append(
                    Sample(prompt_ids=history, completion_ids=said, mask=(1,) * len(said), advantage=advantage)
                )
                history = (*history, *said[len(said) // 2 :])
    return samples


def side(options: argparse.Namespace) -> dict[str, float]:
    """One of the two in this process."""
    if options.side == "without":
        prefixes.WORTH_SHARE = math.inf
    torch.set_num_threads(options.threads)
    learner = Learner(load_model(options.model), micro_tokens=options.micro_tokens)
    samples, spec = samples_of(options), resolve_loss("reinforce")
    before, seconds = resident(), []
    restart_peak()
    for _ in range(options.passes + 1):
        start = time.perf_counter()
        learner.forward_backward(samples, spec)
        if learner.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        learner.zero_grad()
    used = torch.cuda.max_memory_allocated() if learner.device.type == "cuda" else peak() - before
    batches = list(micro_batches(samples, token_budget=options.micro_tokens))
    return {
        "tokens": sum(len(batch.input_ids_S) for batch in batches),
        "micro-batches": len(batches),
        "seconds": statistics.median(seconds[1:]),
        "MiB": used / MIB,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = {"groups": 1, "episodes": 8, "segments": 4, "shared": 600, "said": 100}
    for name, default in {**shapes, "micro-tokens": 8192, "passes": 5, "threads": torch.get_num_threads()}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--side", choices=["with", "without"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(side(options)))
        return 0
    results = {}
    for name in ("without", "with"):
        command = [sys.executable, __file__, *sys.argv[1:], "--side", name]
        results[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{name:8}", "   ".join(f"{value:,.4g} {unit}" for unit, value in results[name].items()))
    print("ratio   ", "   ".join(f"{results['without'][k] / results['with'][k]:.2f} {k}" for k in results["with"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
