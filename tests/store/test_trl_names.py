"""TRL's names for our metrics: those that TRL has, each once, with the right number."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from groupwise.store.trl_names import TRL_NAMES, TokenCount, trl_metrics

BY_TRAINER = {"loss", "grad_norm", "learning_rate"}  # logged by transformers' Trainer, which GRPOTrainer is


def source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def test_every_name_is_one_that_trl_logs():
    trl = source("trl.trainer.grpo_trainer") + source("trl.trainer.dpo_trainer")
    trainer = source("transformers.trainer")
    for _, theirs in TRL_NAMES:
        name = theirs.removeprefix("eval_").replace("*", "{reward_func_name}")
        assert f'"{name}"' in (trainer if theirs in BY_TRAINER else trl), theirs
    assert '"num_tokens"' in trl


@pytest.mark.parametrize(("ours", "theirs"), TRL_NAMES)
def test_each_by_itself(ours: str, theirs: str):
    named = trl_metrics({ours.replace("*", "exact_match"): 0.25})
    assert named[theirs.replace("*", "exact_match")] == 0.25


def test_where_two_of_ours_have_one_name_the_better_counts():
    assert trl_metrics({"loss/cross_entropy": 2.0, "loss/policy": 1.0}) == {"loss": 1.0, "policy_loss": 1.0}
    assert trl_metrics({"loss/kl": 1.0, "kl/mean": 2.0}) == {"kl": 2.0}


def test_what_trl_does_not_have_is_left_out():
    assert (
        trl_metrics({"perf/tok_s": 1.0, "reward/a/share": 1.0, "eval/greedy/reward": 1.0, "reward/a/b/mean": 1.0}) == {}
    )
    assert trl_metrics({}) == {}


def test_none_of_their_names_is_ours():
    ours = {name for name, _ in TRL_NAMES}
    assert not ours & {theirs for _, theirs in TRL_NAMES}


def test_tokens_are_added_up_and_a_step_that_is_done_again_counts_once():
    count = TokenCount(
        [{"step": 1, "rollout/total_tokens": 10.0}, {"step": 2, "rollout/total_tokens": None}, {"step": 3}]
    )
    assert count.at(4, {"rollout/total_tokens": 5.0}) == {"num_tokens": 15.0}
    assert count.at(4, {"rollout/total_tokens": 7.0}) == {"num_tokens": 17.0}
    assert count.at(2, {"rollout/total_tokens": 1.0}) == {"num_tokens": 11.0}  # gone back to
    assert count.at(5, {"eval/greedy/reward": 1.0}) == {}
