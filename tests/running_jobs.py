"""Small real runs of the starter model for the tests of the loop, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.config.run import RunConfig, parse_config
from groupwise.run.display import LineDisplay

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
    for name, section in sections.items():
        both = isinstance(section, Mapping) and isinstance(data.get(name), Mapping)
        data[name] = {**data[name], **section} if both else section
    return parse_config(data)


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


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock measured."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: v for key, v in record.items() if not key.startswith(NOT_COMPARED)} for record in records]


def rollouts_of(run_dir: Path) -> list[dict[str, Any]]:
    """The groups of all steps, in order."""
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
