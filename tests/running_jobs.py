"""Small real runs of the starter model for the tests of the loop, and what they leave."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.config.run import RunConfig, parse_config
from groupwise.run.display import LineDisplay
from groupwise.run.stop_request import StopRequest
from groupwise.store.tracking import read_rollouts
from groupwise.types import RolloutGroup

NOT_COMPARED = ("time", "time/", "perf/")


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    """Six steps of 4 prompts x 4 completions; a section's keys are merged into it."""
    data: dict[str, Any] = {
        "model": "starter",
        "data": {
            "source": "groupwise.tasks.starter.tasks:prompts",
            "args": {"skill": ["add"], "style": "bare", "n": 64},
        },
        "rewards": [{"function": "groupwise.rewards.text:exact_match"}],
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 8},
        "train": {"steps": 6, "learning_rate": 1e-3, "lora": {"rank": 4}},
        "checkpoint": {"every": 2},
        "scoring": {"workers": 0},
        "output_dir": str(tmp_path / "runs"),
    }
    return parse_config(merged(data, sections))


def two_steps(folder: Path, **sections: Any) -> dict[str, Any]:
    """The sections of a run of two steps of 4 prompts x 4 completions in `folder`, every group of it used."""
    data: dict[str, Any] = {
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 24, "refill": 1.0},
        "train": {"steps": 2},
        "device": "cpu",
        "dtype": "float32",
        "folder": str(folder),
        "run_dir": str(folder / "run"),
    }
    if "env" not in sections:
        data["scoring"] = {"workers": 0}
    return merged(data, sections)


def from_file(folder: Path, rows: Sequence[Mapping[str, Any]], **always: Any) -> Callable[..., RunConfig]:
    """`make(...)`: four steps on `rows`, as rows.jsonl of `folder`, in its `runs`; sections are merged into it."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data: dict[str, Any] = {
        "data": {"source": "rows.jsonl"},
        "train": {"steps": 4, "learning_rate": 3e-3, "lora": {"rank": 4}},
        "checkpoint": {"every": 1},
        "scoring": {"workers": 0},
        "device": "cpu",
        "dtype": "float32",
        "folder": str(folder),
        "output_dir": str(folder / "runs"),
    }
    return lambda **sections: parse_config(merged(merged(data, always), sections))


def merged(data: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with the keys of `sections`, a section's own keys merged into it; without what is None."""
    result = dict(data)
    for name, section in sections.items():
        both = isinstance(section, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = {**result[name], **section} if both else section
    return {name: section for name, section in result.items() if section is not None}


def says_a(completions: Sequence[Any], **columns: Any) -> list[float]:
    """A reward that differs between the completions of a random model, and is equal in some groups."""
    return [float("a" in completion[0]["content"]) for completion in completions]


class Dies(LineDisplay):
    """Ends the run when `step` is shown, as abruptly as a process can without dying."""

    class Now(BaseException):
        pass

    def __init__(self, step: int, *, total: int, stream: Any):
        super().__init__(total, stream=stream)
        self._last = step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        if step == self._last:
            raise Dies.Now


class Interrupts(LineDisplay):
    """Asks for a clean stop while `step` is shown, as Ctrl-C does."""

    def __init__(self, stop: StopRequest, *, step: int, total: int):
        super().__init__(total, stream=io.StringIO())
        self._stop, self._at = stop, step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        self._stop.requested |= step == self._at


class DiesAfter(LineDisplay):
    """Ends the process's work when so many steps were shown, of whichever stage."""

    def __init__(self, steps: int):
        super().__init__(steps, stream=io.StringIO())
        self._left = steps

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._left -= 1
        if not self._left:
            raise Dies.Now


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock measured."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: v for key, v in record.items() if not key.startswith(NOT_COMPARED)} for record in records]


def groups_of(run_dir: Path) -> list[RolloutGroup]:
    """The groups of all steps, in order, as what they were."""
    return [group for path in sorted((run_dir / "rollouts").glob("*.jsonl")) for group in read_rollouts(path)]


def rollouts_of(run_dir: Path) -> list[dict[str, Any]]:
    """The groups of all steps, in order, as their files say."""
    paths = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def sidecars_of(run_dir: Path) -> dict[str, dict[str, Any]]:
    """groupwise.json of every version that is there, without the time at which it was written."""
    paths: Sequence[Path] = sorted((run_dir / "adapters").rglob("groupwise.json"))
    return {path.parent.name: {**json.loads(path.read_bytes()), "created": None} for path in paths}


def adapter_bytes(run_dir: Path) -> dict[str, bytes]:
    """The weights of every version that is there, by name."""
    paths: Sequence[Path] = sorted((run_dir / "adapters").rglob("adapter_model.safetensors"))
    return {path.parent.name: path.read_bytes() for path in paths}
