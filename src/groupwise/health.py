"""Learning failures that would otherwise be silent, named with their cause and what to do.

Each rule reads the metrics of the last `WINDOW` steps and gives one finding when it holds; a finding is reported once,
and again only after it has gone away in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WINDOW = 10

Means = Mapping[str, float]


@dataclass(frozen=True)
class Rule:
    """A finding `message`, formatted with the window's mean of the metric `needs`, when `holds` of it."""

    name: str
    needs: str
    holds: Callable[[float], bool]
    message: str


RULES = (
    Rule(
        "no signal",
        "reward/frac_zero_std",
        lambda share: share > 0.8,
        "{value:.0%} of the groups have equal rewards and teach nothing: the task is too easy or too hard for this "
        "policy, or the reward never differs; mix in other prompts, raise rollout.group_size, or use a finer reward",
    ),
    Rule(
        "truncation",
        "rollout/truncated_frac",
        lambda share: share > 0.3,
        "{value:.0%} of the completions were cut at rollout.max_tokens; raise it, or reward short answers",
    ),
    Rule(
        "mismatch",
        "mismatch/logprob_diff_mean",
        lambda gap: gap > 0.02,
        "sampler and trainer disagree by {value:.3g} nats a token: another precision or other weights; set "
        "algo.correction: tis_token, or run both in float32",
    ),
    Rule(
        "entropy",
        "loss/entropy",
        lambda entropy: entropy < 0.01,
        "the policy's entropy is {value:.2g} nats: it has collapsed to one answer per prompt; lower "
        "train.learning_rate, set algo.kl_coeff or algo.entropy_coeff, or stop here",
    ),
    Rule(
        "gradients",
        "optim/grad_norm",
        lambda norm: norm > 100,
        "the gradient norm is {value:.3g} before clipping; lower train.learning_rate or look for huge rewards",
    ),
    Rule(
        "rewards",
        "rollout/error_frac",
        lambda share: share > 0.05,
        "{value:.0%} of the completions could not be scored and were left out; see `error` in the run's rollouts",
    ),
)


class Health:
    """Watches a run's metrics."""

    def __init__(self) -> None:
        self._history: deque[Means] = deque(maxlen=WINDOW)
        self._standing: set[str] = set()

    def findings(self, metrics: Means) -> list[str]:
        """What is newly wrong after this step; nothing before the window is full."""
        self._history.append(metrics)
        if len(self._history) < WINDOW:
            return []
        new = []
        for rule in RULES:
            values = [m[rule.needs] for m in self._history if rule.needs in m]
            mean = sum(values) / len(values) if values else None
            if mean is None or not rule.holds(mean):
                self._standing.discard(rule.name)
            elif rule.name not in self._standing:
                self._standing.add(rule.name)
                new.append(f"{rule.name}: {rule.message.format(value=mean)}")
        return new
