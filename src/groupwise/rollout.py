"""Episodes -> groups -> samples: one group's way to the learner. `batches` says which groups, and when."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from groupwise.config_env import EnvConfig
from groupwise.errors import EnvError
from groupwise.segments import segments_of
from groupwise.types import Completion, Prompt, Rollout, RolloutGroup, Sample, Turn

REWARD = "env"  # the name of an environment's reward among those of reward functions


@dataclass(frozen=True, kw_only=True)
class Collected:
    """One step's groups. `groups` will be trained on; `sampled` is every group drawn for it, for the statistics."""

    groups: tuple[RolloutGroup, ...]
    sampled: tuple[RolloutGroup, ...]
    too_long: int = 0  # prompts passed over because of their length
    ages: tuple[int, ...] = ()  # of the fresh groups: steps since the policy that sampled them
    replayed: int = 0  # of `groups`: those trained again
    rerolled: int = 0  # prompts tried again

    @property
    def completions(self) -> list[Rollout]:
        return [rollout for group in self.sampled for rollout in group.rollouts]


# Scores a group. What fails is in its rollouts as their error; nothing is raised for it.
Score = Callable[[RolloutGroup], Awaitable[RolloutGroup]]


def group_of(prompt: Prompt, completions_G: Sequence[Completion]) -> RolloutGroup:
    """Single-turn rollouts of an encoded prompt, unscored."""
    return RolloutGroup(
        prompt=prompt, rollouts=tuple(Rollout(turns=(Turn(prompt.token_ids, c),)) for c in completions_G)
    )


def priced(played: Rollout, config: EnvConfig) -> Rollout:
    """A played episode with what it is worth: `reward`, or of one that has an `error` what `env.on_error` says.

    Raises EnvError where an error is to end the run.
    """
    reward, error, stop = played.reward, played.error, played.stop
    if error is not None:
        if config.on_error == "stop":
            raise EnvError(error, hint="env.on_error: exclude goes on without such episodes")
        reward, stop = 0.0 if config.on_error == "zero" and played.turns else None, "error"
    rewards, left = ({}, error) if reward is None else ({REWARD: reward}, None)
    info = {**played.info, "turns": float(len(played.turns)), "failed": float(error is not None)}
    return replace(played, rewards=rewards, reward=reward, error=left, stop=stop, info=info)


def samples_of(groups: Sequence[RolloutGroup], *, mask_truncated: bool = False) -> list[Sample]:
    """The samples of groups that have advantages, one per segment; rollouts without one (unscorable) are left out.

    Token ids and behaviour logprobs are those of the engine, untouched. With `mask_truncated`, no token of a completion
    that was cut at its longest is trained, of an episode none of any turn.
    """
    return [
        Sample(
            prompt_ids=segment.prompt_ids,
            completion_ids=segment.completion_ids,
            mask=(0,) * len(segment.mask) if mask_truncated and rollout.truncated else segment.mask,
            advantage=rollout.advantage,
            behaviour_logprobs=segment.logprobs,
            continues=number > 0,
        )
        for group in groups
        for rollout in group.rollouts
        if rollout.advantage is not None
        for number, segment in enumerate(segments_of(rollout.turns))
    ]
