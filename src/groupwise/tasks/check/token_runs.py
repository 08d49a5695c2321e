"""One whole episode as the learner gets it: segment by segment, which tokens are trained and which are only seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from rich.text import Text

from groupwise.algo.samples import Segment, segments_of
from groupwise.tasks.transcript import visible
from groupwise.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED, SEEN = "bold green", "dim"


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """Tokens in a row that are all trained, or all only seen."""

    trained: bool
    tokens: int
    text: str


def runs_of(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> list[list[TokenRun]]:
    """Return the segments of an episode; each begins with its prompt."""
    return [_runs(segment, tokenizer) for segment in segments_of(rollout.turns)]


def drawn(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> list[Text]:
    """Return the episode in lines: green is trained, grey only seen; each run says which, for those who see no
    colours."""
    segments = runs_of(rollout, tokenizer)
    lines: list[Text] = []
    for number, runs in enumerate(segments, start=1):
        if number > 1:
            lines.append(Text(f"-- fork: this turn does not go on from the one before; segment {number} --", "yellow"))
        for run in runs:
            style = TRAINED if run.trained else SEEN
            head = f"{'trained' if run.trained else 'seen':<8}{run.tokens:>5}  "
            shown = visible(run.text).rstrip("\n").replace("\n", "\n" + " " * len(head))
            lines.append(Text.assemble((head, "cyan" if run.trained else "dim"), (shown, style)))
    return lines


def summary(rollout: Rollout) -> str:
    """Return how it ended and what it was worth, turn by turn."""
    rewards = ", ".join("-" if turn.reward is None else f"{turn.reward:g}" for turn in rollout.turns)
    worth = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    error = "" if rollout.error is None else f"; {rollout.error}"
    return f"{len(rollout.turns)} turns (their rewards: {rewards or '-'}), ended: {rollout.stop}, {worth}{error}"


def _runs(segment: Segment, tokenizer: PreTrainedTokenizerBase) -> list[TokenRun]:
    marked: Sequence[tuple[int, int]] = [
        *((id, 0) for id in segment.prompt_ids),
        *zip(segment.completion_ids, segment.mask, strict=True),
    ]
    runs: list[TokenRun] = []
    for trained, group in groupby(marked, key=itemgetter(1)):
        ids = [id for id, _ in group]
        runs.append(TokenRun(trained=bool(trained), tokens=len(ids), text=_text(ids, tokenizer)))
    return runs


def _text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text with the special tokens at its end, which `chat.decode` drops."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)
