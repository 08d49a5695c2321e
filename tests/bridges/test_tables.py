"""Each table as a whole: what it says of a key is what happens to the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asking_keys import asking
from groupwise.bridges.axolotl import trainer as axolotl
from groupwise.bridges.trainer_args import grpo_args, optimizer_args
from groupwise.config.formats.format import format_named
from groupwise.config.formats.keys import Key
from groupwise.config.formats.tables import keys_of
from groupwise.config.yaml import inline
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun, read_run
from reference_files import QUICK_START
from wording import raises

FILES = {
    "axolotl": QUICK_START.replace("use_vllm: true", "use_vllm: false").replace(
        "{path: openai/gsm8k, name: main, type: rewards.prompt_transform, split: train}", "{path: owner/prompts}"
    ),
    "trl": "model_name_or_path: starter\ndataset_name: p.jsonl\nreward_funcs: [m.f]\nmax_steps: 10\nbeta: 0.1\n"
    "use_peft: true\nlora_target_modules: all-linear\n",
    "prime-rl": "max_steps: 10\nmonitors: {wandb: {project: p}}\nckpt: {interval: 5}\n"
    "trainer: {model: {lora: {rank: 4}}}\n"
    "orchestrator: {group_size: 4, train: {source: [{env: {taskset: {id: x}}}]},"
    " eval: {source: [{env: {taskset: {id: x}}}]}}\n",
    "unsloth": "from_pretrained: {model_name: starter, load_in_4bit: false}\nget_peft_model: {r: 8}\n"
    "dataset_name: p.jsonl\nreward_funcs: [m.f]\nmax_steps: 10\n",
    "aitraining": "trainer: grpo\nproject_name: p\nmodel: starter\nmax_steps: 10\npeft: true\n",
}
TABLES = {system: format_named(system).keys for system in FILES}
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


@SYSTEM
def test_an_older_name_is_read_as_the_present_one(read, system):
    for key in keys(system, "older"):
        now = named(system)[key.now]
        assert now.fate in ("plain", "made"), key.name
        value = "steps" if now.name == "eval_strategy" else asking(now)
        assert outcome(read, system, key.name, value) == outcome(read, system, now.name, value), key.name


def outcome(read, system: str, name: str, value: Any) -> Any:
    """The configuration that comes of a value, or the code of what is wrong with it."""
    try:
        return read(system, f"{name}={inline(value)}").config
    except ConfigError as error:
        return error.code


SAMPLES = {
    "chat.template_kwargs": {"enable_thinking": False},
    "data.shuffle": False,
    "algo.aggregation": "normalize_then_sum",
    "algo.mask_truncated": True,
    "train.learning_rate": 0.25,
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


def named(system: str) -> dict[str, Key]:
    shared = Path(grpo_args.__file__).with_name(f"{system}.yaml")
    return {key.name: key for key in (keys_of(shared) if shared.exists() else format_named(system).keys)}


def test_what_a_table_says_in_words_is_what_the_code_does():
    shared = named("grpo_args")
    arrows = ", ".join(f"{there}: {here}" for there, here in grpo_args.CORRECTIONS.items())
    assert shared["vllm_importance_sampling_mode"].what == arrows
    made = {"rollout.include_stop", *grpo_args.GENERATION_KWARGS.values()}
    assert set(shared["generation_kwargs"].here) == made
    assert shared["generation_kwargs"].what.startswith(", ".join(grpo_args.GENERATION_KWARGS))
    for name in grpo_args.NARROWING_OFF:
        assert shared[name].here == (grpo_args.GENERATION_KWARGS[name],)
    optimizer = named("optimizer_args")
    schedules = ", ".join(f"{there}: {here}" for there, here in optimizer_args.SCHEDULES.items())
    assert optimizer["lr_scheduler_type"].what == schedules
    assert {*optimizer_args.ADAMW, *optimizer_args.ADAMW_8BIT} <= set(re.findall(r"\w+", optimizer["optim"].what))
    assert axolotl.ATTENTION in {key.what for key in format_named("axolotl").keys}


def test_a_table_takes_in_another_under_its_own_names_and_defaults():
    there, here = named("axolotl"), named("grpo_args")
    assert there["trl.ref_model_mixup_alpha"].default == 0.9 and here["ref_model_mixup_alpha"].default == 0.6
    assert there["trl.use_adaptive_entropy"].instead == "trl.use_adaptive_entropy=false"
    assert there["trl.repetition_penalty"].instead == "trl.repetition_penalty=null"
    scheduler = named("aitraining")["scheduler"]
    assert scheduler.here == ("train.schedule",) and "lr_scheduler_type" not in named("aitraining")


@pytest.mark.parametrize(
    "entry",
    [
        "{maybe: x, here: y}",
        "{include: vllm, only: [vllm_mod]}",
        "{include: vllm, defaults: {beta: 1}}",
        "{plain: x, kind: integer, hree: y}",
        "{plain: x, kind: whole, here: y}",
    ],
)
def test_a_table_with_a_mistake_is_refused(tmp_path, entry):
    for path in Path(grpo_args.__file__).parent.glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "odd.yaml").write_text(f"- {entry}\n")
    with raises((ValueError, TypeError, KeyError)):
        keys_of.__wrapped__(tmp_path / "odd.yaml")
