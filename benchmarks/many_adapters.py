"""What do ten thousand registered adapters cost a server? Its start, lists, answers, a job's first step, memory.

    python benchmarks/many_adapters.py [--adapters 1 10000] [--model 64x2]

For each number a state directory with so many adapters, each a version directory of its own of rank 1, is made, and a
server started on it as `groupwise serve` is. Seconds, by the clock: from the start until it is ready; GET /v1/adapters
and /v1/models, the first one and a later one; a chat of 8 tokens answered by an adapter drawn at random (median of 20);
a job posted to continue such a one, until its first step is made (the first job, which waits for the worker, and the
median of 5 later ones). Processor seconds of the server in 10 seconds with a listener to GET /v1/events, and nothing
else. MiB of the server and of the worker at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
from live_server import free_port, process
from subjects import write_model

from groupwise.config.lora import LoraSpec
from groupwise.model.load import load_model
from groupwise.platform import resident_bytes
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion

MIB, TICKS = 1 << 20, os.sysconf("SC_CLK_TCK")
GROUP = {
    "messages": [{"role": "user", "content": "2+2="}],
    "completions": [{"text": "4", "reward": 1.0}, {"text": "5", "reward": 0.0}],
}


def register(root: Path, model: Path, count: int) -> None:
    """Make a store of `count` adapters at `root`: one is published, and the others are copies of its files."""
    base, store = load_model(str(model), device="cpu", dtype="float32"), AdapterStore(root)
    info = Provenance(
        base_model=base.name,
        base_hash=base.hash,
        quantization=None,
        parent=PolicyVersion.base(),
        step=1,
        config_hash="",
        metrics={"loss/policy": 0.1, "reward/mean": 0.5},
        job=None,
        canary=None,
    )
    made = store.publish("a0", Learner(base, lora=LoraSpec(rank=1)).save_adapter, info=info)
    for number in range(1, count):
        shutil.copytree(store.path(made), root / f"a{number}" / "v000001")


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def processes(port: int) -> tuple[int, int]:
    """The server's process, and its worker's."""
    found = subprocess.run(["pgrep", "-f", f"serve.*--port {port}"], capture_output=True, text=True, check=True)
    server = int(found.stdout.split()[0])
    found = subprocess.run(["pgrep", "-P", str(server), "-f", "worker"], capture_output=True, text=True, check=False)
    return server, int((found.stdout.split() or ["0"])[0])


def used(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Site:
    """A server, over HTTP."""

    def __init__(self, url: str, count: int):
        self._http, self._count = httpx2.Client(base_url=url, timeout=600), count
        self._random = random.Random(0)

    def get(self, path: str) -> httpx2.Response:
        return self._http.get(path).raise_for_status()

    def adapter(self) -> str:
        return f"a{self._random.randrange(self._count)}"

    def chat(self) -> None:
        body = {"model": self.adapter(), "messages": [{"role": "user", "content": "2+2"}], "max_tokens": 8}
        self._http.post("/v1/chat/completions", json=body).raise_for_status()

    def train(self) -> float:
        """Seconds from posting a job to its first step."""
        config = {"output_name": self.adapter(), "auto_load": False, "iterations": 20}
        began = time.perf_counter()
        job = self._http.post("/v1/train/grpo", json={"groups": [GROUP], "config": config}).raise_for_status().json()
        while (status := self.get(f"/v1/train/status/{job['job_id']}").json())["step"] < 1:
            if status["state"] not in ("queued", "running"):
                sys.exit(json.dumps(status["error"]))
            time.sleep(0.02)
        took = time.perf_counter() - began
        self._http.post(f"/v1/train/cancel/{job['job_id']}")
        return took

    def listen(self, seconds: float) -> None:
        """Read the events for a while."""
        with self._http.stream("GET", "/v1/events") as answer:
            threading.Timer(seconds, answer.close).start()
            try:
                for _ in answer.iter_bytes():
                    pass
            except httpx2.HTTPError:
                return


def measure(count: int, model: str) -> dict[str, float]:
    """All numbers of one server."""
    with tempfile.TemporaryDirectory(prefix="many-adapters-") as folder:
        state, place, port = Path(folder) / "state", Path(folder) / "model", free_port()
        hidden, layers = map(int, model.split("x"))
        write_model(place, hidden=hidden, layers=layers)
        register(state / "adapters", place, count)
        command = [str(Path(sys.executable).with_name("groupwise")), "serve", str(place)]
        command += ["--state-dir", str(state), "--port", str(port)]
        url, began = f"http://127.0.0.1:{port}", time.perf_counter()
        with process(command, url, ready="/ready", log=Path(folder) / "log"):
            found, site = {"adapters": float(count), "start": time.perf_counter() - began}, Site(url, count)
            for what, path in (("list", "/v1/adapters"), ("models", "/v1/models")):
                found[f"first {what}"] = timed(lambda path=path: site.get(path))
                found[what] = statistics.median(timed(lambda path=path: site.get(path)) for _ in range(3))
            found["first answer"] = timed(site.chat)
            found["answer"] = statistics.median(timed(site.chat) for _ in range(20))
            found["first job"] = site.train()
            found["job"] = statistics.median(site.train() for _ in range(5))
            server, worker = processes(port)
            before = used(server)
            site.listen(10)
            found["events, processor"] = used(server) - before
            found["server MiB"], found["worker MiB"] = (resident_bytes(pid) / MIB for pid in (server, worker))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 10_000])
    parser.add_argument("--model", default="64x2", help="HIDDENxLAYERS")
    options = parser.parse_args()
    for count in options.adapters:
        print(", ".join(f"{name} {value:.3g}" for name, value in measure(count, options.model).items()), flush=True)


if __name__ == "__main__":
    main()
