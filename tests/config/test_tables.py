"""Each table as a whole: what it says of a key is what happens to the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reference_files import QUICK_START

from groupwise.config.importers.aitraining import KEYS as AITRAINING
from groupwise.config.importers.axolotl_keys import KEYS as AXOLOTL
from groupwise.config.importers.base import Key
from groupwise.config.importers.trl import KEYS as TRL
from groupwise.config.yaml import inline
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun, read_run

FILES = {
    "axolotl": QUICK_START.replace("use_vllm: true", "use_vllm: false").replace(
        "{path: openai/gsm8k, name: main, type: rewards.prompt_transform, split: train}", "{path: owner/prompts}"
    ),
    "trl": "model_name_or_path: starter\ndataset_name: p.jsonl\nreward_funcs: [m.f]\nmax_steps: 10\nbeta: 0.1\n"
    "use_peft: true\nlora_target_modules: all-linear\n",
    "aitraining": "trainer: grpo\nproject_name: p\nmodel: starter\nmax_steps: 10\npeft: true\n",
}
TABLES: dict[str, tuple[Key, ...]] = {"axolotl": AXOLOTL, "trl": TRL, "aitraining": AITRAINING}
NATIVE = ("data.source=p.jsonl", "rewards=[m:f]")  # aitraining has no words for them
SYSTEM = pytest.mark.parametrize("system", TABLES)


@pytest.fixture
def read(tmp_path: Path):
    def read(system: str, *overrides: str) -> LoadedRun:
        (tmp_path / f"{system}.yaml").write_text(FILES[system])
        return read_run(tmp_path / f"{system}.yaml", [*overrides, *(NATIVE if system == "aitraining" else ())])

    return read


def keys(system: str, fate: str) -> list[Key]:
    return [key for key in TABLES[system] if key.fate == fate and "[]" not in key.name]


def asking(key: Key) -> Any:
    """A value with which a key asks for what it is named for."""
    for value in (7, "x", True, 0.5, [3], {"a": 1}, False):
        try:
            if key.kind(value) not in key.off:
                return value
        except ValueError:
            continue
    raise AssertionError(f"no value for {key.name}")


@SYSTEM
def test_what_is_idle_is_listed_and_changes_nothing(read, system):
    idle = keys(system, "idle")
    loaded = read(system, *(f"{key.name}={inline(asking(key))}" for key in idle))
    assert {note.place.split()[0] for note in loaded.idle} >= {key.name for key in idle}
    assert loaded.runnable() == read(system).runnable()


@SYSTEM
def test_what_is_absent_is_refused_and_runs_as_advised(read, system):
    absent = keys(system, "absent")
    given = [f"{key.name}={inline(asking(key))}" for key in absent]
    loaded = read(system, *given)
    assert {note.place.split()[0] for note in loaded.refused} == {key.name for key in absent}
    with pytest.raises(ConfigError) as caught:
        loaded.runnable()
    assert all(f"{key.name} (given as" in str(caught.value) and key.what in str(caught.value) for key in absent)
    read(system, *given, *(word for key in absent for word in key.instead.split())).runnable()


@SYSTEM
def test_values_that_ask_for_nothing_are_nothing_to_speak_of(read, system):
    plain = read(system)
    for key in keys(system, "absent"):
        for value in key.off:
            loaded = read(system, f"{key.name}={inline(value)}")
            assert not loaded.refused and loaded.config == plain.config, key.name


SAMPLES = {
    "data.shuffle": False,
    "algo.aggregation": "normalize_then_sum",
    "algo.mask_truncated": True,
    "train.weight_decay": 0.25,
    "tracking.tensorboard": True,
}


@SYSTEM
def test_what_is_plain_arrives(read, system):
    for key in keys(system, "plain"):
        value = SAMPLES.get(key.here[0], 4)
        try:
            key.kind(value)
        except ValueError:
            value = "some-name"
        config: Any = read(system, f"{key.name}={inline(value)}").config
        for part in key.here[0].split("."):
            config = getattr(config, part)
        assert config == value, key.name
