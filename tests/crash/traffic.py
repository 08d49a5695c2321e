"""A client that goes on while servers come and go: it submits, looks, samples, activates, and writes down what it was
told. A line of the history is appended when the answer is there, so that each is a promise of the server's.

What a request of it may meet is a server that is away or starting; any other refusal is noted as wrong.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupwise.errors import RemoteError
from groupwise.sdk.client import Client

AWAY = (0, 429, 503)  # no connection, or not now
OPEN_JOBS = 4  # submitted and not ended: several run at once
CONFIG = {"learning_rate": 1e-3, "lora_rank": 4, "checkpoint_interval": 2}
GRPO = CONFIG | {"iterations": 3, "minibatches": 2}  # 6 steps
SFT = CONFIG | {"epochs": 3, "batch_size": 2}  # 6 steps


class Traffic(threading.Thread):
    """The client, as a thread. `stop` ends it, `finish` first sees all that was begun to its end. With `learners`, it
    keeps a job of each of so many adapters open, which grow from version to version."""

    def __init__(self, url: str, history: Path, *, seed: int = 0, learners: int = 0):
        super().__init__(name="traffic", daemon=True)
        self.wrong: list[str] = []
        self.bodies: dict[str, tuple[str, list[Any], dict[str, Any]]] = {}  # key -> kind, data, config
        self.jobs: dict[str, str] = {}  # key -> job
        self.versions: dict[str, str] = {}  # job -> version, of those seen completed
        self._client, self._history = Client(url, retries=0), history
        self._random, self._learners = random.Random(seed), learners
        self._wanted = threading.Semaphore(0)
        self._ended, self._finishing, self._open = threading.Event(), threading.Event(), 0
        self._rollouts: list[Any] = []

    # --- for the test ---

    def ask_for_jobs(self, count: int) -> None:
        """Submit so many jobs as soon as possible, however many are open."""
        for _ in range(count):
            self._wanted.release()

    def finish(self, *, seconds: float) -> None:
        """Submit nothing new; return when everything has an answer and every job has ended."""
        self._finishing.set()
        assert self._idle.wait(seconds), f"after {seconds} s jobs have not ended: {self.unfinished()}"
        self.stop()

    def stop(self) -> None:
        self._ended.set()
        self.join(120)
        self._client.close()

    def unfinished(self) -> list[str]:
        return [key for key in self.bodies if self.jobs.get(key) not in self.versions]

    def told(self, what: str) -> list[dict[str, Any]]:
        lines = self._history.read_text().splitlines() if self._history.exists() else []
        return [line for line in map(json.loads, lines) if line["what"] == what]

    # --- the thread ---

    def start(self) -> None:
        self._idle = threading.Event()
        super().start()

    def run(self) -> None:
        acts = (self._submit, self._look, self._list, self._sample, self._activate)
        while not self._ended.is_set():
            for act in acts:
                try:
                    act()
                except RemoteError as error:
                    if error.status not in AWAY:
                        self.wrong.append(f"{act.__name__}: {error.status} {error}")
                except Exception as error:
                    self.wrong.append(f"{act.__name__}: {type(error).__name__}: {error}")
            if self._finishing.is_set() and not self.unfinished():
                self._idle.set()
            self._ended.wait(0.1)

    def _tell(self, what: str, **facts: Any) -> None:
        descriptor = os.open(self._history, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, (json.dumps({"what": what, **facts}) + "\n").encode())
        os.close(descriptor)

    def _submit(self) -> None:
        for key in [key for key in self.bodies if key not in self.jobs]:  # perhaps accepted, perhaps not
            self.send(key)
        if self._finishing.is_set():
            return
        for _ in range(max(1, self._learners)):
            if self._wanted.acquire(blocking=False) or self._open < (self._learners or OPEN_JOBS):
                key = f"key-{len(self.bodies)}"
                self.bodies[key] = self._body(len(self.bodies))
                self._tell("tried", key=key)
                self._open += 1
                self.send(key)

    def send(self, key: str) -> str:
        kind, data, config = self.bodies[key]
        post: Callable[..., Any] = self._client.train_grpo if kind == "grpo" else self._client.train_sft
        id = post(data, idempotency_key=key, timeout=30, **config).job_id
        if self.jobs.setdefault(key, id) != id:
            self.wrong.append(f"{key} was job {self.jobs[key]} and is job {id}")
        self._tell("accepted", key=key, job=id)
        return id

    def _body(self, number: int) -> tuple[str, list[Any], dict[str, Any]]:
        """Three adapters that grow from version to version, of which one has dropout and none beside it, one that
        continues another one, and one that always begins afresh."""
        name = ("chain", "alone", "taught", "beside", "after", "dropped")[number % 6]
        if self._learners:
            name = f"learner-{number % self._learners}"
        more = {"alone": {"base_adapter": "base"}, "after": {"base_adapter": "chain"}, "dropped": {"lora_dropout": 0.1}}
        config = {"output_name": name, "seed": number} | more.get(name, {})
        sums = [(number + i, 7 * number + i) for i in range(4)]
        if name == "taught":
            talks = [[_asks(a, b), {"role": "assistant", "content": str(a + b)}] for a, b in sums]
            return "sft", [{"messages": talk} for talk in talks], SFT | config
        groups = [_group(a, b) for a, b in sums[:2]]
        if self._rollouts:  # a reward for what was sampled before, perhaps by a server that is dead now
            groups[0] = self._rollouts.pop().scored([1.0, 0.0])
        return "grpo", groups, GRPO | config

    def _look(self) -> None:
        jobs = {job.job_id: job for job in self._client.jobs(timeout=10)}
        for key, id in list(self.jobs.items()):
            if id not in jobs:
                self.wrong.append(f"{key}: job {id} was accepted and is lost")
            elif jobs[id].state in ("failed", "cancelled"):
                self.wrong.append(f"{key}: job {id} is {jobs[id].state}: {jobs[id].error}")
                self.versions.setdefault(id, "none")
            elif jobs[id].state == "completed":
                version = str(jobs[id].adapter_version)
                if self.versions.setdefault(id, version) != version:
                    self.wrong.append(f"{key}: job {id} was {self.versions[id]} and is {version}")
                self._tell("completed", key=key, job=id, version=version)
        self._open = len(self.unfinished())

    def _list(self) -> None:
        listed = self._client.adapters.list(timeout=10)
        found = [version for adapter in listed.available for version in adapter.versions]
        self._tell("listed", versions=found, active=listed.active_version)
        if listed.active_version not in ("base", *found):
            self.wrong.append(f"{listed.active_version} is active and not in the list")

    def _sample(self) -> None:
        groups = self._client.sample(["What is 2 + 3?"], n=2, max_tokens=4, timeout=20)
        self._tell("sampled", versions=[each.adapter for each in groups[0].completions])
        self._rollouts = [groups[0], *self._rollouts[:2]]

    def _activate(self) -> None:
        if self._random.random() < 0.3 and self.versions:
            version = self._random.choice(["base", *self.versions.values()])
            self._client.adapters.activate(version, timeout=20)
            self._tell("activated", version=version)


def _asks(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} + {b}?"}


def _group(a: int, b: int) -> dict[str, Any]:
    answers = {str(a + b): 1.0, str(a + b + 1): 0.0, f"{a} + {b} = {a + b}": 0.8}
    completions = [{"text": text, "reward": reward} for text, reward in answers.items()]
    return {"messages": [_asks(a, b)], "completions": completions}
