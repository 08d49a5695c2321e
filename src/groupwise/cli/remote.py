"""The commands that talk to a server: `groupwise rollouts sample | train ...`.

    groupwise serve                                         # in one terminal
    groupwise rollouts sample "What is 47 + 138?" --json > groups.json
    python score.py < groups.json > scored.json             # puts a "reward" into each completion
    groupwise train grpo scored.json --output-name math --wait
    groupwise chat "What is 47 + 138?"

`--json` prints the server's own answer. No torch here, and no server: `groupwise.sdk.client` is all that is used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.frame import OPTIONS, ApiKey, AsJson, Debug, Url, examples, open_client, print_answer, print_table
from groupwise.cli.output import print_line, print_pairs, say
from groupwise.config.json_lines import json_lines
from groupwise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from groupwise.sdk.client import Client
    from groupwise.sdk.types import JobEvent, TrainStatus

Adapter = Annotated[
    str | None, typer.Option(metavar="NAME[@N]", help="The policy: `base`, an adapter; default: the active version.")
]
MaxTokens = Annotated[int | None, typer.Option(help="Longest completion.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default 1.")]
Seed = Annotated[int | None, typer.Option(help="Fixes the draw.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
ScoredFile = Annotated[Path, typer.Argument(metavar="FILE", help="JSON or JSONL; `-` is stdin.")]
OutputName = Annotated[str | None, typer.Option(metavar="NAME", help="The adapter to make the next version of.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of `config`; may be repeated.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is completed; what happens goes to stderr.")]
Timeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Longest to wait.")]
WAIT_S = 3600.0

# What a line of --follow shows of a step; `groupwise.Client.metrics` has the rest
SHOWN = {
    "reward/mean": "reward",
    "loss/policy": "loss",
    "loss/cross_entropy": "loss",
    "loss/kl": "kl",
    "optim/grad_norm": "grad",
    "perf/tok_s": "tok/s",
    "time/step_s": "s/step",
}

# What `rollouts sample` says of a completion and training does not ask for: always, and where its id says it
SAMPLED = {"prompt_index", "completion_index", "finish_reason", "adapter", "reasoning_content", "usage"}
TOLD_BY_ID = {"text", "token_ids", "prompt_token_ids", "logprobs"}

rollouts = typer.Typer(help="Sample completions to be scored.", **OPTIONS)
train = typer.Typer(help="Train adapters on a server, and follow its jobs.", **OPTIONS)


def add_to(app: typer.Typer) -> None:
    """Make these commands part of `groupwise`."""
    app.add_typer(rollouts, name="rollouts")
    app.add_typer(train, name="train")


# ---- sampling ----


@rollouts.command(
    epilog=examples(
        'groupwise rollouts sample "What is 47 + 138?" -n 8 --max-tokens 64 --json',
        "groupwise rollouts sample --file prompts.jsonl -n 8 --json > groups.json",
    )
)
def sample(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="Messages of the user.")] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL: a prompt, or messages, a line; `-` is stdin.")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Completions of each prompt.")] = 8,
    adapter: Adapter = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Give token ids and logprobs back.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Groups of completions. With --json: {"groups": ...}, as `train grpo` takes them once each has a reward."""
    asked: list[Any] = [*(prompts or ()), *(_prompts(file) if file is not None else ())]
    if not asked:
        raise DataError("there is no prompt", hint="give prompts as arguments, or a file with --file")
    more: dict[str, Any] = {"logprobs": True, "return_token_ids": True} if token_ids else {}
    options = {"adapter": adapter, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with open_client(url, api_key) as client:
        groups = client.sample(asked, n=n, **options, **more)
    if as_json:
        return print_answer({"groups": groups})
    for group in groups:
        print_line(str(group.messages[-1].get("content")))
        for completion in group.completions:
            print_line(f"  {completion.rollout_id or '-'}  {' '.join(completion.text.split())}")


def _prompts(path: Path) -> Iterator[Any]:
    for number, line in json_lines(_text(path)):
        row = _parse(line, where=f"{path}:{number}")
        prompt = row.get("messages", row.get("prompt")) if isinstance(row, Mapping) else row
        if not isinstance(prompt, str | list):
            hint = 'write {"prompt": "..."} or {"messages": [...]} a line'
            raise DataError(f"{path}:{number} has no prompt", hint=hint)
        yield prompt


# ---- training ----


@train.command(epilog=examples("groupwise train grpo scored.json --output-name math --set learning_rate=1e-4 --wait"))
def grpo(
    file: ScoredFile,
    output_name: OutputName = None,
    set_: Settings = None,
    wait: Wait = False,
    timeout: Timeout = WAIT_S,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train on scored completions: {"groups": [...], "config": {...}}, or a group a line."""
    groups, config = _submission(file, "groups", set_, output_name)
    groups = [_to_submit(group) for group in groups]
    with open_client(url, api_key) as client:
        _report(client, client.train_grpo(groups, **config), wait=wait, timeout=timeout, as_json=as_json)


@train.command(epilog=examples("groupwise train sft conversations.jsonl --output-name tone --set epochs=2"))
def sft(
    file: ScoredFile,
    output_name: OutputName = None,
    set_: Settings = None,
    wait: Wait = False,
    timeout: Timeout = WAIT_S,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train on conversations: {"examples": [...], "config": {...}}, or {"messages": [...]} a line."""
    examples, config = _submission(file, "examples", set_, output_name)
    with open_client(url, api_key) as client:
        _report(client, client.train_sft(examples, **config), wait=wait, timeout=timeout, as_json=as_json)


@train.command(epilog=examples("groupwise train status", "groupwise train status 6f1e... --url http://host:8420"))
def status(
    job_id: Annotated[str | None, typer.Argument(metavar="JOB", help="Default: every job.", show_default=False)] = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List every job, the running one first; or show one, in detail."""
    with open_client(url, api_key) as client:
        if job_id is not None:
            job = client.status(job_id)
            return print_answer(job) if as_json else _print_job(job)
        jobs = client.jobs()
    if as_json:
        return print_answer(jobs)
    if not jobs:
        return say("no training jobs")
    rows = [("job", "kind", "state", "done", "step", "loss", "reward", "adapter", "seconds")]
    print_table([*rows, *map(_row, jobs)])


@train.command()
def cancel(
    job_id: JobId, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Cancel a job that waits or runs."""
    with open_client(url, api_key) as client:
        answer = client.cancel(job_id)
    if as_json:
        return print_answer(answer)
    print_line(f"{answer.job_id} {answer.status}")


@train.command(epilog=examples("groupwise train wait 6f1e... --follow"))
def wait(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", help="Print what happens; with --json, an event a line.")] = False,
    timeout: Timeout = WAIT_S,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Wait until a job is completed; exits with 5 if it failed or was cancelled, with 75 after --timeout."""

    def show(event: JobEvent) -> None:
        if as_json:
            print_answer(event)
        else:
            print_line(_line(event))

    with open_client(url, api_key) as client, _going_on(job_id):
        job = client.wait(job_id, timeout=timeout, on_event=show if follow else None)
    _print_end(job, as_json=as_json)


def _submission(
    path: Path, what: str, settings: Sequence[str] | None, output_name: str | None
) -> tuple[list[Any], dict[str, Any]]:
    """Return the groups or examples of a file, and its config with what the command line says over it."""
    from groupwise.config.yaml import Document

    rows, config = _rows(path, what)
    document = Document(dict(config), "config")
    for text in settings or ():
        if "=" not in text:
            raise ConfigError(f"--set {text!r} has no value", hint="write KEY=VALUE, such as learning_rate=1e-4")
        document.override(text, shorthand={})
    return rows, document.data | ({} if output_name is None else {"output_name": output_name})


def _to_submit(group: Any) -> Any:
    """Return a group as `rollouts sample --json` printed it, with rewards, as the server takes it; another one as it
    is."""
    if not isinstance(group, Mapping) or not isinstance(group.get("completions"), list):
        return group
    kept = {key: value for key, value in group.items() if value or key != "tools"}
    return kept | {"completions": [_named(each) for each in group["completions"] if _is_scored(each)]}


def _named(completion: Any) -> Any:
    if not isinstance(completion, Mapping):
        return completion
    left_out = SAMPLED | (TOLD_BY_ID if completion.get("rollout_id") else set())
    return {key: value for key, value in completion.items() if key not in left_out and value is not None}


def _is_scored(completion: Any) -> bool:
    """Return whether a completion was scored: a reward of null says that it could not be."""
    return not isinstance(completion, Mapping) or "reward" not in completion or completion["reward"] is not None


def _rows(path: Path, what: str) -> tuple[list[Any], Mapping[str, Any]]:
    text = _text(path)
    try:
        whole = json.loads(text)
    except ValueError:
        return [_parse(line, where=f"{path}:{number}") for number, line in json_lines(text)], {}
    if isinstance(whole, list):
        return whole, {}
    if isinstance(whole, Mapping) and what in whole:
        if unknown := whole.keys() - {what, "config"}:
            raise DataError(
                f"{path} has {', '.join(sorted(unknown))} beside {what}", hint="options go under config, or into --set"
            )
        return whole[what], whole.get("config") or {}
    if isinstance(whole, Mapping) and not whole.keys().isdisjoint({"messages", "completions"}):  # one line of JSONL
        return [whole], {}
    raise DataError(f"{path} has no {what}", hint=f'write {{"{what}": [...], "config": {{...}}}}, or JSONL')


def _text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _parse(line: str, *, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None


# ---- what is printed ----


def _report(client: Client, submitted: Any, *, wait: bool, timeout: float, as_json: bool) -> None:
    for warning in submitted.warnings:
        say(f"warning: {warning}")
    if not wait:
        if as_json:
            return print_answer(submitted)
        print_line(submitted.job_id)
        return say(f"{submitted.message}; follow it with: groupwise train wait {submitted.job_id} --follow")
    say(f"{submitted.job_id}: {submitted.message}")
    with _going_on(submitted.job_id):
        job = client.wait(submitted.job_id, timeout=timeout, on_event=lambda event: say(_line(event)))
    _print_end(job, as_json=as_json, told=submitted.warnings)


def _print_end(job: TrainStatus, *, as_json: bool, told: Sequence[str] = ()) -> None:
    """Print how a job ended; on stderr its warnings, but for those that were told."""
    for warning in (each for each in job.warnings if each not in told):
        say(f"warning: {warning}")
    if as_json:
        return print_answer(job)
    print_line(f"{job.job_id} {job.state}: {job.adapter_version or job.adapter_name}")


@contextmanager
def _going_on(job_id: str) -> Iterator[None]:
    """Tell a user who interrupts the wait in the block that the job continues."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"job {job_id} goes on; end it with: groupwise train cancel {job_id}")
        raise


def _line(event: JobEvent) -> str:
    shown = {label: event.data[key] for key, label in SHOWN.items() if isinstance(event.data.get(key), int | float)}
    numbers = "  ".join(f"{label} {value:.4g}" for label, value in shown.items())
    return f"{event.at.astimezone():%H:%M:%S} {event.kind:<8} {event.message}{'  ' if numbers else ''}{numbers}"


def _row(job: TrainStatus) -> tuple[str, ...]:
    state = f"queued {job.position}" if job.state == "queued" and job.position else job.state
    if job.state == "running":
        state = job.phase or job.state
    reward = job.metrics.get("reward/mean")
    loss, reward = ("" if value is None else f"{value:.4g}" for value in (job.current_loss, reward))
    steps = f"{job.step}/{job.steps}"
    adapter = job.adapter_version or job.adapter_name or ""
    return (
        job.job_id,
        job.kind,
        state,
        f"{job.progress:.0%}",
        steps,
        loss,
        reward,
        adapter,
        _seconds(job.duration_secs),
    )


def _seconds(duration: float | None) -> str:
    """Return the seconds that a job ran; None of one that never did, however long it waited."""
    return "" if duration is None else f"{duration:.1f}"


def _print_job(job: TrainStatus) -> None:
    rows = [
        ("job", job.job_id),
        ("kind", job.kind),
        ("state", f"{job.state} ({job.phase})" if job.phase and not job.finished else job.state),
        ("progress", f"{job.progress:.0%}, step {job.step} of {job.steps}, attempt {job.attempt}"),
        ("adapter", job.adapter_version or job.adapter_name or ""),
        *((name, f"{datetime.fromisoformat(when):%Y-%m-%d %H:%M:%S %Z}") for name, when in _times(job) if when),
        ("elapsed", f"{job.elapsed_secs:.1f} s"),
        ("duration", f"{job.duration_secs:.1f} s" if job.duration_secs is not None else "never ran"),
        *([("waits", job.waits.message)] if job.waits is not None else []),
        *([("deadline", f"{job.deadline.at}: {job.deadline.message}")] if job.deadline is not None else []),
        *((name, "-" if value is None else f"{value:.6g}") for name, value in job.metrics.items()),
        *(("warning", warning) for warning in job.warnings),
    ]
    if job.error is not None:
        rows.append(("error", f"{job.error.message} ({job.error.code})"))
        rows += [("hint", job.error.hint)] if job.error.hint else []
    print_pairs(rows)


def _times(job: TrainStatus) -> Iterator[tuple[str, str | None]]:
    yield from (("created", job.created_at), ("started", job.started_at), ("finished", job.finished_at))
