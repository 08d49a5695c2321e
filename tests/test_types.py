"""What the data types do by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from groupwise.recorded import RoutedExperts
from groupwise.types import Completion, FinishReason, PolicyVersion

FIRST, SECOND, THIRD = (PolicyVersion("math", number) for number in (1, 2, 3))
PROMPT, SAID = 4, 6


def completion(switches: tuple[tuple[int, PolicyVersion], ...] = ()) -> Completion:
    experts = np.arange((PROMPT + SAID - 1) * 2 * 2).reshape(-1, 2, 2)
    return Completion(
        token_ids=tuple(range(SAID)),
        logprobs=(-0.5,) * SAID,
        text="said",
        finish_reason=FinishReason.LENGTH,
        version=FIRST,
        switches=switches,
        routed_experts=RoutedExperts.of(experts),
    )


@pytest.mark.parametrize(
    ("count", "spans"),
    [
        (1, ((FIRST, 1),)),
        (2, ((FIRST, 2),)),
        (3, ((FIRST, 2), (SECOND, 1))),
        (5, ((FIRST, 2), (SECOND, 2), (THIRD, 1))),
        (6, ((FIRST, 2), (SECOND, 2), (THIRD, 2))),
    ],
)
def test_a_cut_completion_has_the_versions_and_the_experts_of_what_is_left(count: int, spans: tuple):
    whole = completion(((2, SECOND), (4, THIRD)))
    cut = whole.first(count, text="sa")
    assert (len(cut.token_ids), cut.finish_reason, cut.spans) == (count, FinishReason.STOP, spans)
    assert cut.routed_experts is not None and whole.routed_experts is not None
    kept = cut.routed_experts.array()
    assert len(kept) == PROMPT + count - 1 and (kept == whole.routed_experts.array()[: len(kept)]).all()


@pytest.mark.parametrize("largest", [3, 300])
def test_experts_are_cut_whatever_their_width(largest: int):
    experts = np.full((5, 3, 2), largest)
    experts[1] = 1
    assert (RoutedExperts.of(experts).first(2).array() == experts[:2]).all()
