"""What the history, the ledger, the store and an undisturbed worker say about a place where processes were killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from groupwise.sdk.client import Client
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_schema import read_payload
from threads import THREADS

from .place import Place, is_torn, sha256
from .traffic import Traffic

WEIGHTS = "adapter_model.safetensors"
UNDISTURBED_S = 1800


def judge(place: Place, traffic: Traffic) -> dict[str, int]:
    """Counts of what must not be, and of what must. The server is up, every job has ended, the client has stopped."""
    rows = place.jobs()
    jobs = {row["id"]: row for row in rows}
    versions = place.versions()
    owners = Counter(_job_of(path) for path in versions.values())
    accepted = {(told["key"], told["job"]) for told in traffic.told("accepted")}
    seen = {version for told in traffic.told("listed") for version in told["versions"]}
    served = {version for told in traffic.told("sampled") for version in told["versions"]}
    chosen = {told["version"] for told in traffic.told("activated")} | {
        told["active"] for told in traffic.told("listed")
    }
    return {
        "accepted_and_lost": len({job for _, job in accepted} - jobs.keys()),
        "not_completed": sum(row["state"] != "completed" for row in rows),
        "published_twice": sum(count > 1 for count in owners.values()),
        "versions_of_nobody": len(owners.keys() - jobs.keys()),
        "jobs_with_the_wrong_version": sum(_job_of(versions[row["version"]]) != row["id"] for row in rows),
        "torn": sum(map(is_torn, versions.values())),
        "listed_and_gone": len(seen - versions.keys()),
        "served_or_active_and_gone": len((served | chosen) - versions.keys() - {"base"}),
        "keys_with_two_jobs": len(accepted) - len({key for key, _ in accepted}),
        "jobs_without_a_key": len(jobs.keys() - {job for _, job in accepted}),
        "keys_that_changed_their_job": sum(_again(place, traffic, key) != job for key, job in sorted(accepted)),
        "not_servable": len(_not_servable(place, versions)),
        "wrong_bytes": len(differing(place)),
        "faults_of_state": len(place.faults_of_state()),
        "left_over": len(left_over(place)),
        "wrong_answers": len(traffic.wrong),
        "jobs": len(jobs),
        "versions": len(versions),
        "begun_again": sum(row["attempt"] > 1 for row in rows),
    }


def left_over(place: Place) -> list[str]:
    """What a crash leaves and a start without open jobs has to remove."""
    patterns = (
        ".staging*",
        "adapters/.staging*",
        "checkpoints/*",
        "spool/.*",
        "adapters/.quarantine/*",
    )
    ids = {row["id"] for row in place.jobs()}
    found = [str(path) for pattern in patterns for path in place.state.glob(pattern)]
    return found + [str(path) for path in place.state.glob("spool/*.payload") if path.stem not in ids]


def _job_of(version: Path) -> str:
    return json.loads((version / "groupwise.json").read_bytes())["job"]


def _again(place: Place, traffic: Traffic, key: str) -> str:
    """The job that a key names now."""
    kind, data, config = traffic.bodies[key]
    with Client(place.url) as client:
        post: Any = client.train_grpo if kind == "grpo" else client.train_sft
        return post(data, idempotency_key=key, **config).job_id


def _not_servable(place: Place, versions: dict[str, Path]) -> list[str]:
    """Each version is loaded by the server and answers."""
    with Client(place.url) as client:
        return [
            version
            for version in versions
            if client.sample(["What is 1 + 1?"], n=1, max_tokens=2, adapter=version)[0].completions[0].adapter
            != version
        ]


def differing(place: Place) -> list[str]:
    """The jobs whose adapter is not, byte for byte, what a worker makes of the same jobs if nobody disturbs it, or
    whose sidecar is another but for the job's id and the time."""
    state, rows = place.log.parent / "undisturbed", place.jobs()
    ledger = Ledger(state / "ledger.db")
    twins = {}
    for row in rows:
        twin, _ = ledger.submit(
            kind=row["kind"],
            adapter=row["adapter"],
            config=json.loads(row["config"]),
            summary=json.loads(row["summary"]),
            payload=read_payload(place.state / "spool" / f"{row['id']}.payload"),
            steps=row["steps"],
            auto_load=False,
            max_queued=len(rows),
        )
        twins[row["id"]] = twin.id
    _work(state, ledger)
    mine, theirs = place.versions(), Place(state.parent, state=state).versions()
    made = {id: theirs[str(ledger.job(twin).version)] for id, twin in twins.items()}
    ledger.close()
    return [
        f"job {row['id']}, {row['version']}"
        for row in rows
        if sha256(mine[row["version"]] / WEIGHTS) != sha256(made[row["id"]] / WEIGHTS)
        or _told(mine[row["version"]]) != _told(made[row["id"]])
    ]


def _told(version: Path) -> dict[str, Any]:
    return {**json.loads((version / "groupwise.json").read_bytes()), "job": None, "created": None}


def _work(state: Path, ledger: Ledger) -> None:
    """Let a worker do every job of a ledger."""
    command = [sys.executable, "-m", "groupwise.run.worker", "--state", str(state), "--model", "starter"]
    command += ["--dtype", "float32", "--device", "cpu", "--threads", "1"]
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": THREADS}
    with (state / "log").open("wb") as log:
        worker = subprocess.Popen(command, env=os.environ | quiet, stderr=log)
        try:
            deadline = time.monotonic() + UNDISTURBED_S
            while not all(job.state.is_final for job in ledger.jobs()):
                assert worker.poll() is None and time.monotonic() < deadline, (state / "log").read_text()
                time.sleep(0.05)
        finally:
            worker.terminate()
            worker.wait()
