"""Check a run of kind sft: it learns the dataset's own answers, and the policy samples nothing to learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupwise.config.section import conflict

if TYPE_CHECKING:
    from groupwise.config.run import RunConfig


def check_supervised(config: RunConfig) -> None:
    """Raise ConfigError for sections and keys that do nothing where the dataset's own answers are learned."""
    if config.data is None:
        raise conflict("data", "required and missing: name the examples (data.source)")
    for key, given in (("env", config.env), ("teacher", config.teacher), ("promote", config.promote)):
        if given is not None:
            raise conflict(key, "does not go with kind sft, which learns the dataset's own answers; leave it out")
    for key, given in (("stream_groups", config.rollout.stream_groups), ("replay", config.rollout.replay.size)):
        if given:
            raise conflict("rollout", key, "does not go with kind sft; leave one of the two out")
    if config.algo.kl is not None:
        raise conflict("algo", "kl", f"{config.algo.kl!r} is of what the policy samples; leave it out with kind sft")
    if config.eval is not None and config.eval.data is None:
        raise conflict("eval", "data", "required and missing: name the held-out prompts")
    if config.eval is not None and not config.rewards and not config.eval.rewards:
        raise conflict("eval", "evaluation is by rewards, and there are none; name some (eval.rewards)")
