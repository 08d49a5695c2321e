"""Rows with images, in the forms that datasets have."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import DataError
from groupwise.pictures import Picture, pictures_in, read_picture
from groupwise.rewards.call import _decoded
from groupwise.tasks.prompts import to_prompt
from seeing_models import drawn
from wording import raises

ONE, TWO = drawn(6, 4), drawn(4, 6, seed=1)
FIRST, SECOND = read_picture(ONE), read_picture(TWO)
BASE64 = base64.b64encode(FIRST.data).decode()
ANTHROPICS = {"type": "base64", "media_type": "image/png", "data": BASE64}
TEXT = {"type": "text", "text": "How many?"}


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.png").write_bytes(FIRST.data)
    return tmp_path


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "How many?", "image": "one.png"},
        {"prompt": [{"role": "user", "content": "How many?"}], "image": ONE},
        {"prompt": [{"role": "user", "content": "How many?"}], "images": [{"bytes": FIRST.data, "path": None}]},
        {"prompt": asked({"type": "image"}, TEXT), "images": [ONE]},
        {"prompt": asked({"type": "image", "text": None}, {**TEXT, "image": None}), "images": [ONE], "image": None},
        {"prompt": asked({"type": "image", "image": ONE}, TEXT)},
        {"prompt": asked({"type": "image", "path": "one.png"}, TEXT)},
        {"prompt": asked({"type": "image", "base64": BASE64}, TEXT)},
        {"prompt": asked({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}}, TEXT)},
        {"prompt": asked({"type": "input_image", "image_url": f"data:image/png;base64,{BASE64}"}, TEXT)},
        {"prompt": asked({"type": "image", "source": ANTHROPICS}, TEXT)},
    ],
)
def test_every_form_is_the_same_prompt(row: dict[str, Any], folder: Path) -> None:
    prompt = to_prompt(row, id="rows:1", folder=folder)
    assert prompt.messages is not None and prompt.text is None
    assert pictures_in(prompt.messages) == [FIRST]
    (message,) = prompt.messages
    assert [part["type"] for part in message["content"]] == ["image", "text"]  # type: ignore[index]
    assert all(value in (FIRST, [FIRST], None) for value in prompt.columns.values())


def test_images_are_given_to_parts_in_order(folder: Path) -> None:
    messages = [*asked({"type": "image"}, TEXT), {"role": "assistant", "content": "2"}, *asked({"type": "image"})]
    prompt = to_prompt({"prompt": messages, "images": [ONE, TWO]}, id="rows:1", folder=folder)
    assert pictures_in(prompt.messages or ()) == [FIRST, SECOND] and prompt.columns["images"] == [FIRST, SECOND]


def test_without_parts_all_stand_in_front_of_the_users_first_words(folder: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Same?"}]
    prompt = to_prompt({"prompt": messages, "images": (ONE, TWO)}, id="rows:1", folder=folder)
    assert prompt.messages is not None
    assert [part["type"] for part in prompt.messages[1]["content"]] == ["image", "image", "text"]  # type: ignore[index]


def test_rows_without_images_are_as_they_were(folder: Path) -> None:
    prompt = to_prompt({"prompt": "2+2?", "images": [], "image": None}, id="rows:1", folder=folder)
    assert prompt.text == "2+2?" and prompt.messages == ({"role": "user", "content": "2+2?"},)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "How many?", "image": ONE, "images": [TWO]},
        {"prompt": asked({"type": "image"}, {"type": "image"}, TEXT), "images": [ONE]},
        {"prompt": asked({"type": "image"}, TEXT), "images": [ONE, TWO]},
        {"prompt": asked({"type": "image"}, TEXT)},
        {"prompt": "How many?", "image": "two.png"},
        {"prompt": asked({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, TEXT)},
    ],
)
def test_what_is_wrong_is_told_with_its_row(row: dict[str, Any], folder: Path) -> None:
    with raises(DataError) as refused:
        to_prompt(row, id="rows.jsonl:3", folder=folder)
    assert str(refused.value).startswith("rows.jsonl:3: ")


def test_rewards_get_pil_images() -> None:
    said = [{"role": "user", "content": [{"type": "image", "image": FIRST}, TEXT]}]
    decoded = _decoded([said, [FIRST, SECOND]])
    assert decoded[0][0]["content"][0]["image"].size == (6, 4) and decoded[1][1].size == (4, 6)
    plain = ["a", {"b": [1]}]
    assert _decoded(plain) is plain
    assert isinstance(said[0]["content"][0]["image"], Picture)  # type: ignore[index]
