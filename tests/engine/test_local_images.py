"""Images of requests, as the local engine gets them: decoded before they are its turn."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

from groupwise.engine.local import LocalEngine
from groupwise.errors import DataError, GroupwiseError
from groupwise.model.chat import encode_prompt
from groupwise.model.image_tokens import FIRST, PLACES, vision_of
from groupwise.model.load import LoadedModel
from groupwise.model.vision import Vision
from groupwise.pictures import Picture, read_picture
from groupwise.types import Prompt, SamplingParams, SamplingRequest
from seeing_models import drawn, load_seeing
from wording import raises


def shown(folder: Path) -> tuple[LoadedModel, Vision, tuple[int, ...]]:
    """A model that sees, its eyes, and a prompt with an image."""
    base = load_seeing("qwen2_5_vl", folder / "model", dtype="float32")
    vision = vision_of(base.model)
    assert vision is not None
    content = [{"type": "image", "image": read_picture(drawn(90, 60))}, {"type": "text", "text": "?"}]
    asked = encode_prompt(Prompt(id="1", messages=({"role": "user", "content": content},)), base.tokenizer)
    assert asked.token_ids is not None
    return base, vision, asked.token_ids


def test_an_image_that_another_process_encoded_is_decoded_beside_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are answered meanwhile; then what follows the image is sampled as ever."""
    base, vision, seen = shown(tmp_path)
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    asked, text = SamplingRequest(prompt_ids=seen, params=params), SamplingRequest(prompt_ids=(1, 2, 3), params=params)
    held, threads, pixels = threading.Event(), list[str](), Picture.pixels

    def slowly(self: Picture) -> object:
        threads.append(threading.current_thread().name)
        held.wait(20)
        return pixels(self)

    with closing(LocalEngine(base, max_rows=4)) as engine:
        (first,) = engine.generate([asked])[0]
        vision._features.clear()
        vision._inputs.clear()
        monkeypatch.setattr(Picture, "pixels", slowly)
        (waiting,) = engine.submit([asked])
        assert len(engine.generate([text])[0]) == 1 and not waiting.done()
        held.set()
        assert waiting.result(20)[0].token_ids == first.token_ids
        assert len(threads) == 1 and threads[0].startswith("groupwise-images")


def test_one_that_waits_for_its_image_hears_that_the_engine_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, vision, seen = shown(tmp_path)
    vision._inputs.clear()
    begun, held, prepare = threading.Event(), threading.Event(), vision.prepare

    def slowly(picture: Picture) -> None:
        begun.set()
        held.wait(20)
        prepare(picture)

    monkeypatch.setattr(vision, "prepare", slowly)
    engine = LocalEngine(base, max_rows=4)
    (waiting,) = engine.submit([SamplingRequest(prompt_ids=seen, params=SamplingParams(max_tokens=4))])
    assert begun.wait(20)
    threading.Timer(0.1, held.set).start()
    engine.close()
    with pytest.raises(GroupwiseError):
        waiting.result(20)


@pytest.mark.parametrize("error", [DataError("the file is gone"), OSError("the disk is")])
def test_an_image_that_cannot_be_decoded_any_more_fails_its_own_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Its file may have been removed, as a server does with what was not used for long."""
    base, vision, seen = shown(tmp_path)
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    asked, text = SamplingRequest(prompt_ids=seen, params=params), SamplingRequest(prompt_ids=(1, 2, 3), params=params)

    def gone(self: Picture) -> object:
        raise error

    with closing(LocalEngine(base, max_rows=4, lanes=1)) as engine:
        expected = engine.generate([text])
        vision._inputs.clear()
        monkeypatch.setattr(Picture, "pixels", gone)
        first, second = engine.submit([text, asked])
        assert [first.result(20)] == expected
        assert second.exception(20) is error


def test_an_image_that_is_not_known_is_refused_before_it_is_queued(tmp_path: Path) -> None:
    """Also by a model whose images stand in one row of positions, which are counted without them."""
    base = load_seeing("gemma3", tmp_path / "model", dtype="float32")
    with closing(LocalEngine(base, max_rows=4, lanes=1)) as engine, raises(DataError):
        engine.submit([SamplingRequest(prompt_ids=(1, FIRST + 3 * PLACES, 2), params=SamplingParams(max_tokens=4))])
