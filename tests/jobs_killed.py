"""Jobs that a worker trains at once, and SIGKILL: `python jobs_killed.py ROOT CAUSE FAULT...`.

For each fault a forked child does four jobs, until it is killed; the jobs in its hands are taken back for CAUSE, as the
supervisor does, and another child does what is left. The first line is of a child that nobody kills. A line of JSON
each: how the children ended, how many jobs the first had in its hands, and the digests of what all jobs left.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from groupwise.model.load import load_model
from groupwise.store.files import WEIGHTS
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_attempts import Cause
from groupwise.train.together import JointPasses
from job_place import PROMPTS, Place, examples, groups, kill_children


def main(root: Path, cause: str, wanted: Sequence[str]) -> None:
    torch.set_num_threads(1)
    base = load_model(str(root / "model"), device="cpu", dtype="float32")
    template = root / "template"

    def prepare() -> None:
        place = Place(template, base)
        place.submit(groups(logprob=-2.0), adapter="math", iterations=4, checkpoint_interval=2)
        place.submit(groups(PROMPTS[::-1]), adapter="sql", lora_rank=4, iterations=4, checkpoint_interval=1)
        place.submit(examples(), adapter="talk", kind="sft", epochs=2, batch_size=2)
        place.submit(groups(PROMPTS[:1]), adapter="math", iterations=2)
        place.ledger.close()

    def serve(state: Path) -> None:
        Place(state, base, passes=JointPasses(at_once=2)).serve()

    for killed in kill_children(root, wanted, prepare, serve, cause=Cause(cause)):
        told = {"fault": killed.fault, "ended": killed.ended, "in_hand": killed.in_hand}
        print(json.dumps({**told, **_look(killed.state)}), flush=True)


def _look(state: Path) -> dict[str, object]:
    ledger = Ledger(state / "ledger.db")
    jobs = ledger.jobs()
    paths = [*state.glob(f"adapters/*/v*/{WEIGHTS}"), *state.glob("adapters/.optimizer/*/*/learner.safetensors")]
    left = {str(path.relative_to(state)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    ledger.close()
    assert all(job.version for job in jobs) and not list(state.glob("checkpoints/*"))
    return {
        "left": {name: digest for name, digest in sorted(left.items()) if name.endswith(WEIGHTS)},
        "alone": sum(job.alone for job in jobs),
        "begun_again": sum(job.attempt > 1 for job in jobs),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
