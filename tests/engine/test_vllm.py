"""The vLLM engine against servers that speak vLLM's API and sample with a real model; faults, swaps, deaths."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from groupwise.config.engine import VllmConfig
from groupwise.config.lora import LoraSpec
from groupwise.config.run import load_config
from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm.client import VllmServer, server_url
from groupwise.engine.vllm.engine import CompletionStream, VllmEngine
from groupwise.engine.vllm.handshake import linear_names
from groupwise.engine.vllm.open import read_launch
from groupwise.errors import (
    AdapterError,
    AdapterNotFoundError,
    ConfigError,
    ContextLengthError,
    EngineError,
    ModelError,
)
from groupwise.model.load import LoadedModel
from groupwise.store.export import AdapterMerge
from groupwise.train.learner import Learner
from groupwise.types import (
    FinishReason,
    Grammar,
    GrammarKind,
    PolicyVersion,
    Sample,
    SamplingParams,
    SamplingRequest,
)
from processes import becomes
from slow_cases import long_case
from vllm_peer import Faults, Peer, serving
from wording import raises

RECIPE = Path(__file__).parents[2] / "configs" / "arithmetic.yaml"
BASE = PolicyVersion.base()
FIRST, SECOND = PolicyVersion("math", 1), PolicyVersion("math", 2)
QUICK = {
    "max_loras": 3,
    "health_interval_s": 0.1,
    "start_timeout_s": 20.0,
    "recovery_timeout_s": 20.0,
    "sync_timeout_s": 20.0,
}


@pytest.fixture
def peer(tiny: LoadedModel) -> Iterator[Peer]:
    with serving(tiny) as peer:
        yield peer


@pytest.fixture
def attach(tiny: LoadedModel) -> Iterator[Callable[..., VllmEngine]]:
    """`attach(peer, ..., sync_retries=0)`: an engine over these servers; closed after the test."""
    with ExitStack() as opened:

        def make(
            *peers: Peer | str,
            base: LoadedModel = tiny,
            reloads: bool = False,
            merge: AdapterMerge | None = None,
            in_flight_updates: bool = False,
            rows: int | None = None,
            **options,
        ) -> VllmEngine:
            urls = tuple(each if isinstance(each, str) else each.url for each in peers)
            config = VllmConfig(urls=urls, **{**QUICK, **options})
            targets = linear_names(base.model, "all-linear")
            local = LocalEngine(base, max_rows=1, prefix_cache_mb=0)
            engine = VllmEngine(
                config,
                base,
                local,
                targets=targets,
                reloads=reloads,
                merge=merge,
                in_flight_updates=in_flight_updates,
                rows=rows,
            )
            opened.callback(engine.close)
            return engine

        yield make


def test_who_is_waited_for_is_said(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which server, since when, why it is not there, and how long it may take; until it is."""
    monkeypatch.setattr("groupwise.engine.vllm.fleet.FIRST_SAID_S", 0.05)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"  # where nobody answers
        said: list[str] = []
        config = VllmConfig(urls=(url,), **{**QUICK, "start_timeout_s": 1.5})
        targets, local = linear_names(tiny.model, "all-linear"), LocalEngine(tiny, max_rows=1, prefix_cache_mb=0)
        with raises(EngineError):
            VllmEngine(config, tiny, local, targets=targets, say=said.append)
    assert said and all(line.startswith(f"waiting for vLLM at {url}, asked ") for line in said)
    assert "vllm.start_timeout_s: 1.5" in said[-1]


@pytest.fixture(scope="module")
def adapters(tiny: LoadedModel, make_base, make_adapter) -> list[Path]:
    """Saved adapters of the tiny model, far apart."""
    return [make_adapter(make_base("qwen3", dtype=torch.float32, context=192), seed=seed) for seed in (1, 2, 3)]


def request(prompt=(1, 2, 3, 4), *, n: int = 1, version=BASE, **params) -> SamplingRequest:
    params = {"max_tokens": 8, "seed": 5, "ignore_eos": True} | params
    return SamplingRequest(prompt_ids=tuple(prompt), n=n, version=version, params=SamplingParams(**params))


def off(completions, prompt, engine: LocalEngine, version: PolicyVersion, *, temperature: float = 1.0) -> float:
    """The largest difference between behaviour log-probabilities and the trainer's, in nats."""
    return max(
        abs(a - b)
        for each in completions
        for a, b in zip(
            each.logprobs, engine.score(prompt, each.token_ids, version, temperature=temperature), strict=True
        )
    )


# ---- what is sent and what comes back ----


def test_completions_are_token_ids_with_the_trainers_logprobs(attach, peer, tiny_engine):
    engine = attach(peer)
    for temperature in (0.0, 0.7, 1.0):
        (group,) = engine.generate([request(n=3, temperature=temperature)])
        assert len(group) == 3 and all(len(each.token_ids) == len(each.logprobs) == 8 for each in group)
        assert off(group, (1, 2, 3, 4), tiny_engine, BASE, temperature=temperature or 1.0) < 1e-4
        assert len({each.token_ids for each in group}) == (1 if temperature == 0 else 3)
    body = peer.seen[-1]
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    assert body["prompt"] == [1, 2, 3, 4] and neutral.items() <= body.items()


def test_a_seed_fixes_the_draw_and_another_one_changes_it(attach, peer):
    engine = attach(peer)
    (a,), (b,), (c,), (d,) = engine.generate([request(seed=s, max_tokens=24) for s in (5, 5, 6, None)])
    assert a.token_ids == b.token_ids != c.token_ids and d.token_ids not in (a.token_ids, c.token_ids)


def test_stop_strings_and_ids_end_a_completion_as_in_the_local_engine(attach, peer, tiny_engine, tokenizer):
    engine = attach(peer)
    (free,) = engine.generate([request(max_tokens=40, temperature=0.0)])[0]
    stop = tokenizer.decode(free.token_ids[4:6])
    for params in ({"stop": (stop,)}, {"stop_ids": (free.token_ids[5],)}, {"ignore_eos": False}):
        asked = request(max_tokens=40, temperature=0.0, **params)
        (ours,), (theirs,) = engine.generate([asked])[0], tiny_engine.generate([asked])[0]
        assert (ours.token_ids, ours.text, ours.finish_reason) == (
            theirs.token_ids,
            theirs.text,
            theirs.finish_reason,
        )
        assert ours.finish_reason is FinishReason.STOP or not params.get("stop")


def test_what_cannot_be_is_refused_before_it_is_sent(attach, tiny):
    with serving(tiny, context=100) as peer:
        engine = attach(peer)
        assert engine.context_length == 100
        sent = len(peer.seen)
        for asked, error, facts in (
            (request(range(1, 101)), ContextLengthError, {"kind": None}),
            (request(()), ContextLengthError, {"kind": "empty"}),
            (request((1, 9999)), ModelError, {}),
            (request(n=0), ConfigError, {"field": "n"}),
            (request(version=FIRST), AdapterNotFoundError, {}),
            (request(top_k=5), ConfigError, {"field": "top_k"}),
            (request(top_p=0.5), ConfigError, {"field": "top_p"}),
            (request(min_p=0.1), ConfigError, {"field": "min_p"}),
            (request(repetition_penalty=1.1), ConfigError, {"field": "repetition_penalty"}),
            (request(min_tokens=2), ConfigError, {"field": "min_tokens"}),
            (request(grammar=Grammar.of_json({"a": 1}), ignore_eos=False, top_k=2), ConfigError, {"field": "top_k"}),
        ):
            with raises(error, **facts):
                engine.submit([request(), asked])
        assert len(peer.seen) == sent
        (long,) = engine.generate([request(range(1, 99), max_tokens=50)])[0]
        assert len(long.token_ids) == 2 and long.finish_reason is FinishReason.LENGTH


def test_urls_may_have_a_v1_and_must_be_urls(attach, peer):
    for text in (f"{peer.url}/v1", f"{peer.url}/v1/", f"{peer.url}/"):
        assert server_url(text) == peer.url
    for text in ("localhost:8000", "http://[bad", "http://host:port"):
        with raises(ConfigError):
            server_url(text)
    assert attach(f"{peer.url}/v1").generate([request()])


def test_several_servers_share_the_requests(attach, tiny):
    with serving(tiny) as one, serving(tiny) as two:
        for each in (one, two):
            each.faults.slow_s = 0.05
        engine = attach(one, two)
        before = len(one.seen), len(two.seen)
        engine.generate([request(seed=i) for i in range(20)])
        assert min(len(one.seen) - before[0], len(two.seen) - before[1]) >= 5


# ---- the handshake ----


def test_a_stale_or_another_server_is_refused(attach, peer, make_base):
    other = make_base("qwen3", dtype=torch.float32, context=192, seed=9)
    cases = (
        (other, Faults(), "weights"),
        (None, Faults(raw_logprobs=True), "weights"),
        (None, Faults(other_template=True), "tokenizer"),
        (None, Faults(load_status=403), "no_adapters"),
    )
    for model, faults, kind in cases:
        with serving(model or peer.base, faults=faults) as wrong, raises(EngineError, kind=kind):
            attach(wrong)
    with raises(EngineError, kind=None):
        attach("http://127.0.0.1:9", start_timeout_s=0.5)


def test_a_server_that_mixes_base_and_adapters_is_found_out_and_got_round(attach, tiny, adapters, tiny_engine):
    with serving(tiny, faults=Faults(mixes=True)) as mixing, serving(tiny) as sound:
        engine = attach(mixing, sound)
        found = engine.servers
        assert found[mixing.url].mixes and not found[sound.url].mixes
        engine.load(FIRST, adapters[0])
        groups = engine.generate([request(seed=i, version=(BASE, FIRST)[i % 2]) for i in range(20)])
        assert off([c for g in groups[::2] for c in g], (1, 2, 3, 4), tiny_engine, BASE) < 1e-4


# ---- versions ----


def test_loading_and_unloading_twice_is_no_error_and_another_refusal_is(peer, adapters):
    """Which refusal it was is said by the error's kind."""

    async def talk() -> EngineError:
        server = VllmServer(peer.url, request_timeout_s=5.0)
        try:
            for _ in range(2):
                await server.load("math-1", str(adapters[0]), timeout=5.0)
            assert await server.adapters() == {"math-1"}
            for _ in range(2):
                await server.unload("math-1")
            assert await server.adapters() == set()
            with pytest.raises(EngineError) as refused:
                await server.load("math-2", "/nowhere", timeout=5.0)
            return refused.value
        finally:
            await server.close()

    assert asyncio.run(talk()).kind is None


def test_each_version_samples_as_it_was_trained_under_a_name_of_its_own(attach, peer, adapters, make_base):
    engine = attach(peer)
    judge = LocalEngine(peer.base, max_rows=1)
    for number, directory in enumerate(adapters, 1):
        version = PolicyVersion("math", number)
        engine.load(version, directory)
        engine.load(version, directory)  # a no-op
        judge.load(version, directory)
        mixed = [request(n=2, seed=i, version=(version, BASE)[i % 2]) for i in range(6)]
        for asked, group in zip(mixed, engine.generate(mixed), strict=True):
            assert {each.version for each in group} == {asked.version}
            assert off(group, asked.prompt_ids, judge, asked.version) < 1e-4
        if number > 1:
            engine.unload(PolicyVersion("math", number - 1))
    judge.close()
    names = [name for name in peer.ever if name.startswith("math-v")]
    assert [name.rpartition("-")[0] for name in names] == ["math-v1", "math-v2", "math-v3"]
    assert becomes(lambda: [name for name in peer.loaded if name.startswith("math")] == [names[2]])
    with raises(AdapterNotFoundError):
        engine.submit([request(version=FIRST)])


def test_the_same_version_of_another_run_has_another_name_on_the_same_server(attach, peer, adapters):
    """So nothing needs to be restarted between runs."""
    for directory in adapters[:2]:
        engine = attach(peer)
        engine.load(FIRST, directory)
        engine.close()
    names = [name for name in peer.ever if name.startswith("math-v1")]
    assert len(set(names)) == 2 and not peer.loaded


def test_a_version_is_unloaded_after_the_last_request_that_samples_from_it(attach, peer, adapters):
    engine = attach(peer)
    engine.load(FIRST, adapters[0])
    (name,) = [name for name in peer.loaded if name.startswith("math")]
    peer.faults.slow_s = 0.5
    futures = engine.submit([request(version=FIRST)])
    engine.unload(FIRST)
    time.sleep(0.2)
    assert name in peer.loaded and not futures[0].done()
    assert futures[0].result(10)[0].version == FIRST
    assert becomes(lambda: name not in peer.loaded)


def test_a_swap_under_64_requests_mixes_nothing(attach, peer, adapters):
    engine = attach(peer)
    judge = LocalEngine(peer.base, max_rows=1)
    for version, directory in ((FIRST, adapters[0]), (SECOND, adapters[1])):
        judge.load(version, directory)
    engine.load(FIRST, adapters[0])
    old = engine.submit([request((1, 2, 3, i), seed=i, version=FIRST) for i in range(32)])
    engine.load(SECOND, adapters[1])
    new = engine.submit([request((1, 2, 3, i), seed=i, version=SECOND) for i in range(32)])
    engine.unload(FIRST)
    for version, futures in ((FIRST, old), (SECOND, new)):
        for i, future in enumerate(futures):
            assert off(future.result(30), (1, 2, 3, i), judge, version) < 1e-4
    judge.close()


def test_a_sync_that_fails_is_tried_again_and_then_ends_the_run_by_name(attach, peer, adapters, tmp_path):
    engine = attach(peer, sync_retries=1)
    engine.load(FIRST, adapters[0])
    for faults, kind in ((Faults(load_status=500), None), (Faults(stale=True), "weights")):
        peer.faults = faults
        with raises(EngineError, kind=kind):
            engine.load(SECOND, adapters[1])
        peer.faults = Faults()
        assert engine.generate([request(version=FIRST)])
        with pytest.raises(AdapterNotFoundError):
            engine.submit([request(version=SECOND)])
    engine.load(SECOND, adapters[1])
    with pytest.raises(AdapterError):
        engine.load(PolicyVersion("math", 3), tmp_path)
    with raises(ConfigError):
        engine.adopt(PolicyVersion("math", 4))


# ---- all parameters are trained ----


def whole(make_base) -> LoadedModel:
    """A model of one's own, as another process has it."""
    return make_base("qwen3", dtype=torch.float32, context=192)


def step(base: LoadedModel) -> None:
    with torch.no_grad():
        for parameter in base.model.parameters():
            parameter.mul_(1.05)


def test_whole_models_are_read_anew_also_by_a_server_that_was_away(attach, make_base):
    base = whole(make_base)
    with serving(whole(make_base)) as peer:
        step(peer.base)  # what an earlier run has left there
        engine = attach(peer, base=base, reloads=True, transfer="file")
        for version in (FIRST, SECOND):
            step(base)
            engine.adopt(version)
            (group,) = engine.generate([request(version=version, n=2)])
            assert off(group, (1, 2, 3, 4), LocalEngine(base, max_rows=1), BASE) < 1e-4
        with raises(AdapterNotFoundError):
            engine.submit([request(version=FIRST)])
        assert len(peer.checkpoints) == 3 and [path.exists() for path in peer.checkpoints] == [False, False, True]
        peer.die()
        assert becomes(lambda: engine.servers[peer.url] is None)
        peer.base = whole(make_base)
        peer.start()
        assert engine.generate([request(version=SECOND, n=2)]) == [group]
        assert peer.checkpoints[3] == peer.checkpoints[2]


def test_weights_that_a_server_does_not_take_end_the_run_by_name(attach, make_base):
    base = whole(make_base)
    with serving(whole(make_base)) as peer:
        engine = attach(peer, base=base, reloads=True, transfer="file", sync_retries=1)
        step(base)
        peer.faults.keeps_weights = True
        with raises(EngineError):
            engine.adopt(FIRST)
        assert len(peer.checkpoints) == 3


def test_merged_adapters_are_read_as_whole_models_also_by_a_server_that_was_away(
    attach, make_base, adapters, tiny_engine
):
    """`vllm.push: merged`: no adapter ever reaches the server, and what it samples is what the adapter makes."""
    with serving(whole(make_base)) as peer:
        step(peer.base)  # what an earlier run has left there
        engine = attach(peer, base=whole(make_base), merge=AdapterMerge(whole(make_base)), transfer="file")
        (group,) = engine.generate([request(version=BASE, n=2)])
        assert off(group, (1, 2, 3, 4), tiny_engine, BASE) < 1e-4
        for version, directory in zip((FIRST, SECOND), adapters, strict=False):
            engine.load(version, directory)
            tiny_engine.load(version, directory)
            (group,) = engine.generate([request(version=version, n=2)])
            assert off(group, (1, 2, 3, 4), tiny_engine, version) < 1e-4 < off(group, (1, 2, 3, 4), tiny_engine, BASE)
            tiny_engine.unload(version)
        for gone in (BASE, FIRST):
            with raises(AdapterNotFoundError):
                engine.submit([request(version=gone)])
        peer.die()
        assert becomes(lambda: engine.servers[peer.url] is None)
        peer.base = whole(make_base)
        peer.start()
        assert engine.generate([request(version=SECOND, n=2)]) == [group]
        assert len(peer.checkpoints) == 4 and peer.ever == []


def test_a_server_that_was_restarted_unseen_is_given_its_weights_again(attach, make_base):
    """By somebody else, between two looks: it answers, and has the weights of its start."""
    base = whole(make_base)
    with serving(whole(make_base)) as peer:
        engine = attach(peer, base=base, reloads=True, transfer="file")
        step(base)
        engine.adopt(FIRST)
        peer.label = "default"
        assert becomes(lambda: len(peer.checkpoints) == 3)
        assert engine.generate([request(version=FIRST)])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["train.lora=null"], "vllm.push"),
        (["rollout.max_staleness=1"], "rollout"),
    ],
)
def test_where_versions_cannot_be_merged_that_is_said(options, field: str):
    with raises(ConfigError, field=field, kind="conflict"):
        load_config(RECIPE, ["engine=vllm", "vllm.push=merged", *options])


@pytest.mark.parametrize("options", [["quantization=nf4"], ["train.lora.use_dora=true"]])
def test_what_vllm_cannot_apply_itself_is_refused_and_merged(options):
    with raises(ConfigError, kind="conflict"):
        load_config(RECIPE, ["engine=vllm", *options])
    assert load_config(RECIPE, ["engine=vllm", "vllm.push=merged", *options]).vllm.push == "merged"


def test_rounded_weights_are_another_policy():
    """What the loss is told, which then keeps groups whose rewards are equal, and warns of what is not corrected."""

    def rounded(*options: str) -> bool:
        return load_config(RECIPE, ["engine=vllm", *options]).may_be_stale

    assert not rounded("dtype=float32") and not rounded("dtype=float32", "vllm.push=merged")
    assert rounded("vllm.quantization=fp8") and rounded("dtype=float32", "vllm.dtype=bfloat16")
    assert rounded("dtype=bfloat16", "vllm.push=merged") and not rounded("dtype=bfloat16", "vllm.dtype=bfloat16")


def test_a_server_of_merged_or_rounded_weights_is_started_so(model_dir):
    options = [f"model={model_dir}", "device=cpu", "dtype=float32", "engine=vllm"]
    merged = read_launch(load_config(RECIPE, [*options, "vllm.push=merged", "train.lora.targets=[q_proj]"]), port=8000)
    assert merged.environment["VLLM_SERVER_DEV_MODE"] == "1" and not any("lora" in word for word in merged.argv)
    rounded = read_launch(load_config(RECIPE, [*options, "vllm.quantization=fp8"]), port=8000)
    at = rounded.argv.index("--quantization")
    assert rounded.argv[at + 1] == "fp8" and "--enable-lora" in rounded.argv


def test_tied_embeddings_are_refused_on_a_cpu(model_dir):
    options = [f"model={model_dir}", "device=cpu", "dtype=float32", "engine=vllm", "train.lora=null"]
    with raises(ConfigError):
        read_launch(load_config(RECIPE, options), port=8000)


# ---- deaths ----


def test_what_was_in_flight_on_a_server_that_dies_is_sampled_when_it_is_back(attach, peer, adapters, tiny_engine):
    engine = attach(peer)
    engine.load(FIRST, adapters[0])
    expected = engine.generate([request(seed=i, version=(BASE, FIRST)[i % 2]) for i in range(4)])
    peer.faults.slow_s = 1.0
    futures = engine.submit([request(seed=i, version=(BASE, FIRST)[i % 2]) for i in range(4)])
    time.sleep(0.3)
    peer.die()
    assert becomes(lambda: engine.servers[peer.url] is None)
    peer.faults = Faults()
    peer.start()
    for future, (before,) in zip(futures, expected, strict=True):
        (after,) = future.result(120)
        assert (after.token_ids, after.version) == (before.token_ids, before.version)


def test_another_server_takes_over_at_once(attach, tiny):
    with serving(tiny) as one, serving(tiny) as two:
        engine = attach(one, two)
        for each in (one, two):
            each.faults.slow_s = 0.5
        futures = engine.submit([request(seed=i) for i in range(6)])
        time.sleep(0.2)
        one.die()
        assert all(future.result(120) for future in futures)  # while the other is away
        one.start()


def test_an_answer_that_is_cut_and_one_that_never_comes_are_asked_for_again(attach, peer):
    engine = attach(peer, request_timeout_s=0.5)
    peer.faults.cut = 2
    assert engine.generate([request()]) and not peer.faults.cut
    peer.faults.stuck, before = True, len(peer.seen)
    future = engine.submit([request()])[0]
    assert becomes(lambda: len(peer.seen) == before + 2)  # after half a second in which no token was sampled
    peer.faults.stuck = False
    assert future.result(120)


def test_a_request_may_wait_in_the_queue_and_sample_for_long_while_the_server_moves(attach, peer):
    """Twelve groups of which a server works on two at a time, 0.4 s each, take 2.4 s: longer than it may stand still.
    Each is sent once."""
    engine = attach(peer, request_timeout_s=2.0)
    peer.faults.slow_s, peer.faults.at_once, before = 0.4, 2, len(peer.seen)
    groups = engine.generate([request(seed=i, n=2) for i in range(12)])
    assert [len(group) for group in groups] == [2] * 12
    assert len(peer.seen) == before + 12


def test_answers_are_what_moves_where_tokens_are_not_counted(attach, peer):
    engine = attach(peer, request_timeout_s=2.0)
    peer.faults.slow_s, peer.faults.at_once, peer.faults.counts, before = 0.4, 1, False, len(peer.seen)
    assert len(engine.generate([request(seed=i) for i in range(6)])) == 6
    assert len(peer.seen) == before + 6


def test_a_server_is_given_twice_the_completions_that_it_samples_at_once(attach, tiny):
    """The others wait here, and go to whichever server has room: a slow one does not keep what it was given."""
    with serving(tiny) as slow, serving(tiny) as quick:
        engine = attach(slow, quick, rows=2)
        began = [len(each.seen) for each in (slow, quick)]
        for each in (slow, quick):
            each.most_flying = 0
        slow.faults.slow_s = 1.0
        assert len(engine.generate([request(seed=i, n=2) for i in range(24)])) == 24
        given = [len(each.seen) - before for each, before in zip((slow, quick), began, strict=True)]
        assert sum(given) == 24 and given[1] > 2 * given[0]
        assert max(slow.most_flying, quick.most_flying) == 2  # groups of two: four completions
        assert engine.generate([request(n=9)])  # more than ever fit go alone


def test_a_request_that_is_always_lost_fails_and_so_does_a_server_that_stays_away(attach, peer):
    engine = attach(peer, recovery_timeout_s=0.5)
    peer.faults.cut = 100
    with raises(EngineError):
        engine.generate([request()])
    peer.faults.cut = 0
    peer.die()
    with raises(EngineError):
        engine.generate([request()])
    peer.start()


def test_a_server_that_comes_back_as_another_ends_the_run(attach, peer, make_base):
    engine = attach(peer)
    peer.die()
    peer.base = make_base("qwen3", dtype=torch.float32, context=192, seed=9)
    peer.start()
    with raises(EngineError):
        engine.generate([request()])


def test_a_cancelled_request_and_a_closed_engine(attach, peer):
    engine = attach(peer)
    peer.faults.slow_s = 0.5
    first, second = engine.submit([request(), request(seed=6)])
    assert first.cancel()
    assert second.result(10)
    waiting = engine.submit([request()])[0]
    engine.close()
    assert waiting.cancelled() or waiting.exception(1) is not None


# ---- structured outputs ----

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.of_json(SCHEMA),
        pytest.param(Grammar.regex(r"\d/[a-c]{3}"), marks=pytest.mark.slow),
        long_case(Grammar.choice(["x", 'y"z'])),
        pytest.param(Grammar.lark('root ::= "a" [bc]'), marks=pytest.mark.slow),
        long_case(Grammar(GrammarKind.CHOICE, '["x", "yz"]', thoughts="begun")),
        Grammar(GrammarKind.LARK, 'start: "@a" @a', parts=(("a", Grammar.choice(["x", "yz"])),)),
    ],
    ids=["json", "regex", "choice", "gbnf", "thought", "parts"],
)
def test_what_a_grammar_left_is_recorded_and_trained(attach, peer, make_base, tiny_engine, grammar):
    """As it is by the local engine, by which each completion could have been sampled."""
    asked = request(n=3, max_tokens=16, grammar=grammar, ignore_eos=False, temperature=0.7)
    group = attach(peer).generate([asked])[0]
    learner = Learner(make_base("qwen3", dtype=torch.float32, context=192), lora=LoraSpec(rank=2), threads=1)
    matcher = tiny_engine.prepare(grammar).result()
    for each in group:
        ids = each.token_ids
        assert matcher.deep_copy().validate_tokens(list(ids)) == len(ids) and all(each.kept.has(ids))
        sample = Sample(
            prompt_ids=asked.prompt_ids, completion_ids=ids, mask=(1,) * len(ids), advantage=1.0, kept=each.kept
        )
        (trained,) = learner.forward([sample], temperature=0.7)
        assert each.behaviour_logprobs == pytest.approx(trained, abs=1e-4)
        whole = tiny_engine.score(asked.prompt_ids, ids, BASE, temperature=0.7)
        assert each.logprobs == pytest.approx(whole, abs=1e-4) and sum(each.logprobs) < sum(trained)


@pytest.mark.parametrize(
    ("asked", "kept_to"),
    [("[ad]", "[bc]"), long_case("[a-d]", "[abc]")],
)
def test_a_server_that_keeps_to_another_grammar_is_found_out(attach, peer, asked: str, kept_to: str):
    engine, grammar = attach(peer), Grammar.lark(f"start: /{asked}/")
    peer.faults.keeps_to = f"start: /{kept_to}/"
    with raises(EngineError):
        engine.generate([request(grammar=grammar, ignore_eos=False)])


def test_a_completion_with_a_grammar_ends_under_its_version(attach, peer, adapters):
    engine = attach(peer, in_flight_updates=True)
    engine.load(FIRST, adapters[0])
    peer.faults.slow_s = 0.3
    (future,) = engine.submit([request(grammar=Grammar.choice(["x", "yz"]), ignore_eos=False)])
    engine.replace(BASE, FIRST, recompute=True)
    assert future.result(20)[0].spans[0][0] == BASE and not peer.seen[-1].get("stream")


# ---- in-flight updates ----


def test_a_version_takes_over_completions_under_way(attach, peer, adapters):
    """What was heard stays, the rest is asked of the new version as its continuation, also of one that comes while the
    second is sampling; each token has the log-probability of a fresh forward of the version that drew it."""
    engine = attach(peer, in_flight_updates=True)
    for version, directory in zip((FIRST, SECOND), adapters, strict=False):
        engine.load(version, directory)
    peer.faults.hold_stream = 5
    asked = [request(n=2, max_tokens=16), request((9, 8, 7), max_tokens=16), request((9, 8, 7), version=SECOND)]
    futures = engine.submit(asked)

    def heard() -> list[int]:
        return sorted(len(row._ids) for row in engine._following)

    assert becomes(lambda: heard() == [5, 5, 5, 5])
    engine.replace(BASE, FIRST, recompute=True)
    assert becomes(lambda: heard() == [5, 10, 10, 10])
    engine.replace(FIRST, SECOND, recompute=True)
    assert becomes(lambda: heard() == [5, 15, 15, 15])
    peer.faults.hold_stream = None
    groups = [future.result(20) for future in futures]
    local = engine._reference
    for each, group in zip(asked, groups, strict=True):
        for said in group:
            fresh: list[float] = []
            for version, count in said.spans:
                scores = local.score(each.prompt_ids, said.token_ids, version)
                fresh += scores[len(fresh) : len(fresh) + count]
            assert said.logprobs == pytest.approx(fresh, abs=1e-4)
    assert all(c.spans == ((BASE, 5), (FIRST, 5), (SECOND, 6)) for group in groups[:2] for c in group)
    assert groups[2][0].spans == ((SECOND, 8),)
    (late,) = engine.generate([request(version=BASE)])
    assert late[0].version == SECOND
    engine.unload(BASE)
    assert engine.generate([request(version=BASE)])[0][0].version == BASE


def test_completions_that_nobody_reads_are_told_many_tokens_at_a_time(attach, peer, monkeypatch):
    engine, told = attach(peer, in_flight_updates=True), list[int]()
    heard = CompletionStream._hear
    monkeypatch.setattr(
        CompletionStream, "_hear", lambda self, piece: (told.append(len(piece.token_ids)), heard(self, piece))
    )
    (((said,),)) = engine.generate([request(max_tokens=40)])
    assert told == [1, 16, 16, 7] and len(said.token_ids) == 40


def test_nothing_was_heard_or_all_was_when_a_version_came(attach, peer, adapters):
    engine = attach(peer, in_flight_updates=True)
    engine.load(FIRST, adapters[0])
    for hold, spans in ((0, ((FIRST, 8),)), (8, ((BASE, 8),))):
        engine.unload(BASE)
        peer.faults.hold_stream = hold
        (future,) = engine.submit([request()])
        assert becomes(lambda hold=hold: [len(row._ids) for row in engine._following] == [hold] and len(peer.seen) > 0)
        engine.replace(BASE, FIRST, recompute=True)
        peer.faults.hold_stream = None
        assert future.result(20)[0].spans == spans


def test_a_cancelled_request_is_not_asked_again(attach, peer, adapters):
    engine = attach(peer, in_flight_updates=True)
    engine.load(FIRST, adapters[0])
    peer.faults.hold_stream = 2
    (future,) = engine.submit([request()])
    assert becomes(lambda: [len(row._ids) for row in engine._following] == [2])
    future.cancel()
    assert becomes(lambda: not engine._following)
    asked = len(peer.seen)
    engine.replace(BASE, FIRST, recompute=True)
    peer.faults.hold_stream = None
    time.sleep(0.1)
    assert len(peer.seen) == asked


def test_what_vllm_cannot_do_with_a_cache_is_refused(attach, peer):
    with raises(ConfigError, field="rollout.in_flight_cache"):
        attach(peer, in_flight_updates=True).check_replaceable(recompute=False)
    with raises(ConfigError, field="rollout.in_flight_cache"):
        attach(peer).replace(BASE, FIRST, recompute=True)
    with raises(AdapterNotFoundError):
        attach(peer, in_flight_updates=True).replace(BASE, FIRST, recompute=True)
