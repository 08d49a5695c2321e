"""Batches counted in completions: the cases that Axolotl's own validator is tested with, and what follows from them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.bridges.trainer_args.batch_sizes import Batch, Names, SizeError, Sizes, batch_sizes
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun, read_run
from reference_files import QUICK_START
from wording import raises

NAMES = Names(micro="micro", accumulate="accumulate", group="group", generation="generation", processes="processes")


def axolotl(tmp_path, **sizes) -> LoadedRun:
    """The quick start with these sizes; None takes a key away."""
    (tmp_path / "a.yaml").write_text(QUICK_START)
    overrides = [f"{name}={'null' if size is None else size}" for name, size in sizes.items()]
    return read_run(tmp_path / "a.yaml", ["trl.use_vllm=false", *overrides])


def sizes(micro: int, accumulate: int, group: int | None = None, generation: int | None = None, processes: int = 1):
    trl = {"trl.num_generations": group, "trl.generation_batch_size": generation}
    given = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulate, "num_processes": processes}
    return given | trl


@pytest.mark.parametrize(
    ("case", "given", "expected"),
    [
        (1, sizes(1, 4, 4), (1, 1)),
        (5, sizes(1, 1, 4, 8), (2, 2)),  # a group is not cut: 8 optimizer steps of one completion are 2 of a group
        (10, sizes(1, 4, 4, processes=2), (2, 1)),  # Axolotl refuses it; the batch is 8, which is two groups
        (11, sizes(1, 8, 4, processes=2), (4, 1)),
    ],
)
def test_validator_cases_that_pass(tmp_path, case, given, expected):
    config = axolotl(tmp_path, **given).runnable()
    assert (config.rollout.prompts_per_step, config.train.minibatches) == expected


@pytest.mark.parametrize(
    ("case", "given"),
    [
        (2, sizes(1, 2, 4)),
        (3, sizes(1, 3, 4)),
        (4, sizes(1, 4, 1)),
        (6, sizes(1, 1, 4, 6)),
        (9, sizes(1, 3, None)),  # G is 8 by default, which Axolotl does not look at
    ],
)
def test_validator_cases_that_are_refused(tmp_path, case, given):
    with raises(ConfigError):
        axolotl(tmp_path, **given)


def test_validator_cases_of_other_trainers_have_no_groups(tmp_path):
    with raises(ConfigError):  # case 8
        axolotl(tmp_path, **{"rl": "null", **sizes(1, 3, None)})
    pairs = axolotl(tmp_path, **{"rl": "dpo", **sizes(1, 3, 4)})  # case 7
    assert pairs.config.kind == "dpo" and pairs.config.rollout.prompts_per_step == 3
    assert any(note.place.startswith("trl.num_generations") for note in pairs.idle)


def test_gdpo_is_checked_like_grpo(tmp_path):
    with raises(ConfigError):
        axolotl(tmp_path, rl="gdpo", **sizes(1, 3, 4))


def test_a_generation_batch_that_is_no_whole_number_of_batches_on_several_processes_fails_early(tmp_path):
    with raises(ConfigError):
        axolotl(tmp_path, **sizes(8, 1, 4, 8, processes=2))


def test_the_default_group_of_eight_with_a_batch_of_four_fails_early(tmp_path):
    with raises(ConfigError):
        axolotl(tmp_path, **sizes(1, 4, None))


def test_a_failure_names_the_nearest_valid_sizes_of_each_kind():
    with pytest.raises(SizeError) as caught:
        batch_sizes(Sizes(micro=4, accumulate=1, group=8), NAMES)
    assert str(caught.value).endswith("write accumulate: 2, or micro: 8, or group: 4")


def test_what_differs_is_said(tmp_path):
    loaded = axolotl(tmp_path, **sizes(1, 1, 4, 8))
    assert [note.text for note in loaded.differs] == [
        "8 optimizer steps on 2 groups become 2: a group is not cut",
    ]
    assert loaded.config.train.steps == 200 / 8


@given(
    micro=st.integers(1, 8),
    accumulate=st.integers(1, 8),
    group=st.integers(1, 16),
    generation=st.none() | st.integers(1, 128),
    processes=st.integers(1, 3),
)
def test_what_is_valid_adds_up_and_what_is_suggested_is_valid(micro, accumulate, group, generation, processes):
    given = {"micro": micro, "accumulate": accumulate, "group": group, "generation": generation, "processes": processes}
    try:
        batch = batch_sizes(Sizes(**given), NAMES)
    except SizeError as error:
        suggested = re.findall(r"(micro|accumulate|group): (\d+)", str(error))
        nearest = re.findall(r"nearest are (\d+)(?: and (\d+))?", str(error))
        suggested += [("generation", each) for pair in nearest for each in pair if each]
        assert suggested or group < 2
        for name, size in suggested:
            assert isinstance(batch_sizes(Sizes(**given | {name: int(size)}), NAMES), Batch)
    else:
        step = micro * accumulate * processes
        rollout = max(step, generation or step)
        assert batch.prompts * group == rollout and batch.steps_there * step == rollout
        assert batch.prompts % batch.minibatches == 0 and batch.minibatches <= batch.steps_there
