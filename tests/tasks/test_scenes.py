"""The pictures and questions of the starter that sees."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

from groupwise.errors import DataError
from groupwise.tasks.starter.scenes import (
    ASKS,
    CELL,
    COLOURS,
    PLACES,
    SHAPES,
    SIDE,
    SKILLS,
    Thing,
    draw_scene,
    is_held_out,
    lessons,
    picture_of,
    prompts,
)
from wording import raises


def in_place(image, place: str) -> np.ndarray:
    x, y = CELL * "abcd".index(place[0]), CELL * "1234".index(place[1])
    return np.asarray(image)[y : y + CELL, x : x + CELL].reshape(-1, 3)


def test_every_thing_is_drawn_in_its_place_in_its_colour() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        scene = draw_scene(rng)
        image = picture_of(scene, rng)
        assert image.size == (SIDE, SIDE)
        for place in PLACES:
            pixels = in_place(image, place)
            inked = pixels[pixels.min(-1) < 225]
            assert (len(inked) > 0) == (place in scene), (seed, place)
            if place in scene:
                assert tuple(inked[0]) == COLOURS[scene[place].colour]


def test_shapes_and_digits_differ() -> None:
    """Each from each, where all else is the same."""
    whats = [*SHAPES, *"0123456789"]
    drawn = [picture_of({"b2": Thing(what)}, random.Random(1)).tobytes() for what in whats]
    assert len(set(drawn)) == len(whats)


def test_answers_are_those_of_the_scene() -> None:
    scene = {"a1": Thing("circle", "red"), "b1": Thing("cross", "red"), "c1": Thing("circle", "red")}
    scene |= {"b3": Thing("4"), "c3": Thing("0"), "d4": Thing("square", "blue")}
    told = {asked.question: asked for seed in range(400) for asked in [SKILLS["count"](scene, random.Random(seed))]}
    assert told["How many red circles are there?"].places == ("a1", "c1")
    assert told["How many crosses are there?"].answer == "1"
    assert told["How many red shapes are there?"].reply(pointing=True) == "<think>\na1 b1 c1\n</think>\n\n3"
    assert told["How many green shapes are there?"].reply(pointing=True) == "<think>\nnone\n</think>\n\n0"
    assert SKILLS["read"](scene, random.Random(0)).answer == "40"
    where = {SKILLS["where"](scene, random.Random(seed)).question for seed in range(50)}
    assert where == {"Where is the red cross?", "Where is the blue square?"}
    assert SKILLS["describe"](scene, random.Random(0)).answer.startswith(
        "a1 red circle, b1 red cross, c1 red circle, d1 "
    )


def test_splits_share_no_question_and_seeds_repeat() -> None:
    sets = {}
    for split in ("train", "test"):
        rows = prompts("count", split, n=60)
        again = prompts("count", split, n=60)
        assert [(row["prompt"], row["answer"], row["image"].tobytes()) for row in rows] == [
            (row["prompt"], row["answer"], row["image"].tobytes()) for row in again
        ]
        sets[split] = {(row["prompt"], row["image"].tobytes()) for row in rows}
    assert not sets["train"] & sets["test"]
    assert all(row["prompt"].endswith(ASKS["point"]) for row in prompts("count", n=3, form="point"))
    assert [row["skill"] for row in prompts(["count", "read"], n=4)] == ["count", "read"] * 2


def test_lessons_are_of_the_train_split() -> None:
    for scene, image, turns in islice(lessons(3), 50):
        assert image.size == (SIDE, SIDE) and [turn["role"] for turn in turns] == ["user", "assistant"] * (
            len(turns) // 2
        )
        assert not any(
            is_held_out(scene, SKILLS["describe"](scene, random.Random(0))) for _ in turns if len(turns) == 2
        )
    described = [len(turns) == 2 for _, _, turns in islice(lessons(3, descriptions=1.0), 20)]
    assert all(described)


@pytest.mark.parametrize("options", [{"skill": "sing"}, {"skill": ["count", "sing"]}, {"form": "sung"}])
def test_what_there_is_not_is_told(options) -> None:
    with raises(DataError):
        prompts(**options)
