"""A run's rollouts as a dataset: one row a completion, in a Parquet file, with a card that says what the columns are.

Every text is masked (`store.masking`). Token ids and log-probabilities stay in the run's directory: they would say
again what was taken out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.cli.push.facts import Facts
from groupwise.errors import ConfigError
from groupwise.run.record import read_run
from groupwise.store.masking import Masking
from groupwise.store.rollouts import plain
from groupwise.store.tracking import read_rollouts
from groupwise.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    import pyarrow

FILE = "data/train-00000-of-00001.parquet"  # as the hub looks for a split

_COLUMNS = {
    "step": "the training step that sampled it",
    "group": "the number of its group in the step: completions of one group answer one prompt",
    "prompt_id": "the prompt's name, the same in every step",
    "prompt": "the messages before the completion: `role` and `content`, which is JSON where it is not text",
    "completion": "what the policy said; of an episode its last turn",
    "messages": "of an episode of several turns all that was said in it; else empty",
    "tools": "the tools that the policy was told of, as JSON; null without any",
    "reward": "the sum of its rewards; null where it could not be scored",
    "rewards": "each reward by its name, as JSON, before its weight",
    "advantage": "its advantage over its group, by which it was trained; null where it was not",
    "tokens": "how many tokens the policy said",
    "finish_reason": "stop, or length: cut at the longest",
    "version": "the version of the policy that sampled it",
    "error": "why it could not be scored; null where it was",
    "columns": "the other columns of the prompt's row, as JSON",
}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Counts of what was written: the rows, and the steps they are of."""

    rows: int
    steps: int


def write_rows(facts: Facts, path: Path, *, masking: Masking) -> Rows:
    """Write the rollouts of a run as Parquet, a row group a step. Raises ConfigError where it has none, DataError for a
    file that is damaged."""
    import pyarrow.parquet

    rollouts = read_run(facts.run_dir).rollouts
    if not rollouts:
        raise ConfigError(
            f"{facts.run_dir} has no rollouts, so that there is no dataset to push",
            hint="leave --dataset out",
            field="--dataset",
        )
    schema, count = _schema(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for step, file in rollouts.items():
            rows = [row for at, group in enumerate(read_rollouts(file)) for row in _rows(step, at, group, masking)]
            count += len(rows)
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    return Rows(rows=count, steps=len(rollouts))


def dataset_card(facts: Facts, written: Rows, *, repo: str) -> str:
    """Return the README.md of the dataset."""
    size = next((name for most, name in ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"))
                 if written.rows < most), "100K<n<1M")  # fmt: skip
    columns = [f"| `{name}` | {what} |" for name, what in _COLUMNS.items()]
    lines = [
        "---",
        "tags: [groupwise, rollouts, reinforcement-learning]",
        "task_categories: [text-generation]",
        f"size_categories: [{size}]",
        "---",
        "",
        f"# Rollouts of {repo.rpartition('/')[2]}",
        "",
        f"{written.rows:,} completions that `{facts.name}` sampled in {written.steps} steps of training "
        f"(`{facts.kind}`, from `{facts.base.name}`) with Groupwise, with their rewards.",
        "",
        "| column | what it is |",
        "|---|---|",
        *columns,
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        f'rollouts = load_dataset("{repo}", split="train")',
        "```",
        "",
        "Prompts and the columns of their rows are those of the data that the run was trained on, under its terms.",
    ]
    return "\n".join(lines) + "\n"


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    kinds = {"step": pa.int32(), "group": pa.int32(), "tokens": pa.int32(), "prompt": messages, "messages": messages}
    kinds |= {"reward": pa.float64(), "advantage": pa.float64()}
    return pa.schema([(name, kinds.get(name, pa.string())) for name in _COLUMNS])


def _rows(step: int, at: int, group: RolloutGroup, masking: Masking) -> Iterator[dict[str, Any]]:
    prompt = group.prompt
    asked = _messages(prompt.messages or ({"role": "user", "content": prompt.text or ""},), masking)
    shared = {
        "step": step,
        "group": at,
        "prompt_id": masking.text(prompt.id),
        "prompt": asked,
        "tools": _json(prompt.tools, masking) if prompt.tools else None,
        "columns": _json(prompt.columns, masking),
    }
    for rollout in group.rollouts:
        yield shared | _row(rollout, masking)


def _row(rollout: Rollout, masking: Masking) -> dict[str, Any]:
    last = rollout.turns[-1].completion if rollout.turns else None
    return {
        "completion": "" if last is None else masking.text(last.text),
        "messages": _messages(rollout.messages, masking),
        "reward": rollout.reward,
        "rewards": _json(rollout.rewards, masking),
        "advantage": rollout.advantage,
        "tokens": sum(len(turn.completion.token_ids) for turn in rollout.turns),
        "finish_reason": None if last is None else last.finish_reason.value,
        "version": None if last is None else str(last.version),
        "error": None if rollout.error is None else masking.text(rollout.error),
    }


def _messages(messages: Any, masking: Masking) -> list[dict[str, str]]:
    return [{"role": str(each["role"]), "content": _content(each, masking)} for each in messages or ()]


def _content(message: Mapping[str, Any], masking: Masking) -> str:
    """Return what a message says; with tool calls, or parts, as JSON."""
    content = message.get("content")
    if isinstance(content, str) and set(message) <= {"role", "content"}:
        return masking.text(content)
    return _json({key: value for key, value in message.items() if key != "role"}, masking)


def _json(value: Any, masking: Masking) -> str:
    return json.dumps(masking.value(plain(value)), ensure_ascii=False)
