"""Runs that come before a run: `stages`, each from the adapter of the one before it.

    stages:
      - {name: examples, kind: sft, data: {source: examples.jsonl}, train: {steps: 60, learning_rate: 3.0e-3}}
    data: {source: prompts.jsonl}        # the run itself: it goes on from the last stage's adapter
    rewards: [my_rewards:exact]

A stage is the file's own run with the keys changed that it names. Its `data` replaces the run's as a whole. A stage of
kind sft leaves out what is of sampling alone: `env`, `teacher`, `promote`, `algo`, and of `rollout` what mixes batches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from groupwise.config.section import conflict
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config.run import RunConfig

STAGES = "stages"  # of a run directory: the directories of its stages

_OF_SAMPLING = ("env", "teacher", "promote", "algo")
_OF_BATCHES = ("stream_groups", "replay", "reroll", "structured_outputs", "structured_outputs_regex")
_ITS_OWN = ("stages", "run_dir", "resume", "name")  # never a stage's, or never the run's


def stage_config(config: RunConfig, number: int) -> RunConfig:
    """Return the run that stage `number` (from 0) of a configuration is.

    Raises:
        ConfigError: it is not valid.
    """
    from groupwise.config.run import parse_config

    stage = dict(config.stages[number])
    name = stage.pop("name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(
            f"stages[{number}].name is {name!r}; a stage needs a name, letters, digits, '.', '_' and '-'",
            hint=f"stages[{number}].name={stage.get('kind', 'first')}",
        )
    if wrong := [key for key in _ITS_OWN if key in stage]:
        raise ConfigError(f"stages[{number}].{wrong[0]} is of the whole run, not of one stage", hint="leave it out")
    base = config.model_dump(mode="json", exclude_unset=True)
    if stage.get("kind", config.kind) == "sft":
        base = {key: value for key, value in base.items() if key not in _OF_SAMPLING}
        if "rollout" in base:
            base["rollout"] = {key: value for key, value in base["rollout"].items() if key not in _OF_BATCHES}
        if config.env is not None:  # what its evaluation plays is left out with it
            base.pop("eval", None)
    if "data" in stage:
        base.pop("data", None)
    base = {key: value for key, value in base.items() if key not in ("stages", "run_dir", "resume")}
    try:
        return parse_config(_merged(base, stage) | {"name": config.name, "folder": str(config.folder)})
    except ConfigError as error:
        raise ConfigError(f"stages[{number}] ({name}): {error.message}", hint=error.hint) from None


def stage_names(config: RunConfig) -> list[str]:
    """Return the names of the stages, in order."""
    return [str(stage.get("name")) for stage in config.stages]


def check_stages(config: RunConfig) -> None:
    """Refuse stages that are no runs, or leave no adapter to go on from."""
    if not config.stages:
        return
    if config.train.lora is None:
        raise conflict("stages", "go on from an adapter, and all parameters are trained here; set train.lora")
    if config.adapters.start is not None:
        message = f"{config.adapters.start!r} is where the run starts, and so is its last stage"
        raise conflict("adapters", "start", f"{message}; give it to the first stage")
    names = stage_names(config)
    if len(set(names)) < len(names):
        raise conflict("stages", f"two have the name {max(names, key=names.count)!r}; give each its own")
    for number in range(len(config.stages)):
        try:
            stage_config(config, number)
        except ConfigError as error:
            message = error.message.removeprefix("stages")
            raise conflict("stages", f"{message}; {error.hint}" if error.hint else message) from None


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        own = merged.get(key)
        merged[key] = _merged(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return merged
