"""The memory of keys and values: bounded by `cache_bytes`, and in order again after it ran out."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
import torch

from groupwise.engine import kv_cache, local, packed
from groupwise.engine.kv_cache import CacheNeed, KeyValueCache
from groupwise.engine.local import LocalEngine
from groupwise.errors import EngineError
from groupwise.model.activations import ModelSize
from groupwise.model.layer_settings import keys_from
from groupwise.model.memory import cache_token_bytes
from groupwise.types import Completion, PolicyVersion, SamplingParams, SamplingRequest
from serving import starter
from wording import raises

LENGTHS = [(3, 20, 4), (9, 5, 2), (4, 24, 6), (20, 8, 1), (5, 3, 8), (6, 24, 3)]  # prompt, completion, n


def requests() -> list[SamplingRequest]:
    return [
        SamplingRequest(
            prompt_ids=tuple((11 * i + 7 * at) % 250 for i in range(prompt)),
            n=n,
            version=PolicyVersion.base(),
            params=SamplingParams(max_tokens=completion, seed=at, ignore_eos=True),
        )
        for at, (prompt, completion, n) in enumerate(LENGTHS)
    ]


def ids_of(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of all keys and values of a cache, each time that there may be more of them."""
    seen: list[int] = []
    reserve = kv_cache._Store.reserve
    made: dict[int, kv_cache._Store] = {}

    def watched(store: kv_cache._Store, lines: int, length: int) -> None:
        reserve(store, lines, length)
        made[id(store)] = store
        stores = made.values()
        seen.append(sum(x.numel() * x.itemsize for each in stores for pair in each.layers.values() for x in pair))

    monkeypatch.setattr(kv_cache._Store, "reserve", watched)
    return seen


def test_completions_in_flight_never_need_more_than_the_bound(make_base, taken: list[int]) -> None:
    with closing(LocalEngine(make_base("qwen3", dtype=torch.float64), lanes=1)) as engine:
        expected, whole = ids_of(engine.generate(requests())), max(taken)
    base = make_base("qwen3", dtype=torch.float64)
    size = ModelSize.of(base.model.config.get_text_config(), parameters=0, value_bytes=base.model.dtype.itemsize)
    bound = 64 * cache_token_bytes(size)  # of 24 rows by 24 tokens, and prompts
    assert bound < whole / 4
    taken.clear()
    with closing(LocalEngine(base, lanes=1, cache_bytes=2 * bound)) as engine:  # half is the interactive lane's
        assert ids_of(engine.generate(requests())) == expected
    assert 0 < max(taken) <= bound


def test_one_completion_alone_is_never_refused(make_base) -> None:
    with closing(LocalEngine(make_base("qwen3", dtype=torch.float64), lanes=1)) as engine:
        expected = ids_of(engine.generate(requests()))
    with closing(LocalEngine(make_base("qwen3", dtype=torch.float64), lanes=1, cache_bytes=1)) as engine:
        assert ids_of(engine.generate(requests())) == expected


@pytest.mark.parametrize(
    ("need", "n", "fit"),
    [
        (CacheNeed(), 8, 4),  # 4 x 20 and a prompt of 20
        (CacheNeed(rows=2, own=20, slots=1, prompt=20), 8, 1),
        (CacheNeed(rows=2, own=40, slots=1, prompt=20), 8, 0),
        (CacheNeed(rows=1, own=10, slots=1, prompt=60), 2, 0),
    ],
)
def test_how_many_rows_fit(need: CacheNeed, n: int, fit: int) -> None:
    assert KeyValueCache(64, 100).fitting(need, n, own=20, prompt=20, slots=1) == fit
    assert KeyValueCache(64).fitting(need, n, own=20, prompt=20, slots=1) == n


def test_rows_that_have_gone_make_room_for_longer_ones() -> None:
    cache = KeyValueCache(64, 400)
    like = torch.zeros(1, 1, 1)
    cache.rows.reserve(16, 20)
    keys, _ = cache.rows.of(0, like, like)
    keys[0] = 3
    cache.prepare(CacheNeed(rows=2, own=150, slots=1, prompt=100), rows=1, longest=7)
    cache.rows.reserve(2, 8)
    assert cache.rows.length >= 8
    assert cache.rows.lines * cache.rows.length <= 300
    keys, _ = cache.rows.of(0, like, like)
    assert keys[0, 0, :7, 0].tolist() == [3] * 7


def test_a_cache_that_could_not_grow_grows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KeyValueCache(8)
    like = torch.zeros(1, 1, 1)
    cache.rows.reserve(2, 4)
    for layer in (0, 1):
        cache.rows.of(layer, like, like)[0][:] = layer
    before, larger, calls = (cache.rows.lines, cache.rows.length), kv_cache._larger, iter(range(100))

    def full(x: torch.Tensor, lines: int, length: int) -> torch.Tensor:
        if next(calls) == 2:  # in the second layer
            raise torch.OutOfMemoryError("no memory")
        return larger(x, lines, length)

    monkeypatch.setattr(kv_cache, "_larger", full)
    with pytest.raises(torch.OutOfMemoryError):
        cache.rows.reserve(4, 40)
    assert (cache.rows.lines, cache.rows.length) == before
    cache.rows.reserve(4, 40)
    for layer in (0, 1):
        keys, values = cache.rows.of(layer, like, like)
        assert keys.shape == values.shape and keys.shape[0] >= 4 and keys.shape[2] >= 40
        assert keys[:2, 0, :4, 0].eq(layer).all()


def test_prompts_that_found_no_memory_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KeyValueCache(8)
    cache.add_prompts([4])
    cache.prompts.of(0, *[torch.zeros(1, 1, 1)] * 2)

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "_larger", full)
        with pytest.raises(torch.OutOfMemoryError):
            cache.add_prompts([9, 9, 9])
    assert cache.lengths == [4] and list(cache.add_prompts([9])) == [1]


def test_an_engine_that_ran_out_of_memory_goes_on(make_base, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(LocalEngine(make_base("qwen3", dtype=torch.float64), lanes=1)) as engine:
        expected, larger, calls = ids_of(engine.generate(requests())), kv_cache._larger, iter(range(1 << 20))
    with closing(LocalEngine(make_base("qwen3", dtype=torch.float64), lanes=1)) as engine:

        def full(x: torch.Tensor, lines: int, length: int) -> torch.Tensor:
            if next(calls) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return larger(x, lines, length)

        monkeypatch.setattr(kv_cache, "_larger", full)
        with raises(EngineError) as caught:
            engine.generate(requests())
        assert caught.value.code == "engine_failed"
        assert ids_of(engine.generate(requests())) == expected


def test_rows_that_found_no_memory_are_free_again(make_base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a request that had some rows already, and was to get more, too; and none twice."""
    with closing(LocalEngine(make_base("qwen3", dtype=torch.float64), lanes=1, max_rows=4)) as engine:
        prepare, calls = KeyValueCache.prepare, []

        def full(cache: KeyValueCache, *args: object, **options: object) -> None:
            calls.append(engine._budget.free)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("no memory")
            prepare(cache, *args, **options)

        monkeypatch.setattr(KeyValueCache, "prepare", full)
        lengths = (3, 9)
        asked = [
            SamplingRequest(
                prompt_ids=(1, 2, 3 + at),
                n=3,
                version=PolicyVersion.base(),
                params=SamplingParams(max_tokens=length, seed=at, ignore_eos=True),
            )
            for at, length in enumerate(lengths)
        ]
        with raises(EngineError):
            engine.generate(asked)
        assert len(calls) == 2 and engine._budget.free == 4
        assert all(len(group) == 3 for group in engine.generate(asked))
        assert engine._budget.free == 4


def test_an_engine_without_work_gives_back_the_memory_of_its_rows(monkeypatch):
    """After a while; and what is asked next is answered as before."""
    monkeypatch.setattr(local, "REST_S", 0.2)
    request = SamplingRequest(
        prompt_ids=(5, 6, 7),
        params=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        n=8,
        version=PolicyVersion.base(),
    )
    with closing(LocalEngine(starter(), max_rows=8)) as engine:
        first = engine.generate([request])[0]

        def held() -> int:
            return sum(len(lane.decoder.cache.rows.layers) for lane in engine._lanes)

        assert held()
        until = time.monotonic() + 30
        while held() and time.monotonic() < until:
            time.sleep(0.05)
        assert not held()
        again = engine.generate([request])[0]
        assert [each.token_ids for each in again] == [each.token_ids for each in first]


GEMMA = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 8,
    "global_head_dim": 8,
}


def test_layers_with_keys_of_an_earlier_one_keep_none_of_their_own(make_base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 E2B in small, beyond its window: bytes of half as many layers, and the same is sampled, bit by bit."""
    base = make_base("gemma4", dtype=torch.float32, **GEMMA)
    size = ModelSize.of(base.model.config, parameters=1, value_bytes=4)
    assert cache_token_bytes(size) == 2 * 3 * size.key_value * 4
    params = SamplingParams(max_tokens=16, ignore_eos=True, seed=3)
    asked = [SamplingRequest(prompt_ids=tuple(range(5, 5 + length)), params=params, n=3) for length in (4, 12)]
    found, kept = [], []
    for owners in (keys_from, lambda config: {}):
        monkeypatch.setattr(packed, "keys_from", owners)
        with closing(LocalEngine(base, max_rows=8)) as engine:
            found.append([[(each.token_ids, each.logprobs) for each in group] for group in engine.generate(asked)])
            stores = [
                store for lane in engine._lanes for store in (lane.decoder.cache.prompts, lane.decoder.cache.rows)
            ]
            kept.append({layer for store in stores for layer in store.layers})
    assert found[0] == found[1] and kept == [{0, 1, 2}, set(range(6))]
