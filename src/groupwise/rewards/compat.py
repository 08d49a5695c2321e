r"""Well-known rewards of other recipes, under their names, with their signatures and amounts, and hardened against
gaming.

| name | gives | what differs from the recipes, and why |
|---|---|---|
| `accuracy_reward` | 1 / 0 | a unit, a fraction or a percent sign is read; an empty answer is never right |
| `format_reward` | 1 / 0 | <think> and <answer> exactly once, in order, none empty, nothing around them |
| `length_penalty` | -0.5 / -0.2 / 0 | a run of blanks counts one character; a right answer is never too short |
| `exact_match_reward` | 2 / 0 | no match of nothing with nothing; a row without an answer does not apply |
| `fuzzy_match_reward` | 0 to 1 | ROUGE-L's F1 over words, linear time; copying the prompt is worth 0 |
| `numeric_correctness_reward` | 2 / 0 | $42, 42%, 1/2, 1e3 m, 1,234 are read; 0 is met within 1e-8 |
| `strict_xml_format_reward` | 0.5 / 0 | the last line needs no line break; each tag exactly once, none empty |
| `soft_xml_format_reward` | 0.5 / 0 | each tag exactly once, in order, none empty; text around them is allowed |
| `json_format_reward` | 0.5 / 0 | an object or an array, not a mere 3; a ``` fence is allowed; a schema can be given |
| `incremental_format_reward` | 0 to 0.5 | tags count in their order only; never below 0 |
| `ideal_length_reward` | 0 to 0.3 | nothing where the answer is known and wrong |
| `min_length_reward` | 0.2 / -0.2 | the 0.2 only where the answer is right, if it is known |
| `max_length_penalty` | -0.3 / 0 | |
| `reasoning_quality_reward` | 0 to 0.3 | a connector needs a sentence of five words around it, and a right answer |
| `citation_reward` | 0.2 / 0 | what is cited must stand in the prompt; one invention takes it all |
| `no_repetition_penalty` | -0.3 / 0 | an answer of one or two words repeats nothing |
| `math_problem_reward` | 0 to 2.5 | as its two parts |
| `code_execution_reward` | 2 / 0 | each row has its own test cases; in a sandbox, with limits |
| `code_block_format_reward` | 0.5 / 0 | exactly one fenced Python block |
| `no_syntax_error_reward` | 0.2 / 0 | a name or a constant is no program |
| `code_generation_reward` | 0 to 2.7 | as its three parts |

"Right" is what `accuracy_reward` says. Where a reward looks at the answer only to close a hole, the column is optional:
without it the amounts are those of the recipes. For new work take `rewards.math`, `text`, `format` and `length`, which
give 0 to 1 and leave the amount to the `weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.rewards import code
from groupwise.rewards import format as formats
from groupwise.rewards import length as lengths
from groupwise.rewards.base import text_of
from groupwise.rewards.math import last_quantity, number_match
from groupwise.rewards.text import exact_match, gold_text, prompt_text, rouge_l, tagged, words_of

Scores = list[float | None]
_XML = ("reasoning", "answer")


# ---- being right ----


def accuracy_reward(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None
) -> Scores:
    """1 where the text in the last <answer>, or else the last number of the completion, is the expected one.

    An expected answer that is one number is compared as a number, behind "####" if it has one; any other as text, and
    then a completion without the tag must be that text. The column is `answer`, or `solution`.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise ValueError("accuracy_reward needs `answer` or `solution` as a column")
    return [_is_right(text_of(completion), gold) for completion, gold in zip(completions, golds, strict=True)]


def _is_right(text: str, answer: Any) -> float | None:
    gold = gold_text(answer)
    gold = None if gold is None else gold.rpartition("####")[2].strip() or None
    if gold is None:
        return None
    inside = tagged(text, "answer")
    said = text if inside is None else inside
    numeric = last_quantity(gold) is not None and len(gold.split()) <= 2
    return (number_match if numeric else exact_match)([said], [gold])[0]


def _known_wrong(completions: Sequence[Any], answer: Sequence[Any] | None) -> list[bool]:
    golds = [None] * len(completions) if answer is None else answer
    return [_is_right(text_of(each), gold) == 0.0 for each, gold in zip(completions, golds, strict=True)]


def exact_match_reward(completions: Sequence[Any], answer: Sequence[Any]) -> Scores:
    """2 where the text in the last <answer> is the expected one."""
    return _times(2.0, exact_match(completions, answer, tag="answer"))


def fuzzy_match_reward(
    completions: Sequence[Any], answer: Sequence[Any], prompts: Sequence[Any] | None = None
) -> Scores:
    """How alike the text in the last <answer>, or else the completion, and the expected one are, from 0 to 1."""
    inside = [tagged(text_of(completion), "answer") for completion in completions]
    said = [text_of(each) if part is None else part for each, part in zip(completions, inside, strict=True)]
    return rouge_l(said, answer, prompts)


def numeric_correctness_reward(completions: Sequence[Any], answer: Sequence[Any], *, tolerance: float = 0.01) -> Scores:
    """2 where the number in the last <answer>, or else the last of the completion, is within `tolerance` of it."""
    inside = [tagged(text_of(completion), "answer") for completion in completions]
    said = [text_of(each) if part is None else part for each, part in zip(completions, inside, strict=True)]
    return _times(2.0, number_match(said, answer, tolerance=tolerance))


def math_problem_reward(completions: Sequence[Any], answer: Sequence[Any]) -> Scores:
    """`soft_xml_format_reward` + `exact_match_reward`."""
    exact = exact_match_reward(completions, answer)
    form = soft_xml_format_reward(completions)
    return [None if right is None else right + well for right, well in zip(exact, form, strict=True)]


# ---- form ----


def format_reward(completions: Sequence[Any]) -> list[float]:
    """1 for <think>...</think><answer>...</answer>."""
    return formats.tag_format(completions)


def strict_xml_format_reward(completions: Sequence[Any]) -> list[float]:
    """0.5 for <reasoning> and <answer> with each tag on a line of its own."""
    lines = re.compile("\n".join(rf"<{tag}>\n.*\n</{tag}>" for tag in _XML) + r"\n?", re.DOTALL)
    well_formed = formats.tag_format(completions, tags=_XML)
    texts = map(text_of, completions)
    return [0.5 * well * bool(lines.fullmatch(text)) for well, text in zip(well_formed, texts, strict=True)]


def soft_xml_format_reward(completions: Sequence[Any]) -> list[float]:
    """0.5 for <reasoning>...</reasoning><answer>...</answer> somewhere."""
    parts: list[str] = []
    for completion in completions:
        text = text_of(completion)
        start, end = text.find("<reasoning>"), text.rfind("</answer>")
        outside = text[: max(start, 0)] + (text[end + len("</answer>") :] if end >= 0 else "")
        whole = 0 <= start < end and not any(f"<{slash}{tag}>" in outside for tag in _XML for slash in ("", "/"))
        parts.append(text[start : end + len("</answer>")] if whole else "")
    return _halves(formats.tag_format(parts, tags=_XML))


def json_format_reward(completions: Sequence[Any], *, schema: Mapping[str, Any] | None = None) -> list[float]:
    """0.5 for a JSON object or array, of the `schema` if there is one."""
    return _halves(formats.json_format(completions, schema=schema, types=("object", "array")))


def incremental_format_reward(completions: Sequence[Any], *, tags: Sequence[str] = _XML) -> list[float]:
    """0.125 for each opening and each closing tag in order, less 0.001 for each character outside of them."""
    return [
        0.25 * len(tags) * share
        for share in formats.tag_progress(completions, tags=tags, outside_cost=0.001 / (0.25 * len(tags)))
    ]


# ---- length and style ----


def length_penalty(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, *, shortest: int = 50, longest: int = 2000
) -> list[float]:
    """-0.5 below `shortest` characters, -0.2 above `longest`."""
    golds = [None] * len(completions) if answer is None else answer
    scores: list[float] = []
    for completion, gold in zip(completions, golds, strict=True):
        size = len(" ".join(text_of(completion).split()))
        short = size < shortest and _is_right(text_of(completion), gold) != 1.0
        scores.append(-0.5 if short else -0.2 if size > longest else 0.0)
    return scores


def ideal_length_reward(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, *, ideal_tokens: int = 100
) -> list[float]:
    """0.3 max(0, 1 - |n - ideal| / ideal), n words."""
    near = lengths.ideal_length(completions, ideal=ideal_tokens, unit="words")
    wrong = _known_wrong(completions, answer)
    return [0.0 if is_wrong else 0.3 * share for share, is_wrong in zip(near, wrong, strict=True)]


def min_length_reward(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, *, min_tokens: int = 50
) -> list[float]:
    """0.2 from `min_tokens` words on, -0.2 below."""
    wrong = _known_wrong(completions, answer)
    sizes = [len(text_of(completion).split()) for completion in completions]
    long_enough = [0.0 if is_wrong else 0.2 for is_wrong in wrong]
    return [reached if size >= min_tokens else -0.2 for size, reached in zip(sizes, long_enough, strict=True)]


def max_length_penalty(completions: Sequence[Any], *, max_tokens: int = 500) -> list[float]:
    """-0.3 above `max_tokens` words."""
    return [-0.3 if len(text_of(completion).split()) > max_tokens else 0.0 for completion in completions]


def no_repetition_penalty(completions: Sequence[Any]) -> list[float]:
    """-0.3 where fewer than 70 % of the trigrams of words are distinct."""
    return lengths.repetition_penalty(completions, ngram=3, max_penalty=0.3, allowed=0.3, shape="step")


_CONNECTORS = (
    "therefore",
    "because",
    "since",
    "thus",
    "hence",
    "consequently",
    "first",
    "second",
    "next",
    "finally",
)
_FEWEST_WORDS = 5  # of a sentence in which a connector connects something


def reasoning_quality_reward(completions: Sequence[Any], answer: Sequence[Any] | None = None) -> list[float]:
    """0.05 for each of ten connectors ("therefore", "because", ...) in <reasoning>, 0.3 at most.

    It rewards how reasoning looks. Prefer a reward for the result, or a judge with a rubric (`rewards.judge`).
    """
    scores: list[float] = []
    for completion, wrong in zip(completions, _known_wrong(completions, answer), strict=True):
        reasoning = tagged(text_of(completion), "reasoning") or ""
        found: set[str] = set()
        for sentence in re.split(r"[.!?;\n]+", reasoning):
            words = words_of(sentence)
            here = set(words) & set(_CONNECTORS)
            if len(set(words)) - len(here) >= _FEWEST_WORDS - 1:
                found |= set(sorted(here)[:1])
        scores.append(0.0 if wrong else min(0.3, 0.05 * len(found)))
    return scores


_CITATION = re.compile(
    r"\[[0-9]+\]|\([A-Z][a-z]+,?\s+[0-9]{4}\)|\b(?i:according to|as stated in)\s+(?:the\s+)?([\w-]+)"
)


def citation_reward(completions: Sequence[Any], prompts: Sequence[Any]) -> list[float]:
    """0.2 where the completion cites, as [1], (Name, 2020) or "according to X", and only what the prompt holds."""
    scores: list[float] = []
    for completion, prompt in zip(completions, prompts, strict=True):
        given = prompt_text(prompt)
        cited = list(_CITATION.finditer(text_of(completion)))
        scores.append(0.2 if cited and all(_is_in(given, each) for each in cited) else 0.0)
    return scores


def _is_in(prompt: str, citation: re.Match[str]) -> bool:
    """Whether the prompt has the citation: [1] as it stands, a name and a year, the word behind "according to"."""
    if citation[0].startswith("["):
        return citation[0] in prompt
    words = set(words_of(prompt))
    cited = words_of(citation[1] or citation[0])
    return all(len(word) > 2 and word in words for word in cited)


# ---- code ----


def code_execution_reward(completions: Sequence[Any], test_cases: Sequence[Any]) -> Scores:
    """2 where the program's `solution` passes every test case of its row."""
    return _times(2.0, code.code_execution(completions, test_cases))


def code_block_format_reward(completions: Sequence[Any]) -> list[float]:
    """0.5 for one fenced Python block."""
    return _halves(code.code_block_format(completions))


def no_syntax_error_reward(completions: Sequence[Any]) -> list[float]:
    """0.2 for a program that can be compiled."""
    return [0.2 * score for score in code.no_syntax_error(completions)]


def code_generation_reward(completions: Sequence[Any], test_cases: Sequence[Any]) -> Scores:
    """`code_execution_reward` + `code_block_format_reward` + `no_syntax_error_reward`."""
    passes = code_execution_reward(completions, test_cases)
    block, valid = code_block_format_reward(completions), no_syntax_error_reward(completions)
    return [None if a is None else a + b + c for a, b, c in zip(passes, block, valid, strict=True)]


def _times(amount: float, scores: Scores) -> Scores:
    return [None if score is None else amount * score for score in scores]


def _halves(scores: Sequence[float]) -> list[float]:
    return [0.5 * score for score in scores]
