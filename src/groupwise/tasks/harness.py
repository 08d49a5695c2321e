"""Harness runs (`env.harness`): a separate program plays each episode, in a workspace that is scored when it ends.

    prepare     a new directory: `template` copied, files of the configuration and of the row written
    run         the command there, told where the policy is (environment variables) and what to do (arguments, stdin, a
                file); what it asks is recorded by the endpoint like what any other agent asks
    end         it exits, or is killed at `env.timeout_s`; all processes that it left are killed too
    score       `score.command` on a copy in the sandbox, without links that lead to its files; or reward functions,
                which get the directory as `workspace`

The sandbox's keeper (`rewards.sandbox`) always watches the program, and kills all its descendants, also when this
process dies. With `isolated` the program runs in the sandbox: then it has a separate network with a single port, the
policy's, whose connections are passed on to the run's endpoint from here.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from groupwise.config.harness import HarnessConfig, HarnessScoreConfig
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, EnvError
from groupwise.platform import hide_memory, try_lock
from groupwise.rewards.sandbox import (
    GRACE_S,
    Box,
    Isolation,
    Limits,
    ProgramResult,
    SandboxError,
    checked_isolation,
    outcome_of,
    untrusted,
    workspace_program,
)
from groupwise.tasks.agents import Agent, AgentResult
from groupwise.tasks.agents import outcome_of as returned
from groupwise.tasks.rollout_sources import case_of
from groupwise.types import Prompt, Rollout

NAME = "the harness"
TOLD = ("base_url", "anthropic_base_url", "api_key", "model", "seed", "workspace", "folder")
COLUMNS = ("workspace", "exit_status", "stdout", "stderr", "score_status", "score_output")  # for reward functions
ROOT, HELD = "groupwise-harness-", "held"  # in the directory for temporary files, and the file there that is locked
STARTING_S = 120.0  # besides the limits of program and score: copying, starting, killing, on a busy machine
ISOLATED_DISK_MB = 256  # of /tmp in the sandbox, which is in memory
ISOLATED_MEMORY_MB = 4096  # where memory_mb says nothing
ISOLATED_PROCESSES, ISOLATED_FILES = 512, 512  # processes with their threads; open files of each process
SCORE_DISK_MB = 1024  # of the copy that is scored, which is in memory where there are namespaces
_PLACE = re.compile(r"[$]\{\w+\}|\{\{\w+\}\}|\{([A-Za-z_]\w*)\}")  # ${HOME} and {{name}} stay

_SCORE = """
import json, os, shutil, stat, sys

workspace, *argv = sys.argv[1:]
workspace, links = os.path.realpath(workspace), []
over = json.load(sys.stdin.buffer)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

def special(folder, names):  # all but files and directories
    found = []
    for name in names:
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            links.append(path)
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            found.append(name)
    return found

shutil.copytree(workspace, "workspace", symlinks=True, ignore=special)
for link in links:  # as one to what it leads to in the end, if that is a file or directory of the program's own
    leads = os.path.realpath(link)
    if os.path.commonpath([workspace, leads]) != workspace:
        continue
    target = os.path.relpath(leads, workspace)
    if target == ".":
        given = bool(over)
    else:
        given = any((path + "/").startswith(target + "/") for path in over)
    copy = os.path.join("workspace", os.path.relpath(link, workspace))
    if not given and os.path.lexists(os.path.join("workspace", target)):
        os.symlink(os.path.relpath(leads, os.path.dirname(link)), copy)
for path, text in over.items():
    *folders, name = path.split("/")
    place = "workspace"
    for folder in folders:
        place = os.path.join(place, folder)
        if os.path.islink(place) or os.path.isfile(place):
            os.unlink(place)
        os.makedirs(place, exist_ok=True)
    target = os.path.join(place, name)
    if os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    elif os.path.lexists(target):
        os.unlink(target)
    with open(target, "w", encoding="utf-8", newline="") as file:
        file.write(text)
os.chdir("workspace")
os.execvp(argv[0], argv)
"""

T = TypeVar("T")


def load_harness(config: EnvConfig, *, folder: str | Path, scored: bool) -> Agent:
    """Return the agent that plays episodes by `config.harness`. `scored`: reward functions judge workspaces too.

    Raises ConfigError where the command is not there, nothing says what an episode is worth, or the sandbox that is
    asked for cannot be had on this machine.
    """
    assert config.harness is not None  # else there is an environment or an agent
    harness = Harness(config.harness, Path(folder).resolve(), timeout_s=config.timeout_s, keeps=scored)
    harness.check_machine()
    if not scored and config.harness.score is None:
        message = "nothing says what an episode is worth: there is neither env.harness.score nor a reward function"
        raise ConfigError(message, hint="set env.harness.score.command, or rewards, which get `workspace`")
    score_s = 0.0 if config.harness.score is None else config.harness.score.timeout_s
    return Agent(
        name=NAME,
        function=harness,
        takes=("case", "base_url", "api_key", "model", "seed"),
        extra_s=score_s + STARTING_S,
        columns=COLUMNS,
        check_cases=harness.check,
        after_scoring=harness.release,
        on_close=harness.close,
    )


@dataclass(frozen=True, kw_only=True)
class _EpisodeFolders:
    """The directories of an episode."""

    root: Path

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    @property
    def home(self) -> Path:
        return self.root / "home"


class Harness:
    """Plays episodes: each call is one, and returns what it came to. It may be called by many tasks at once.

    Args:
        folder: the folder at which relative paths of the configuration begin.
        timeout_s: seconds that a program may take, the policy's answers included.
        keeps: workspaces stay until `release`, for reward functions; otherwise they go when the episode ends.
    """

    def __init__(self, config: HarnessConfig, folder: Path, *, timeout_s: float, keeps: bool):
        self.config, self.folder = config, folder
        self._timeout_s, self._keeps = timeout_s, keeps
        self._lock = threading.Lock()
        self._boxes: set[Box] = set()
        self._root: Path | None = None
        self._held = -1  # the open file whose lock says that the directory's owner lives
        self._threads: ThreadPoolExecutor | None = None

    # ---- checks before the run ----
    def check_machine(self) -> None:
        """Raise ConfigError where a program, or the sandbox that is asked for, is not on this machine. This process is
        hidden from programs that are not isolated."""
        commands = [("env.harness.command", self.config.command, self._path)]
        if self.config.score is not None:
            commands.append(("env.harness.score.command", self.config.score.command, _box_path()))
        for key, command, path in commands:
            first = command[0]
            if "/" not in first and not _PLACE.search(first) and shutil.which(first, path=path) is None:
                hint = "install it, or give its absolute path; one in the workspace begins with ./"
                raise ConfigError(f"{key}: there is no program {first!r} in {path}", hint=hint, field=key)
        if not self.config.isolated:
            hide_memory()
        isolated = {"env.harness.isolated": self.config.isolated}
        if self.config.score is not None:
            isolated["env.harness.score.isolated"] = self.config.score.isolated
        for key, wanted in isolated.items():
            try:
                checked_isolation(wanted)
            except SandboxError as error:
                raise ConfigError(f"{key}: {error.message}", hint=error.hint, field=key) from error

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError for a row that lacks what the configuration takes from it."""
        for prompt in prompts:
            told = self._told(case_of(prompt), **dict.fromkeys(TOLD, ""))
            for key, text in self._texts():
                _filled(text, told, f"{key} (row {prompt.id})")
            self._template(told)
            for _ in (*self._row_files("files_column", told), *self._row_files("score.files_column", told)):
                pass

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yield every text with placeholders, with its key."""
        config, score = self.config, self.config.score
        lists = {"command": config.command, "stdin": [config.stdin or ""], "template": [config.template or ""]}
        lists |= {"env": config.env.values(), "files": config.files.values()}
        if score is not None:
            lists |= {"score.command": score.command, "score.files": score.files.values()}
        yield from ((f"env.harness.{key}", text) for key, texts in lists.items() for text in texts)

    # ---- an episode ----
    async def __call__(
        self, *, case: Mapping[str, Any], base_url: str, api_key: str, model: str, seed: int
    ) -> AgentResult:
        """Play one episode. Raises EnvError where it could not be prepared, started or scored."""
        place = await self._in_thread(self._new_place)
        kept = False
        try:
            told = self._told(
                case,
                base_url=base_url,
                anthropic_base_url=base_url.removesuffix("/v1"),
                api_key=api_key,
                model=model,
                seed=seed,
                workspace=str(place.workspace),
                folder=str(self.folder),
            )
            await self._in_thread(self._prepare, place, told)
            end = await self._run(place, told, port=urlsplit(base_url).port or 80)
            result = await self._judged(place, told, end)
            kept = self._keeps
            return result
        finally:
            if not kept:
                self._pool.submit(shutil.rmtree, place.root, ignore_errors=True)

    def release(self, rollout: Rollout) -> None:
        """Remove the workspace of a rollout that has been scored."""
        if (workspace := rollout.columns.get("workspace")) and self._root is not None:
            root = Path(workspace).parent
            if root.parent == self._root:
                self._pool.submit(shutil.rmtree, root, ignore_errors=True)

    def close(self) -> None:
        """Kill what runs, and remove all workspaces. The next episode begins with a new directory."""
        with self._lock:
            boxes, threads, root, held = list(self._boxes), self._threads, self._root, self._held
            self._threads = self._root = None
        for box in boxes:
            box.end()
        if threads is not None:
            threads.shutdown(wait=True)
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
            os.close(held)

    # ---- the workspace ----
    def _new_place(self) -> _EpisodeFolders:
        with self._lock:
            if self._root is None:
                sweep()
                self._root, self._held = _new_root()
        root = Path(tempfile.mkdtemp(prefix="episode-", dir=self._root))
        root.chmod(0o711)
        return _EpisodeFolders(root=root)

    def _prepare(self, place: _EpisodeFolders, told: Mapping[str, Any]) -> None:
        template = self._template(told)
        try:
            if template is None:
                place.workspace.mkdir()
            else:
                shutil.copytree(template, place.workspace, symlinks=True)
            place.home.mkdir()
            for path, text in self.config.files.items():
                _write(place.workspace, path, _filled(text, told, "env.harness.files"))
            for path, text in self._row_files("files_column", told):
                _write(place.workspace, path, text)
        except OSError as error:
            raise EnvError(f"the workspace of {NAME} could not be made: {error}") from error

    def _template(self, told: Mapping[str, Any]) -> Path | None:
        if self.config.template is None:
            return None
        path = self.folder / _filled(self.config.template, told, "env.harness.template")
        if not path.is_dir():
            key = "env.harness.template"
            raise ConfigError(f"{key}: {str(path)!r} is no directory", hint="it is copied for each episode", field=key)
        return path

    def _row_files(self, key: str, told: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return what a row's column of files holds. Raises ConfigError for what is none."""
        section = self.config.score if key.startswith("score.") else self.config
        column, key = section and section.files_column, f"env.harness.{key}"
        if column is None:
            return []
        files = told.get(column)
        if isinstance(files, str):
            with suppress(ValueError):
                files = json.loads(files)
        texts = files.values() if isinstance(files, Mapping) else [0]
        if not all(text is None or isinstance(text, str) for text in texts) or not isinstance(files, Mapping):
            what = "no such column" if column not in told else f"a {type(files).__name__} there"
            raise ConfigError(
                f"{key} is {column!r}, and a row has {what}",
                hint='it holds an object of paths and texts, such as {"src/a.py": "x = 1\\n"}',
                field=key,
            )
        return [(path, text) for path, text in files.items() if text is not None]  # tables give every row every path

    def _told(self, case: Mapping[str, Any], **told: Any) -> dict[str, Any]:
        """Return what placeholders stand for: the row's columns, and what the program is told."""
        prompt = case.get("prompt")
        if isinstance(prompt, list | tuple):
            case = {**case, "prompt": "\n\n".join(str(message.get("content") or "") for message in prompt)}
        return {**case, **told}

    # ---- the program ----
    @property
    def _path(self) -> str:
        return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])

    def _environment(self, place: _EpisodeFolders, told: Mapping[str, Any]) -> dict[str, str]:
        home = "/tmp" if self.config.isolated else str(place.home)
        base_url, key, model = str(told["base_url"]), str(told["api_key"]), str(told["model"])
        return {
            "PATH": self._path,
            "HOME": home,
            "LANG": "C.UTF-8",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            **{name: os.environ[name] for name in self.config.inherit if name in os.environ},
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,  # its older name, which LiteLLM and others read
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": model,
            "ANTHROPIC_BASE_URL": str(told["anthropic_base_url"]),
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_SMALL_FAST_MODEL": model,
            **{name: _filled(text, told, "env.harness.env") for name, text in self.config.env.items()},
        }

    async def _run(self, place: _EpisodeFolders, told: Mapping[str, Any], *, port: int) -> dict[str, Any]:
        """Run the program to its end; the keeper's `end` message. Cancelled, it is killed."""
        config = self.config
        environment = self._environment(place, told)
        argv = [_filled(part, told, "env.harness.command") for part in config.command]
        found = argv[0] if "/" in argv[0] else shutil.which(argv[0], path=environment["PATH"])
        if found is None:
            raise EnvError(f"env.harness.command: there is no program {argv[0]!r} in {environment['PATH']}")
        limits = {"wall_s": self._timeout_s, "disk_mb": config.disk_mb}
        if config.isolated:
            limits["disk_mb"] = max(config.disk_mb, ISOLATED_DISK_MB)
            limits |= {"processes": ISOLATED_PROCESSES, "open_files": ISOLATED_FILES}
            limits["cpu_s"] = math.ceil(self._timeout_s)
        if config.isolated and config.memory_mb is None:
            limits["data_mb"] = ISOLATED_MEMORY_MB
        if config.memory_mb is not None:
            limits["memory_mb"] = config.memory_mb
        level = checked_isolation(True) if config.isolated else None
        spec = workspace_program(
            [found, *argv[1:]],
            cwd=str(place.workspace),
            env=environment,
            stdin="" if config.stdin is None else _filled(config.stdin, told, "env.harness.stdin"),
            limits=limits,
            output_bytes=4 * config.output_characters,  # of UTF-8
            level=level,
            shown=[str(self.folder / each) for each in config.show],
            port=None if level is None else port,
        )
        return await self._in_box(spec, limit_s=self._timeout_s + GRACE_S, port=spec["port"] if level else None)

    async def _in_box(self, spec: Mapping[str, Any], *, limit_s: float, port: int | None = None) -> dict[str, Any]:
        loop, running = asyncio.get_running_loop(), _Running()

        def work() -> dict[str, Any]:
            with Box(spec) as box:
                with self._lock:
                    self._boxes.add(box)
                try:
                    if running.begin(box) and port is not None and (listening := box.listener(timeout=GRACE_S)):
                        serve = asyncio.start_server(partial(_pass_on, port=port), sock=listening)
                        running.servers.append(asyncio.run_coroutine_threadsafe(serve, loop).result(GRACE_S))
                    return box.wait(timeout=limit_s)
                finally:
                    with self._lock:
                        self._boxes.discard(box)

        try:
            return await self._in_thread(work)
        except (SandboxError, TimeoutError) as error:
            raise EnvError(f"{NAME} could not be run: {error}") from error
        finally:
            running.end()

    # ---- what it came to ----
    async def _judged(self, place: _EpisodeFolders, told: Mapping[str, Any], end: Mapping[str, Any]) -> AgentResult:
        if end.get("setup"):
            raise EnvError(f"{NAME} could not be started: {end['setup']}", hint="see env.harness.command")
        config, late = self.config, end["reason"] == "wall"
        status = end["exit"] if end["exit"] is not None else -end["signal"]
        failed = late or status != 0
        stdout, stderr = (end[name][-config.output_characters :] for name in ("stdout", "stderr"))
        columns: dict[str, Any] = {"exit_status": status, "stdout": stdout, "stderr": stderr}
        if self._keeps:
            columns["workspace"] = str(place.workspace)
        metrics = {"program_s": float(end["seconds"]), "program_failed": float(failed)}
        ending = f"it was killed after {self._timeout_s:g} s" if late else f"it ended with status {status}"
        ending = f"{ending}; the end of its output: {(stderr or stdout).strip()[-400:] or 'nothing'}"
        worth, failure = AgentResult(), None
        if failed and config.on_failure == "error":
            failure = EnvError(f"{NAME} failed: {ending}", kind="timeout" if late else None)
            late = False  # reaching a limit is not a failure, and this must be one
        elif failed and config.on_failure == "zero":
            worth = AgentResult(reward=0.0)
        elif config.score is not None:
            worth, judged = await self._score(config.score, place, told)
            columns |= {"score_status": judged.status, "score_output": (judged.stdout + judged.stderr)[-4000:]}
        return AgentResult(
            reward=worth.reward,
            metrics={**worth.metrics, **metrics},
            turn_rewards=worth.turn_rewards,
            columns=columns,
            stop="timeout" if late else None,
            failure=failure,
            ending=ending,
        )

    async def _score(
        self, score: HarnessScoreConfig, place: _EpisodeFolders, told: Mapping[str, Any]
    ) -> tuple[AgentResult, ProgramResult]:
        """Return what the command says of the workspace, and what it printed. Raises EnvError for what is not its
        doing, and for an object in its last line that says no reward."""
        argv = [_filled(part, told, "env.harness.score.command") for part in score.command]
        files = {path: _filled(text, told, "env.harness.score.files") for path, text in score.files.items()}
        limits = Limits(
            wall_s=score.timeout_s,
            cpu_s=math.ceil(score.timeout_s),
            memory_mb=score.memory_mb,
            disk_mb=SCORE_DISK_MB,
            open_files=256,
        )
        level = checked_isolation(score.isolated)

        def prepared() -> dict[str, Any]:
            over = {_inside(path): text for path, text in self._row_files("score.files_column", told)}
            over = {_inside(path): text for path, text in files.items()} | over
            return _score_spec(argv, place, over, limits=limits, level=level)

        try:
            spec = await self._in_thread(prepared)
            judged = outcome_of(await self._in_box(spec, limit_s=limits.wall_s + GRACE_S), limits, level)
        except (SandboxError, OSError) as error:
            raise EnvError(f"the workspace could not be scored: {error}") from error
        if judged.status == "lost":
            raise EnvError("the workspace could not be scored: its command was killed from outside of its box")
        if score.reward == "exit_status":
            return AgentResult(reward=float(judged.status == "ok")), judged
        return _said_of(judged.stdout), judged

    # ---- threads ----
    @property
    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:  # one for each program that runs; as many do as there are episodes
                self._threads = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="harness")
            return self._threads

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


def sweep() -> None:
    """Remove the workspaces of processes that were killed: directories of this user whose lock no process holds."""
    for root in Path(tempfile.gettempdir()).glob(f"{ROOT}*"):
        with suppress(OSError):
            if root.is_symlink() or root.stat().st_uid != os.geteuid():
                continue
            held = os.open(root / HELD, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if try_lock(held):
                    shutil.rmtree(root, ignore_errors=True)
            finally:
                os.close(held)


def _new_root() -> tuple[Path, int]:
    """Return a directory for workspaces, and the open file in it that is locked as long as this process lives."""
    while True:
        root = Path(tempfile.mkdtemp(prefix=ROOT)).resolve()
        held = os.open(root / HELD, os.O_RDWR | os.O_CREAT, 0o600)
        if try_lock(held) and (root / HELD).exists():
            root.chmod(0o711)  # in the sandbox the program may be another user
            return root, held
        os.close(held)  # another process swept between the two calls


class _Running:
    """A box that a thread waits for and a task may give up at any time."""

    def __init__(self) -> None:
        self.servers: list[asyncio.Server] = []
        self._box: Box | None = None
        self._over = False
        self._lock = threading.Lock()

    def begin(self, box: Box) -> bool:
        """Take note that the box has been started; return False if it is not wanted any more, and then ended."""
        with self._lock:
            self._box = box
            if self._over:
                box.end()
            return not self._over

    def end(self) -> None:
        with self._lock:
            self._over = True
            if self._box is not None:
                self._box.end()
        for server in self.servers:
            server.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, port: int) -> None:
    """Connect a connection of the box's network to the same port of this machine, until either end closes it."""
    try:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.close()
        return
    await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    with suppress(OSError):
        writer.close()


def _score_spec(
    argv: Sequence[str], place: _EpisodeFolders, over: Mapping[str, str], *, limits: Limits, level: Isolation
) -> dict[str, Any]:
    """Return the keeper's specification of the command that scores a copy of a workspace, over which the files `over`
    are put.

    The copy has no link that leads out of it or to one of those files: a program could otherwise have its own answer
    compared with itself. They are nowhere but in the copy: the box reads them, and the command has an empty input.
    """
    if level.own_user:
        _open_to_all(place.root)
    stub = [sys.executable, "-s", "-B", "-c", _SCORE, str(place.workspace), *argv]
    spec = untrusted(stub, stdin=json.dumps(over), limits=limits, level=level)
    spec["env"] |= {"PATH": _box_path()}
    return spec | {"shown": [*spec["shown"], str(place.workspace)], "keep": "last"}


def _box_path() -> str:
    return f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"


def _open_to_all(root: Path) -> None:
    """Let every user read a directory: the box's is none that owns files here."""
    for folder, _, names in os.walk(root):
        os.chmod(folder, os.lstat(folder).st_mode | 0o555)
        for name in names:
            path = os.path.join(folder, name)
            if stat.S_ISREG(mode := os.lstat(path).st_mode):
                os.chmod(path, mode | 0o444)


def _write(directory: Path, path: str, text: str) -> None:
    """Write a file of a directory, with the folders that it needs. Raises EnvError for one that leads out of it."""
    target = directory / _inside(path)
    if not target.parent.resolve().is_relative_to(directory.resolve()) or target.is_symlink():
        raise _leads_out(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8", newline="")


def _inside(path: str) -> str:
    """Return a path within a workspace, in its plain form. Raises EnvError for one that leads out of it."""
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts:
        raise _leads_out(path)
    return str(pure)


def _leads_out(path: str) -> EnvError:
    return EnvError(f"{path!r} leads out of the workspace", hint="write a path within it, such as src/a.py")


def _filled(text: str, told: Mapping[str, Any], key: str) -> str:
    """Return the text with what its placeholders stand for. Raises ConfigError for one that stands for nothing."""

    def value(found: re.Match[str]) -> str:
        if (name := found[1]) is None:
            return found[0]
        if name not in told:
            there = ", ".join(sorted({*told, *TOLD}))
            hint = "give the row that column; a shell's own variable is written ${NAME}, a template's {{NAME}}"
            raise ConfigError(f"{key}: {{{name}}} stands for nothing; there are {there}", hint=hint, field=key)
        given = told[name]
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)

    return _PLACE.sub(value, text)


def _said_of(text: str) -> AgentResult:
    """Return the number in the last line, or the object that an agent may return; 0 where there is neither. Raises
    EnvError for an object that is none of those."""
    last = re.split(r"[\r\n]", text.strip())[-1].strip()  # U+2028 ends no line of JSON
    with suppress(ValueError):
        number = float(last)
        return AgentResult(reward=number if math.isfinite(number) else 0.0)
    with suppress(ValueError):
        if isinstance(said := json.loads(last), dict):
            return returned(said, "env.harness.score.command")
    return AgentResult(reward=0.0)
