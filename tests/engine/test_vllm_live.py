"""The engine of a live server over servers that speak vLLM's API and sample with a real model."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.engine import VllmConfig
from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm import fleet as vllm_fleet
from groupwise.engine.vllm.handshake import linear_names
from groupwise.engine.vllm.live import LiveVllm
from groupwise.errors import AdapterError, EngineError, GrammarError
from groupwise.model.load import LoadedModel
from groupwise.types import Grammar, GrammarKind, PolicyVersion, SamplingParams, SamplingRequest
from processes import becomes
from vllm_peer import Faults, Peer, serving
from wording import raises

BASE, MATH = PolicyVersion.base(), PolicyVersion("math", 1)
PROMPT = (1, 2, 3, 4)
QUICK = {"max_loras": 3, "health_interval_s": 0.1, "start_timeout_s": 20.0, "recovery_timeout_s": 1.0}


@pytest.fixture
def peer(tiny: LoadedModel) -> Iterator[Peer]:
    with serving(tiny) as peer:
        yield peer


@pytest.fixture
def attach(tiny: LoadedModel) -> Iterator[Callable[..., LiveVllm]]:
    """`attach(peer, ..., sync_retries=0)`: an engine over these servers; closed after the test."""
    with ExitStack() as opened:

        def make(*peers: Peer, **options: Any) -> LiveVllm:
            config = VllmConfig(urls=tuple(each.url for each in peers), **{**QUICK, **options})
            local = LocalEngine(tiny, max_rows=1, prefix_cache_mb=0)
            engine = LiveVllm(config, tiny, local, most_rank=8, targets=linear_names(tiny.model, "all-linear"))
            opened.callback(engine.close)
            return engine

        yield make


@pytest.fixture(scope="module")
def adapters(make_base, make_adapter) -> list[Path]:
    return [make_adapter(make_base("qwen3", dtype=torch.float32, context=192), seed=seed) for seed in (1, 2)]


def request(*, n: int = 1, version: PolicyVersion = BASE, **params: Any) -> SamplingRequest:
    params = {"max_tokens": 8, "seed": 5, "ignore_eos": True} | params
    return SamplingRequest(prompt_ids=PROMPT, n=n, version=version, params=SamplingParams(**params))


class Heard:
    """What a stream said, by completion."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[tuple[int, float, Any]]] = defaultdict(list)
        self.first = threading.Event()

    def __call__(self, index: int, token: int, logprob: float, top: Any) -> None:
        self.tokens[index].append((token, logprob, top))
        self.first.set()

    def ids(self, index: int = 0) -> tuple[int, ...]:
        return tuple(token for token, _, _ in self.tokens[index])


def streamed(engine: LiveVllm, asked: SamplingRequest):
    heard = Heard()
    return heard, engine.submit([asked], on_token=heard)[0].result(20)


def test_a_stream_says_what_a_whole_answer_holds(attach, peer, tiny_engine):
    engine = attach(peer)
    for asked in (request(n=3), request(temperature=0.0), request(n=2, temperature=0.7, top_logprobs=2)):
        heard, group = streamed(engine, asked)
        assert [each.token_ids for each in group] == [each.token_ids for each in engine.generate([asked])[0]]
        for index, each in enumerate(group):
            tops = each.top_logprobs or ((),) * 8
            assert heard.tokens[index] == list(zip(each.token_ids, each.logprobs, tops, strict=True))
            temperature = asked.params.temperature or 1.0
            scored = tiny_engine.score(PROMPT, each.token_ids, BASE, temperature=temperature)
            assert each.logprobs == pytest.approx(scored, abs=1e-4)


def test_alternatives_are_the_likeliest_tokens_by_their_ids(attach, peer, tiny_engine):
    (each,) = attach(peer).generate([request(top_logprobs=3, max_tokens=4)])[0]
    for found, (_, expected) in zip(
        each.top_logprobs, tiny_engine.score_top(PROMPT, each.token_ids, BASE, top=3), strict=True
    ):
        assert [token for token, _ in found] == [token for token, _ in expected]
        assert [at for _, at in found] == pytest.approx([at for _, at in expected], abs=1e-4)


def test_a_given_sequence_is_scored_as_in_the_local_engine(attach, peer, tiny_engine):
    engine, what = attach(peer), {"first": 2, "top": 2, "cells": ([1, 2, 2], [9, 4, 5])}
    assert engine.score_sequence((5, 6, 7), BASE, **what) == tiny_engine.score_sequence((5, 6, 7), BASE, **what)
    assert engine.vocabulary == tiny_engine.vocabulary


@pytest.mark.parametrize("top", [0, 2])
def test_a_narrowed_draw_has_the_logprobs_of_the_whole_distribution(attach, peer, tiny_engine, top):
    engine = attach(peer)
    asked = request(top_k=2, temperature=0.8, top_logprobs=top)
    heard, (each,) = streamed(engine, asked)
    scored = tiny_engine.score_top(PROMPT, each.token_ids, BASE, temperature=0.8, top=top)
    assert each.logprobs == pytest.approx([logprob for logprob, _ in scored], abs=1e-4)
    assert heard.ids() == each.token_ids and peer.seen[-1]["top_k"] == 2
    assert [len(tops) for tops in each.top_logprobs] == ([top] * 8 if top else [])
    assert engine.generate([asked])[0] == [each]


def test_a_draw_with_penalties_is_vllms_and_has_the_policys_logprobs(attach, peer, tiny_engine):
    engine = attach(peer)
    changes = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": ((7, 2.0),), "min_tokens": 4}
    asked = request(temperature=0.0, **changes)
    heard, (each,) = streamed(engine, asked)
    assert each.token_ids == tiny_engine.generate([asked])[0][0].token_ids == heard.ids()
    assert each.logprobs == pytest.approx(tiny_engine.score(PROMPT, each.token_ids, BASE), abs=1e-4)
    sent = changes | {"logit_bias": {"7": 2.0}}
    assert sent.items() <= peer.seen[-1].items()


def test_a_grammar_is_kept_to_and_the_logprobs_are_the_policys(attach, peer, tiny_engine):
    engine = attach(peer)
    for grammar in (Grammar.regex("[a-c]{4}"), Grammar(GrammarKind.CHOICE, '["x", "yz"]', thoughts="optional")):
        asked = request(grammar=grammar, ignore_eos=False, max_tokens=12)
        engine.prepare(grammar).result()
        heard, (each,) = streamed(engine, asked)
        assert peer.seen[-1]["structured_outputs"]["grammar"].startswith("%llguidance {}\n")
        assert heard.ids() == each.token_ids and each.kept is not None
        assert each.logprobs == pytest.approx(tiny_engine.score(PROMPT, each.token_ids, BASE), abs=1e-4)
    cold = request(
        grammar=Grammar.choice(["x", "yz"]), ignore_eos=False, max_tokens=12, temperature=0.0, top_logprobs=2
    )
    assert engine.generate([cold])[0][0].text == tiny_engine.generate([cold])[0][0].text


def test_a_grammar_that_is_none_is_refused_before_it_is_sent(attach, peer):
    engine, sent = attach(peer), len(peer.seen)
    for grammar, field in (
        (Grammar(GrammarKind.JSON_SCHEMA, "{", field="response_format"), "response_format"),
        (Grammar.regex("(a", field="guided_regex"), "guided_regex"),
        (Grammar.of_json({"properties": {"a": {"type": "strin"}}}), "grammar.properties.a"),
    ):
        with raises(GrammarError, field=field):
            engine.prepare(grammar).result()
    with raises(GrammarError, field="grammar"):
        engine.submit([request(grammar=Grammar(GrammarKind.JSON_SCHEMA, "{"), ignore_eos=False)])
    assert len(peer.seen) == sent


def test_a_stop_string_may_stay(attach, peer, tiny_engine, tokenizer):
    engine = attach(peer)
    (free,) = engine.generate([request(max_tokens=40, temperature=0.0)])[0]
    asked = request(max_tokens=40, temperature=0.0, stop=(tokenizer.decode(free.token_ids[4:6]),), include_stop=True)
    (ours,), (theirs,) = engine.generate([asked])[0], tiny_engine.generate([asked])[0]
    assert ours.text == theirs.text and ours.text.endswith(asked.params.stop[0])


def test_a_stream_whose_server_is_lost_goes_on_from_what_was_heard(attach, peer, tiny_engine):
    engine = attach(peer, recovery_timeout_s=20.0)
    asked = request(temperature=0.0, max_tokens=24)
    _, (whole,) = streamed(engine, asked)
    peer.faults.cut_stream = 5
    heard, (each,) = streamed(engine, asked)
    assert heard.ids() == each.token_ids == whole.token_ids
    assert peer.seen[-1]["prompt"] == [*PROMPT, *whole.token_ids[:5]] and peer.seen[-1]["max_tokens"] == 19
    assert each.logprobs == pytest.approx(tiny_engine.score(PROMPT, each.token_ids, BASE), abs=1e-4)


@pytest.mark.parametrize("ending", ["length", "stop id", "stop string"])
def test_a_stream_that_is_cut_after_its_last_token_is_whole(attach, peer, tokenizer, ending):
    engine = attach(peer, recovery_timeout_s=20.0)
    free = streamed(engine, request(temperature=0.0, max_tokens=6))[1][0]
    options = {
        "length": {"max_tokens": 6},
        "stop id": {"max_tokens": 40, "stop_ids": (free.token_ids[5],)},
        "stop string": {"max_tokens": 40, "stop": (tokenizer.decode([free.token_ids[5]]),)},
    }[ending]
    asked = request(temperature=0.0, **options)
    whole, requests = engine.generate([asked])[0], len(peer.seen)
    peer.faults.cut_stream = len(whole[0].token_ids)
    heard, group = streamed(engine, asked)
    assert group == whole and heard.ids() == whole[0].token_ids and len(peer.seen) == requests + 1


@pytest.mark.parametrize("cut", [4, 5])
def test_a_stop_string_that_is_begun_when_a_server_is_lost_ends_the_completion(attach, peer, tokenizer, cut):
    """The next server samples only its end."""
    engine = attach(peer, recovery_timeout_s=20.0)
    free = streamed(engine, request(temperature=0.0, max_tokens=9))[1][0]
    asked = request(temperature=0.0, max_tokens=40, stop=(tokenizer.decode(free.token_ids[:6]),))
    whole = engine.generate([asked])[0]
    assert len(whole[0].token_ids) == 6 and whole[0].finish_reason == "stop"
    peer.faults.cut_stream = cut
    heard, group = streamed(engine, asked)
    assert [each.token_ids for each in group] == [whole[0].token_ids] == [heard.ids()]
    assert (group[0].text, group[0].finish_reason) == (whole[0].text, "stop")


def test_a_cancelled_stream_is_given_up_at_the_server(attach, peer):
    engine = attach(peer)
    heard = Heard()
    (future,) = engine.submit([request(max_tokens=180)], on_token=heard)
    assert heard.first.wait(120) and engine.stats()["running"] == 1
    future.cancel()
    assert becomes(lambda: peer.engine.stats()["running"] == 0)
    assert engine.stats() == {"running": 0, "waiting": 0, "adapters": 0}
    said = len(heard.tokens[0])
    time.sleep(0.1)
    assert len(heard.tokens[0]) == said < 180


def test_a_sum_of_adapters_samples_and_scores_as_in_the_local_engine(attach, peer, tiny_engine, adapters):
    engine, version = attach(peer), PolicyVersion("0.5*math@1+-1.0*sql", 2)
    parts = [(adapters[0], 0.5), (adapters[1], -1.0)]
    for each in (engine, tiny_engine):
        each.load_composed(version, parts)
    asked = request(version=version, temperature=0.0)
    (ours,), (local,) = engine.generate([asked])[0], tiny_engine.generate([asked])[0]
    assert ours.token_ids == local.token_ids
    assert ours.logprobs == pytest.approx(local.logprobs, abs=1e-4)
    assert engine.score(PROMPT, ours.token_ids, version) == pytest.approx(ours.logprobs, abs=1e-4)
    assert "*" not in peer.ever[-1]
    for each in (engine, tiny_engine):
        each.unload(version)


def test_an_adapter_whose_rank_vllm_has_no_room_for_is_refused(attach, peer, make_base, make_adapter):
    engine = attach(peer)
    large = make_adapter(make_base("qwen3", dtype=torch.float32, context=192), rank=9)
    with raises(AdapterError):
        engine.load(MATH, large)
    with raises(AdapterError):
        engine.load(MATH, large / "nothing")


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern"])
def test_an_adapter_whose_modules_have_scales_of_their_own_is_refused(attach, peer, make_base, make_adapter, key):
    """vLLM reads r and lora_alpha alone."""
    engine = attach(peer)
    directory = make_adapter(make_base("qwen3", dtype=torch.float32, context=192))
    config = json.loads((directory / "adapter_config.json").read_text()) | {key: {"q_proj": 3}}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    with raises(AdapterError):
        engine.load(MATH, directory)


def test_a_server_that_comes_back_as_another_fails_requests_until_it_is_the_right_one(attach, peer, monkeypatch):
    monkeypatch.setattr(vllm_fleet, "REFUSED_S", 0.2)
    engine = attach(peer)
    assert engine.unavailable_reason is None
    peer.die()
    assert becomes(lambda: engine.unavailable_reason is not None)
    peer.faults.other_template = True
    peer.start()
    assert becomes(lambda: "another tokenizer or chat template" in str(engine.unavailable_reason))
    with raises(EngineError):
        engine.generate([request()])
    peer.faults = Faults()
    assert becomes(lambda: engine.unavailable_reason is None)
    assert len(engine.generate([request()])[0][0].token_ids) == 8
