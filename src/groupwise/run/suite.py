"""`groupwise eval --suite SUITE`: other people's evaluations (lm-eval, inspect-ai) of a version, through our endpoint.

`groupwise serve` is started on the version as a separate process, on a free port and with its own key. The suite
runs as a process too, with the Python that has it installed, and is told the endpoint's address. Its own result files
are read afterwards: `SuiteResult` is what they say, and what is kept with the version (`AdapterStore.record`).

    lm-eval   https://github.com/EleutherAI/lm-evaluation-harness   local-completions, or local-chat-completions
    inspect   https://inspect.aisi.org.uk                           openai-api
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from groupwise.errors import ConfigError, DataError, EngineError, GroupwiseError
from groupwise.store import files
from groupwise.types import BASE

STARTS_S = 1800.0  # a large model loads for minutes, a download for longer
STOPS_S = 60.0
STDERR = 2  # its descriptor: stdout is for the result
NAME = "groupwise"  # the provider, as inspect calls whoever speaks OpenAI's API


@dataclass(frozen=True, kw_only=True)
class Target:
    """The policy that a suite evaluates: the model to serve, its tokenizer (a directory or a name that transformers
    loads), and the adapter over it, as `store.locate.find_adapter` takes it, with its version's name ("math@12"; "base"
    without)."""

    model: str
    tokenizer: str
    adapter: str | None = None
    version: str = BASE
    options: tuple[str, ...] = ()
    """Further options of `groupwise serve`."""


@dataclass(frozen=True, kw_only=True)
class ServedVersion:
    """A version that is being served. `url` has no path, `context` is in tokens."""

    url: str
    key: str
    context: int
    target: Target


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """An order to run a suite: tasks by the suite's own names, at most `limit` samples of each, and `arguments` for its
    command line.

    `chat` is lm-eval's: conversations by the model's chat template, in place of texts. `folder` is where its tasks of
    one's own are (--include_path). `python` has the suite installed, and `output` is where its files go.
    """

    suite: str
    tasks: tuple[str, ...]
    output: Path
    python: str = sys.executable
    limit: int | None = None
    chat: bool = False
    folder: Path | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Holds a number that a suite reports for a task, with its standard error and its number of samples if the suite
    reports them."""

    value: float
    stderr: float | None = None
    samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """The metrics that a suite measured of a version, by task and name: "arc_easy/acc", "sums/match/accuracy"."""

    suite: str
    release: str
    metrics: Mapping[str, Metric]
    chat: bool = False
    limit: int | None = None
    arguments: tuple[str, ...] = ()
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def as_json(self) -> dict[str, Any]:
        """Return the results that are stored with the version."""
        metrics = {
            name: {key: value for key, value in vars(metric).items() if value is not None}
            for name, metric in self.metrics.items()
        }
        asked = {"chat": self.chat, "limit": self.limit, "arguments": list(self.arguments)}
        return {"suite": self.suite, "release": self.release, "created": self.created, **asked, "metrics": metrics}


# ---- the suites ----


class Suite(Protocol):
    """A tool: the packages that its Python needs, its command and environment, and how its files are read."""

    packages: Mapping[str, str]  # what must be importable -> what is installed for it
    release: str  # the distribution whose version is noted

    def command(self, run: SuiteRun, endpoint: ServedVersion) -> list[str]: ...
    def environment(self, endpoint: ServedVersion) -> dict[str, str]: ...
    def read(self, output: Path) -> dict[str, Metric]: ...


class LmEval:
    """EleutherAI's lm-evaluation-harness: `acc` and the like by log-probabilities of texts, and generated answers."""

    packages: Mapping[str, str] = {"lm_eval": "lm_eval[api]", "transformers": "transformers", "aiohttp": "lm_eval[api]"}
    release = "lm_eval"

    def command(self, run: SuiteRun, endpoint: ServedVersion) -> list[str]:
        route = "v1/chat/completions" if run.chat else "v1/completions"
        model = {
            "model": endpoint.target.version,
            "base_url": f"{endpoint.url}/{route}",
            "tokenizer": endpoint.target.tokenizer,
            "tokenizer_backend": "huggingface",
            "max_length": endpoint.context,
            "num_concurrent": 8,
        }
        if run.chat:
            kind, more = "local-chat-completions", ["--apply_chat_template"]
            model = {key: value for key, value in model.items() if key not in ("tokenizer", "tokenizer_backend")}
        else:
            kind, more = "local-completions", ["--batch_size", "8"]
            model["tokenized_requests"] = True
        told = ",".join(f"{key}={value}" for key, value in model.items())
        words = ["--model", kind, "--model_args", told, "--tasks", ",".join(run.tasks), *more]
        words += ["--output_path", str(run.output)]
        words += [] if run.limit is None else ["--limit", str(run.limit)]
        words += [] if run.folder is None else ["--include_path", str(run.folder)]
        return [run.python, "-m", "lm_eval", *words, *run.arguments]

    def environment(self, endpoint: ServedVersion) -> dict[str, str]:
        return {"OPENAI_API_KEY": endpoint.key}

    def read(self, output: Path) -> dict[str, Metric]:
        """Read the scores of results_<time>.json; a name is "task/metric", behind it the filter where it is not
        "none"."""
        metrics: dict[str, Metric] = {}
        for path in sorted(output.rglob("results_*.json")):
            said = _load(path)
            counts = said.get("n-samples", {})
            for task, values in said["results"].items():
                for key, value in values.items():
                    metric, comma, kind = key.partition(",")
                    number = _number(value)
                    if not comma or metric.endswith("_stderr") or number is None:
                        continue
                    metrics[f"{task}/{metric}" + ("" if kind == "none" else f"/{kind}")] = Metric(
                        value=number,
                        stderr=_number(values.get(f"{metric}_stderr,{kind}")),
                        samples=counts.get(task, {}).get("effective"),
                    )
        return metrics


class Inspect:
    """The UK AI Security Institute's inspect-ai: a task is a Python file, or FILE@NAME, or PACKAGE/NAME."""

    packages: Mapping[str, str] = {"inspect_ai": "inspect-ai", "openai": "openai"}
    release = "inspect-ai"

    def command(self, run: SuiteRun, endpoint: ServedVersion) -> list[str]:
        model = f"openai-api/{NAME}/{endpoint.target.version}"
        words = [*run.tasks, "--model", model, "--log-dir", str(run.output), "--log-format", "json"]
        words += ["--display", "plain"]
        words += [] if run.limit is None else ["--limit", str(run.limit)]
        return [run.python, "-m", "inspect_ai", "eval", *words, *run.arguments]

    def environment(self, endpoint: ServedVersion) -> dict[str, str]:
        provider = NAME.upper()
        return {f"{provider}_BASE_URL": f"{endpoint.url}/v1", f"{provider}_API_KEY": endpoint.key}

    def read(self, output: Path) -> dict[str, Metric]:
        """Read the scores of the logs; a name is "task/scorer/metric". Raises DataError where a task did not come to
        its end."""
        metrics: dict[str, Metric] = {}
        for path in sorted(output.rglob("*.json")):
            log = _load(path)
            task = log["eval"]["task"]
            if log["status"] != "success" or not log.get("results"):
                why = (log.get("error") or {}).get("message", "")
                raise DataError(f"inspect: the task {task} ended as {log['status']!r}: {why}", hint=f"see {path}")
            for score in log["results"]["scores"]:
                said = {key: metric["value"] for key, metric in score["metrics"].items()}
                for key, value in said.items():
                    number = _number(value)
                    if key.startswith("stderr") or number is None:
                        continue
                    metrics[f"{task}/{score['name']}/{key}"] = Metric(
                        value=number,
                        stderr=_number(said.get("stderr")) if key in ("accuracy", "mean") else None,
                        samples=score.get("scored_samples"),
                    )
        return metrics


SUITES: Mapping[str, Suite] = {"lm-eval": LmEval(), "inspect": Inspect()}


def check_suite(run: SuiteRun) -> str:
    """Return the version of the suite that the run's Python has. Raises ConfigError for an unknown suite, no tasks,
    options that the suite does not have, and packages that are missing; before any model is loaded."""
    if run.suite not in SUITES:
        raise ConfigError(f"--suite {run.suite!r} does not exist; valid: {', '.join(SUITES)}")
    if not run.tasks:
        raise ConfigError(f"--suite {run.suite} needs tasks", hint="name them: --tasks a,b")
    for option, given in (("--chat", run.chat), ("--include-path", run.folder)):
        if given and run.suite != "lm-eval":
            raise ConfigError(f"{option} is of --suite lm-eval; {run.suite} has no such thing", hint="leave it out")
    suite = SUITES[run.suite]
    program = (
        "import importlib.metadata as m, importlib.util as u, json, sys\n"
        "print(json.dumps([[p for p in sys.argv[2:] if u.find_spec(p) is None],"
        " next((d.version for d in m.distributions(name=sys.argv[1])), None)]))"
    )
    try:
        done = subprocess.run(
            [run.python, "-c", program, suite.release, *suite.packages], capture_output=True, text=True, check=True
        )
        missing, release = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise ConfigError(f"--python {run.python} cannot be run: {error}", hint="name a Python interpreter") from None
    if missing:
        wanted = " ".join(dict.fromkeys(repr(suite.packages[each]) for each in missing))
        raise ConfigError(
            f"{run.suite} cannot run with {run.python}: it has no {', '.join(missing)}",
            hint=f"{run.python} -m pip install {wanted}, or name the Python that has it with --python",
        )
    return str(release)


def run_suite(run: SuiteRun, target: Target, *, say: Callable[[str], None]) -> SuiteResult:
    """Serve the target, run the suite against it, and read what it says. What the suite prints goes to stderr.

    Raises ConfigError as `check_suite` and for a folder that holds results already, EngineError if the endpoint does
    not come up, GroupwiseError if the suite ends with an error, DataError where it left no numbers.
    """
    release, suite = check_suite(run), SUITES[run.suite]
    if any(run.output.rglob("*.json")):
        raise ConfigError(f"{run.output} holds results already", hint="name another folder: --output DIR")
    with files.writing(f"making {run.output}"):
        run.output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as state, serving(target, state=Path(state)) as endpoint:
        say(f"serving {target.version} over {target.model} on {endpoint.url}")
        process = subprocess.Popen(
            suite.command(run, endpoint),
            env={**os.environ, **suite.environment(endpoint)},
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
        )
        with _ended(process):
            code = process.wait()
    if code:
        raise GroupwiseError(f"{run.suite} ended with exit code {code}", hint="what it said stands above")
    metrics = suite.read(run.output)
    if not metrics:
        raise DataError(f"{run.suite} left no numbers in {run.output}", hint="what it said stands above")
    return SuiteResult(
        suite=run.suite,
        release=release,
        metrics=metrics,
        chat=run.chat,
        limit=run.limit,
        arguments=run.arguments,
    )


# ---- the endpoint ----


@contextmanager
def serving(target: Target, *, state: Path) -> Iterator[ServedVersion]:
    """Serve the target with `groupwise serve` in a process during the block. `state` is the server's directory.

    Raises EngineError if it ends before it is ready, or is not ready in half an hour.
    """
    key, said = secrets.token_hex(16), state / "stderr"
    words = [target.model, "--port", "0", "--state-dir", str(state), *target.options]
    words += [] if target.adapter is None else ["--adapter", target.adapter]
    with said.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "groupwise", "serve", *words],
            env={**os.environ, "GROUPWISE_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=written,
        )
    with _ended(process):
        url = _ready(process, said)
        yield ServedVersion(url=url, key=key, context=_context(url, key), target=target)


def _ready(process: subprocess.Popen[Any], said: Path) -> str:
    """Return the address of a server, once it answers."""
    deadline = time.monotonic() + STARTS_S
    while time.monotonic() < deadline:
        ended = process.poll()
        text = said.read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^ready on (\S+)$", text, re.MULTILINE):
            return match[1]
        if ended is not None:
            last = "\n".join(text.splitlines()[-15:])
            raise EngineError(f"the endpoint ended with exit code {ended}:\n{last}")
        time.sleep(0.1)
    raise EngineError(f"the endpoint was not ready in {STARTS_S:.0f} seconds")


def _context(url: str, key: str) -> int:
    """Return tokens that prompt and completion may have together."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["data"][0]["max_model_len"])


@contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """End the process after the block, in every case."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STOPS_S)
        if process.poll() is None:
            process.kill()
            process.wait()


def _load(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises DataError if the file does not hold one."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise DataError(f"{path} holds a {type(said).__name__}; it must be an object")
    return said


def _number(value: object) -> float | None:
    """Return a finite number, or None for any other value: "N/A", NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
