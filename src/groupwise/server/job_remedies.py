"""Remedies for a job: those of runs (`groupwise.run.health_rules`) in the words of POST /v1/train/grpo and
/v1/train/sft.

    train.learning_rate=9e-05      config.learning_rate=9e-05
    rollout.group_size=16          in words: `n` of /v1/completions/batch, since the client sampled before posting
    rollout.refill=2               left out: a job cannot be refilled

A change is computed from the job's own configuration, and is left out if it changes nothing or would be refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groupwise.config.job import SAMPLED_WITH, job_field, job_name, parse_job_config
from groupwise.errors import ConfigError
from groupwise.run.health_remedies import changed
from groupwise.run.health_rule import KeyNames, Remedy
from groupwise.run.health_rules import RULES

_REMEDIES: Mapping[str, Sequence[Remedy]] = {rule.id: rule.remedies for rule in RULES}

_JOB_KEYS = KeyNames(job_name)

_ELSEWHERE = {  # said before a job is posted
    **{key: f"{name} of /v1/completions/batch" for key, name in SAMPLED_WITH.items()},
    "rollout.prompts_per_step": "more groups in a job",
    "dtype": "groupwise serve --dtype float32",
}


def job_remedies(rule: str, kind: str, config: Mapping[str, Any], *, name: str = "") -> list[str]:
    """Return the remedy for a finding of this rule in a job of this accepted configuration."""
    return [text for remedy in _REMEDIES[rule] if (text := _told(remedy, kind, _effective(config), name)) is not None]


def _effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return it with the estimator that a null stands for."""
    return {**config, "kl": "k3"} if config.get("kl") is None and config.get("kl_coeff") else dict(config)


def _told(remedy: Remedy, kind: str, config: Mapping[str, Any], name: str) -> str | None:
    """None where the job has no means for it."""
    text = (remedy.job_text or remedy.text).format(key=_JOB_KEYS)
    if not remedy.overrides:
        return text if remedy.for_jobs else None
    if all(key in _ELSEWHERE for key in remedy.overrides):
        return f"{text}: {', '.join(_ELSEWHERE[key] for key in remedy.overrides)}"
    if any(config.get(job_field(key, kind) or "") != value for key, value in remedy.only_if.items()):
        return None
    changes = dict(_changes(remedy, kind, config, name))
    if len(changes) < len(remedy.overrides) or not _is_valid(kind, {**config, **changes}):
        return None
    return f"{text}: {' '.join(f'config.{key}={_shown(value)}' for key, value in changes.items())}"


def _changes(remedy: Remedy, kind: str, config: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield (field, new value) for the fields that the job has and that would change."""
    for key, change in remedy.overrides.items():
        field = job_field(key, kind)
        if field is not None and (new := changed(config.get(field), change, name)) is not None:
            yield field, new


def _is_valid(kind: str, config: Mapping[str, Any]) -> bool:
    try:
        parse_job_config(kind, config)
    except ConfigError:
        return False
    return True


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
