"""Datasets that the field trains on, by name: their rows as prompts with a checked answer, each with the reward for it.

    data: {source: groupwise.tasks.datasets:gsm8k}                 from Hugging Face's hub, or from a file of its shape:
    data: {source: groupwise.tasks.datasets:gsm8k, args: {source: my/gsm8k.jsonl}}

    function        a row has                                  its reward
    gsm8k           question, answer ("... #### 42")           rewards.math:number_match {box: true}
    math            problem, solution (with \\boxed{}) or       rewards.math:math_match
                    problem, answer
    countdown       nums, target                               rewards.math:equation_match {tag: answer}
    reverse_text    prompt                                     rewards.text:lcs_ratio {tag: reversed_text}

Every function takes `source` (a dataset of the hub, a saved one, or a file), `split`, `instruction` (what the model is
told besides the row's own text; published results are often very sensitive to it) and `folder`, from which relative
paths begin and which a configuration fills in. Other columns of a row stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from groupwise.config.data import RowsConfig
from groupwise.errors import DataError
from groupwise.rewards.math import boxed
from groupwise.tasks.rows import read_rows

BOXED = "Reason step by step, and put the final answer in \\boxed{}."
COUNTDOWN = (
    "Think in <think> </think> tags. Then give the equation's left side in <answer> </answer> tags, such as "
    "<answer>(1 + 2) / 3</answer>."
)
REVERSE = "Reverse the text character by character. Put the result in <reversed_text> </reversed_text> tags."


def gsm8k(
    source: str = "openai/gsm8k", *, split: str = "train", instruction: str = BOXED, folder: str = "."
) -> Iterator[dict[str, Any]]:
    """Grade-school word problems (arXiv 2110.14168); `answer` is the number behind the row's last ####.

    Raises DataError for a row of another shape.
    """
    for id, row in _rows(source, split, folder, ("question", "answer"), config="main"):
        _, mark, number = str(row["answer"]).rpartition("####")
        if not mark:
            raise DataError(f"{id}: the answer has no ####, behind which its number stands", hint="is it GSM8K?")
        yield {**row, "prompt": f"{row['question']}\n\n{instruction}", "answer": number.strip().replace(",", "")}


def math(
    source: str = "DigitalLearningGmbH/MATH-lighteval",
    *,
    split: str = "train",
    instruction: str = BOXED,
    folder: str = ".",
) -> Iterator[dict[str, Any]]:
    """Competition mathematics (MATH, arXiv 2103.03874; MATH-500 is HuggingFaceH4/MATH-500 with split test).

    `answer` is the row's, or what its solution has in its last \\boxed{}. Raises DataError for a row without either.
    """
    for id, row in _rows(source, split, folder, ("problem",)):
        given = row.get("answer")
        answer = boxed(str(row.get("solution") or "")) if given in (None, "") else given
        if answer is None:
            raise DataError(f"{id}: there is neither an answer nor a solution with \\boxed{{}}", hint="is it MATH?")
        yield {**row, "prompt": f"{row['problem']}\n\n{instruction}", "answer": str(answer)}


def countdown(
    source: str = "Jiayi-Pan/Countdown-Tasks-3to4",
    *,
    split: str = "train",
    instruction: str = COUNTDOWN,
    folder: str = ".",
) -> Iterator[dict[str, Any]]:
    """Make `target`, which becomes `answer`, of the numbers `nums`. Raises DataError for a row of another shape."""
    for id, row in _rows(source, split, folder, ("nums", "target")):
        try:
            numbers = [int(each) for each in row["nums"]]
        except (TypeError, ValueError):
            raise DataError(f"{id}: nums is {row['nums']!r}", hint="it is a list of whole numbers") from None
        asked = f"Using the numbers {numbers}, make an equation that equals {row['target']}."
        rule = "You may use +, -, *, / and parentheses, and each number once."
        yield {**row, "prompt": f"{asked} {rule} {instruction}", "nums": numbers, "answer": str(row["target"])}


def reverse_text(
    source: str = "PrimeIntellect/Reverse-Text-RL",
    *,
    split: str = "train",
    instruction: str = REVERSE,
    folder: str = ".",
) -> Iterator[dict[str, Any]]:
    """Write a text backwards; `answer` is the text reversed. Raises DataError for a row of another shape."""
    for id, row in _rows(source, split, folder, ("prompt",)):
        text = row["prompt"]
        if not isinstance(text, str) or not text:
            raise DataError(f"{id}: prompt is {text!r:.80}", hint="it is the text to be reversed")
        system = {"role": "system", "content": instruction}
        yield {**row, "prompt": [system, {"role": "user", "content": text}], "answer": text[::-1]}


def _rows(
    source: str, split: str, folder: str, columns: tuple[str, ...], *, config: str | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row with its id. Raises DataError for one without one of the columns, and for a split that the source
    does not have; `config` is the hub's name."""
    try:
        wanted = RowsConfig(source=source, split=None if split == "train" else split)
    except ValidationError as error:
        raise DataError(f"split: {error.errors()[0]['msg']}") from None
    if wanted.kind == "dataset" and config and "/" in source:
        wanted = wanted.model_copy(update={"args": {"name": config}})
    for id, row in read_rows(wanted, folder=folder):
        if not isinstance(row, Mapping) or any(row.get(name) is None for name in columns):
            has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            hint = f"rows of this dataset have {', '.join(columns)}"
            raise DataError(f"{id}: it has {has or 'no columns'}", hint=hint)
        yield id, row
