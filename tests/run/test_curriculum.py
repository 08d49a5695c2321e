"""Which prompts a curriculum draws, how often, and that nothing is lost for ever."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from groupwise.errors import ConfigError, DataError
from groupwise.run.curriculum import FLOOR, REVISIT, Curriculum
from groupwise.tasks.prompt_stream import PromptSource
from groupwise.types import Prompt, Rollout, RolloutGroup
from prompt_streams import take
from wording import raises


def numbered(count: int) -> list[Prompt]:
    return [Prompt(id=str(index), text="x") for index in range(count)]


def source(count: int, **options) -> PromptSource:
    return PromptSource(numbered(count), **options)


def group(id: str, rewards: Sequence[float | None]) -> RolloutGroup:
    rollouts = tuple(Rollout(turns=(), reward=reward) for reward in rewards)
    return RolloutGroup(prompt=Prompt(id=id, text="x"), rollouts=rollouts)


def knowing(curriculum: Curriculum, rates: Mapping[str, float]) -> Curriculum:
    curriculum.observe([group(id, [rate]) for id, rate in rates.items()])
    return curriculum


def in_epochs(curriculum: Curriculum, epochs: int) -> list[list[str]]:
    """The ids that are drawn in each of the first `epochs` epochs."""
    drawn: list[list[str]] = [[] for _ in range(epochs)]
    while True:
        [issued] = curriculum.issue(1)
        if issued.ticket.epoch >= epochs:
            return drawn
        drawn[issued.ticket.epoch].append(issued.prompt.id)
        curriculum.resolve(issued.ticket)


# ---- rates ----


def test_the_rate_is_a_running_mean():
    curriculum = Curriculum(source(3), weight=True)
    assert curriculum.rate("0") is None
    curriculum.observe([group("0", [1.0, 0.0, None, 0.0, 1.0])])
    assert curriculum.rate("0") == 0.5
    curriculum.observe([group("0", [1.0, 1.0]), group("1", [None, math.nan])])
    assert curriculum.rate("0") == 0.75
    curriculum.observe([group("0", [0.0, 0.0])])
    assert curriculum.rate("0") == 0.375
    assert curriculum.rate("1") is None  # nothing could be scored
    assert curriculum.metrics() == {"curriculum/seen": 1 / 3, "curriculum/passed_over": 0.0}


def test_a_rate_counts_as_known_after_min_seen_groups():
    curriculum = Curriculum(source(3), weight=True, min_seen=2)
    curriculum.observe([group("0", [1.0, 0.0])])
    assert curriculum.rate("0") is None
    curriculum.observe([group("0", [1.0, 0.0])])
    assert curriculum.rate("0") == 0.5


@pytest.mark.parametrize(
    ("rewards", "rate"),
    [
        ([0.2, 0.4], 0.3),  # within [0, 1]: as they are
        ([-1.0, 1.0, 1.0, 1.0], 0.75),
        ([0.0, 2.0], 0.5),
        ([3.0, 7.0, 4.0, 3.0], 0.3125),
        ([5.0, 5.0], None),  # high or low?
    ],
)
def test_rewards_outside_0_to_1_are_scaled_by_what_was_seen(rewards, rate):
    curriculum = Curriculum(source(3), weight=True)
    curriculum.observe([group("0", rewards)])
    assert curriculum.rate("0") == (rate if rate is None else pytest.approx(rate))


# ---- filter ----


def test_what_is_unknown_is_drawn_as_from_the_source():
    plain, curriculum = source(7, seed=4), Curriculum(source(7, seed=4), filter=(0.2, 0.8), weight=True)
    assert take(curriculum, 20) == take(plain, 20)
    assert curriculum.cursor == plain.cursor | {"curriculum": curriculum.cursor["curriculum"]}
    assert len(curriculum) == 7 and curriculum.known == plain.known and curriculum.prompt("3") == plain.prompt("3")
    assert curriculum.epochs == plain.epochs == pytest.approx(20 / 7)


def test_the_filter_passes_over_what_is_outside():
    rates = {"0": 0.0, "1": 0.2, "2": 0.5, "3": 0.8, "4": 1.0}  # 5 is unknown
    curriculum = knowing(Curriculum(source(6, shuffle=False), filter=(0.2, 0.8)), rates)
    epochs = in_epochs(curriculum, 2 * REVISIT)
    drawn = Counter(id for epoch in epochs for id in epoch)
    assert drawn == {"1": 8, "2": 8, "3": 8, "5": 8, "0": 2, "4": 2}
    for id in ("0", "4"):  # every fourth epoch, from one of the first four on
        first = next(n for n, epoch in enumerate(epochs) if id in epoch)
        assert first < REVISIT and id in epochs[first + REVISIT]
    assert curriculum.metrics()["curriculum/passed_over"] in (12, 13)  # the last draw is of the epoch after


def test_a_prompt_comes_back_when_its_rate_does():
    rates = dict.fromkeys(map(str, range(8)), 1.0)
    curriculum = knowing(Curriculum(source(8, shuffle=False), filter=(0.1, 0.9)), rates)
    assert len(set(ids := [each.id for each in take(curriculum, 4)])) == 4 and curriculum.epochs > 0.5
    curriculum.observe([group(id, [0.0, 0.0]) for id in rates])
    assert {each.id for each in take(curriculum, 9)} == set(rates) != set(ids)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_dataset_that_is_all_outside_does_not_hang(rows):
    rates = dict.fromkeys(map(str, range(rows)), 1.0)
    curriculum = knowing(Curriculum(source(rows), filter=(0.0, 0.5)), rates)
    assert Counter(each.id for each in take(curriculum, 3 * rows)) == dict.fromkeys(rates, 3)
    assert curriculum.epochs <= 3 * REVISIT


# ---- weight ----


def test_prompts_are_drawn_in_proportion_to_their_weight():
    rates = {"0": 0.0, "1": 0.1, "2": 0.3, "3": 0.5, "4": 1.0}
    curriculum = knowing(Curriculum(source(5), weight=True, seed=2), rates)
    epochs = 3000
    by_epoch = in_epochs(curriculum, epochs)
    assert all(len(set(each)) == len(each) for each in by_epoch)
    drawn = Counter(id for each in by_epoch for id in each)
    for id, p in rates.items():
        share = (p * (1 - p) + FLOOR) / (0.25 + FLOOR)
        assert drawn[id] / epochs == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / epochs) + 1e-9)
    assert drawn["3"] == epochs


def test_draws_follow_the_seed():
    def drawn(seed):
        rates = {str(n): n / 20 for n in range(20)}
        return [each.id for each in take(knowing(Curriculum(source(20), weight=True, seed=seed), rates), 60)]

    assert drawn(1) == drawn(1) != drawn(2)


# ---- the cursor ----


def test_a_restored_curriculum_goes_on_as_if_it_had_not_stopped():
    """Also where a prompt on its way has, by then, a rate at which it would not be drawn."""

    def make():
        return Curriculum(source(12, seed=1), filter=(0.1, 0.9), weight=True, seed=3)

    original = make()
    issued = original.issue(9)
    for each in issued[::2]:
        original.observe([group(each.prompt.id, [1.0, float(int(each.prompt.id) % 2)])])
        original.resolve(each.ticket)
    original.observe([group(each.prompt.id, [1.0, 1.0]) for each in issued[1::2]])
    cursor = json.loads(json.dumps(original.cursor, allow_nan=False))
    restored = make()
    restored.restore(cursor)
    assert restored.cursor == cursor
    again = restored.issue(4)
    assert [(each.ticket, each.prompt) for each in again] == [(each.ticket, each.prompt) for each in issued[1::2]]
    for each in again:
        original.resolve(each.ticket)
        restored.resolve(each.ticket)
    assert restored.issue(30) == original.issue(30)
    assert restored.cursor == original.cursor and restored.metrics() == original.metrics()


def test_a_cursor_without_a_curriculum():
    plain = source(4)
    take(plain, 3)
    curriculum = Curriculum(source(4), weight=True)
    curriculum.restore(plain.cursor)
    assert take(curriculum, 5) == take(plain, 5)
    knowing(curriculum, {"0": 0.5})
    plain.restore(curriculum.cursor)  # and back: the curriculum was taken out of the configuration
    assert take(plain, 3) == take(curriculum, 3)


def test_what_is_not_a_cursor_is_refused():
    curriculum = Curriculum(source(4), weight=True)
    cursor = curriculum.cursor
    with raises(DataError):
        curriculum.restore(cursor | {"curriculum": {"means": {}}})
    with raises(DataError):
        curriculum.restore(Curriculum(source(5), weight=True).cursor)


def test_a_curriculum_that_would_do_nothing_is_refused():
    with raises(ConfigError):
        Curriculum(source(4))
    with raises(ConfigError):
        Curriculum(source(4), filter=(0.8, 0.2))
