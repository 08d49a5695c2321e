"""Turns -> trained sequences: what was sampled is trained once, with its own logprob, in the context that it had."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.algo.samples import Segment, samples_of, segments_of
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def turn(prompt, said, *, trained: bool = True, end: FinishReason = STOP, first: float = -0.1) -> Turn:
    """A turn whose logprobs are first, first - 0.1, ..."""
    logprobs = tuple(round(first - i / 10, 6) for i in range(len(said)))
    completion = Completion(token_ids=tuple(said), logprobs=logprobs, text="", finish_reason=end)
    return Turn(tuple(prompt), completion, trained=trained)


def segment(prompt, completion, mask, logprobs) -> Segment:
    return Segment(prompt_ids=tuple(prompt), completion_ids=tuple(completion), mask=tuple(mask), logprobs=logprobs)


# What a NeMo agent's plugin makes of a response, as token ids: (turns, segments).
ORACLE = {
    "one call": (
        [turn([10, 20, 30], [40, 50])],
        [segment([10, 20, 30], [40, 50], [1, 1], (-0.1, -0.2))],
    ),
    "a call, its output, a call": (
        [turn([10, 20], [30, 31]), turn([10, 20, 30, 31, 100, 101, 102], [40, 41], first=-0.5)],
        [segment([10, 20], [30, 31, 100, 101, 102, 40, 41], [1, 1, 0, 0, 0, 1, 1], (-0.1, -0.2, 0, 0, 0, -0.5, -0.6))],
    ),
    "a message": ([turn([10, 20], [30, 31, 32])], [segment([10, 20], [30, 31, 32], [1, 1, 1], (-0.1, -0.2, -0.3))]),
    "nothing": ([], []),
    "a second prompt that was tokenised otherwise": (
        [turn([10, 20], [30, 31]), turn([10, 20, 30, 99, 100], [40])],
        [segment([10, 20], [30, 31], [1, 1], (-0.1, -0.2)), segment([10, 20, 30, 99, 100], [40], [1], (-0.1,))],
    ),
    "a second prompt that lacks what was said": (
        [turn([10, 20], [30, 31]), turn([10, 20], [40])],
        [segment([10, 20], [30, 31], [1, 1], (-0.1, -0.2)), segment([10, 20], [40], [1], (-0.1,))],
    ),
    "a second prompt that has all but the last token": (
        [turn([10, 20], [30, 31]), turn([10, 20, 30], [40])],
        [segment([10, 20], [30, 31], [1, 1], (-0.1, -0.2)), segment([10, 20, 30], [40], [1], (-0.1,))],
    ),
    "a fork that goes on": (
        [turn([1], [2]), turn([9], [3]), turn([9, 3, 5], [4])],
        [segment([1], [2], [1], (-0.1,)), segment([9], [3, 5, 4], [1, 0, 1], (-0.1, 0, -0.1))],
    ),
    "two turns with nothing in between": (
        [turn([1], [2]), turn([1, 2], [3])],
        [segment([1], [2, 3], [1, 1], (-0.1, -0.1))],
    ),
    "a turn in which nothing was said": (
        [turn([1], [2]), turn([1, 2, 7], []), turn([1, 2, 7, 8], [3])],
        [segment([1], [2, 7, 8, 3], [1, 0, 0, 1], (-0.1, 0, 0, -0.1))],
    ),
    "only a turn in which nothing was said": ([turn([1], [])], [segment([1], [], [], ())]),
    "only the first is trained": (
        [turn([1], [2]), turn([1, 2, 7], [3], trained=False)],
        [segment([1], [2], [1], (-0.1,))],
    ),
    "only the last is trained": (
        [turn([1], [2], trained=False), turn([1, 2, 7], [3], first=-0.5)],
        [segment([1], [2, 7, 3], [0, 0, 1], (-0.1, 0, -0.5))],
    ),
    "a fork that is not trained": (
        [turn([1], [2]), turn([9], [3], trained=False)],
        [segment([1], [2], [1], (-0.1,))],
    ),
    "none is trained": ([turn([1], [2], trained=False)], []),
}


@pytest.mark.parametrize(("turns", "expected"), ORACLE.values(), ids=ORACLE)
def test_the_oracle(turns, expected):
    assert segments_of(turns) == expected


# ---- whatever the turns are ----
TOKENS = st.lists(st.integers(0, 3), max_size=3)  # few tokens, so that prompts resemble each other by chance
TURNS = st.lists(
    st.tuples(
        st.sampled_from(["extends", "extends", "rewrites", "repeats", "cuts"]),
        TOKENS,  # what is said in between
        TOKENS,  # what is sampled
        st.booleans(),
        st.sampled_from([STOP, LENGTH]),
    ),
    max_size=6,
)


def played(steps) -> list[Turn]:
    """Turns of which some see the one before and some do not; each token has a logprob of its own."""
    turns: list[Turn] = []
    number = 0
    for how, between, said, trained, end in steps:
        seen = [*turns[-1].prompt_ids, *turns[-1].completion.token_ids] if turns else [0]
        before = turns[-1].prompt_ids if turns else ()
        prompt = {
            "extends": [*seen, *between],
            "rewrites": [0, *between],
            "repeats": [*before, *between],
            "cuts": [*seen[:-1], *between],
        }[how] or [0]
        logprobs = tuple(-1.0 - number - i for i in range(len(said)))
        number += len(said)
        turns.append(Turn(tuple(prompt), Completion(token_ids=tuple(said), logprobs=logprobs, text="",
                                                    finish_reason=end), trained=trained))  # fmt: skip
    return turns


@settings(max_examples=400)
@given(TURNS)
def test_each_token_is_trained_once_in_the_context_in_which_it_was_sampled(steps):
    turns = played(steps)
    sampled = {
        logprob: (turn.prompt_ids + turn.completion.token_ids[:i], turn.completion.token_ids[i])
        for turn in turns
        if turn.trained
        for i, logprob in enumerate(turn.completion.logprobs)
    }
    said = {logprob for turn in turns for logprob in turn.completion.logprobs}
    trained = {}
    for each in segments_of(turns):
        assert len(each.completion_ids) == len(each.mask) == len(each.logprobs)
        for t, (token, mask, logprob) in enumerate(zip(each.completion_ids, each.mask, each.logprobs, strict=True)):
            if mask:
                assert logprob not in trained
                trained[logprob] = (each.prompt_ids + each.completion_ids[:t], token)
            else:
                assert logprob == 0.0 or logprob in said  # the environment's, or a turn that is not trained
    assert trained == sampled


def test_the_samples_of_an_episode_have_its_advantage():
    forked = ORACLE["a second prompt that was tokenised otherwise"][0]
    rollouts = (
        Rollout(turns=tuple(forked), reward=1.0, advantage=0.5),
        Rollout(turns=(), error="failed before its first turn"),
        Rollout(turns=tuple(forked), error="failed", reward=None),
        Rollout(turns=tuple(forked[:1]), reward=0.0, advantage=-0.5),
    )
    samples = samples_of([RolloutGroup(prompt=Prompt(id="p"), rollouts=rollouts)])
    assert [(sample.prompt_ids, sample.advantage) for sample in samples] == [
        ((10, 20), 0.5),
        ((10, 20, 30, 99, 100), 0.5),
        ((10, 20), -0.5),
    ]
    assert [sample.behaviour_logprobs for sample in samples] == [(-0.1, -0.2), (-0.1,), (-0.1, -0.2)]
    assert [sample.continues for sample in samples] == [False, True, False]


@pytest.mark.parametrize(
    ("turns", "stop", "cut"),
    [
        ([turn([1], [2, 3]), turn([1, 2, 3, 7], [4])], "done", False),
        ([turn([1], [2, 3], end=LENGTH), turn([1, 2, 3, 7], [4])], "done", True),  # env.stop_at_cut: false
        ([turn([1], [2, 3]), turn([1, 2, 3, 7], [4], end=LENGTH)], "max_tokens", True),
        ([turn([1], [2, 3]), turn([9], [4], end=LENGTH)], "max_tokens", True),  # forked: two segments
        ([turn([1], [2, 3]), turn([1, 2, 3, 7], [4])], "context", True),
        ([turn([1], [2, 3]), turn([1, 2, 3, 7], [4])], "max_turns", False),
        ([turn([1], [2, 3], end=LENGTH)], None, True),
    ],
    ids=["whole", "cut in the middle", "cut at its end", "cut after a fork", "no room left", "turns", "completion"],
)
def test_of_an_episode_that_was_cut_no_turn_is_trained_where_that_is_asked_for(turns, stop, cut):
    """As TRL's `mask_truncated_completions`, whose completion is the whole episode. Its reward counts all the same."""
    whole = Rollout(turns=(turn([1], [5]),), reward=0.0, advantage=-1.0)
    group = RolloutGroup(
        prompt=Prompt(id="p"), rollouts=(Rollout(turns=tuple(turns), stop=stop, reward=1.0, advantage=1.0), whole)
    )
    plain, masked = samples_of([group]), samples_of([group], mask_truncated=True)
    assert masked[-1] == plain[-1] and all(any(sample.mask) for sample in plain)
    assert [any(sample.mask) for sample in masked[:-1]] == [not cut] * (len(plain) - 1)
    for kept, hidden in zip(plain[:-1], masked[:-1], strict=True):
        assert hidden == (replace(kept, mask=(0,) * len(kept.mask)) if cut else kept)  # it is seen all the same
