"""Our metrics under the names that TRL's trainers log, for dashboards that exist.

    reward/mean -> reward        rollout/truncated_frac -> completions/clipped_ratio        loss/entropy -> entropy

The numbers are ours (docs/metrics.md, docs/losses.md); they differ from TRL 1.16's in three places. `reward_std` is
the mean of the groups' standard deviations: TRL logs that of the whole batch, which is above 0 even where no group
teaches anything. The same is true of `rewards/<name>/std`. `sampling/importance_sampling_ratio/*` is the ratio before
it is clipped or masked: after it, its minimum cannot warn of anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Ours -> TRL's. `*` is the name of a reward function. Of two of ours with the same name there, the first counts.
TRL_NAMES: tuple[tuple[str, str], ...] = (
    ("reward/mean", "reward"),
    ("reward/std", "reward_std"),
    ("reward/frac_zero_std", "frac_reward_zero_std"),
    ("reward/*/mean", "rewards/*/mean"),
    ("reward/*/std", "rewards/*/std"),
    ("rollout/len_mean", "completions/mean_length"),
    ("rollout/len_min", "completions/min_length"),
    ("rollout/len_max", "completions/max_length"),
    ("rollout/len_terminated_mean", "completions/mean_terminated_length"),
    ("rollout/len_terminated_min", "completions/min_terminated_length"),
    ("rollout/len_terminated_max", "completions/max_terminated_length"),
    ("rollout/truncated_frac", "completions/clipped_ratio"),
    ("loss/policy", "loss"),
    ("loss/policy", "policy_loss"),
    ("loss/cross_entropy", "loss"),
    ("loss/preference", "loss"),
    ("preference/chosen_reward", "rewards/chosen"),
    ("preference/rejected_reward", "rewards/rejected"),
    ("preference/margin", "rewards/margins"),
    ("preference/accuracy", "rewards/accuracies"),
    ("preference/chosen_logprob", "logps/chosen"),
    ("preference/rejected_logprob", "logps/rejected"),
    ("loss/entropy", "entropy"),
    ("kl/mean", "kl"),
    ("loss/kl", "kl"),
    ("loss/clip_frac", "clip_ratio/region_mean"),
    ("loss/clip_frac_low", "clip_ratio/low_mean"),
    ("loss/clip_frac_high", "clip_ratio/high_mean"),
    ("mismatch/logprob_diff_mean", "sampling/sampling_logp_difference/mean"),
    ("mismatch/logprob_diff_max", "sampling/sampling_logp_difference/max"),
    ("mismatch/ratio_min", "sampling/importance_sampling_ratio/min"),
    ("mismatch/ratio_mean", "sampling/importance_sampling_ratio/mean"),
    ("mismatch/ratio_max", "sampling/importance_sampling_ratio/max"),
    ("optim/grad_norm", "grad_norm"),
    ("optim/lr", "learning_rate"),
    ("time/step_s", "step_time"),
    ("eval/sampled/reward", "eval_reward"),
)

TOKENS = "rollout/total_tokens"  # of a step; TRL's `num_tokens` is their sum so far


def trl_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return these metrics under TRL's names; those that TRL does not have are left out.

    >>> trl_metrics({"reward/mean": 0.5, "reward/exact/mean": 0.5, "perf/tok_s": 900.0})
    {'reward': 0.5, 'rewards/exact/mean': 0.5}
    """
    named: dict[str, float] = {}
    for ours, theirs in TRL_NAMES:
        pattern = re.compile(re.escape(ours).replace(r"\*", "([^/]+)"))
        for key, value in metrics.items():
            if match := pattern.fullmatch(key):
                named.setdefault(theirs.replace("*", match[1] if match.groups() else ""), value)
    return named


class TokenCount:
    """TRL's `num_tokens`: prompt and completion tokens of all steps so far. A step that is done again counts once."""

    def __init__(self, records: Iterable[Mapping[str, float | None]] = ()):
        self._of_step = {int(record["step"] or 0): record[TOKENS] or 0.0 for record in records if TOKENS in record}

    def at(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """{"num_tokens": ...} after this step; nothing where it sampled nothing."""
        if TOKENS not in metrics:
            return {}
        self._of_step[step] = metrics[TOKENS]
        return {"num_tokens": sum(tokens for done, tokens in self._of_step.items() if done <= step)}
