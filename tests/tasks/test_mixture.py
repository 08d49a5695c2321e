"""Several sources with weights: the shares of what is drawn, and an order that follows from the seed alone."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from groupwise.config.data import DataConfig, DatasetConfig
from groupwise.errors import DataError
from groupwise.tasks.mixture import MixedOrder, Mixture
from groupwise.tasks.prompt_stream import PromptSource
from groupwise.tasks.prompts import open_prompts
from prompt_streams import take

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


def write(path: Path, count: int, name: str) -> str:
    """A file of so many prompts, `name-0` and so on."""
    path.write_text("".join(json.dumps({"prompt": f"{name}-{i}", "answer": i}) + "\n" for i in range(count)))
    return path.name


def mixed(folder: Path, seed: int = 0, **options: object) -> PromptSource:
    sources = [
        {"source": write(folder / "many.jsonl", 90, "many"), "weight": 1},
        {"source": write(folder / "few.jsonl", 10, "few"), "weight": 3},
    ]
    source = open_prompts(DataConfig.model_validate({"sources": sources, **options}), folder=folder, seed=seed)
    assert isinstance(source, PromptSource)
    return source


def drawn(source: PromptSource, count: int) -> list[str]:
    return [str(prompt.columns["data_source"]) for prompt in take(source, count)]


# ---- the shares ----


@given(WEIGHTS, st.integers(1, 300), st.integers(0, 40))
def test_after_any_number_of_blocks_each_source_is_within_a_draw_of_its_share(weights, block, blocks):
    mixture = Mixture(weights, block=block, seed=7)
    counts = Counter(source for each in range(blocks) for source, _ in mixture.draws(each))
    for source, weight in enumerate(weights):
        assert abs(counts[source] - block * blocks * weight / sum(weights)) <= 0.5 + 1e-6
        assert counts[source] == mixture.before(blocks, source)


@given(WEIGHTS, st.integers(1, 300), st.integers(0, 10), st.booleans())
def test_the_draws_of_a_source_are_numbered_one_after_another(weights, block, first, jitter):
    mixture = Mixture(weights, block=block, seed=3, jitter=jitter)
    for source in range(len(weights)):
        numbers = [number for b in (first, first + 1) for each, number in mixture.draws(b) if each == source]
        assert numbers == list(range(mixture.before(first, source), mixture.before(first + 2, source)))


def test_every_step_has_nearly_the_mixture():
    """A simulation of 8,000 steps of 32 prompts: independent draws would vary with sqrt(32 w (1 - w))."""
    weights, steps, prompts = (0.5, 0.3, 0.15, 0.05), 8_000, 32
    mixture = Mixture(weights, block=1024, seed=1)
    draws = [source for block in range(steps * prompts // 1024) for source, _ in mixture.draws(block)]
    for source, weight in enumerate(weights):
        counts = [draws[i : i + prompts].count(source) for i in range(0, len(draws), prompts)]
        mean = sum(counts) / steps
        deviation = math.sqrt(sum((count - prompts * weight) ** 2 for count in counts) / steps)
        assert mean == pytest.approx(prompts * weight, abs=2e-3)
        assert max(abs(count - prompts * weight) for count in counts) < 3
        assert deviation < 0.75 < math.sqrt(prompts * weight * (1 - weight))


def test_no_source_comes_at_a_fixed_beat():
    """Of two equal sources each cell has one draw of either, in random order: a draw is of another source than the one
    before it always within a cell, and half of the time between two."""
    order = [source for block in range(50) for source, _ in Mixture((1, 1), block=100, seed=5).draws(block)]
    changes = sum(a != b for a, b in itertools.pairwise(order)) / (len(order) - 1)
    assert changes == pytest.approx(0.75, abs=0.03)


def test_a_small_share_is_drawn_now_and_then():
    order = MixedOrder([9, 1], [199, 1], seed=0, shuffle=True)  # a twentieth of a draw an epoch
    epochs = [order(epoch).count(9) for epoch in range(200)]
    assert set(epochs) == {0, 1} and sum(epochs) == 10


# ---- the order of rows ----


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 5), st.randoms(use_true_random=False))
def test_each_source_is_gone_through_before_a_row_comes_again(sizes, seed, rng: random.Random):
    weights = [rng.choice((0.5, 1, 2, 7)) for _ in sizes]
    order = MixedOrder(sizes, weights, seed=seed, shuffle=True)
    rows = [row for epoch in range(6) for row in order(epoch)]
    start = 0
    for size in sizes:
        mine = [row - start for row in rows if start <= row < start + size]
        for turn in range(len(mine) // size):
            assert sorted(mine[turn * size : (turn + 1) * size]) == list(range(size))
        start += size


def test_without_shuffling_sources_alternate_in_the_order_of_their_rows(tmp_path):
    source = mixed(tmp_path, shuffle=False)
    assert [prompt.text for prompt in take(source, 8)] == [
        *("few-0", "many-0", "few-1", "few-2", "few-3", "many-1", "few-4", "few-5")
    ]


def test_the_order_follows_from_the_seed(tmp_path):
    assert take(mixed(tmp_path, seed=1), 250) == take(mixed(tmp_path, seed=1), 250)
    assert take(mixed(tmp_path, seed=1), 250) != take(mixed(tmp_path, seed=2), 250)


def test_a_restored_mixture_goes_on_as_if_it_had_not_stopped(tmp_path):
    whole, first = mixed(tmp_path), mixed(tmp_path)
    expected = take(whole, 400)
    assert take(first, 130) == expected[:130]
    under_way = first.issue(7)
    for each in under_way[:3]:
        first.resolve(each.ticket)
    restored = mixed(tmp_path)
    restored.restore(json.loads(json.dumps(first.cursor)))
    assert take(restored, 4 + 263) == expected[133:]


def test_without_weights_each_row_is_drawn_once_an_epoch(tmp_path):
    sources = [{"source": write(tmp_path / "a.jsonl", 5, "a")}, {"source": write(tmp_path / "b.jsonl", 15, "b")}]
    source = open_prompts(DataConfig.model_validate({"sources": sources}), folder=tmp_path)
    assert isinstance(source, PromptSource)
    assert Counter(drawn(source, 40)) == {"a.jsonl": 10, "b.jsonl": 30}
    assert [each.share for each in source.counts] == [None, None]


# ---- the configuration ----


def test_rows_say_which_source_they_are_of(tmp_path):
    write(tmp_path / "a.jsonl", 2, "a")
    (tmp_path / "b.jsonl").write_text('{"question": "b", "data_source": "own"}\n{"question": "c"}\n')
    sources = [{"source": "a.jsonl", "name": "sums"}, {"source": "b.jsonl", "columns": {"prompt": "question"}}]
    prompts = open_prompts(DatasetConfig.model_validate({"sources": sources, "system": "Be brief."}), folder=tmp_path)
    assert [(prompt.id, prompt.columns["data_source"]) for prompt in prompts.known] == [
        *(("sums:1", "sums"), ("sums:2", "sums"), ("b.jsonl:1", "own"), ("b.jsonl:2", "b.jsonl"))
    ]
    assert all((prompt.messages or ({},))[0].get("content") == "Be brief." for prompt in prompts.known)


def test_the_counts_of_each_source(tmp_path):
    source = mixed(tmp_path)
    assert [(each.label, each.rows, each.used, each.share) for each in source.counts] == [
        *(("many.jsonl", 90, 90, 0.25), ("few.jsonl", 10, 10, 0.75))
    ]


def test_an_error_names_the_source_and_the_row(tmp_path):
    write(tmp_path / "a.jsonl", 2, "a")
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n{"question": "y"}\n')
    config = DatasetConfig.model_validate({"sources": [{"source": "a.jsonl"}, {"source": "b.jsonl"}]})
    with pytest.raises(DataError, match=r"b\.jsonl:2"):
        open_prompts(config, folder=tmp_path)


A, B = {"source": "a.jsonl"}, {"source": "b.jsonl"}


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"sources": [A], "source": "c.jsonl"}, ("source",)),
        ({"sources": [A], "limit": 5}, ("limit",)),
        ({"sources": [A], "split": "train[:5]"}, ("split",)),
        ({"sources": [A | {"weight": 1}, B]}, ("sources", 1, "weight")),
        ({"sources": [A | {"weight": 0}, B | {"weight": 1}]}, ("sources", 0, "weight")),
        ({"sources": [A, {"source": "other/a.jsonl"}]}, ("sources", 1, "name")),
        ({"sources": [{"weight": 1}]}, ("sources", 0, "source")),
        ({"sources": [A | {"split": "test"}]}, ("sources", 0, "split")),
        ({}, ("source",)),
    ],
)
def test_what_does_not_go_together_is_refused(data, field):
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate(data)
    assert caught.value.errors()[0]["loc"] == field


def test_an_evaluation_reads_all_of_its_sources_and_takes_no_weights(tmp_path):
    sources = [
        {"source": write(tmp_path / "a.jsonl", 2, "a"), "limit": 1},
        {"source": write(tmp_path / "b.jsonl", 2, "b")},
    ]
    prompts = open_prompts(DatasetConfig.model_validate({"sources": sources}), folder=tmp_path).known
    assert [prompt.text for prompt in prompts] == ["a-0", "b-0", "b-1"]
    with pytest.raises(ValidationError) as caught:
        DatasetConfig.model_validate({"sources": [{**each, "weight": 1} for each in sources]})
    assert caught.value.errors()[0]["loc"] == ("sources", 0, "weight")


def test_what_is_said_once_for_all_survives_being_written_down(tmp_path):
    data = {"sources": [A, B | {"raw": False}], "raw": True}
    config = DataConfig.model_validate(data)
    assert [each.raw for each in config.sources] == [True, False]
    assert DataConfig.model_validate(config.model_dump(mode="json")) == config
