"""One step's update: the thread it runs in, and what its advantages are relative to."""

import io
import statistics
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from groupwise.algo.credit import has_signal
from groupwise.config.algo import RunAlgoConfig
from groupwise.config.job import GrpoJobConfig
from groupwise.config.loss import loss_of
from groupwise.config.run import STARTER_DIR
from groupwise.errors import ConfigError
from groupwise.run.display import LineDisplay
from groupwise.run.loop import run_loop
from groupwise.run.update import learner_thread
from groupwise.store.rollouts import group_from_json
from groupwise.store.tracking import read_metrics
from groupwise.train.learner import Learner
from running_jobs import config, rollouts_of
from slow_cases import slow_but
from wording import raises


def test_batch_std_is_the_deviation_of_all_that_was_sampled(tmp_path: Path):
    """Groups of equal rewards are not trained, and are in the batch all the same (Lite-PPO, and TRL)."""
    given = config(
        tmp_path,
        rollout={"prompts_per_step": 8, "group_size": 4, "max_tokens": 8, "refill": 1.0},
        train={"steps": 1},
        algo={"advantage": "batch_std"},
    )
    result = run_loop(given, display=LineDisplay(1, stream=io.StringIO()))
    groups = [group_from_json(line) for line in rollouts_of(result.run_dir)]
    trained = [group for group in groups if has_signal(group)]
    assert 0 < len(trained) < len(groups)
    std = statistics.stdev(rollout.reward for group in groups for rollout in group.rollouts)
    for group in trained:
        mean = statistics.fmean(rollout.reward for rollout in group.rollouts)
        for rollout in group.rollouts:
            assert rollout.advantage == pytest.approx((rollout.reward - mean) / (std + 1e-4))


def test_mixed_precision_rounds_products_and_not_what_is_trained(tmp_path: Path):
    """All parameters are trained in float32, by gradients that are near those without: the same batch, one step."""
    changed: dict[bool, dict[str, torch.Tensor]] = {}
    gaps: dict[bool, float] = {}
    for mixed in (False, True):
        given = config(
            tmp_path / str(mixed),
            dtype="float32",
            train={"steps": 1, "lora": None, "learning_rate": 1e-4, "warmup_steps": 0, "mixed_precision": mixed},
            algo={"correction": "tis_token"},
        )
        result = run_loop(given, display=LineDisplay(1, stream=io.StringIO()))
        assert result.trained and given.may_be_stale == mixed
        gaps[mixed] = read_metrics(result.run_dir / "metrics.jsonl")[0]["mismatch/logprob_diff_mean"]
        changed[mixed] = load_file(next(result.run_dir.rglob("model.safetensors")))
    assert gaps[False] < 1e-5 < 3e-4 < gaps[True] < 0.05
    before = load_file(STARTER_DIR / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in changed[True].values())
    ways = [torch.cat([(new[key] - before[key].float()).flatten() for key in new]) for new in changed.values()]
    assert 0.5 < torch.cosine_similarity(*ways, dim=0) < 0.9999


def test_mixed_precision_is_over_float32(tmp_path: Path):
    with raises(ConfigError, field="train.mixed_precision", kind="conflict"):
        config(tmp_path, train={"mixed_precision": True})


def test_training_keeps_its_threads_when_the_engine_decodes_on_one():
    thread = learner_thread(2)
    engine = threading.Thread(target=torch.set_num_threads, args=(1,))
    engine.start()
    engine.join()
    assert thread.submit(torch.get_num_threads).result() == 2
    thread.shutdown()


def test_a_streamed_step_numbers_its_groups_as_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is measured of some groups (`Learner.measure_kl`) is of other groups each step, however they arrive."""
    measured: list[list[int]] = []
    measure = Learner.measure_kl

    def watched(learner: Learner, samples, **options):
        measured.append([sample.group for sample in samples])
        return measure(learner, samples, **options)

    monkeypatch.setattr(Learner, "measure_kl", watched)
    given = config(
        tmp_path,
        rollout={"prompts_per_step": 6, "group_size": 4, "max_tokens": 8, "refill": 1.0, "stream_groups": 1},
        train={"steps": 1},
    )
    run_loop(given, display=LineDisplay(1, stream=io.StringIO()))
    (groups,) = measured
    assert list(dict.fromkeys(groups)) == list(range(len(set(groups)))) and len(set(groups)) > 1


@pytest.mark.parametrize("policy_loss", slow_but(["grpo"], of=("grpo", "dapo", "cispo", "gspo"), long=["gspo"]))
def test_dropout_is_no_ratio(tmp_path: Path, policy_loss: str):
    """One optimizer step on what was just sampled: the trainer's own forward, with the same masks, is the anchor."""
    given = config(
        tmp_path,
        rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 8},
        train={"steps": 4, "learning_rate": 2e-3, "warmup_steps": 0, "lora": {"dropout": 0.3}},
        algo={"policy_loss": policy_loss},
    )
    result = run_loop(given, display=LineDisplay(4, stream=io.StringIO()))
    steps = [line for line in read_metrics(result.run_dir / "metrics.jsonl") if "loss/ratio_min" in line]
    assert len(steps) > 1
    for line in steps:
        assert line["loss/ratio_min"] == line["loss/ratio_max"] == 1.0 and line["loss/clip_frac"] == 0.0
    assert max(line["mismatch/logprob_diff_mean"] for line in steps) > 0, "the sampler has no dropout"


def test_an_anchor_that_is_asked_for_stays():
    own, asked = RunAlgoConfig(policy_loss="dapo"), RunAlgoConfig(policy_loss="dapo", anchor="behaviour")
    assert loss_of(own, max_tokens=8, dropout=False).anchor == "behaviour"
    assert loss_of(own, max_tokens=8, dropout=True).anchor == "old"
    assert loss_of(asked, max_tokens=8, dropout=True).anchor == "behaviour"
    assert GrpoJobConfig(lora_dropout=0.05).loss(recorded=True).anchor == "old"


def test_an_adapted_kl_keeps_its_weight_where_demonstrations_alone_are_trained(tmp_path: Path):
    """Every completion is cut and masked, and the best of each group is learned by cross-entropy."""
    given = config(
        tmp_path,
        rollout={"prompts_per_step": 8, "group_size": 4, "max_tokens": 1},
        rewards=[{"function": "running_jobs:says_a"}],
        algo={"kl": "k3", "kl_coeff": 0.1, "kl_target": 0.01, "mask_truncated": True},
        teacher={"self": True, "loss": "sft", "best": 1},
        train={"steps": 1},
    )
    result = run_loop(given, display=LineDisplay(1, stream=io.StringIO()))
    (line,) = read_metrics(result.run_dir / "metrics.jsonl")
    assert result.trained and "kl/mean" not in line and line["kl/coeff"] == 0.1
    assert line["rollout/truncated_frac"] == 1.0 and line["teacher/demonstrations"] > 0


def test_what_a_step_trains_is_told_by_the_second(tmp_path: Path):
    """`perf/*` of both kinds of tokens, those that were sampled and those that were trained."""
    result = run_loop(config(tmp_path, train={"steps": 1}), display=LineDisplay(1, stream=io.StringIO()))
    (line,) = read_metrics(result.run_dir / "metrics.jsonl")
    assert line["perf/train_tok_s"] == pytest.approx(line["train/tokens"] / line["time/train_s"])
    assert line["perf/sample_tok_s"] == pytest.approx(line["rollout/tokens"] / line["time/rollout_s"])
