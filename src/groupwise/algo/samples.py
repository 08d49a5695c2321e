"""Makes training samples of the turns of an episode: token sequences with a mask of what the policy sampled.

    turn 1   saw 1 2          said 3 4
    turn 2   saw 1 2 3 4 9 9  said 5        extends what there was: 9 9 is a tool's answer and the template's own tokens

    one segment   prompt 1 2    completion 3 4 9 9 5    mask 1 1 0 0 1

A turn that does not extend what came before it (a template that drops earlier <think> blocks rewrites history) begins
another segment, whose prompt is all that this turn saw. The segments of an episode have its advantage, or, where turns
have their own advantages, the tokens of each turn have that. So a token is trained once, in the context in which it
was sampled, and nothing is decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.recorded import RoutedExperts, SamplingMask
from groupwise.types import RolloutGroup, Sample, Turn


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A prompt and what follows it. The others have one entry per completion token: `mask` is 1 on what is trained,
    `logprobs` (nats) are those under the distribution that the sampler drew from, 0 where nothing was sampled,
    `advantages` those of the turns, 0 between them (None where turns have none of their own).
    `routed_experts` are of all tokens; `kept` is what each completion token was drawn from, where that is recorded."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...] | None = None
    routed_experts: RoutedExperts | None = None
    kept: SamplingMask | None = None


def segments_of(turns: Sequence[Turn]) -> list[Segment]:
    """Return the segments of an episode in which any turn is trained."""
    segments = [_segment(run) for run in _runs(turns)]
    return [segment for segment in segments if segment is not None]


def _runs(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Turns of which each sees all of the one before, in order."""
    runs: list[list[Turn]] = []
    seen: tuple[int, ...] = ()
    for turn in turns:
        if runs and turn.prompt_ids[: len(seen)] == seen:
            runs[-1].append(turn)
        else:
            runs.append([turn])
        seen = turn.prompt_ids + turn.completion.token_ids
    return runs


def _segment(run: Sequence[Turn]) -> Segment | None:
    if not any(turn.trained for turn in run):
        return None
    while not run[-1].trained:  # nothing after the last trained token is worth a forward
        run = run[:-1]
    if len(run) == 1:
        return _alone(run[0])
    start = len(run[0].prompt_ids)
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    for turn in run:
        between = turn.prompt_ids[start + len(ids) :]
        said = turn.completion
        advantages += [0.0] * len(between) + [turn.advantage or 0.0] * len(said.token_ids)
        ids += [*between, *said.token_ids]
        mask += [0] * len(between) + [int(turn.trained)] * len(said.token_ids)
        logprobs += [0.0] * len(between) + list(said.behaviour_logprobs)
    return Segment(
        prompt_ids=run[0].prompt_ids,
        completion_ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        advantages=None if all(turn.advantage is None for turn in run) else tuple(advantages),
        routed_experts=_routed(run, tokens=start + len(ids)),
        kept=_kept(run),
    )


def _alone(turn: Turn) -> Segment:
    """Return the segment of one turn, whose tokens and log-probabilities are the completion's own."""
    said = turn.completion
    return Segment(
        prompt_ids=turn.prompt_ids,
        completion_ids=said.token_ids,
        mask=(1,) * len(said.token_ids),
        logprobs=said.behaviour_logprobs,
        advantages=None if turn.advantage is None else (turn.advantage,) * len(said.token_ids),
        routed_experts=_routed([turn], tokens=len(turn.prompt_ids) + len(said.token_ids)),
        kept=_kept([turn]),
    )


def _kept(run: Sequence[Turn]) -> SamplingMask | None:
    """Return what the tokens of a segment were drawn from; those that were not sampled count as drawn from
    everything."""
    recorded = [each for turn in run if (each := turn.completion.kept) is not None]
    if all(each.is_whole for each in recorded):
        return None
    vocabulary, parts, seen = recorded[0].vocabulary, list[SamplingMask](), len(run[0].prompt_ids)
    for turn in run:
        said = turn.completion
        parts.append(SamplingMask.whole(vocabulary, len(turn.prompt_ids) - seen))
        parts.append(said.kept or SamplingMask.whole(vocabulary, len(said.token_ids)))
        seen = len(turn.prompt_ids) + len(said.token_ids)
    return SamplingMask.join(parts)


def _routed(run: Sequence[Turn], *, tokens: int) -> RoutedExperts | None:
    """Return what was chosen for each token when it was first computed; a later turn may have computed it again."""
    recorded = [each for turn in run if (each := turn.completion.routed_experts) is not None]
    if not recorded:
        return None
    first, *others = (each.array() for each in recorded)
    whole = first.astype("int16")
    whole.resize((tokens, *first.shape[1:]), refcheck=False)
    whole[len(first) :] = -1
    for chosen in others:
        known = whole[: len(chosen)]
        known[known < 0] = chosen[known < 0]
    return RoutedExperts.of(whole)


def samples_of(groups: Sequence[RolloutGroup], *, mask_truncated: bool = False, first: int = 0) -> list[Sample]:
    """Return the samples of groups that have advantages, one per segment; rollouts without one (unscorable) are left
    out.

    Token ids and behaviour logprobs are those of the engine, untouched. With `mask_truncated`, no token of a completion
    that was cut at its longest is trained, of an episode none of any turn. `first` is the number of the first group in
    its batch, where these are a part of one (`Sample.group`).
    """
    return [
        Sample(
            prompt_ids=segment.prompt_ids,
            completion_ids=segment.completion_ids,
            mask=(0,) * len(segment.mask) if mask_truncated and rollout.truncated else segment.mask,
            advantage=rollout.advantage if segment.advantages is None else 1.0,
            behaviour_logprobs=segment.logprobs,
            weights=segment.advantages,
            continues=number > 0,
            group=index,
            routed_experts=segment.routed_experts,
            kept=segment.kept,
        )
        for index, group in enumerate(groups, first)
        for rollout in group.rollouts
        if rollout.advantage is not None
        for number, segment in enumerate(segments_of(rollout.turns))
    ]
