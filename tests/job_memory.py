"""A job in a process whose memory is limited by the kernel, as a script: `python job_memory.py MODEL STATE MEBIBYTES`.

The limit (RLIMIT_AS) is so many MiB of address space above what the process has when the model is loaded. Prints what
became of the job, as JSON.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from groupwise.model.load import load_model
from job_place import Place

COMPLETIONS, LENGTH = 16, 200


def payload(groups: int = 4) -> dict[str, Any]:
    """Groups of long completions; each group is a few thousand tokens."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(280) for _ in range(count)]

    def completion(number: int) -> dict[str, Any]:
        return {"ids": ids(LENGTH), "logprobs": [-2.0] * LENGTH, "reward": float(number % 2)}

    return {
        "groups": [
            {"prompt_ids": ids(20), "completions": [completion(i) for i in range(COMPLETIONS)]} for _ in range(groups)
        ]
    }


def address_space() -> int:
    """Of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(model: str, state: str, mebibytes: str) -> None:
    torch.set_num_threads(1)
    place = Place(Path(state), load_model(model, device="cpu", dtype="float32"))
    job = place.submit(payload(), micro_tokens=100_000)
    limit = address_space() + (int(mebibytes) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    place.worker.do(place.lease())
    job = place.ledger.job(job.id)
    found = {"version": job.version, "error": job.error, "micro_tokens": job.micro_tokens, "attempt": job.attempt}
    print(json.dumps(found | {"messages": place.messages(job)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
