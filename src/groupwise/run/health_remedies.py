"""Remedies for one run: what can be changed in its configuration, as overrides to copy.

Nothing is proposed that would change nothing, or that the configuration's own checks would refuse.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.config.loss import loss_of
from groupwise.config.run import RunConfig, parse_config
from groupwise.config.yaml import Document, parse_keys
from groupwise.errors import ConfigError
from groupwise.run.health_rule import RUN_KEYS, Remedy, Times


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advice on a problem, in words, and the overrides that carry it out, such as `rollout.group_size=16`; none where
    only words can say it."""

    text: str
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}: {' '.join(self.overrides)}" if self.overrides else self.text


def advise(remedies: Sequence[Remedy], config: RunConfig | None, *, name: str = "") -> tuple[Advice, ...]:
    """Return the remedies that apply to a run of this configuration. Without one, all, with the keys to look at."""
    if config is None:
        return tuple(_in_words(remedy) for remedy in remedies)
    data = config.model_dump(mode="json")
    found = (_for_this_run(remedy, data, name) for remedy in remedies)
    return tuple(advice for advice in found if advice is not None)


def _in_words(remedy: Remedy) -> Advice:
    keys = f" ({', '.join(remedy.overrides)})" if remedy.overrides else ""
    return Advice(text=remedy.text.format(key=RUN_KEYS) + keys)


def _for_this_run(remedy: Remedy, data: Mapping[str, Any], name: str) -> Advice | None:
    if any(_at(data, key) != value for key, value in remedy.only_if.items()):
        return None
    changes = {key: changed(_at(data, key), change, name) for key, change in remedy.overrides.items()}
    if any(value is None for value in changes.values()):
        return None
    overrides = tuple(f"{key}={_yaml(value)}" for key, value in changes.items())
    return Advice(text=remedy.text.format(key=RUN_KEYS), overrides=overrides) if _is_valid(data, overrides) else None


def changed(now: Any, change: object, name: str) -> Any:
    """Return the new value; None where it would be the one that is."""
    if isinstance(change, str):
        change = change.format(name=name)
    if not isinstance(change, Times):
        return None if change == now else change
    if isinstance(now, bool) or not isinstance(now, int | float):
        return None
    value = min(max(now * change.factor, change.least), change.most)
    value = int(value) if isinstance(now, int) else float(f"{value:.3g}")
    moved = value > now if change.factor > 1 else value < now
    return value if moved else None


def _is_valid(data: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Return whether the run would start with them, as far as the configuration can tell."""
    document = Document(copy.deepcopy(dict(data)))
    try:
        for text in overrides:
            document.override(text, shorthand={})
        config = parse_config(document.data)
        loss_of(config.algo, max_tokens=config.rollout.max_tokens, folder=config.folder)
    except ConfigError:
        return False
    return True


def _at(data: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None where there is none."""
    value: Any = data
    for part in parse_keys(key):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
