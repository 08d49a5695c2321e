"""Which runs the words of `groupwise run` name."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.errors import ConfigError
from groupwise.run.sweep_words import read_runs
from wording import raises

TEXT = """
name: toy
model: starter
data: {source: prompts.jsonl}
rewards: [my_rewards:exact]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yaml", "sub/a.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("folder")
class TestRuns:
    def test_one_file_is_one_run(self):
        (run,) = read_runs(["a.yaml", "train.steps=3"])
        assert run.label == "" and run.loaded.config.train.steps == 3

    def test_overrides_are_for_all_files_wherever_they_stand(self):
        runs = read_runs(["a.yaml", "train.steps=3", "b.yaml", "seed=4"])
        assert [run.label for run in runs] == ["a", "b"]
        assert all(run.loaded.config.train.steps == 3 and run.loaded.config.seed == 4 for run in runs)

    def test_a_sweep_goes_through_its_values(self):
        runs = read_runs(["a.yaml", "seed=9"], ["seed=0,1,2"])
        assert [run.label for run in runs] == ["seed=0", "seed=1", "seed=2"]
        assert [run.loaded.config.seed for run in runs] == [0, 1, 2]

    def test_several_go_through_every_pair(self):
        runs = read_runs(["a.yaml", "b.yaml"], ["seed=0,1", "train.learning_rate=1e-5,3e-5"])
        assert [run.label for run in runs][:3] == [
            "a seed=0 learning_rate=1e-5",
            "a seed=0 learning_rate=3e-5",
            "a seed=1 learning_rate=1e-5",
        ]
        assert len(runs) == 8
        rates = {(run.loaded.config.seed, run.loaded.config.train.learning_rate) for run in runs}
        assert rates == {(0, 1e-5), (0, 3e-5), (1, 1e-5), (1, 3e-5)}

    def test_a_comma_in_brackets_is_of_the_value(self):
        runs = read_runs(["a.yaml"], ["rewards=[r:exact],[r:exact,'r:shorter']"])
        assert [[each.function for each in run.loaded.config.rewards] for run in runs] == [
            ["r:exact"],
            ["r:exact", "r:shorter"],
        ]

    def test_an_apostrophe_and_a_bracket_that_was_not_opened_hold_nothing_together(self):
        runs = read_runs(["a.yaml"], ["data.system=Don't add,Do,:)"])
        assert [run.loaded.config.data and run.loaded.config.data.system for run in runs] == ["Don't add", "Do", ":)"]
        (quoted,) = read_runs(["a.yaml"], ["data.system='Do, then say'"])
        assert quoted.loaded.config.data and quoted.loaded.config.data.system == "Do, then say"

    def test_keys_that_end_alike_are_written_whole(self):
        (first, _) = read_runs(["a.yaml"], ["train.steps=1,2", "rollout.group_size=4"])
        assert first.label == "steps=1 group_size=4"
        (first, _) = read_runs(["a.yaml"], ["rollout.temperature=1.0,0.9", "eval.temperature=1.0", "eval.every=0"][:1])
        assert first.label == "temperature=1.0"

    def test_labels_are_different(self):
        assert [run.label for run in read_runs(["a.yaml", "a.yaml"])] == ["a", "a (2)"]
        assert [run.label for run in read_runs(["a.yaml", "sub/a.yaml"])] == ["a.yaml", "sub/a.yaml"]

    @pytest.mark.parametrize("sweep", ["seed", "seed=", "seed=1,,2", "=1,2"])
    def test_a_sweep_without_values_is_refused(self, sweep: str):
        with raises(ConfigError):
            read_runs(["a.yaml"], [sweep])

    def test_a_key_is_swept_once(self):
        with raises(ConfigError):
            read_runs(["a.yaml"], ["seed=0,1", "seed=2"])

    def test_a_value_is_checked_like_any_override(self):
        with raises(ConfigError):
            read_runs(["a.yaml"], ["train.steps=1,none"])

    def test_a_word_that_is_neither_is_refused_as_ever(self):
        with raises(ConfigError):
            read_runs(["a.yaml", "train.steps"])

    def test_a_flag_is_no_file(self):
        with raises(ConfigError):
            read_runs(["a.yaml", "--seed", "b.yaml"])
