"""Runs that come before a run: `stages`, each from the adapter of the one before it.

    stages:
      - {name: examples, kind: sft, data: {source: examples.jsonl}, train: {steps: 60, learning_rate: 3.0e-3}}
    data: {source: prompts.jsonl}        # the run itself: it continues from the last stage's adapter
    rewards: [my_rewards:exact]

A stage is the file's own run with the keys changed that it names. Its `data` replaces the run's as a whole. A stage of
kind sft or dpo leaves out what is of sampling alone: `env`, `teacher`, `promote`, `algo`, `data.curriculum`, and of
`rollout` what mixes batches; one that is not of kind dpo leaves out `dpo`.
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

_WHOLE = ("stages", "run_dir", "resume")  # of the whole run, not of one stage
_OF_SAMPLING = ("env", "teacher", "promote", "algo")
_OF_BATCHES = ("stream_groups", "replay", "reroll", "structured_outputs", "structured_outputs_regex")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def stage_config(config: RunConfig, number: int) -> RunConfig:
    """Return the run that stage `number` (from 0) of a configuration is. Raises ConfigError if it is not valid."""
    from groupwise.config.run import parse_config

    stage = {key: value for key, value in config.stages[number].items() if key != "name"}
    left_out = {*_WHOLE, *(["data"] if "data" in stage else [])}
    kept = config.model_dump(mode="json", exclude_unset=True)
    kind = stage.get("kind", config.kind)
    if kind != "dpo":
        left_out.add("dpo")
    if kind in ("sft", "dpo"):
        left_out |= {*_OF_SAMPLING, *(["eval"] if config.env is not None else [])}  # an environment's is played in it
        if isinstance(kept.get("data"), Mapping):
            kept["data"] = {key: value for key, value in kept["data"].items() if key != "curriculum"}
        kept["rollout"] = {key: value for key, value in kept.get("rollout", {}).items() if key not in _OF_BATCHES}
    kept = {key: value for key, value in kept.items() if key not in left_out}
    return parse_config(_merged(kept, stage) | {"name": config.name, "folder": str(config.folder)})


def stage_names(config: RunConfig) -> list[str]:
    """Return the names of the stages, in order."""
    return [str(stage.get("name", "")) for stage in config.stages]


def check_stages(config: RunConfig) -> None:
    """Refuse stages that are not runs, or that leave no adapter for the next one."""
    if not config.stages:
        return
    if config.train.lora is None:
        raise conflict("stages", "go on from an adapter, and all parameters are trained here; set train.lora")
    if config.adapters.start is not None:
        message = f"{config.adapters.start!r} is where the run starts, and so is its last stage"
        raise conflict("adapters", "start", f"{message}; give it to the first stage")
    names = stage_names(config)
    for number, (stage, name) in enumerate(zip(config.stages, names, strict=True)):
        if not _NAME.fullmatch(name):
            given = repr(stage.get("name"))
            message = f"{given} is not valid; a stage needs a name, of letters, digits, '.', '_' and '-'"
            raise conflict("stages", number, "name", message)
        if name in names[:number]:
            raise conflict("stages", number, "name", f"{name!r} is another stage's; give each its own")
        for key in _WHOLE:
            if key in stage:
                raise conflict("stages", number, key, "is of the whole run, not of one stage; leave it out")
        try:
            stage_config(config, number)
        except ConfigError as error:
            raise conflict(
                "stages", number, f"{error.message}; {error.hint}" if error.hint else error.message
            ) from None


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        own = merged.get(key)
        merged[key] = _merged(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return merged
