"""A state directory as a server has it after a busy week: hundreds of versions, thousands of jobs, many rollouts.

    fill(state, versions=500, jobs=5000, rollouts=100_000)

All of it is written by the store and the ledger, as a server and its worker would; only nothing was sampled or trained.
"""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path

from groupwise.config.run import LoraSpec
from groupwise.model.load import load_model
from groupwise.store.adapters import AdapterStore
from groupwise.store.feedback import FeedbackLog
from groupwise.store.files import Provenance
from groupwise.store.ledger import Ledger, RolloutRecord
from groupwise.train.lora import add_lora, save_lora
from groupwise.types import BASE, PolicyVersion

NAMES = ("sums", "carries", "support", "sql", "tone", "summaries", "code-review", "lesson")
NOTES = ("good at sums, weak at carries", "the one in production since May", "collapsed: repeats itself")
CONFIG = {"output_name": "sums", "learning_rate": 1e-3, "iterations": 4, "seed": 0}
AT_A_TIME = 2000


def fill(state: Path, *, versions: int, jobs: int, rollouts: int, decisions: int = 0, scratch: Path) -> None:
    """Write all of it. `scratch` is a directory that does not exist yet."""
    state.mkdir(parents=True, exist_ok=True)
    base = load_model("starter")
    config = add_lora(base.model, LoraSpec(rank=1, alpha=1.0, targets=["down_proj"]), seed=0)
    scratch.mkdir()
    save_lora(base.model, config, scratch, base_name="starter")
    _publish(AdapterStore(state / "adapters"), scratch, versions, base_hash=base.hash)
    ledger = Ledger(state / "ledger.db")
    for i in range(jobs):
        _job(ledger, i)
    for start in range(0, rollouts, AT_A_TIME):
        ledger.save_rollouts([_rollout(i) for i in range(start, min(start + AT_A_TIME, rollouts))])
    book = FeedbackLog(ledger)
    for i in range(decisions):
        data = {"version": f"sums@{i + 1}", "against": f"sums@{i}"}
        book.note(*(("gate_refused", "a mean below") if i % 2 else ("gate_passed", "a mean above")), data=data)
    ledger.close()


def _publish(store: AdapterStore, adapter: Path, count: int, *, base_hash: str) -> None:
    """The first name has half of the versions, in one chain; each other begins from a version of it."""
    newest: dict[str, PolicyVersion] = {}
    for i in range(count):
        name = NAMES[0] if i % 2 == 0 else NAMES[1 + (i // 2) % (len(NAMES) - 1)]
        metrics = {"reward/mean": 1 - math.exp(-i / count), "loss/policy": 0.01, "kl/mean": i / count / 10}
        parent = newest.get(name) or newest.get(NAMES[0]) or PolicyVersion.base()
        info = Provenance(
            base_model="starter", base_hash=base_hash, parent=parent, step=i, metrics=metrics, job=f"{i:032x}"
        )
        newest[name] = store.publish(name, lambda to: [shutil.copy(file, to) for file in adapter.iterdir()], info=info)
        if i % 25 == 0:
            store.write_note(newest[name], f"{NOTES[i // 25 % len(NOTES)]} ({i})")


def _job(ledger: Ledger, i: int) -> None:
    name, reward = NAMES[i % len(NAMES)], (i % 97) / 97
    summary = {"groups": 16, "completions": 128, "groups_equal": i % 5, "reward_mean": reward, "reward_stderr": 0.02}
    made = {"kind": "grpo", "adapter": name, "config": {**CONFIG, "output_name": name, "seed": i}, "summary": summary}
    kept = {"idempotency_key": f"{i}", "fingerprint": "x"}  # as the SDK sends: such a job is kept for a day at least
    job, _ = ledger.submit(**made, **kept, payload=b"{}", steps=2, auto_load=False, id=f"{i:032x}")
    lease = ledger.lease("filler")
    assert lease is not None and lease.job.id == job.id
    ledger.progress(lease, phase="training", step=2, metrics={"loss/policy": 0.01, "reward/mean": reward})
    if i % 11 == 0:
        ledger.fail(lease, {"code": "diverged", "message": "the loss is not a number", "hint": "a lower rate"})
    else:
        ledger.published(lease, f"{name}@{1 + i // len(NAMES)}")


def _rollout(i: int) -> RolloutRecord:
    random_ = random.Random(i)
    a, b = random_.randrange(1000), random_.randrange(1000)
    text = f"{a} + {b}: add the ones, carry, then the tens. The answer is {a + b}."
    ids = tuple(random_.randrange(3, 60) for _ in range(24))
    return RolloutRecord(
        id=f"{i:032x}",
        prompt_ids=tuple(range(3, 20)),
        completion_ids=ids,
        logprobs=tuple(-random_.random() for _ in ids),
        version=BASE if i % 3 else f"sums@{1 + i % 50}",
        temperature=1.0,
        finish_reason="length" if i % 7 == 0 else "stop",
        text=text,
    )
