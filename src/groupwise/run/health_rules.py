"""Reads the rules by which a run is judged: the table health_rules.yaml next to this file, which docs/metrics.md lists.

`groupwise.run.health_remedies` defines a rule, a condition and a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ruamel.yaml

from groupwise.run.health_rule import Condition, Remedy, Rule, Times

TABLE = Path(__file__).with_suffix(".yaml")


def read_rules(path: Path) -> tuple[Rule, ...]:
    """Return the rules of a table, in its order. Raises TypeError or KeyError for a word that a rule does not have."""
    table = ruamel.yaml.YAML(typ="safe").load(path.read_text("utf-8"))
    named = {name: _remedy(**raw) for name, raw in table["remedies"].items()}
    return tuple(_rule(raw, named) for raw in table["rules"])


def _rule(raw: Mapping[str, Any], named: Mapping[str, Remedy]) -> Rule:
    words = {key: value for key, value in raw.items() if key not in ("when", "also", "unless", "remedies")}
    return Rule(
        **raw["when"],
        **words,
        also=tuple(Condition(**each) for each in raw.get("also", ())),
        unless=tuple(raw.get("unless", ())),
        remedies=tuple(named[each] if isinstance(each, str) else _remedy(**each) for each in raw["remedies"]),
    )


def _remedy(
    *,
    do: str,
    set: Mapping[str, Any] | None = None,
    only_if: Mapping[str, Any] | None = None,
    for_jobs: bool | str = True,
) -> Remedy:
    changes = {key: _change(value) for key, value in (set or {}).items()}
    job_text = for_jobs if isinstance(for_jobs, str) else ""
    return Remedy(
        text=do, overrides=changes, only_if=dict(only_if or {}), job_text=job_text, for_jobs=for_jobs is not False
    )


def _change(value: Any) -> object:
    """Return the new value of a key, or by how much the present one is multiplied."""
    if not isinstance(value, Mapping):
        return value
    bounds = dict(value)
    return Times(bounds.pop("times"), **bounds)


RULES = read_rules(TABLE)
