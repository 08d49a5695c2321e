"""Measure what thinking costs a run: how long its trial completions thought, and how many were cut meanwhile.

A completion that is cut before its thought ends has no answer for the rewards to see, so that a group of them teaches
nothing. That is known from a few completions, before a run is spent on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from groupwise.config.run import RolloutConfig
from groupwise.model.chat import THINKS, opens_thought, template_reads
from groupwise.model.reply_formats.format import ThoughtMarks
from groupwise.model.reply_formats.known import format_of
from groupwise.types import FinishReason, RolloutGroup, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT = 0.1  # share of completions cut inside a thought from which there is a warning


@dataclass(frozen=True, kw_only=True)
class ThoughtCost:
    """Counts the thoughts of a trial's turns.

    Attributes:
        turns: turns in all, of which `thinking` began a thought, and `cut` had not ended it at their last token.
        tokens: the median length of a thought that ended, in tokens; of those that were cut where none ended.
        share: tokens in thoughts, as a part of all completion tokens.
    """

    turns: int
    thinking: int
    cut: int
    tokens: int
    share: float

    def __str__(self) -> str:
        said = f"{self.thinking} of {self.turns} trial turns think, about {self.tokens} tokens, {self.share:.0%} of all"
        return f"{said}; {self.cut} were cut inside their thought" if self.cut else said

    def warning(self, rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Return a warning with a remedy if many thoughts are cut; else None."""
        if self.cut <= CUT * self.turns:
            return None
        budget = max(1, rollout.max_tokens // 2)
        ways = ["raise rollout.max_tokens", f"end thoughts sooner (rollout.thinking_budget: {budget}, say)"]
        if template_reads(THINKS, tokenizer):
            ways.insert(0, f"switch thoughts off (chat.template_kwargs.{THINKS}: false)")
        return (
            f"{self.cut} of {self.turns} trial completions were still thinking when rollout.max_tokens = "
            f"{rollout.max_tokens} ended them, so that rewards see no answer: {', '.join(ways[:-1])}, or {ways[-1]}"
        )


def thought_cost(groups: Sequence[RolloutGroup], tokenizer: PreTrainedTokenizerBase) -> ThoughtCost | None:
    """Return the cost of these groups' thoughts; None without thoughts."""
    turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
    thoughts = [(turn, length) for turn in turns if (length := _thought_tokens(turn, tokenizer)) is not None]
    if not thoughts:
        return None
    marks = format_of(tokenizer).thought
    cut = [length for turn, length in thoughts if _is_cut(turn, marks)]
    ended = [length for turn, length in thoughts if not _is_cut(turn, marks)]
    spoken = sum(len(turn.completion.token_ids) for turn in turns)
    return ThoughtCost(
        turns=len(turns),
        thinking=len(thoughts),
        cut=len(cut),
        tokens=round(median(ended or cut)),
        share=sum(length for _, length in thoughts) / max(1, spoken),
    )


def _is_cut(turn: Turn, marks: ThoughtMarks) -> bool:
    return turn.completion.finish_reason is FinishReason.LENGTH and marks.end not in turn.completion.text


def _thought_tokens(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the tokens of a turn's thought, by its share of the text; None where it has none."""
    text, length = turn.completion.text, len(turn.completion.token_ids)
    marks = format_of(tokenizer).thought
    if not (opens_thought(turn.prompt_ids, tokenizer) or text.lstrip().startswith(marks.start)):
        return None
    thought, ended, _ = text.partition(marks.end)
    return round(length * len(thought) / max(1, len(text))) if ended else length
