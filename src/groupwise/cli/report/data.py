"""Collects a report's data from the runs: the answers that `groupwise ui` would give, as far as the file may grow.

Metrics, health, evaluations and configuration are complete; only a very long run's metrics are thinned, to every so
many steps. Completions are taken as long as they fit: whole steps, spread over the run, and of a step that is too large
by itself the groups whose rewards differ most, which are those that taught. Pictures are scaled down, and as many are
taken as fit (`pictures`). `left_out` says what is left out.

Text of models and users goes in as text: what would hide or reorder it is made visible.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from groupwise.cli.report.pictures import MOST_BYTES, embedded
from groupwise.server.metric_definitions import defined_metrics
from groupwise.server.run_files import RunFiles
from groupwise.server.run_pairs import against
from groupwise.server.run_rollouts import change_of, groups_of, steps_of
from groupwise.server.runs import judged
from groupwise.server.schema_runs import RunRolloutGroup
from groupwise.server.visible_text import plain
from groupwise.store.rundir import IMAGES

MOST_COMPLETION_BYTES = 8_000_000  # of all runs together, as JSON
MOST_VALUES = 150_000  # of metrics, of all runs together: about 5 MB
MOST_TOKENS = 1_500  # of a completion
MOST_CHARS = 8_000  # of a prompt, and of a completion's text
_LARGE_STEP = 3  # a step has at most this part of the room: the first, the last and the middle one fit


def data_of(runs: Sequence[RunFiles], *, steps: Sequence[int] = ()) -> dict[str, Any]:
    """Return the report's data, as JSON has it. `steps` are those whose completions are in it; none means those that
    fit."""
    share = len(runs)
    rooms = {"room": MOST_COMPLETION_BYTES // share, "values": MOST_VALUES // share, "pictures": MOST_BYTES // share}
    saved = [_run(run, steps, **rooms) for run in runs]
    definitions = defined_metrics().model_dump(mode="json")["definitions"]
    held_out = [each.model_dump(mode="json") for each in against(runs)] if len(runs) > 1 else []
    written = datetime.now(UTC).isoformat(timespec="seconds")
    return {"written": written, "definitions": definitions, "runs": saved, "held_out": held_out}


def _run(run: RunFiles, steps: Sequence[int], *, room: int, values: int, pictures: int) -> dict[str, Any]:
    lines, every = _thinned(run.metrics.by_step(), values)
    evaluations = _evaluations(run, room=room // 2)
    found = _completions(run, steps, room=room - _size(evaluations))
    notes = [*found.notes(run)]
    if every > 1:
        notes.insert(0, f"Metrics are of every {every} steps, of each evaluation and of the last step.")
    groups = [group for step in sorted(found.steps, reverse=True) for group in found.steps[step]]
    named = [*_addresses(evaluations["changed"]), *_addresses(groups)]
    shown = embedded(named, run.directory / IMAGES, room=pictures)
    if missing := len({address for address in named if address} - {*shown}):
        some = f"Of {len(shown) + missing} pictures {len(shown)} are here"
        notes.append(f"{some}; groupwise ui {run.directory.name} shows all.")
    return _shown(
        {
            "detail": run.detail().model_dump(mode="json"),
            "steps": [_rounded(line) for line in lines],
            "health": judged(run).model_dump(mode="json"),
            "evaluations": evaluations,
            "groups": groups,
            "images": shown,
            "left_out": notes,
        }
    )


def _addresses(entries: Sequence[Mapping[str, Any]]) -> Iterator[str | None]:
    """Yield the pictures of prompts, and of the messages of their episodes."""
    for entry in entries:
        yield from entry.get("images") or ()
        for rollout in entry["rollouts"] if "rollouts" in entry else (entry["before"], entry["after"]):
            for part in rollout["parts"]:
                yield from part.get("images") or ()


# ---- metrics ----
def _thinned(lines: Sequence[dict[str, Any]], most: int) -> tuple[list[dict[str, Any]], int]:
    """Return the lines with at most about `most` values, and how many steps lie between two of them."""
    every = max(1, math.ceil(sum(map(len, lines)) / max(most, 1)))
    kept = [
        line
        for index, line in enumerate(lines)
        if index % every == 0 or index == len(lines) - 1 or any(key.startswith("eval/") for key in line)
    ]
    return kept, every


def _rounded(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in line.items()}


# ---- completions ----
def _evaluations(run: RunFiles, *, room: int) -> dict[str, Any]:
    """Return what changed on the held-out prompts, with as many of them as fit."""
    evaluations = change_of(run).model_dump(mode="json")
    changed, evaluations["changed"] = evaluations["changed"], []
    for pair in changed:
        sides = {side: _compact(pair[side]) for side in ("before", "after")}
        evaluations["changed"].append({**pair, **sides, "prompt": _cut(pair["prompt"])})
        if _size(evaluations) > room:
            evaluations["changed"].pop()
    return evaluations


@dataclass
class _Completions:
    """The groups that are in the file, by step, and what is not."""

    steps: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    partly: dict[int, tuple[int, int]] = field(default_factory=dict)  # groups that are there, of how many
    damaged: list[str] = field(default_factory=list)
    cut: bool = False  # a group lacks completions
    available: int = 0

    def notes(self, run: RunFiles) -> Iterator[str]:
        whole = f"groupwise ui {run.directory.name} shows all."
        if len(self.steps) < self.available:
            there = ", ".join(map(str, sorted(self.steps)[:40])) + ("…" if len(self.steps) > 40 else "")
            some = f"{len(self.steps)} of {self.available} steps are here" + (f" ({there})" if there else "")
            yield f"Completions of {some}; {whole}"
        if self.partly:
            some = ", ".join(f"step {step}: {few} of {all_}" for step, (few, all_) in sorted(self.partly.items())[:8])
            yield f"Of large steps the groups whose rewards differ most are here ({some}); {whole}"
        if self.cut:
            yield f"Of groups that are too large by themselves the best and the worst completions are here; {whole}"
        yield from self.damaged


def _completions(run: RunFiles, wanted: Sequence[int], *, room: int) -> _Completions:
    """Return the steps of `wanted`, or steps spread over the run, until `room` bytes are used."""
    available = steps_of(run)
    found, left = _Completions(available=len(available)), room
    order = [step for step in dict.fromkeys(wanted) if step in available] or outermost_first(available)
    for step in order:
        groups = [*groups_of(run, step, tokens=MOST_TOKENS, left_out=found.damaged.append)]
        limit = min(left, room // min(_LARGE_STEP, len(order)))
        kept, used = _fitting(groups, limit)
        if groups and not kept:
            kept, used = _ends(max(groups, key=_spread), limit)
            found.cut = found.cut or bool(kept)
        if groups and not kept:
            break
        left -= used
        if kept:
            found.steps[step] = kept
        if len(kept) < len(groups):
            found.partly[step] = len(kept), len(groups)
    return found


def outermost_first(steps: Sequence[int]) -> list[int]:
    """Return the last, the first, the middle one, those in the middle of the halves, and so on.

    >>> outermost_first([1, 2, 3, 4, 5])
    [5, 1, 3, 2, 4]
    """
    if len(steps) < 2:
        return list(steps)
    order, spans = [len(steps) - 1, 0], [(0, len(steps) - 1)]
    for low, high in spans:  # grows while it is read
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    return [steps[index] for index in order]


def _fitting(groups: Sequence[RunRolloutGroup], room: int) -> tuple[list[dict[str, Any]], int]:
    """Return those of the groups that fit, the widest spread of rewards first, in the order in which they were sampled;
    and their size in bytes."""
    kept: dict[int, dict[str, Any]] = {}
    used = 0
    for index in sorted(range(len(groups)), key=lambda index: -_spread(groups[index])):
        group = _compact_group(groups[index])
        size = _size(group)
        if used + size <= room:
            kept[index] = group
            used += size
    return [kept[index] for index in sorted(kept)], used


def _ends(group: RunRolloutGroup, room: int) -> tuple[list[dict[str, Any]], int]:
    """Return the group with as many of its best and its worst completions as fit; nothing where not one does."""
    whole = _compact_group(group)
    rollouts, count = whole["rollouts"], len(whole["rollouts"])
    outermost = [index for pair in zip(range(count), reversed(range(count)), strict=True) for index in pair]
    used, kept = _size({**whole, "rollouts": []}), set[int]()
    for index in dict.fromkeys(outermost):
        size = _size(rollouts[index])
        if used + size > room:
            break
        used += size
        kept.add(index)
    return ([{**whole, "rollouts": [rollouts[index] for index in sorted(kept)]}], used) if kept else ([], 0)


def _size(data: Any) -> int:
    """Return bytes of JSON."""
    return len(json.dumps(data, ensure_ascii=False).encode("utf-8", "replace"))


def _spread(group: RunRolloutGroup) -> float:
    rewards = [each.reward for each in group.rollouts if each.reward is not None]
    return statistics.pstdev(rewards) if len(rewards) > 1 else -1.0


def _compact_group(group: RunRolloutGroup) -> dict[str, Any]:
    raw = group.model_dump(mode="json")
    rollouts = [_compact(rollout) for rollout in raw["rollouts"]]
    return {**raw, "prompt": _cut(raw["prompt"]), "prompt_token_ids": [], "rollouts": rollouts}


def _compact(rollout: dict[str, Any]) -> dict[str, Any]:
    """Return a rollout without its token ids and its prompt, which the group has; log-probabilities in four digits."""
    shorter = {name: _digits(rollout[name]) for name in ("logprobs", "gaps")}
    return {**rollout, **shorter, "prompt": "", "token_ids": [], "text": _cut(rollout["text"])}


def _digits(values: Sequence[float | None] | None) -> list[float | None] | None:
    return None if values is None else [None if value is None else float(f"{value:.4g}") for value in values]


def _cut(text: str) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= MOST_CHARS:
        return text
    half = MOST_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are left out here …\n{text[-half:]}"


def _shown(value: Any) -> Any:
    """Return `value` with every text made fit to be shown."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): _shown(each) for key, each in value.items()}
    return [_shown(each) for each in value] if isinstance(value, list | tuple) else value
