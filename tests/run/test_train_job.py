"""One job: that it learns, what it continues, what it refuses, and that an interrupted one ends with the same bytes."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.errors import Interrupted
from groupwise.run import job as train_job
from groupwise.run.job import run_job
from groupwise.store.adapters import AdapterStore
from groupwise.store.job_checkpoint import trained_in
from groupwise.store.ledger import JobState
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Sample, SamplingParams, SamplingRequest
from job_place import PROMPTS, REPLIES, REWARDS, SMALL, Place, examples, groups
from slow_cases import slow_but
from wording import wording


@pytest.fixture
def place(make_base, tmp_path: Path) -> Place:
    return Place(tmp_path, make_base("qwen3", dtype=torch.float32))


def logprobs(place: Place, version: PolicyVersion | None, prompt, completion) -> list[float]:
    """By transformers and PEFT alone."""
    model = copy.deepcopy(place.base.model)
    if version is not None:
        model = PeftModel.from_pretrained(model, str(place.store.path(version)))
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([(*prompt, *completion)])).logits[0].log_softmax(-1)
    start = len(prompt) - 1
    return [float(logp[start + t, token]) for t, token in enumerate(completion)]


def tensors(data_or_path) -> dict[str, torch.Tensor]:
    return load_file(data_or_path / "adapter_model.safetensors")


def sampled(place: Place) -> dict:
    """The groups with the base model's own log-probabilities, as if it had sampled them."""
    posted = groups()
    for group in posted["groups"]:
        for each in group["completions"]:
            each["logprobs"] = logprobs(place, None, group["prompt_ids"], each["ids"])
    return posted


# --- what acts ---


def test_a_job_says_what_it_was_begun_with(place):
    """Where the request says nothing, the adapter that is continued does."""
    defaults = dict.fromkeys(("lora_rank", "lora_alpha", "target_modules"))
    fresh = place.do(groups(), **defaults)
    acting = {"lora_rank": 16, "lora_alpha": 32.0, "target_modules": "all-linear"}
    assert fresh.effective == {**acting, "checkpoint_interval": 10, "kl": "k3"} and fresh.config["lora_rank"] is None
    place.do(groups(), adapter="small", kl_coeff=0.0)
    going_on = place.do(groups(), adapter="small", checkpoint_interval=5, **defaults)
    expected = {"lora_rank": 2, "lora_alpha": 4.0, "target_modules": ["down_proj", "q_proj"], "kl": "k3"}
    assert going_on.effective == expected


# --- a policy that a step destroys ---

DESTROYED = {"learning_rate": 1.0, "target_modules": "all-linear"}


def said(place: Place) -> dict:
    """Groups that the base model itself has sampled."""
    with closing(LocalEngine(place.base)) as engine:
        params = SamplingParams(max_tokens=12, seed=0, ignore_eos=True)
        answered = engine.generate([SamplingRequest(prompt_ids=prompt, n=4, params=params) for prompt in PROMPTS])
    scored = [
        [
            {"ids": list(each.token_ids), "logprobs": list(each.logprobs), "reward": reward}
            for each, reward in zip(group, REWARDS, strict=True)
        ]
        for group in answered
    ]
    return {"groups": [{"prompt_ids": list(p), "completions": c} for p, c in zip(PROMPTS, scored, strict=True)]}


def shown(place: Place) -> dict:
    """The same as examples of what to say."""
    groups = said(place)["groups"]
    rows = [(group["prompt_ids"], each["ids"]) for group in groups for each in group["completions"]]
    return {"examples": [{"prompt_ids": p, "completion_ids": c, "mask": [1] * len(c)} for p, c in rows]}


def test_a_destroyed_policy_is_stored_and_not_made_active(place):
    """One step, whose metrics were measured before it was taken: only what is measured afterwards shows it."""
    job = place.do(said(place), **DESTROYED)
    assert (job.state, job.phase, job.version, job.step) == ("completed", "done", "math@1", 1)
    assert job.metrics["loss/kl"] < 0.01 and job.metrics["final/logprob_drop"] > 1
    assert job.unhealthy is not None and "less likely than before the first (policy.destroyed)" in job.unhealthy
    assert place.ledger.published_jobs() == []  # nothing is swapped in
    last = place.ledger.events(job.id)[-1]
    assert (last.level, last.data["state"]) == ("warning", "completed") and last.data["unhealthy"] == job.unhealthy
    assert place.store.info(place.version(job)).unhealthy == job.unhealthy


def test_supervised_training_destroys_a_policy_too(place):
    job = place.do(shown(place), kind="sft", epochs=1, **DESTROYED)
    assert job.unhealthy is not None and "policy.destroyed" in job.unhealthy


def test_a_kl_term_that_exploded_is_an_error_of_health_too(place, monkeypatch):
    """As the loss itself reports it, of a step before."""
    monkeypatch.setattr(train_job, "_logprob_drop", lambda run: 0.0)
    job = place.do(said(place), iterations=2, **DESTROYED)
    assert job.metrics["loss/kl"] > 1000 and job.unhealthy is not None and "(kl.exploded)" in job.unhealthy


def test_what_went_well_is_swapped_in(place):
    for kind, payload in (("grpo", said(place)), ("sft", shown(place))):
        job = place.do(payload, kind=kind, adapter=kind)
        assert (job.phase, job.unhealthy) == ("swapping", None) and job.metrics["final/logprob_drop"] < 0.1


def test_the_drop_is_from_what_the_job_started_from(place):
    """Not from the base model, from which a version may be far by now; nor from whatever logprobs were posted."""
    first = place.do(examples(), kind="sft", adapter="math", epochs=20)
    assert first.metrics["final/logprob_drop"] < -1  # it says now what it was shown
    second = place.do(groups(logprob=-0.001), learning_rate=0.0)
    assert second.version == "math@2" and second.metrics["final/logprob_drop"] == pytest.approx(0.0, abs=1e-6)


def test_the_next_job_goes_on_from_the_last_version_that_was_well(place):
    well = place.do(said(place))
    place.store.activate(place.version(well))
    broken = place.do(said(place), learning_rate=1.0)
    assert broken.version == "math@2" and broken.unhealthy is not None
    job = place.do(said(place))
    assert "continues math@1 (rank 2) with its optimizer's moments" in place.messages(job)
    assert place.store.info(place.version(job)).parent == place.version(well)
    named = place.do(said(place), base_adapter="math@2")  # by its number it can be had
    assert "continues math@2 (rank 2) with a fresh optimizer" in place.messages(named)


def test_where_no_version_is_well_the_name_starts_afresh(place):
    assert place.do(said(place), **DESTROYED).unhealthy
    job = place.do(said(place))
    assert job.version == "math@2" and "begins with a fresh adapter of rank 2" in place.messages(job)


def test_a_job_that_is_killed_before_the_ledger_knows_is_still_unhealthy(place, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(place.ledger, "published", lambda lease, version, **_: place.ledger.release(lease))
        place.do(said(place), **DESTROYED)
    job = place.do()
    assert job.state == "completed" and job.unhealthy is not None


# --- GRPO learns ---


@pytest.mark.parametrize("text_only", [False, True], ids=["token ids and logprobs", "text only"])
def test_rewarded_completions_become_likelier_and_the_others_less(place, text_only):
    job = place.do(groups() if text_only else sampled(place), iterations=6)
    assert (job.phase, job.version, job.step) == ("swapping", "math@1", 6)
    version = place.version(job)
    for prompt in PROMPTS:
        gains = [
            sum(logprobs(place, version, prompt, reply)) - sum(logprobs(place, None, prompt, reply))
            for reply in REPLIES
        ]
        assert gains[0] > 0.3 and gains[1] < -0.05 and gains[3] < -0.05
        assert gains[0] == max(gains)


def test_text_only_is_the_same_as_posting_what_the_policy_would_have_recorded(place):
    recorded, text = place.do(sampled(place), iterations=3), place.do(groups(), iterations=3, adapter="other")
    ours, theirs = (tensors(place.store.path(place.version(job))) for job in (recorded, text))
    for key, value in ours.items():
        torch.testing.assert_close(theirs[key], value, rtol=1e-3, atol=1e-5)


def test_one_step_is_the_step_of_the_equations(place):
    """The same by hand: advantages from their definition, the learner driven step by step."""
    job = place.do(groups(logprob=-2.0), betas=(0.8, 0.9), weight_decay=0.1, max_grad_norm=0.5, seed=3)
    mean = sum(REWARDS) / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in REWARDS) / 3)
    samples = [
        Sample(
            prompt_ids=prompt,
            completion_ids=ids,
            mask=(1,) * len(ids),
            advantage=(reward - mean) / (std + 1e-4),
            behaviour_logprobs=(-2.0,) * len(ids),
        )
        for prompt in PROMPTS
        for ids, reward in zip(REPLIES, REWARDS, strict=True)
    ]
    learner = Learner(place.base, lora=LoraSpec(rank=2, alpha=4.0, targets=SMALL["target_modules"]), seed=3)
    spec = resolve_loss("grpo", kl="k3", kl_coeff=0.1, clip_low=0.2, clip_high=0.2)
    metrics = learner.forward_backward(samples, spec)
    norm = torch.nn.utils.clip_grad_norm_(learner.parameters, 0.5)
    torch.optim.AdamW(learner.parameters, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1).step()
    learner.save_adapter(place.directory)
    ours = tensors(place.store.path(place.version(job)))
    for key, value in tensors(place.directory).items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-7)
    assert job.metrics["optim/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert job.metrics["loss/policy"] == pytest.approx(metrics["loss/policy"], rel=1e-5, abs=1e-7)
    assert job.metrics["reward/mean"] == pytest.approx(mean)
    assert {"loss/kl", "optim/lr", "perf/tok_s", "time/step_s"} <= job.metrics.keys()


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo", "gspo", "cispo", "vespo", "reinforce", "dro"])
def test_every_loss_takes_text_only_groups(place, loss):
    job = place.do(groups(), policy_loss=loss, iterations=2, minibatches=2, learning_rate=1e-3)
    assert job.version == "math@1", job.error
    assert len(place.ledger.metrics(job.id)) == 4


def test_a_snapshot_anchor_is_the_starting_policy_in_every_step(place, monkeypatch):
    """`anchor: old` over several steps: the ratio is against the policy before the job, not before the step."""
    seen = []
    plain = Learner.forward_backward

    def spy(self, samples, spec, *, temperature=1.0, old_logprobs=None):
        seen.append(old_logprobs)
        return plain(self, samples, spec, temperature=temperature, old_logprobs=old_logprobs)

    monkeypatch.setattr(Learner, "forward_backward", spy)
    place.do(groups(logprob=-1.0), anchor="old", iterations=2)
    expected = [logprobs(place, None, prompt, reply) for prompt in PROMPTS for reply in REPLIES]
    for rows in seen:
        assert [list(row) for row in rows] == [pytest.approx(row, abs=1e-4) for row in expected]


def test_the_temperature_of_the_samples_is_trained_at(place, monkeypatch):
    seen = []
    plain = Learner.forward_backward
    monkeypatch.setattr(Learner, "forward_backward", lambda *a, **k: seen.append(k["temperature"]) or plain(*a, **k))
    place.do({**groups(), "temperature": 0.7})
    place.do({**groups(), "temperature": 0.7}, temperature=0.9)
    assert seen == [0.7, 0.9]


# --- what teaches nothing ---


def test_without_another_term_groups_of_equal_rewards_never_reach_the_model(place, monkeypatch):
    seen: list[Sample] = []
    for verb in ("forward", "forward_backward"):
        plain = getattr(Learner, verb)
        monkeypatch.setattr(Learner, verb, lambda s, x, *a, _p=plain, **k: seen.extend(x) or _p(s, x, *a, **k))
    mixed = groups(PROMPTS[:2])
    mixed["groups"] += groups(PROMPTS[2:], rewards=(0.5,) * 4)["groups"]
    mixed["groups"] += groups(((1, 2),), rewards=(0.1 + 0.2, 0.3, 0.3, 0.3))["groups"]
    with_flat = place.do(mixed, kl_coeff=0.0)
    assert {sample.prompt_ids for sample in seen} == set(PROMPTS[:2])
    without = place.do(groups(PROMPTS[:2]), adapter="other", kl_coeff=0.0)
    assert place.weights(with_flat) == place.weights(without)
    assert with_flat.metrics["reward/frac_zero_std"] == 0.5 and with_flat.metrics["rollout/groups_trained"] == 2


def test_with_a_kl_groups_of_equal_rewards_are_trained(place):
    mixed = groups(PROMPTS[:2])
    mixed["groups"] += groups(PROMPTS[2:], rewards=(0.5,) * 4)["groups"]
    job = place.do(mixed, minibatches=3)
    assert job.metrics["rollout/groups_trained"] == 3 and job.step == 3


def test_nothing_to_learn_is_a_failure(place):
    job = place.do(groups(rewards=(0.5,) * 4))
    assert (job.state, job.error["code"]) == ("failed", "training_failed")
    wording(job.error)
    empty = groups()
    for group in empty["groups"]:
        for each in group["completions"]:
            each["ids"] = []
    assert "not a single token" in place.do(empty).error["message"]
    assert place.store.versions("math") == ()


# --- steps that are not finite ---


def test_a_step_that_is_not_finite_is_refused_and_reported(place):
    posted = groups(PROMPTS[:1], rewards=(1e39, 0.0, 0.0, 0.0), logprob=-2.0)  # infinite in float32
    posted["groups"] += groups(PROMPTS[1:2], logprob=-2.0)["groups"]
    apart = {"advantage": "mean", "iterations": 2, "micro_tokens": 1}  # no pass holds two samples, in either job
    job = place.do(posted, minibatches=2, **apart)
    assert job.version == "math@1" and job.step == 4
    refused = [step["optim/refused"] for step in place.ledger.metrics(job.id)]
    assert sorted(refused) == [0.0, 0.0, 1.0, 1.0]  # of each step, as in a run
    assert sum("was refused" in message for message in place.messages(job)) == 2
    sound = place.do(groups(PROMPTS[1:2], logprob=-2.0), adapter="other", **apart)
    assert place.weights(job) == place.weights(sound)


@pytest.mark.parametrize("iterations", [3, 7])  # all of them, or too many in a row
def test_a_job_whose_every_step_is_refused_fails(place, iterations):
    job = place.do(groups(logprob=-1.0), temperature=1e-44, iterations=iterations)
    assert job.state == "failed"
    assert "train." not in job.error["hint"]
    wording(job.error)
    assert place.store.versions("math") == ()


# --- SFT ---


def test_sft_lowers_its_loss_on_what_the_mask_marks(place):
    job = place.do(examples(), kind="sft", epochs=8, batch_size=2, learning_rate=0.03)
    losses = [step["loss/cross_entropy"] for step in place.ledger.metrics(job.id)]
    assert len(losses) == 24 and sum(losses[-3:]) < 0.5 * sum(losses[:3])
    version = place.version(job)
    for row in examples()["examples"]:
        before, after = (logprobs(place, v, row["prompt_ids"], row["completion_ids"]) for v in (None, version))
        gained = [b - a for a, b in zip(before, after, strict=True)]
        assert min(gained[0], gained[1], gained[3]) > 0


def test_an_epoch_is_every_example_once_in_its_own_order(place, monkeypatch):
    seen: list[int] = []
    plain = Learner.forward_backward_supervised
    monkeypatch.setattr(
        Learner,
        "forward_backward_supervised",
        lambda self, samples, **options: (
            seen.extend(s.prompt_ids[0] for s in samples) or plain(self, samples, **options)
        ),
    )
    place.do(examples(7), kind="sft", epochs=2, batch_size=3)
    assert sorted(seen[:7]) == sorted(seen[7:]) == [30 + i for i in range(7)]
    assert seen[:7] != seen[7:]


# --- continuing ---


def test_two_rounds_are_one_long_round(place):
    """Round 2 goes on from version 1's weights, with its moments: bit for bit what one job of both does."""
    posted = groups(logprob=-2.0)
    once = place.do(posted, iterations=6, adapter="once")
    first, second = place.do(posted, iterations=3), place.do(posted, iterations=3)
    assert (first.version, second.version) == ("math@1", "math@2")
    assert place.weights(second) == place.weights(once) != place.weights(first)
    info = place.store.info(place.version(second))
    assert (info.parent, info.step, info.job) == (PolicyVersion("math", 1), 6, second.id)


def test_a_parent_that_goes_while_the_job_begins_is_replaced_by_the_newest(place, monkeypatch):
    """Found, and pruned before it was held: the job continues what is the newest by then."""
    first, second = place.do(groups()), place.do(groups(), learning_rate=0.02)
    plain, gone = AdapterStore.held, []

    def held(self, version):
        if not gone:
            gone.append(version)
            other = AdapterStore(self.root)
            other.activate(place.version(first))
            other.delete(version)
        return plain(self, version)

    monkeypatch.setattr(AdapterStore, "held", held)
    third = place.do(groups(), learning_rate=0.03)
    assert gone == [place.version(second)]
    assert place.store.info(place.version(third)).parent == place.version(first)
    gone.clear()
    named = place.do(groups(), base_adapter=str(place.version(third)))
    assert (named.state, named.error["code"]) == (JobState.FAILED, "adapter_not_found")


def test_a_parent_stays_while_the_job_reads_it(place, monkeypatch):
    """A sweep comes between its path and its bytes."""
    first, second = place.do(groups()), place.do(groups(), learning_rate=0.02)
    load, removed = Learner.load_adapter, []

    def load_adapter(self, directory, **how):
        removed.extend(AdapterStore(place.store.root).prune("math", keep=1))
        load(self, directory, **how)

    monkeypatch.setattr(Learner, "load_adapter", load_adapter)
    third = place.do(groups(), base_adapter=str(place.version(first)), adapter="math")
    assert place.store.info(place.version(third)).parent == place.version(first) and removed == []
    assert place.version(second) in place.store.versions("math")


def test_the_moments_of_the_newest_version_of_each_name_are_kept(place):
    place.do(groups(), adapter="once")
    for _ in range(2):
        gone = place.version(place.do(groups(), adapter="gone"))
    place.do(groups())
    place.do(groups())
    assert kept_moments(place) == {"once/v000001", "gone/v000002", "math/v000002"}
    place.store.delete(gone)
    assert kept_moments(place) == {"once/v000001", "math/v000002"}
    assert sorted(os.listdir(place.store.root / ".optimizer")) == ["math", "once"]


def kept_moments(place: Place) -> set[str]:
    return {"/".join(path.parts[-2:]) for path in place.store.root.glob(".optimizer/*/*")}


def test_the_end_of_a_job_reads_nothing_of_other_adapters(place, monkeypatch):
    """With ten thousand of them each job would look through as many directories."""
    place.do(groups(), adapter="math")
    looked = [0]

    def counted(of):
        def count(*given, **named):
            looked[0] += 1
            return of(*given, **named)

        return count

    for name in ("listdir", "scandir", "stat"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))

    def looks(adapter: str) -> int:
        place.submit(groups(), adapter=adapter)
        lease, looked[0] = place.lease(), 0
        place.worker.do(lease)
        return looked[0]

    few = looks("b")
    for number in range(50):
        for folder in (place.store.root, place.store.root / ".optimizer"):
            shutil.copytree(folder / "math", folder / f"x{number}")
    assert len(place.store.names()) == 52 and looks("c") == few


def test_moments_of_a_version_that_is_gone_are_not_kept(place):
    """Deleted between its publication and the end of its job; or its deletion was cut short by a kill."""
    version = place.version(place.do(groups()))
    moments = place.store.moments(version)
    source = place.directory / "source"
    shutil.copytree(moments, source)
    place.store.delete(version)
    place.store.keep_moments(version, source)
    assert kept_moments(place) == set() and source.is_dir()
    shutil.copytree(source, moments)
    AdapterStore(place.store.root)
    assert kept_moments(place) == set()


def test_older_moments_do_not_replace_newer_ones(place):
    """A job that was killed before its end is leased again, after another of its name."""
    versions = [place.version(place.do(groups())) for _ in range(2)]
    source = place.directory / "source"
    source.mkdir()
    place.store.keep_moments(versions[0], source)
    assert kept_moments(place) == {"math/v000002"} and source.is_dir()


def test_moments_are_found_where_they_were_kept_before(place):
    version = place.version(place.do(groups()))
    before = place.directory / "optimizer"
    before.mkdir()
    (before / "notes@home").mkdir()
    place.store.moments(version).rename(before / str(version))
    assert place.store.moments(version) is None
    store = trained_in(place.directory)
    assert store.moments(version) is not None and not before.exists()


def test_without_its_moments_a_version_is_continued_with_a_fresh_optimizer(place):
    posted = groups(logprob=-2.0)
    place.do(posted, iterations=3)
    with_moments = place.do(posted, iterations=3, adapter="a", base_adapter="math@1")
    shutil.rmtree(place.store.moments(PolicyVersion("math", 1)))
    without = place.do(posted, iterations=3, adapter="b", base_adapter="math@1")
    assert "with its optimizer's moments" in place.messages(with_moments)[0]
    assert "with a fresh optimizer" in place.messages(without)[0]
    assert place.weights(with_moments) != place.weights(without)


def test_damaged_moments_are_as_none(place):
    posted = groups(logprob=-2.0)
    place.do(posted)
    moments = place.store.moments(PolicyVersion("math", 1)) / "learner.safetensors"
    moments.write_bytes(moments.read_bytes()[:-40])
    frozen = place.do(posted, learning_rate=0.0)
    assert "with a fresh optimizer" in place.messages(frozen)[0]
    assert (
        place.weights(frozen) == (place.store.path(PolicyVersion("math", 1)) / "adapter_model.safetensors").read_bytes()
    )


def test_what_is_continued(place):
    def parent(**options) -> str:
        job = place.do(groups(), learning_rate=0.0, **options)
        return str(place.store.info(place.version(job)).parent)

    assert parent() == "base"
    assert parent() == "math@1"
    assert parent(base_adapter="math@1") == "math@1"
    assert parent() == "math@3"
    assert parent(base_adapter="math", adapter="poetry") == "math@4"
    assert parent(base_adapter="base") == "base"
    place.store.activate(PolicyVersion("math", 1))
    assert parent(base_adapter="math") == "math@5"  # rounds add up, whatever is active


def test_the_parents_rank_alpha_and_targets_are_kept(place):
    place.do(groups())
    rest = {"lora_rank": None, "lora_alpha": None, "target_modules": None}
    first, second = (
        json.loads((place.store.path(place.version(job)) / "adapter_config.json").read_text())
        for job in (place.do(groups()), place.do(groups(), **rest))
    )
    assert first == second and first["r"] == 2


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"lora_rank": 4}, ["lora_rank is 4", "math@1", "has 2"]),
        ({"lora_alpha": 8.0}, ["lora_alpha is 8.0", "has 4"]),
        ({"target_modules": ["q_proj"]}, ["target_modules is ('q_proj',)", "down_proj"]),
        ({"target_modules": "all-linear"}, ["target_modules is 'all-linear'", "down_proj"]),
    ],
)
def test_another_rank_than_the_parents_is_refused_with_both(place, asked, named):
    place.do(groups())
    job = place.do(groups(), **asked)
    assert job.error["code"] == "invalid_config" and all(part in job.error["message"] for part in named)
    wording(job.error)
    fresh = place.do(groups(), base_adapter="base", **asked)
    assert fresh.version == "math@2"


def test_an_adapter_whose_targets_are_a_pattern_is_continued(place):
    first = place.do(groups())
    directory = place.directory / "uploaded"
    shutil.copytree(place.store.path(place.version(first)), directory)
    config = json.loads((directory / "adapter_config.json").read_text())
    config["target_modules"] = r".*\.(q_proj|down_proj)"
    (directory / "adapter_config.json").write_text(json.dumps(config))
    info = replace(place.store.info(place.version(first)), job=None)
    place.store.import_(directory, "uploaded", info=info)
    rest = {"lora_rank": None, "lora_alpha": None, "target_modules": None}
    job = place.do(groups(), adapter="uploaded", learning_rate=0.0, **rest)
    assert job.version == "uploaded@2", job.error
    assert place.weights(job) == place.weights(first)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"base_adapter": "nobody"}, "adapter_not_found", "nobody"),
        ({"base_adapter": "math@7"}, "adapter_not_found", "math@7"),
        ({"target_modules": ["nonsense"]}, "invalid_config", "target_modules: Qwen3ForCausalLM has no module"),
    ],
)
def test_what_cannot_be_continued_or_adapted_is_a_failure(place, options, code, says):
    job = place.do(groups(), **options)
    assert (job.state, job.error["code"]) == ("failed", code) and says in job.error["message"]
    assert job.error["hint"]


def test_a_version_of_another_base_is_not_continued(place, make_base):
    place.do(groups())
    other = Place(place.directory, make_base("qwen3", dtype=torch.float32, seed=1))
    job = other.do(groups())
    wording(job.error)


@pytest.mark.parametrize(
    ("prompt", "code"), [((5, 280), "invalid_data"), (tuple(range(5, 68)), "context_length_exceeded")]
)
def test_what_the_model_cannot_read_is_refused_before_it_sees_it(place, prompt, code):
    assert place.do(groups((prompt,))).error["code"] == code


@pytest.mark.parametrize(
    "tear", [lambda whole: whole[: len(whole) // 2], lambda whole: whole.replace(b"1.0", b"9.0"), None]
)
def test_a_torn_payload_fails_its_job_at_the_first_attempt(place, tear):
    job = place.submit(groups())
    spooled = place.directory / "spool" / f"{job.id}.payload"
    if tear is None:
        spooled.unlink()
    else:
        whole = spooled.read_bytes()
        assert tear(whole) != whole
        spooled.write_bytes(tear(whole))
    failed = place.do()
    assert (failed.state, failed.attempt, failed.error["code"]) == (JobState.FAILED, 1, "payload_damaged")
    wording(failed.error)


def test_a_payload_that_is_none_is_refused(place):
    """Not torn: somebody submitted it."""
    failed = place.do({"groups": [{"prompt_ids": []}]})
    assert failed.error["code"] == "invalid_data"
    wording(failed.error)


# --- the canary ---


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_the_canary_is_what_the_new_version_computes(place, kind):
    job = place.do(groups() if kind == "grpo" else examples(), kind=kind)
    version = place.version(job)
    canary = place.store.info(version).canary
    assert canary["prompt_ids"] and canary["completion_ids"]
    after = logprobs(place, version, canary["prompt_ids"], canary["completion_ids"])
    before = logprobs(place, None, canary["prompt_ids"], canary["completion_ids"])
    assert canary["logprobs"] == pytest.approx(after, abs=1e-4) != pytest.approx(before, abs=1e-3)


# --- going on ---


class Stop:
    """Raises Interrupted the k-th time it is asked."""

    def __init__(self, after: int):
        self.left = after

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Interrupted("the test asked to stop")


HARD = {"iterations": 3, "minibatches": 2, "lora_dropout": 0.2, "anchor": "old", "schedule": "cosine"}


@pytest.mark.parametrize("steps", slow_but({0, 3}, of=(0, 1, 3, 5, 6)))
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_an_interrupted_job_goes_on_to_the_same_bytes(place, kind, steps):
    posted = groups() if kind == "grpo" else examples()
    options = HARD if kind == "grpo" else {"epochs": 3, "batch_size": 3, "lora_dropout": 0.2, "warmup_steps": 4}
    place.do(groups(), adapter="start")
    options = {"base_adapter": "start@1", "kind": kind, **options}
    whole = place.do(posted, adapter="whole", **options)
    assert whole.steps == 6
    place.submit(posted, **options)
    lease = place.lease()
    with pytest.raises(Interrupted):
        run_job(lease, place.workplace, raise_if_stopped=Stop(steps))
    place.ledger.release(lease)
    checkpoints = list((place.directory / "checkpoints" / lease.job.id).iterdir()) if steps else []
    assert [path.name for path in checkpoints] == ([f"step-{steps:09d}"] if steps else [])
    job = place.do()
    assert any("goes on from the checkpoint" in message for message in place.messages(job)) == bool(steps)
    assert place.weights(job) == place.weights(whole)
    assert [each["step"] for each in place.ledger.metrics(job.id)] == [1, 2, 3, 4, 5, 6]
    assert not (place.directory / "checkpoints" / job.id).exists()


@pytest.mark.parametrize("damaged", ["learner.safetensors", "run.json", "start.safetensors", "learner.json"])
def test_a_job_whose_checkpoint_is_damaged_begins_anew(place, damaged):
    whole = place.do(groups(), adapter="whole", **HARD)
    place.submit(groups(), **HARD)
    lease = place.lease()
    with pytest.raises(Interrupted):
        run_job(lease, place.workplace, raise_if_stopped=Stop(3))
    place.ledger.release(lease)
    (checkpoint,) = (place.directory / "checkpoints" / lease.job.id).iterdir()
    (checkpoint / damaged).write_bytes(b"rubbish")
    job = place.do()
    assert "cannot be read" in " ".join(place.messages(job))
    assert place.weights(job) == place.weights(whole)


def test_the_resumed_parent_is_the_one_it_began_with(place):
    """Somebody publishes a version of the name between two attempts."""
    first = place.do(groups(logprob=-2.0))
    place.submit(groups(logprob=-2.0), iterations=4)
    lease = place.lease()
    with pytest.raises(Interrupted):
        run_job(lease, place.workplace, raise_if_stopped=Stop(2))
    place.ledger.release(lease)
    place.store.import_(place.store.path(place.version(first)), "math", info=place.store.info(place.version(first)))
    job = place.do()
    assert job.version == "math@3" and place.store.info(place.version(job)).parent == PolicyVersion("math", 1)


def test_a_version_that_the_job_published_already_is_taken(place, monkeypatch):
    """Killed after the rename and before the ledger knew."""
    with monkeypatch.context() as patch:
        patch.setattr(place.ledger, "published", lambda lease, version, **_: place.ledger.release(lease))
        place.do(groups())
    assert [str(version) for version in place.store.versions("math")] == ["math@1"]
    monkeypatch.setattr(Learner, "forward_backward", lambda *a, **k: pytest.fail("trained again"))
    job = place.do()
    assert job.version == "math@1" and place.store.versions("math") == (PolicyVersion("math", 1),)


def test_old_checkpoints_are_removed(place, monkeypatch):
    found: list[list[str]] = []
    place.at_step(
        monkeypatch,
        4,
        lambda: found.append([path.name for path in place.directory.glob("checkpoints/*/*")]),
    )
    place.do(groups(), iterations=5, checkpoint_interval=1)
    assert found == [["step-000000004"]]
