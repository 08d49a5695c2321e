"""`groupwise eval --suite SUITE`: tasks of lm-eval or inspect-ai on a version, and where their results go."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from groupwise.cli.adapters import evaluation_rows
from groupwise.cli.frame import print_table
from groupwise.cli.output import print_json, print_line, say
from groupwise.config.hub import model_path
from groupwise.config.run import RunConfig
from groupwise.errors import ConfigError
from groupwise.run.suite import SuiteRun, Target, check_suite, run_suite
from groupwise.store.locate import Located, find_policy, find_version
from groupwise.types import BASE

SUITES = "suites"  # in a run's directory: the files of the suites that were run on its versions


def evaluate_by_suite(
    suite: str,
    *,
    config: RunConfig | None,
    adapter: str | None,
    tasks: tuple[str, ...],
    limit: int | None,
    chat: bool,
    folder: Path | None,
    python: str | None,
    arguments: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Run the tasks against the version, print the result, and keep it with the version where that is in a store."""
    target, located = find_target(config, adapter)
    with ExitStack() as stack:
        if located is not None:
            stack.enter_context(located.held())
        if output is None:
            run_dir = None if located is None else located.run_dir
            at = f"{target.version}-{suite}-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
            kept = None if run_dir is None else run_dir / SUITES / at
            output = kept or Path(stack.enter_context(TemporaryDirectory()))
        run = SuiteRun(
            suite=suite,
            tasks=tasks,
            output=output,
            python=python or sys.executable,
            limit=limit,
            chat=chat,
            folder=folder,
            arguments=tuple(shlex.split(arguments or "")),
        )
        check_suite(run)
        result = run_suite(run, target, say=say).as_json()
        store = None if located is None else located.store
        if store is not None and located is not None:
            store.record(located.version, result)
    if as_json:
        return print_json({"version": target.version, "model": target.model, "recorded": store is not None, **result})
    print_line(f"{target.version} over {target.model}")
    print_table(evaluation_rows([result]))
    if store is None:
        return say(f"not kept: {target.version} is in no store")
    say(f"kept with the version: groupwise adapters show {target.version} --store {store.root}")


def find_target(config: RunConfig | None, adapter: str | None) -> tuple[Target, Located | None]:
    """Return the policy to serve: the adapter (or "base") over the configuration's model, or over the one that it was
    trained on. Raises ConfigError where neither is named, and as `find_policy`."""
    options: list[str] = []
    if config is not None:
        located, model = find_version(adapter), config.model
        given = {"dtype": config.dtype, "device": config.device, "quantization": config.quantization}
        options = [word for key, value in given.items() if value for word in (f"--{key}", value)]
    elif adapter in (None, BASE):
        raise ConfigError("there is nothing to evaluate", hint="name a version (--adapter RUN@N), or a CONFIG")
    else:
        policy = find_policy(adapter)
        located, model = policy.adapter, policy.model
        options = ["--quantization", policy.quantization] if policy.quantization else []
    target = Target(
        model=model,
        tokenizer=model_path(model),
        adapter=None if located is None else str(located.directory),
        version=BASE if located is None else str(located.version),
        options=tuple(options),
    )
    return target, located
