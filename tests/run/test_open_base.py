"""A base model that no process has whole: who needs one, what says what the learner thinks in its place, and where
files can only be read whole."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

from groupwise.config.run import RunConfig, parse_config
from groupwise.engine.local import LocalEngine
from groupwise.errors import AdapterError, AdapterNotFoundError, ConfigError
from groupwise.run.assemble import open_learner
from groupwise.run.learner_scores import LearnerScores
from groupwise.run.open_base import open_base
from groupwise.train.learner import Learner
from groupwise.train.orders import end, follow
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest
from rank_pairs import on_ranks

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))
from parts_cases import save

VERSION = PolicyVersion("policy", 3)
PROMPT, SAID = (5, 6, 7), (8, 9, 10, 11)


@pytest.fixture
def config(make_base, tmp_path: Path):
    """`config(**sections)`: a run of a tiny model in files, whose weights are cut."""
    place = save(make_base("qwen3", dtype=torch.float32), tmp_path / "model")

    def make(**sections) -> RunConfig:
        data = {"data": {"source": "rows.jsonl"}, "rewards": ["my:reward"], "model": str(place), "device": "cpu"}
        train = {"parallel": "fsdp", "lora": {"rank": 2, "targets": ["q_proj"]}} | sections.pop("train", {})
        return parse_config({**data, "train": train, **sections})

    return make


def opened(config: RunConfig, ranks) -> Learner:
    base, parts = open_base(config, ranks)
    return open_learner(config, base, threads=1, ranks=ranks, parts=parts)


@pytest.mark.parametrize(
    ("sections", "keeps"),
    [
        ({}, True),
        ({"engine": "vllm"}, False),
        ({"engine": "vllm", "rollout": {"thinking_budget": 8, "max_tokens": 64}}, True),
        ({"engine": "vllm", "teacher": {"adapter": "somewhere"}}, True),
        ({"kind": "sft", "rewards": []}, False),
    ],
)
def test_who_has_the_whole_base(config, sections, keeps: bool) -> None:
    given = config(**sections)
    assert given.keeps_base == keeps

    def work(ranks):
        base, parts = open_base(given, ranks)
        return base.device.type, parts is not None

    assert on_ranks(work) == [("cpu" if keeps else "meta", True), ("meta", True)]


def test_the_learner_says_what_an_engine_over_the_base_would(config, make_base, tmp_path: Path) -> None:
    """Of the base, of a version in files that is not the learner's own adapter, and while a step trains in another
    thread nothing else."""
    given = config(engine="vllm")
    base, _ = open_base(given.model_copy(update={"train": given.train.model_copy(update={"parallel": "ddp"})}), None)
    other = Learner(base, lora=given.train.lora, seed=1)
    with torch.no_grad():
        for parameter in other.parameters:
            parameter.add_(0.1)
    (tmp_path / "adapter").mkdir()
    other.save_adapter(tmp_path / "adapter")
    engine = LocalEngine(base, max_rows=1, prefix_cache_mb=0, threads=1)
    engine.load(VERSION, tmp_path / "adapter")
    want = [engine.score(PROMPT, SAID, version, temperature=0.5) for version in (PolicyVersion.base(), VERSION)]
    engine.close()

    def work(ranks):
        learner = opened(given, ranks)
        if not ranks.leads:
            return follow(learner)
        scores, before = LearnerScores(learner), [p.detach().clone() for p in learner.parameters]
        with pytest.raises(AdapterNotFoundError):
            scores.score(PROMPT, SAID, VERSION)
        scores.load(VERSION, tmp_path / "adapter")
        found = [scores.score(PROMPT, SAID, version, temperature=0.5) for version in (PolicyVersion.base(), VERSION)]
        assert scores.score_top(PROMPT, SAID, VERSION, temperature=0.5, top=0) == tuple((x, ()) for x in found[1])
        with pytest.raises(ConfigError):
            scores.score_top(PROMPT, SAID, VERSION, top=1)
        with pytest.raises(ConfigError):
            scores.submit([SamplingRequest(prompt_ids=PROMPT, params=SamplingParams(max_tokens=1), n=1)])
        with pytest.raises(AdapterError):
            scores.load(PolicyVersion("policy", 4), tmp_path)
        assert all(map(torch.equal, before, learner.parameters))
        assert learner.base.hash == base.hash
        end(ranks, found)
        return found

    found, told = on_ranks(work)
    assert found == told
    for mine, theirs in zip(found, want, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert abs(want[0][0] - want[1][0]) > 1e-3


def test_what_can_only_be_read_whole_is_and_a_warning_says_why(config) -> None:
    given = config(train={"lora": {"rank": 2, "targets": ["q_proj"], "use_dora": True}})

    def work(ranks):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            base, parts = open_base(given, ranks)
        texts = [str(each.message) for each in said if "read whole by every process" in str(each.message)]
        return base.device.type, parts, texts

    (device, parts, said), (others, _, unsaid) = on_ranks(work)
    assert (device, parts, others) == ("cpu", None, "cpu")
    assert len(said) == 1 and "DoRA" in said[0] and not unsaid


def test_processes_that_make_no_groups_are_refused(config) -> None:
    def work(ranks):
        with pytest.raises(ConfigError) as error:
            opened(config(train={"shard_size": 3}), ranks)
        return error.value.field

    assert on_ranks(work) == ["train.shard_size"] * 2
    with pytest.raises(ConfigError):
        config(train={"parallel": "ddp", "shard_size": 2})
