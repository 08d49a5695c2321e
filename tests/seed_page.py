"""The requests of the guide of the feedback loop, as its page has them, and a server that they are sent to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threads import THREADS

READY_S = 240  # torch is imported and a model loaded, maybe while many tests run
JOB_S = 120

QUESTION = "What is 47 + 138? Reply with just the number."
ROLLOUTS = """{
    "prompts": [
      [{"role": "user", "content": "What is 47 + 138? Reply with just the number."}],
      [{"role": "user", "content": "What is 23 * 17? Reply with just the number."}]
    ],
    "n": 8,
    "temperature": 0.9,
    "max_tokens": 64,
    "seed": 42
  }"""
SCORED = """{
    "groups": [{
      "messages": [{"role": "user", "content": "What is 47 + 138? Reply with just the number."}],
      "completions": [
        {"text": "185", "reward": 1.0},
        {"text": "The answer is 184", "reward": 0.0},
        {"text": "185.", "reward": 1.0},
        {"text": "47 + 138 = 185", "reward": 0.8}
      ]
    }],
    "config": {
      "learning_rate": 1e-5,
      "kl_coeff": 0.1,
      "clip_epsilon": 0.2,
      "lora_rank": 16,
      "output_name": "math-correctness",
      "auto_load": true
    }
  }"""
GROUP = json.loads(SCORED)["groups"][0]


@dataclass(frozen=True)
class Live:
    """A server, as a shell sees it."""

    url: str

    def shell(self, command: str, *, cwd: Path | None = None, config: Path | None = None) -> str:
        """What a command line prints; `groupwise` and `python3` are this environment's."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GROUPWISE_")}
        environment |= {"GROUPWISE_URL": self.url, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environment |= {} if config is None else {"CURL_HOME": str(config)}
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
            cwd=cwd,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def post(self, path: str, body: Any) -> Any:
        """The page's way of posting, down to the pretty-printing."""
        data = body if isinstance(body, str) else json.dumps(body)
        command = f"""curl -s {self.url}{path} -H "Content-Type: application/json" -d '{data}' | python3 -m json.tool"""
        return json.loads(self.shell(command))

    def get(self, path: str) -> Any:
        return json.loads(self.shell(f"curl -s {self.url}{path} | python3 -m json.tool"))

    def train(self, groups: Any = (GROUP,), **config: Any) -> str:
        """The id of a job that was queued."""
        answer = self.post("/v1/train/grpo", {"groups": groups, **({"config": config} if config else {})})
        assert answer.get("state") == "queued", answer
        return answer["job_id"]

    def job(self, job_id: str) -> Any:
        return next(job for job in self.get("/v1/train/status") if job["job_id"] == job_id)

    def ended(self, job_id: str) -> Any:
        end = time.monotonic() + JOB_S
        while (job := self.job(job_id))["state"] in ("queued", "running"):
            assert time.monotonic() < end, job
            time.sleep(0.1)
        return job

    def chat(self, **options: Any) -> Any:
        messages = [{"role": "user", "content": QUESTION}]
        return self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 16, **options})


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Live]:
    """`groupwise serve` with these options, until the end of the block, which it must end well."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GROUPWISE_")}
    environment |= {"OMP_NUM_THREADS": THREADS, "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "groupwise", "serve", "--port", "0", "--worker-threads", "1", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment) as process:
        assert process.stderr is not None
        overdue = threading.Timer(READY_S, process.kill)
        overdue.start()
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("ready on "):
                break
        overdue.cancel()
        rest = threading.Thread(target=lambda: said.extend(process.stderr or ()))
        rest.start()
        try:
            ready = re.match(r"ready on (\S+)", said[-1])
            assert ready is not None, "".join(said)
            yield Live(ready[1])
        finally:
            process.terminate()
            code = process.wait(60)
            rest.join()
    assert code == 0, "".join(said)
