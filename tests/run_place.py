"""Directories of runs as `groupwise run` leaves them, without the hour it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from groupwise.config.run import STARTER_DIR, dump_resolved, parse_config
from groupwise.store.tracking import Tracking
from groupwise.types import Completion, FinishReason, Message, PolicyVersion, Prompt, Rollout, RolloutGroup, Turn

TOKENIZER = Tokenizer.from_file(str(STARTER_DIR / "tokenizer.json"))
END = TOKENIZER.token_to_id("<|im_end|>")
ASKED = TOKENIZER.encode("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n").ids


def turn(
    text: str, *, prompt: Sequence[int] = ASKED, logprob: float = -0.5, version: int = 0, cut: bool = False
) -> Turn:
    ids = [*TOKENIZER.encode(text).ids, *([] if cut else [END])]
    completion = Completion(
        token_ids=tuple(ids),
        logprobs=(logprob,) * len(ids),
        text=text,
        finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        version=PolicyVersion("toy", version) if version else PolicyVersion.base(),
    )
    return Turn(tuple(prompt), completion)


def group(*rollouts: Rollout, id: str = "p:1") -> RolloutGroup:
    messages = (Message(role="user", content="2+2?"),)
    return RolloutGroup(prompt=Prompt(id=id, messages=messages, token_ids=tuple(ASKED)), rollouts=rollouts)


def scored(
    text: str, reward: float | None, *, parts: Mapping[str, float | None] | None = None, **options: Any
) -> Rollout:
    return Rollout(
        turns=(turn(text, **options),),
        rewards={"exact": reward} if parts is None else parts,
        reward=reward,
        advantage=None if reward is None else reward - 0.5,
        error=None if reward is not None else "ValueError: no number in it",
    )


def make_run(
    directory: Path,
    *,
    steps: int = 3,
    planned: int = 3,
    metrics: Mapping[str, float] | None = None,
    rollouts: Mapping[int, Sequence[RolloutGroup]] | None = None,
    **config: Any,
) -> Path:
    """A run of `planned` steps that made `steps` of them."""
    directory.mkdir(parents=True, exist_ok=True)
    given = parse_config(
        {"name": "toy", "data": {"source": "p.jsonl"}, "rewards": ["r:exact"], "train": {"steps": planned}} | config
    )
    (directory / "config.yaml").write_text(dump_resolved(given), encoding="utf-8")
    if steps:
        with Tracking(directory) as tracking:
            for step in range(1, steps + 1):
                tracking.log(step, metrics or {"reward/mean": step / 10, "reward/exact/mean": step / 10})
            for step, groups in (rollouts or {}).items():
                tracking.rollouts(step, groups)
    return directory


def write_line(directory: Path, step: int, metrics: Mapping[str, float] | None = None, *, newline: bool = True) -> None:
    """A line more, whole or torn."""
    line = json.dumps({"step": step, "time": "2026-01-01T00:00:00.000+00:00", **(metrics or {})})
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n" if newline else line[: len(line) // 2])
