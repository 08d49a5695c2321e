"""Trains several runs in one process: `groupwise run a.yaml b.yaml`, `groupwise run a.yaml --sweep seed=0,1,2`.

    heats          the runs that are trained together, and the reason why the others follow one after another
    run_sweep      trains them; an `Outcome` for each

Runs of a heat share one base model in memory. Each run has its own adapter, optimizer, engine over the base's weights,
reward workers and directory. So each run computes the same bytes as alone. A shared batch of the engine would multiply
the completions of several runs by other kernels, with adapters not merged, which changes the last bits of
log-probabilities and, after some steps, tokens; so each run samples in its own batches. Small micro-batches are trained
together, which changes no bit (`train.together`), and no more threads compute at a time than one run has
(`train.processor_turns`).

A run that would change a setting of the whole process is trained alone: `why_alone` has the list.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from groupwise.config.chat import ChatConfig
from groupwise.config.hub import model_path
from groupwise.config.run import RunConfig
from groupwise.config.world import world
from groupwise.errors import ConfigError
from groupwise.model.load import resolve_device, resolve_dtype
from groupwise.platform import run_coroutine, spared
from groupwise.run.assemble import Beside
from groupwise.run.loop import RunResult, opened_run, run_loop, train
from groupwise.run.ranks import check_started
from groupwise.run.stop_request import StopRequest
from groupwise.run.sweep_display import SweepDisplay
from groupwise.train.together import JointPasses

if TYPE_CHECKING:
    from groupwise.run.plan import RunPlan
    from groupwise.run.training_run import TrainingRun
    from groupwise.store.checkpoint import RunState


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """Holds one of the runs: its plan, and a label that tells it from the others, such as `seed=1`."""

    label: str
    plan: RunPlan

    @property
    def config(self) -> RunConfig:
        return self.plan.config


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Holds what became of a run: its result, or the error that ended it; neither where it was not begun."""

    run: SweptRun
    result: RunResult | None = None
    error: Exception | None = None


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Holds runs that are trained together, over one base; `why` says why a single run is trained alone."""

    runs: tuple[SweptRun, ...]
    why: str | None = None


def why_alone(config: RunConfig) -> str | None:
    """Return why a run cannot be trained together with others with the same results; None if it can."""
    tracking, train = config.tracking, config.train
    device = resolve_device(config.device)
    clients = [name for name in ("wandb", "trackio", "mlflow") if getattr(tracking, name) is not None]
    if config.engine != "local":
        return f"engine {config.engine} serves one run"
    if device.type != "cpu":  # gpu-aware
        return f"what it may take of the memory of {device} is what is free when it begins"
    if train.lora is None:
        return "it trains all parameters, which are the base's"
    if train.lora.dropout:
        return "dropout draws from the one generator that torch has in a process"
    if train.memory_gb is not None:
        return "train.memory_gb is of the whole process"
    if config.stages:
        return "its stages are runs of their own"
    if config.teacher is not None:
        return "it has a teacher"
    if config.env is not None and config.env.environment is None:
        return "its agents find their endpoint by the process's environment"
    if clients:
        return f"{clients[0]} has one run in a process"
    return "its model sees, and keeps the pictures of one run" if _sees(config.model) else None


def _sees(model: str) -> bool:
    """Return whether a model has eyes; False where it cannot be read, which loading it will say."""
    try:
        return getattr(AutoConfig.from_pretrained(model_path(model)), "vision_config", None) is not None
    except (OSError, ValueError):
        return False


def heats(runs: Sequence[SweptRun]) -> list[Heat]:
    """Return the runs in the groups that are trained one after another, in the order of the runs.

    Raises ConfigError where two of them name one directory, and in one of several processes.
    """
    here = world()
    if here.size > 1:
        raise ConfigError(
            f"{len(runs)} runs are trained in one process, and {here.size} processes were started",
            hint="launch one run at a time",
        )
    for run in runs:
        check_started(run.config, here)
    named = [str(Path(run.config.run_dir).resolve()) for run in runs if run.config.run_dir is not None]
    if len(set(named)) < len(named):
        raise ConfigError(
            f"{len(runs)} runs are asked for, and run_dir {max(named, key=named.count)!r} is the directory of one",
            hint="leave run_dir out: each then has its own in output_dir",
            field="run_dir",
        )
    found: dict[str, list[SweptRun]] = {}
    alone: dict[str, str] = {}
    for number, run in enumerate(runs):
        why = why_alone(run.config)
        key = _base_of(run.config) if why is None else f"run {number}"
        found.setdefault(key, []).append(run)
        if why is not None:
            alone[key] = why
    several = sum(key not in alone for key in found) > 1
    other = "another base model, or the same in another type or with another chat template" if several else None
    return [
        Heat(runs=tuple(mine), why=alone.get(key, other if len(mine) == 1 else None)) for key, mine in found.items()
    ]


def _base_of(config: RunConfig) -> str:
    """Return what two runs must have alike to have one base: the model as it is loaded, and how it is spoken to."""
    device = resolve_device(config.device)
    loaded = (model_path(config.model), str(device), str(resolve_dtype(config.dtype, device)))
    chat = config.chat.model_dump(mode="json")
    folder = None if config.chat == ChatConfig() else str(config.folder.resolve())  # where a template is looked up
    return json.dumps([*map(str, loaded), config.quantization, config.cast_lm_head, chat, folder], sort_keys=True)


class Outcomes:
    """Collects what became of the runs that have ended so far."""

    def __init__(self, shown: SweepDisplay):
        self._shown, self._of = shown, dict[int, Outcome]()

    @property
    def any_result(self) -> bool:
        return any(outcome.result is not None for outcome in self._of.values())

    def of(self, run: SweptRun) -> Outcome:
        """Return a run's; one without result and error of a run that has not ended."""
        return self._of.get(id(run), Outcome(run=run))

    @contextmanager
    def failures(self, run: SweptRun) -> Iterator[None]:
        """End only this run at an error inside the block."""
        try:
            yield
        except Exception as error:
            self._of[id(run)] = Outcome(run=run, error=error)
            self._shown.of(run.label).note(f"failed: {error}")

    def ended(self, run: SweptRun, result: RunResult) -> None:
        """Take note of what came of a run."""
        self._of[id(run)] = Outcome(run=run, result=result)


def run_sweep(groups: Sequence[Heat], *, shown: SweepDisplay) -> list[Outcome]:
    """Train all runs, the runs of a heat together. Returns an outcome for each, in the order of the heats.

    An error ends only its own run. Ctrl-C finishes the present step of each run of the heat, saves and evaluates; later
    heats do not begin. A second Ctrl-C, or one before the first step, stops at once.

    Raises KeyboardInterrupt if the sweep was stopped at once and no run has a result.
    """
    outcomes = Outcomes(shown)
    try:
        for heat in groups:
            stop = StopRequest(graceful=False)
            if len(heat.runs) == 1:
                _alone(heat.runs[0], shown, stop, outcomes)
            else:
                _beside_each_other(heat.runs, shown, stop, outcomes)
            if stop.requested:
                break
    except KeyboardInterrupt:
        if not outcomes.any_result:
            raise
    return [outcomes.of(run) for heat in groups for run in heat.runs]


def _alone(run: SweptRun, shown: SweepDisplay, stop: StopRequest, outcomes: Outcomes) -> None:
    """Train a run as it is trained without a sweep."""
    with outcomes.failures(run):
        outcomes.ended(run, run_loop(run.config, plan=run.plan, display=shown.of(run.label), stop=stop))


def _beside_each_other(runs: Sequence[SweptRun], shown: SweepDisplay, stop: StopRequest, outcomes: Outcomes) -> None:
    """Open runs over one base, train them in one event loop, and close each when it ends."""
    threads = torch.get_num_threads()
    with ExitStack() as every, stop:
        stop.announce = shown.stopping
        every.callback(torch.set_num_threads, threads)
        begun, base = list[Callable[[], Coroutine[Any, Any, None]]](), None
        passes = JointPasses(at_once=threads)
        for run in runs:
            with outcomes.failures(run):
                mine = every.enter_context(ExitStack())
                beside = Beside(base=base, threads=threads, passes=passes)
                opened = mine.enter_context(opened_run(run.plan, shown=shown.of(run.label), beside=beside))
                base = opened[0].parts.base
                begun.append(partial(_to_its_end, run, opened, mine, stop, outcomes))
        every.enter_context(spared())
        run_coroutine(_together(begun))


async def _together(runs: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    await asyncio.gather(*(run() for run in runs))


async def _to_its_end(
    run: SweptRun,
    opened: tuple[TrainingRun, RunState | None],
    closing: ExitStack,
    stop: StopRequest,
    outcomes: Outcomes,
) -> None:
    """Train an open run, and close it."""
    training, state = opened
    with outcomes.failures(run), closing:
        outcomes.ended(run, await train(training, state, stop=stop))
