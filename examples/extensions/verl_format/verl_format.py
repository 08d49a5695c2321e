"""Reads verl's YAML of a GRPO run as a configuration, for the keys in `keys.yaml`."""

from __future__ import annotations

from pathlib import Path

from groupwise.config.formats.format import ConfigFormat, Count
from groupwise.config.formats.tables import keys_of
from groupwise.config.formats.translation import Translation
from groupwise.config.yaml import Document

KEYS = Path(__file__).with_name("keys.yaml")
ESTIMATORS = {"grpo": "group_std", "rloo": "leave_one_out"}
FILE, NAME, ESTIMATOR = "custom_reward_function.path", "custom_reward_function.name", "algorithm.adv_estimator"


def translate(document: Document, *, folder: Path, count: Count) -> Translation:
    """Put what the file says in verl's words into ours; keys that `keys.yaml` calls plain are there already."""
    t = Translation(document, system="verl", keys=keys_of(KEYS))
    t.put("algo.advantage", ESTIMATORS[t[ESTIMATOR]], ESTIMATOR)
    if t.given(FILE):
        t.put("rewards", [f"{t[FILE]}:{t[NAME]}"], FILE, NAME)
    return t


FORMAT = ConfigFormat(
    name="verl",
    recognises=lambda data: "actor_rollout_ref" in data,
    shares_keys=True,  # its files have a section `data`, as ours
    table=KEYS,
    translate=translate,
)
