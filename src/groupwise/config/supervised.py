"""Check a run of kind sft or dpo: it learns what its dataset says, and the policy samples nothing to learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupwise.config.section import conflict

if TYPE_CHECKING:
    from groupwise.config.run import RunConfig


def check_supervised(config: RunConfig) -> None:
    """Raise ConfigError for sections and keys that do nothing where the dataset's own answers or pairs are learned."""
    learns = "the dataset's own answers" if config.kind == "sft" else "the dataset's preference pairs"
    of_kind = f"does not go with kind {config.kind}"
    if config.data is None:
        raise conflict("data", f"required and missing: name {learns} (data.source)")
    for key, given in (("env", config.env), ("teacher", config.teacher), ("promote", config.promote)):
        if given is not None:
            raise conflict(key, f"{of_kind}, which learns {learns}; leave it out")
    for key, given in (("stream_groups", config.rollout.stream_groups), ("replay", config.rollout.replay.size)):
        if given:
            raise conflict("rollout", key, f"{of_kind}; leave one of the two out")
    if config.rollout.reroll.max_groups:
        again = f"{of_kind}, which samples nothing to try again; leave it out"
        raise conflict("rollout", "reroll", "max_groups", again)
    if config.data.curriculum is not None:
        raise conflict("data", "curriculum", f"follows what was sampled, and {of_kind}; leave it out")
    if config.algo.kl is not None:
        raise conflict("algo", "kl", f"{config.algo.kl!r} is of what the policy samples, and {of_kind}; leave it out")
    if config.eval is not None and config.eval.data is None:
        raise conflict("eval", "data", "required and missing: name the held-out prompts")
    if config.eval is not None and config.eval.best not in (None, "loss") and not config.samples_evaluations:
        message = f"{config.eval.best!r} is of rewards, and there are none; name some (eval.rewards), or write loss"
        raise conflict("eval", "best", message)
