"""A real server with its worker on a state directory of its own: started, killed, and looked at while it is dead.

What is looked at is read from the disk, not through the code that wrote it: opening a store or a ledger repairs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2

from threads import THREADS

START_S = 300  # imports of torch on a busy machine
ORPHAN_S = 30  # a worker may finish its step, for 10 s


class Place:
    """One state directory, one port, and what runs there."""

    def __init__(self, root: Path, *, state: Path | None = None, model: str = "starter", settings: Sequence[str] = ()):
        self.state, self.log = state or root / "state", root / "server.log"
        self.port = random.Random().randrange(20000, 32000)  # below the ports that the kernel gives to clients
        self.kills = 0
        self._model = model
        self._settings = ("min_free_bytes=0", "worker_threads=1", "keep_versions=null", *settings)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- starting ---

    def start(self, *, fault: str = "", largest_file: int | None = None) -> None:
        """Start the server; `fault` is for it and its worker, `largest_file` in bytes, too."""
        assert not self.workers(), "a worker of an earlier server is alive"
        command = [sys.executable, "-m", "groupwise", "serve", self._model, "--port", str(self.port)]
        command += ["--state-dir", str(self.state), "--dtype", "float32", "--device", "cpu"]
        for setting in self._settings:
            command += ["--set", setting]
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": THREADS, "GROUPWISE_FAULTS": fault}
        with self.log.open("ab") as log:
            log.write(f"--- start {fault}\n".encode())
            log.flush()  # through a pipe, so that a limit on the server's files is none on its words
            self._scribe = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log, start_new_session=True)
        with self._scribe.stdin as pipe:
            self._process = subprocess.Popen(
                command, env=os.environ | quiet, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL
            )
        if largest_file is not None:
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))

    def await_ready(self) -> None:
        assert self.ends_or_is_ready(), f"the server ended by itself:\n{self.words}"

    def _answers(self, path: str) -> bool:
        with contextlib.suppress(httpx2.RequestError):
            return httpx2.get(self.url + path, timeout=10).status_code == 200
        return False

    # --- ending ---

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ends_or_is_ready(self) -> bool:
        """Whether the server that was started is ready at last; it may also end by itself."""
        self.until(lambda: not self.is_alive or self._answers("/ready"), "the server neither ends nor is ready")
        return self.is_alive

    def ends_or_answers(self) -> bool:
        """Whether the server that was started has its model, ready or not; it may also end by itself."""
        self.until(lambda: not self.is_alive or self._answers("/v1/models"), "the server neither ends nor answers")
        return self.is_alive

    @property
    def words(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def workers(self) -> list[int]:
        """The worker processes on this state directory, of whatever server."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                arguments = path.read_bytes().split(b"\0")
                if b"groupwise.run.worker" in arguments and str(self.state).encode() in arguments:
                    found.append(int(path.parent.name))
        return found

    def kill_server(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()
            self.kills += 1
        self._process.wait()

    def kill_workers(self) -> None:
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
        self.until(lambda: not self.workers(), "a killed worker is still there", seconds=ORPHAN_S)

    def await_worker(self) -> int:
        self.until(lambda: self.workers(), "there is no worker")
        return self.workers()[0]

    def await_kill_of_server(self, *, seconds: float = START_S) -> None:
        """The fault that it was given ends it."""
        assert self._process is not None
        self.until(lambda: not self.is_alive, "the server did not reach the fault", seconds=seconds)
        assert self._process.returncode == -signal.SIGKILL, self.words
        self.kills += 1

    def await_kill_of_worker(self) -> None:
        """The fault that it was given ends it."""
        pid = self.await_worker()
        self.until(lambda: pid not in self.workers(), "the worker did not reach the fault")
        self.kills += 1

    def await_no_worker(self) -> None:
        """The server is dead: so is its worker, soon."""
        self.until(lambda: not self.workers(), "the worker outlived its server", seconds=ORPHAN_S)

    def stop(self) -> int:
        """Stop the server in order; returns its exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def end(self) -> int:
        """Wait for a server that ends by itself; returns its exit status."""
        assert self._process is not None
        status = self._process.wait(START_S)
        self._scribe.wait(START_S)  # for its last words
        return status

    def clean_up(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._scribe.wait()
        self.kill_workers()

    def until(self, condition: Callable[[], object], otherwise: str, *, seconds: float = START_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{otherwise} after {seconds} s; the server said:\n{self.words}"
            time.sleep(0.02)

    # --- looking ---

    def query(self, statement: str) -> list[sqlite3.Row]:
        with closing(sqlite3.connect(self.state / "ledger.db", timeout=30)) as db:
            db.row_factory = sqlite3.Row
            return db.execute(statement).fetchall()

    def versions(self) -> dict[str, Path]:
        """Every version that a reader can see, by its text."""
        found = {}
        for path in sorted(self.state.glob("adapters/*/v[0-9]*")):
            found[f"{path.parent.name}@{int(path.name[1:])}"] = path
        return found

    def active(self) -> str:
        """The version that requests get, as the store's own file says."""
        path = self.state / "adapters" / ".state.json"
        return (["base"] + json.loads(path.read_bytes())["activations"])[-1] if path.exists() else "base"

    def faults_of_state(self) -> list[str]:
        """What must never be, at whatever moment the processes were killed."""
        wrong = [f"{version} is torn" for version, path in self.versions().items() if is_torn(path)]
        if self.active() not in {"base", *self.versions()}:
            wrong.append(f"the active version {self.active()} does not exist")
        if not (self.state / "ledger.db").exists():
            return wrong
        if (said := self.query("PRAGMA integrity_check")[0][0]) != "ok":
            wrong.append(f"the ledger is damaged: {said}")
        if self.query("PRAGMA foreign_key_check"):
            wrong.append("the ledger has references to rows that are gone")
        spooled = {path.stem for path in self.state.glob("spool/*.payload")}
        wrong += [f"the payload of {row['id']} is lost" for row in self.jobs() if row["id"] not in spooled]
        return wrong

    def crashes_of_a_job(self) -> int:
        """How often the worker died with the job that is to run next: after three, it is failed. Of the server's deaths
        without a step further it may see five, so that the first two count for nothing here."""
        left = [row for row in self.jobs() if row["state"] in ("queued", "running") and row["version"] is None]
        return max((max(row["attempt"] - row["released"], row["server_deaths"] - 2) for row in left), default=0)

    def jobs(self) -> list[sqlite3.Row]:
        """The ledger's jobs, in the order of submission; none before a server has made it."""
        if not (self.state / "ledger.db").exists():
            return []
        has_tables = self.query("SELECT 1 FROM sqlite_master WHERE name = 'job'")
        return self.query("SELECT * FROM job ORDER BY seq") if has_tables else []


@contextmanager
def a_place(root: Path, **options) -> Iterator[Place]:
    made = Place(root, **options)
    try:
        yield made
    finally:
        made.clean_up()


def is_torn(version: Path) -> bool:
    """Whether some file is not what the version's sidecar says."""
    try:
        files = json.loads((version / "groupwise.json").read_bytes())["files"]
    except (OSError, ValueError, KeyError):
        return True
    return any(digest != sha256(version / name) for name, (_, digest) in files.items())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"
