"""Measure the starter: its accuracy on held-out problems, skill by skill; `report.py` reads and shows the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from groupwise.chat import encode_prompt
from groupwise.data import to_prompt
from groupwise.engine.local import LocalEngine
from groupwise.errors import DataError
from groupwise.model import load_model
from groupwise.starter.tasks import SKILLS, Row, Style, is_correct, prompts
from groupwise.types import SamplingParams, SamplingRequest

MAX_TOKENS = 96
BARE: Style = "bare"
ROWS: tuple[tuple[str, Style], ...] = (
    *((skill, BARE) for skill in SKILLS),
    ("add", "sentence"),
    ("add", "think"),
    ("sub", "think"),
    ("add", "tags"),
)


def measure_starter(
    directory: Path, *, problems: int = 300, samples: int = 2, seed: int = 0, note: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the model in `directory` on up to `problems` held-out problems a row, `samples` completions each.

    `note` receives a line per row. Raises ModelError if there is no model.
    """
    base = load_model(str(directory))
    engine = LocalEngine(base)
    rows: list[dict[str, Any]] = []
    try:
        for skill, style in ROWS:
            asked = held_out(skill, style=style, at_most=problems)
            greedy = _accuracy(engine, base.tokenizer, asked, temperature=0.0, samples=1, seed=seed)
            sampled = _accuracy(engine, base.tokenizer, asked, temperature=1.0, samples=samples, seed=seed)
            rows.append({"skill": skill, "style": style, "problems": len(asked), "greedy": greedy, "sampled": sampled})
            note(f"{skill} ({style}): greedy {greedy:.1%}, sampled {sampled:.1%} of {len(asked)} held-out problems")
    finally:
        engine.close()
    return {
        "parameters": sum(parameter.numel() for parameter in base.model.parameters()),
        "base_hash": base.hash,
        "context_length": base.context_length,
        "samples": samples,
        "max_tokens": MAX_TOKENS,
        "skills": rows,
    }


def held_out(skill: str, *, style: Style, at_most: int) -> list[Row]:
    """Held-out problems: `at_most` of them, or nearly all of a skill that has fewer."""
    while True:
        try:
            return prompts(skill, "test", n=at_most, style=style)
        except DataError:
            if at_most <= 1:
                raise
            at_most = at_most * 9 // 10  # what fewer ask for is a prefix of what more do


def _accuracy(
    engine: LocalEngine,
    tokenizer: PreTrainedTokenizerBase,
    asked: list[Row],
    *,
    temperature: float,
    samples: int,
    seed: int,
) -> float:
    """The share of right replies."""
    encoded = [encode_prompt(to_prompt(row, id=str(i)), tokenizer) for i, row in enumerate(asked)]
    requests = [
        SamplingRequest(
            prompt_ids=prompt.token_ids,
            params=SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed * 1_000_003 + i),
            n=samples,
        )
        for i, prompt in enumerate(encoded)
    ]
    replies = engine.generate(requests)
    right = [
        is_correct(row["skill"], completion.text, row["answer"], row["style"])
        for row, completions in zip(asked, replies, strict=True)
        for completion in completions
    ]
    return sum(right) / len(right)
