"""Lists of rewards for common tasks, as a configuration's `rewards` has them. Copy one, then change what is not yours.

    from groupwise import parse_config
    from groupwise.rewards.presets import MATH_REASONING
    config = parse_config({"data": ..., "rewards": MATH_REASONING})

Their form is that of the well-known recipes: being right counts most (2), form and style a fraction of it (0.2 to 0.5).
What would pay a wrong answer for its length or style is gated by being right, or left out. `answer` is a column; the
completions are asked to be <reasoning>...</reasoning><answer>...</answer> where a preset has tags.
"""

from __future__ import annotations

from typing import Any

_LIBRARY = "groupwise.rewards"
_RIGHT = {"function": f"{_LIBRARY}.text:exact_match", "args": {"tag": "answer", "ignore_case": True}}
_NO_LOOPS = {
    "function": f"{_LIBRARY}.length:repetition_penalty",
    "weight": 0.3,
    "args": {"ngram": 3, "allowed": 0.3, "shape": "step"},
}

MATH_REASONING: tuple[dict[str, Any], ...] = (
    {
        "function": f"{_LIBRARY}.math:math_match",
        "weight": 2.0,
        "args": {"tag": "answer", "require_box": False},
    },
    {"function": f"{_LIBRARY}.format:tag_progress", "weight": 0.5, "args": {"tags": ["reasoning", "answer"]}},
    _NO_LOOPS,
)
"""Mathematical answers (numbers, fractions, expressions) in <answer>, partial credit for the tags, no loops."""

CODE_GENERATION: tuple[dict[str, Any], ...] = (
    {"function": f"{_LIBRARY}.code:code_execution", "weight": 2.0},
    {"function": f"{_LIBRARY}.code:code_block_format", "weight": 0.5},
    {"function": f"{_LIBRARY}.code:no_syntax_error", "weight": 0.2},
)
"""Python programs that pass the test cases of the row's `test_cases` column; see `rewards.code`."""

QUESTION_ANSWERING: tuple[dict[str, Any], ...] = (
    {**_RIGHT, "weight": 2.0},
    {
        "function": f"{_LIBRARY}.ensemble:gated",
        "weight": 0.2,
        "args": {
            "function": {
                "function": f"{_LIBRARY}.length:length_window",
                "args": {"shortest": 20, "longest": 500, "margin": 20, "unit": "words"},
            },
            "condition": _RIGHT,
        },
        "name": "length",
    },
    {"function": f"{_LIBRARY}.compat:citation_reward"},
    _NO_LOOPS,
)
"""The exact answer in <answer>; of right ones, those that explain themselves; sources cited from the prompt."""

SUMMARIZATION: tuple[dict[str, Any], ...] = (
    {"function": f"{_LIBRARY}.text:rouge_l", "weight": 1.0},
    {
        "function": f"{_LIBRARY}.ensemble:gated",
        "weight": 0.3,
        "args": {
            "function": {
                "function": f"{_LIBRARY}.length:ideal_length",
                "args": {"ideal": 100, "unit": "words"},
            },
            "condition": f"{_LIBRARY}.text:rouge_l",
            "threshold": 0.2,
        },
        "name": "length",
    },
    _NO_LOOPS,
)
"""Overlap with the `answer` column beyond what copying the prompt gives; about 100 words where there is some."""
