"""In-flight weight updates: a version takes over completions that the local engine is sampling."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from groupwise.config.lora import LoraSpec
from groupwise.engine import packed
from groupwise.engine.local import LocalEngine
from groupwise.errors import AdapterNotFoundError, ConfigError
from groupwise.train.learner import Learner
from groupwise.types import Completion, PolicyVersion, Sample, SamplingParams, SamplingRequest
from slow_cases import slow_but
from wording import raises

BASE, FIRST, SECOND = PolicyVersion.base(), PolicyVersion("math", 1), PolicyVersion("math", 2)
pytestmark = pytest.mark.filterwarnings("ignore:.*(packed rows|recurrent layers).*:UserWarning")


@pytest.fixture
def open_engine(make_base, make_adapter, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """`open_engine("qwen3")`: an engine with two adapters; `plain` is one whose model cannot run packed."""
    opened: list[LocalEngine] = []

    def make(architecture: str = "qwen3", *, plain: bool = False, lanes: int = 1, **options) -> LocalEngine:
        base = make_base(architecture, context=256)
        with monkeypatch.context() as patch:
            if plain:
                patch.setattr("groupwise.engine.local.why_twin_not_packed", lambda base, twin: "this test says so")
            opened.append(LocalEngine(base, lanes=lanes, **options))
        for version in (FIRST, SECOND):
            opened[-1].load(version, make_adapter(base, seed=version.number))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def policies(make_base, make_adapter) -> Mapping[PolicyVersion, PreTrainedModel]:
    """The same three policies as transformers computes them."""
    return policies_of("qwen3", make_base, make_adapter)


def policies_of(architecture: str, make_base, make_adapter) -> Mapping[PolicyVersion, PreTrainedModel]:
    base = make_base(architecture, context=256)
    merged = {
        version: PeftModel.from_pretrained(
            copy.deepcopy(base.model), make_adapter(base, seed=version.number)
        ).merge_and_unload()
        for version in (FIRST, SECOND)
    }
    return {BASE: base.model, **merged}


def asked(prompts: Sequence[int], *, n: int = 3, version=BASE, max_tokens: int = 16, **more) -> list[SamplingRequest]:
    params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True, temperature=0.9)
    return [
        SamplingRequest(
            prompt_ids=tuple((7 * i + p) % 250 for i in range(5 + 4 * p)), n=n, version=version, params=params, **more
        )
        for p in prompts
    ]


def sampled(
    engine: LocalEngine,
    requests: Sequence[SamplingRequest],
    updates: Mapping[int, tuple[PolicyVersion, PolicyVersion]],
    *,
    recompute: bool,
) -> list[list[Completion]]:
    """Sample, and replace one version by another when the first completion has so many tokens."""
    reached, said = [], 0

    def replace_now(old: PolicyVersion, new: PolicyVersion) -> None:
        called = threading.Thread(target=lambda: engine.replace(old, new, recompute=recompute))
        called.start()
        while called.is_alive() and not engine._lanes[0].calls:
            called.join(0.001)  # it waits for the lane, which is here
        reached.append(called)

    def hear(completion: int, token: int, logprob: float, top: object) -> None:
        nonlocal said
        if completion == 0:
            said += 1
            if said in updates:
                replace_now(*updates[said])

    first = engine.submit(requests[:1], on_token=hear)
    rest = engine.submit(requests[1:])
    groups = [future.result() for future in (*first, *rest)]
    for each in reached:
        each.join()
    assert len(reached) == len(updates)
    return groups


def kept_logprobs(
    policies: Mapping[PolicyVersion, PreTrainedModel], prompt: tuple[int, ...], said: Completion, temperature: float
) -> list[float]:
    """Token by token under the version that drew it, on the keys and values that the versions before left."""
    by_token = [version for version, count in said.spans for _ in range(count)]
    cache, ids, found = None, prompt, []
    for version, token in zip(by_token, said.token_ids, strict=True):
        with torch.no_grad():
            out = policies[version](torch.tensor([ids]), past_key_values=cache, use_cache=True)
        cache, ids = out.past_key_values, (token,)
        found.append(float((out.logits[0, -1] / temperature).log_softmax(-1)[token]))
    return found


def fresh_logprobs(
    policies: Mapping[PolicyVersion, PreTrainedModel], prompt: tuple[int, ...], said: Completion, temperature: float
) -> list[float]:
    """Each token under the version that drew it, which reads the whole text before it."""
    found, at = [], 0
    ids = torch.tensor([[*prompt, *said.token_ids]])
    for version, count in said.spans:
        with torch.no_grad():
            logprobs_TV = (
                policies[version](ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
            ).log_softmax(-1)
        found += [float(logprobs_TV[t, said.token_ids[t]]) for t in range(at, at + count)]
        at += count
    return found


def check(policies, requests, groups, *, recompute: bool) -> None:
    reference = fresh_logprobs if recompute else kept_logprobs
    for request, group in zip(requests, groups, strict=True):
        for said in group:
            expected = reference(policies, request.prompt_ids, said, request.params.temperature)
            assert said.logprobs == pytest.approx(expected, abs=1e-8), said.spans


@pytest.mark.parametrize("plain", [False, True], ids=["packed", "plain"])
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("family", slow_but({"qwen3"}, of=("qwen3", "gemma3", "gpt2")))
def test_a_new_version_takes_over(open_engine, make_base, make_adapter, family: str, recompute: bool, plain: bool):
    """Every token's log-probability is that of the version that is written beside it: on a fresh prefix, or on the keys
    and values that were there. The same tokens under a fresh prefix tell the two apart."""
    engine = open_engine(family, plain=plain)
    policies = policies_of(family, make_base, make_adapter)
    requests = asked([0, 1, 2])
    groups = sampled(engine, requests, {4: (BASE, FIRST), 9: (FIRST, SECOND)}, recompute=recompute)
    first = groups[0][0]
    assert [(version, count) for version, count in first.spans] == [(BASE, 4), (FIRST, 5), (SECOND, 7)]
    check(policies, requests, groups, recompute=recompute)
    if not recompute:
        fresh = fresh_logprobs(policies, requests[0].prompt_ids, first, 0.9)
        assert first.logprobs[:4] == pytest.approx(fresh[:4], abs=1e-8)
        assert abs(first.logprobs[12] - fresh[12]) > 1e-3


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
def test_completions_that_begin_later_and_that_are_drafted(open_engine, policies, recompute: bool):
    """Through few rows, in pieces, with drafts: those that begin after the update are wholly the new version's."""
    engine = open_engine(max_rows=4, draft_tokens=3)
    requests = asked([2, 0, 1], n=4)
    groups = sampled(engine, requests, {6: (BASE, FIRST)}, recompute=recompute)
    check(policies, requests, groups, recompute=recompute)
    assert {tuple(version for version, _ in said.spans) for said in groups[0]} == {(BASE, FIRST)}
    assert all(said.spans == ((FIRST, 16),) for group in groups[1:] for said in group)


def test_long_texts_are_computed_again_in_pieces(open_engine, policies, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed, "EXTEND_TOKENS", 5)
    monkeypatch.setattr(packed, "PREFILL_TOKENS", 24)
    engine = open_engine()
    requests = asked([0, 3, 1], n=5, max_tokens=24)
    groups = sampled(engine, requests, {17: (BASE, SECOND)}, recompute=True)
    check(policies, requests, groups, recompute=True)


def test_others_are_left_alone(open_engine, policies):
    """Completions of another version, in rows between, go on with it."""
    engine = open_engine()
    requests = [*asked([0], version=FIRST), *asked([1], version=SECOND), *asked([2], version=FIRST)]
    groups = sampled(engine, requests, {5: (FIRST, BASE)}, recompute=True)
    check(policies, requests, groups, recompute=True)
    assert all(said.spans == ((SECOND, 16),) for said in groups[1])
    assert all(version == BASE for group in (groups[0], groups[2]) for said in group for version, _ in said.spans[1:])


def test_the_trainer_computes_the_same_after_the_update(open_engine, make_base, make_adapter):
    """With the cache recomputed the gap between sampler and trainer is that of an on-policy batch."""
    engine, base = open_engine(), make_base("qwen3", context=256)
    learner = Learner(base, lora=LoraSpec(rank=3, alpha=6.0))
    learner.load_adapter(make_adapter(base, seed=SECOND.number))
    (request,) = asked([1])
    ((said, *_),) = sampled(engine, [request], {5: (BASE, SECOND)}, recompute=True)
    sample = Sample(prompt_ids=request.prompt_ids, completion_ids=said.token_ids, mask=(1,) * len(said.token_ids))
    (trained,) = learner.forward([sample], temperature=0.9)
    assert said.logprobs[5:] == pytest.approx(trained[5:], abs=1e-9)
    assert said.logprobs[:5] != pytest.approx(trained[:5], abs=1e-3)


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
def test_the_next_turn_of_a_conversation(open_engine, policies, recompute: bool):
    """It asks for the version that it began with, and gets the one that stands for it. What was kept of the turns
    before is known to it alone, and only where keys and values are kept."""
    engine = open_engine()
    (request,) = asked([4], n=1, cache=True)
    ((said,),) = sampled(engine, [request], {7: (BASE, FIRST)}, recompute=recompute)
    prompt = (*request.prompt_ids, *said.token_ids, 9, 8, 7)
    engine.replace(FIRST, SECOND, recompute=recompute)
    other = replace(request, prompt_ids=prompt, version=SECOND)
    ((apart,),) = engine.generate([replace(other, cache=False)])
    ((evaluated,),) = engine.generate([other])
    assert evaluated.cached_tokens == 0 and evaluated.logprobs == pytest.approx(apart.logprobs, abs=1e-9)
    ((next_turn,),) = engine.generate([replace(request, prompt_ids=prompt)])
    assert next_turn.spans == ((SECOND, 16),)
    if recompute:
        assert next_turn.logprobs == pytest.approx(apart.logprobs, abs=1e-9)
    else:
        assert next_turn.cached_tokens == len(request.prompt_ids) + len(said.token_ids) - 1
        assert abs(next_turn.logprobs[0] - fresh_logprobs(policies, prompt, next_turn, 0.9)[0]) > 1e-4


def test_lanes_side_by_side(open_engine, policies, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("groupwise.engine.local.LANE_FLOPS", 1.0)
    engine = open_engine(lanes=3, max_rows=64, threads=3)
    requests = asked([0, 1, 2, 3], n=4, max_tokens=40)
    groups = sampled(engine, requests, {3: (BASE, FIRST)}, recompute=True)
    check(policies, requests, groups, recompute=True)


def test_what_stands_for_a_version_until_it_is_unloaded(open_engine):
    engine = open_engine()
    engine.replace(FIRST, SECOND, recompute=False)
    (before,) = engine.generate(asked([0], n=1, version=FIRST))
    assert before[0].version == SECOND
    assert before == engine.generate(asked([0], n=1, version=SECOND))[0]
    engine.unload(FIRST)
    with raises(AdapterNotFoundError):
        engine.generate(asked([0], version=FIRST))
    with raises(AdapterNotFoundError):
        engine.replace(SECOND, PolicyVersion("math", 7), recompute=False)
    assert engine.generate(asked([0], n=1, version=SECOND))[0][0].version == SECOND


def test_recurrent_layers_keep_their_state(open_engine, make_base, make_adapter):
    """It follows from every token before and cannot be computed again in rows of different lengths."""
    engine, policies = open_engine("lfm2"), policies_of("lfm2", make_base, make_adapter)
    with raises(ConfigError, field="rollout.in_flight_cache"):
        engine.replace(BASE, FIRST, recompute=True)
    requests = asked([0, 1])
    groups = sampled(engine, requests, {4: (BASE, FIRST)}, recompute=False)
    check(policies, requests, groups, recompute=False)


def test_a_mixtures_experts_are_recorded_for_every_token(open_engine, make_base, make_adapter):
    engine, policies = open_engine("qwen3_moe", record_routing=True), policies_of("qwen3_moe", make_base, make_adapter)
    requests = asked([0, 1])
    groups = sampled(engine, requests, {4: (BASE, FIRST)}, recompute=True)
    check(policies, requests, groups, recompute=True)
    for request, group in zip(requests, groups, strict=True):
        for said in group:
            assert said.routed_experts is not None
            chosen = said.routed_experts.array()
            assert len(chosen) == len(request.prompt_ids) + len(said.token_ids) - 1 and chosen.min() >= 0
