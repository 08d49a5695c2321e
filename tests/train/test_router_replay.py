"""Routing replay (R3): the trainer computes each token with the experts that the sampler's routers chose for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx2
import numpy as np
import pytest
import torch

from cli_project import Project, cli, save_model
from groupwise.algo.loss import resolve_loss
from groupwise.algo.samples import samples_of, segments_of
from groupwise.config.job import GrpoJobConfig
from groupwise.config.lora import LoraSpec
from groupwise.config.serve import ServeConfig
from groupwise.engine.local import LocalEngine
from groupwise.errors import DataError, RequestError
from groupwise.model.readable import check_routing
from groupwise.recorded import RoutedExperts
from groupwise.run.job_update import make_task
from groupwise.server import rollouts
from groupwise.server.assemble import open_engine
from groupwise.server.bodies import parse_body
from groupwise.server.reader import TextModel
from groupwise.server.schema_train import GrpoRequest
from groupwise.server.submit import Submission, prepare_grpo
from groupwise.store.job_payload import GrpoPayload, parse_payload
from groupwise.store.rollouts import group_from_json, group_to_json
from groupwise.train.learner import Learner
from groupwise.types import (
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    SamplingParams,
    SamplingRequest,
    Turn,
)
from job_place import Place
from serving import Served, served
from wording import raises

PADDED = pytest.mark.filterwarnings("ignore:.*(in packed rows|recurrent layers).*:UserWarning")
PROMPTS = [(3, 4, 5, 6, 7), (9, 8, 7), (11, 12, 13, 14)]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=3)


def sampled(base, **options) -> list[Sample]:
    """Samples of two completions of each prompt."""
    asked = [SamplingRequest(prompt_ids=prompt, n=2, params=PARAMS) for prompt in PROMPTS]
    with closing(LocalEngine(base, max_rows=4, record_routing=True, **options)) as engine:
        groups = [future.result() for future in engine.submit(asked)]
    return [
        Sample(
            prompt_ids=prompt,
            completion_ids=completion.token_ids,
            mask=(1,) * len(completion.token_ids),
            advantage=1.0 - 2.0 * i,
            behaviour_logprobs=completion.logprobs,
            routed_experts=completion.routed_experts,
        )
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for i, completion in enumerate(group)
    ]


def chosen_by_the_model(base, ids: tuple[int, ...]) -> np.ndarray:
    """What the routers of the model itself choose, [tokens, layers, K]."""
    seen: list[torch.Tensor] = []
    routers = [module for module in base.model.modules() if "Router" in type(module).__name__]
    hooks = [router.register_forward_hook(lambda module, args, output: seen.append(output[2])) for router in routers]
    with torch.no_grad():
        base.model(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy()


@PADDED
@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_moe", {}), ("deepseek_v3", {}), ("qwen3_moe", {"draft_tokens": 3}), ("gpt_oss", {}), ("qwen3_next", {})],
)
def test_the_sampler_records_what_the_model_chooses(make_base, family: str, options):
    """Of every token but the last, by every decoder; in float64, where rounding chooses nothing else."""
    base = make_base(family)
    for sample in sampled(base, **options):
        assert sample.routed_experts is not None
        recorded = sample.routed_experts.array()
        expected = chosen_by_the_model(make_base(family), sample.prompt_ids + sample.completion_ids)[:-1]
        assert recorded.dtype == np.int8 and np.array_equal(np.sort(recorded), np.sort(expected))


def test_without_asking_nothing_is_recorded(make_base):
    with closing(LocalEngine(make_base("qwen3_moe"), max_rows=4)) as engine:
        (completion,) = engine.submit([SamplingRequest(prompt_ids=(3, 4), params=PARAMS)])[0].result()
    assert completion.routed_experts is None


@PADDED
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral", "olmoe", "minimax_m2", "gpt_oss"])
def test_in_float64_replay_changes_nothing(make_base, family: str):
    base = make_base(family)
    samples, spec = sampled(base), resolve_loss("grpo")
    found = []
    for replay in (True, False):
        learner = Learner(base, lora=LoraSpec(rank=2, targets=["experts"]), router_replay=replay)
        metrics = learner.forward_backward(samples, spec)
        assert metrics["router/mismatch_frac"] == 0.0
        found.append((learner.forward(samples), [parameter.grad.clone() for parameter in learner.parameters]))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one == pytest.approx(other, abs=1e-12)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


@PADDED
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_experts_are_used_where_they_were_recorded(make_base, family: str, checkpointing: bool):
    """As by routers that choose them: here those of another model, which differs by its routers alone."""
    base, other = make_base(family), make_base(family)
    torch.manual_seed(0)
    for module in other.model.modules():
        if "Router" in type(module).__name__:
            module.weight.data += 0.5 * torch.randn(module.weight.shape, dtype=torch.float64)
    samples = [replace(sample, advantage=1.0) for sample in sampled(other)]
    learner = Learner(base, lora=LoraSpec(rank=2, targets=["experts"]), gradient_checkpointing=checkpointing)
    metrics = learner.forward_backward(samples, resolve_loss("grpo"))
    assert 0.05 < metrics["router/mismatch_frac"] <= 1
    plain = [replace(sample, routed_experts=None) for sample in samples]
    assert learner.forward(samples)[0] != pytest.approx(learner.forward(plain)[0], abs=1e-6)
    gradients = [parameter.grad.clone() for parameter in learner.parameters]
    learner.zero_grad()
    without = learner.forward_backward(plain, resolve_loss("grpo"))
    assert "router/mismatch_frac" not in without and without["router/recorded_frac"] == 0
    half = learner.forward_backward([*samples[:2], *plain[2:]], resolve_loss("grpo"))
    assert metrics["router/recorded_frac"] == pytest.approx(1) and 0.1 < half["router/recorded_frac"] < 0.6
    learner.zero_grad()
    learner.forward_backward(plain, resolve_loss("grpo"))
    assert any(not torch.equal(one, p.grad) for one, p in zip(gradients, learner.parameters, strict=True))
    apart = [learner.forward([sample])[0] for sample in samples]  # in other packed rows
    for one, whole in zip(apart, learner.forward(samples), strict=True):
        assert one == pytest.approx(whole, abs=1e-5)  # DeepSeek routes in float32


def test_in_bfloat16_replay_makes_the_gap_smaller(make_base):
    """Sampler and trainer round differently, and a router that hesitates chooses other experts."""
    base = make_base("qwen3_moe", dtype=torch.bfloat16, num_experts=16, num_experts_per_tok=4)
    samples, gaps = sampled(base), {}
    for replay in (False, True):
        learner = Learner(base, lora=LoraSpec(rank=2), router_replay=replay)
        metrics = learner.forward_backward(samples, resolve_loss("grpo"))
        gaps[replay] = metrics["mismatch/kl"]
        assert 0 < metrics["router/mismatch_frac"] < 0.5
    assert gaps[True] < gaps[False]


def test_rollouts_keep_them_and_turns_are_joined(make_base):
    first = RoutedExperts.of(np.array([[[0, 1]], [[2, 3]], [[1, 2]]], dtype="int16"))  # 2 of the prompt, 1 of 2 said
    second = RoutedExperts.of(np.array([[[-1, -1]], [[3, 0]], [[0, 2]], [[300, 1]], [[2, 0]], [[3, 1]]], dtype="int16"))

    def turn(prompt: tuple[int, ...], said: tuple[int, ...], routed: RoutedExperts | None) -> Turn:
        completion = Completion(
            token_ids=said,
            logprobs=(-1.0,) * len(said),
            text="",
            finish_reason=FinishReason.STOP,
            routed_experts=routed,
        )
        return Turn(prompt, completion)

    turns = (turn((1, 2), (3, 4), first), turn((1, 2, 3, 4, 9), (5, 6), second))
    (segment,) = segments_of(turns)
    assert segment.routed_experts is not None
    assert segment.routed_experts.array()[:, 0].tolist() == [[0, 1], [2, 3], [1, 2], [300, 1], [2, 0], [3, 1], [-1, -1]]
    (bare,) = segments_of([turn((1, 2), (3, 4), None)])
    assert bare.routed_experts is None
    rollout = Rollout(turns=turns, reward=1.0, advantage=0.5)
    group = RolloutGroup(prompt=Prompt(id="a", text="x", token_ids=(1, 2)), rollouts=(rollout,))
    again = group_from_json(json.loads(json.dumps(group_to_json(group))))
    (sample,) = samples_of([again])
    assert sample.routed_experts == segment.routed_experts
    assert first.data == bytes([0, 1, 2, 3, 1, 2]) and len(second.data) == 24


def test_a_run(make_base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The rollouts on disk have them, the step reports the disagreement, and the key that cannot act is refused."""
    monkeypatch.chdir(tmp_path)
    model = save_model(make_base("qwen3_moe", dtype=torch.float32, context=256), tmp_path / "model")
    config = Project.make(tmp_path, model=model).config
    result = cli("run", config, "run_dir=out", "train.steps=2", "train.router_replay=true")
    assert result.exit_code == 0, result.output
    steps = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "mismatch/kl" in step]
    assert trained and all(step["router/mismatch_frac"] < 0.02 and step["mismatch/kl"] < 1e-6 for step in trained)
    lines = [
        json.loads(line) for path in Path("out/rollouts").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    assert all("routed_experts" in turn for line in lines for r in line["rollouts"] for turn in r["turns"])
    dense = save_model(make_base("qwen3", dtype=torch.float32, context=256), tmp_path / "dense")
    refused = cli("run", config, f"model={dense}", "run_dir=other", "train.router_replay=true")
    assert refused.exit_code != 0 and "Qwen3ForCausalLM has no routers of experts" in refused.output


# ---- jobs ----

EXPERTS = {"target_modules": ["experts"]}


@pytest.fixture(scope="module")
def api(make_base, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a mixture in bfloat16, whose routers hesitate, with the engine that `groupwise serve` opens."""
    base = make_base("qwen3_moe", dtype=torch.bfloat16, context=256, num_experts=16, num_experts_per_tok=4)
    directory = tmp_path_factory.mktemp("served")
    engine = cast(LocalEngine, open_engine(ServeConfig(state_dir=directory, batch_rows=8), base))
    with closing(engine), served(directory, [rollouts.router], base=base, engine=engine) as api:
        yield api


@pytest.fixture(scope="module")
def place(api: Served, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("jobs"), api.server.base)


def posted(api: Served, **body: Any) -> dict[str, Any]:
    """Groups of two prompts as a client posts them, by the ids of what the server samples."""
    prompts = [[{"role": "user", "content": f"What is {i}?"}] for i in (7, 12)]
    body = {"prompts": prompts, "n": 3, "max_tokens": 24, "seed": 3, **body}
    answer = httpx2.post(f"{api.url}/v1/completions/batch", json=body, timeout=120).json()
    groups: list[dict[str, Any]] = [{"messages": prompt, "completions": []} for prompt in prompts]
    for one in answer["completions"]:
        reward = float(one["completion_index"] == 1)
        groups[one["prompt_index"]]["completions"].append({"rollout_id": one["rollout_id"], "reward": reward})
    return {"groups": groups}


def submitted(api: Served, body: dict[str, Any], base: Any = None, **config: Any) -> Submission:
    options = {"lora_rank": 2, "learning_rate": 0.01, "base_adapter": "base", **config}
    request = parse_body(json.dumps({**body, "config": options}).encode(), GrpoRequest)
    server = api.server
    return prepare_grpo(
        request, base=TextModel.of(base or server.base), store=server.store, rollouts=server.ledger.rollouts
    )


def payload_of(submission: Submission) -> GrpoPayload:
    payload = parse_payload(submission.kind, submission.payload)
    assert isinstance(payload, GrpoPayload)
    return payload


def trained(place: Place, submission: Submission, *, error: str | None = None) -> tuple[dict[str, float], bytes]:
    """Does the job: the metrics of its step, and the weights of its version."""
    fields = ("kind", "adapter", "config", "summary", "payload", "steps", "auto_load")
    place.ledger.submit(**{name: getattr(submission, name) for name in fields})
    job = place.do()
    assert (job.error and job.error["message"]) == error
    return dict(job.metrics), b"" if error else place.weights(job)


def test_a_job_trains_what_the_server_sampled_with_the_experts_that_it_was_sampled_with(api: Served, place: Place):
    body = posted(api)
    ids = [one["rollout_id"] for group in body["groups"] for one in group["completions"]]
    records = api.server.ledger.rollouts(ids)
    for record in records.values():
        assert record.routed_experts is not None
        assert record.routed_experts.shape == (len(record.prompt_ids) + len(record.completion_ids) - 1, 2, 4)
        assert record.routed_experts.array().min() >= -1 and record.routed_experts.array()[-1].min() >= 0
    found = {}
    for replay in (None, True, False):
        submission = submitted(api, body, router_replay=replay, output_name=f"replay-{replay}", **EXPERTS)
        completions = [one for group in payload_of(submission).groups for one in group.completions]
        assert [one.routing for one in completions] == [records[id].routed_experts for id in ids]
        found[replay] = trained(place, submission)
    for metrics, _ in found.values():
        assert metrics["router/recorded_frac"] > 0.5 and 0 < metrics["router/mismatch_frac"] < 0.5
    assert found[None][1] == found[True][1] != found[False][1]
    assert found[True][0]["mismatch/kl"] < found[False][0]["mismatch/kl"]


def test_completions_that_are_posted_as_token_ids_are_routed_anew(api: Served, place: Place):
    body = posted(api)
    for group in body["groups"]:
        for one in group["completions"]:
            record = api.server.ledger.rollouts([id := one.pop("rollout_id")])[id]
            one["token_ids"], one["logprobs"] = list(record.completion_ids), list(record.logprobs)
    submission = submitted(api, body, output_name="anew")
    assert all(one.routing is None for group in payload_of(submission).groups for one in group.completions)
    metrics, _ = trained(place, submission)
    assert metrics["router/recorded_frac"] == 0 and "router/mismatch_frac" not in metrics
    with raises(RequestError) as refused:
        submitted(api, body, router_replay=True)
    assert refused.value.field == "config.router_replay"


def test_experts_of_another_model_are_refused(api: Served, make_base):
    """When the job is posted; and by the worker, for a payload that waited while the model was exchanged."""
    body = posted(api)
    dense = make_base("qwen3", dtype=torch.float32, context=256)
    for base in (dense, make_base("qwen3_moe", dtype=torch.float32, context=256)):
        with raises(RequestError, field="groups[0].completions[0].rollout_id"):
            submitted(api, body, base)
    text = [{"text": "a", "reward": 0.0}, {"text": "b", "reward": 1.0}]
    plain = {"groups": [{"messages": [{"role": "user", "content": "x"}], "completions": text}]}
    with raises(RequestError, field="config.router_replay"):
        submitted(api, plain, dense, router_replay=True)
    payload = payload_of(submitted(api, body))
    samples = make_task(GrpoJobConfig(), payload, base=api.server.base).samples
    with raises(DataError):
        check_routing(samples, dense)
