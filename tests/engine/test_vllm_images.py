"""Images through the vLLM engine, against servers that speak vLLM's API and have eyes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.engine import VllmConfig
from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm.engine import VllmEngine
from groupwise.engine.vllm.handshake import linear_names
from groupwise.errors import DataError, EngineError, ModelError
from groupwise.model.chat import encode_prompt
from groupwise.model.image_tokens import FIRST, PLACES, is_of_image, vision_of
from groupwise.model.load import LoadedModel, load_model, share_weights
from groupwise.pictures import Picture, read_picture
from groupwise.train.lora import add_lora, save_lora
from groupwise.types import PolicyVersion, Prompt, SamplingParams, SamplingRequest
from seeing_models import drawn, save_seeing
from vllm_peer import Faults, Peer
from wording import raises

ONE, TWO = read_picture(drawn(90, 60)), read_picture(drawn(40, 80, seed=1))
QUICK: dict[str, Any] = {
    "max_loras": 3,
    "health_interval_s": 0.1,
    "start_timeout_s": 20.0,
    "recovery_timeout_s": 20.0,
    "sync_timeout_s": 20.0,
}
FAMILIES = ["qwen2_5_vl", "idefics3"]
Attach = Callable[..., VllmEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    kept: dict[str, Path] = {}

    def saved(name: str) -> Path:
        if name not in kept:
            kept[name] = save_seeing(name, tmp_path_factory.mktemp(name))
        return kept[name]

    return saved


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu", dtype="float32")


def served(opened: ExitStack, folder: Path, **faults: Any) -> Peer:
    """A server with a model, and eyes, of its own."""
    peer = Peer(loaded(folder), faults=Faults(**faults))
    opened.callback(peer.die)
    return peer


def attached(opened: ExitStack, base: LoadedModel, *peers: Peer, **how: Any) -> VllmEngine:
    config = VllmConfig(urls=tuple(peer.url for peer in peers), **QUICK)
    local = LocalEngine(base, max_rows=1, prefix_cache_mb=0)
    engine = VllmEngine(config, base, local, targets=linear_names(base.model, "all-linear"), **how)
    opened.callback(engine.close)
    return engine


def asked(base: LoadedModel, *parts: Picture | str) -> tuple[int, ...]:
    content = [
        {"type": "image", "image": each} if isinstance(each, Picture) else {"type": "text", "text": each}
        for each in parts
    ]
    return encode_prompt(Prompt(id="1", messages=({"role": "user", "content": content},)), base.tokenizer).token_ids


def request(prompt: tuple[int, ...], *, n: int = 2, version: PolicyVersion | None = None) -> SamplingRequest:
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True, top_logprobs=2)
    return SamplingRequest(prompt_ids=prompt, n=n, params=params, version=version or PolicyVersion.base())


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_sampled_after_images_is_the_trainers(
    opened: ExitStack, folder: Callable[[str], Path], name: str, tmp_path: Path
) -> None:
    """Of the base and under an adapter; an image's pixels are sent once, then its name."""
    base, peer = loaded(folder(name)), served(opened, folder(name))
    engine = attached(opened, base, peer)
    version = PolicyVersion("a", 1)
    (tmp_path / "a").mkdir()
    model = share_weights(base.model)
    config = add_lora(model, LoraSpec(rank=4), seed=0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.sin(torch.arange(parameter.numel()).float()).view_as(parameter) / 9
    save_lora(model, config, tmp_path / "a", base_name="tiny")
    engine.load(version, tmp_path / "a")
    peer.images.clear()
    prompt = asked(base, ONE, "and", TWO, ONE, "Same?")
    found = engine.generate([request(prompt), request(prompt, version=version)])
    assert {*peer.images} == {ONE.digest, TWO.digest}
    peer.images.clear()
    found += engine.generate([request(asked(base, ONE, "?"))])
    assert not peer.images
    local = LocalEngine(base, max_rows=4)
    opened.callback(local.close)
    local.load(version, tmp_path / "a")
    for said, ids, of in zip(found, [prompt, prompt, asked(base, ONE, "?")], [None, version, None], strict=True):
        for each in said:
            scores = local.score_top(ids, each.token_ids, of or PolicyVersion.base(), top=2)
            assert each.logprobs == pytest.approx([logprob for logprob, _ in scores], abs=1e-5)
            for ours, (_, theirs) in zip(each.top_logprobs, scores, strict=True):
                assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert found[0][0].logprobs != found[1][0].logprobs


def test_a_server_that_kept_no_image_is_sent_it_again(opened: ExitStack, folder: Callable[[str], Path]) -> None:
    base, peer = loaded(folder("qwen2_5_vl")), served(opened, folder("qwen2_5_vl"))
    engine = attached(opened, base, peer)
    prompt = asked(base, ONE, TWO, "?")
    first = engine.generate([request(prompt)])
    peer._pictures.clear()  # as after a restart, or where its cache is full
    peer.images.clear()
    assert [each.token_ids for each in engine.generate([request(prompt)])[0]] == [each.token_ids for each in first[0]]
    assert sorted(peer.images) == sorted([ONE.digest, TWO.digest])
    peer.faults.keeps_images = False
    for _ in range(2):
        assert engine.generate([request(prompt)])[0][0].logprobs == first[0][0].logprobs


def test_a_stream_after_an_image(opened: ExitStack, folder: Callable[[str], Path]) -> None:
    """As with updates in flight, whose completions are requests of their own; one that is cut goes on."""
    base, peer = loaded(folder("qwen2_5_vl")), served(opened, folder("qwen2_5_vl"))
    engine = attached(opened, base, peer, in_flight_updates=True)
    prompt = asked(base, ONE, "?")
    peer.seen.clear()
    peer.faults.cut_stream = 2
    (said,) = engine.generate([request(prompt, n=1)])
    streams = [body for body in peer.seen if body.get("stream")]
    assert len(streams) == 2 and len(streams[1]["token_ids"]) == len(streams[0]["token_ids"]) + 2
    local = LocalEngine(base, max_rows=4)
    opened.callback(local.close)
    expected = local.score(prompt, said[0].token_ids, PolicyVersion.base())
    assert said[0].logprobs == pytest.approx(expected, abs=1e-5) and len(said[0].token_ids) == 6


@pytest.mark.parametrize("fault", ["sees_less", "scale_out"])
def test_a_server_that_does_not_see_as_the_trainer_is_given_texts_alone(
    opened: ExitStack, folder: Callable[[str], Path], fault: str
) -> None:
    base = loaded(folder("qwen2_5_vl"))
    peer = served(opened, folder("qwen2_5_vl"), **{fault: fault == "sees_less"})
    engine = attached(opened, base, peer)
    (said,) = engine.generate([request(asked(base, "2+2?"))])
    assert len(said) == 2
    with raises(ModelError):
        asked(base, ONE, "?")


def test_a_server_that_begins_to_see_otherwise_is_found_out(opened: ExitStack, folder: Callable[[str], Path]) -> None:
    base, peer = loaded(folder("qwen2_5_vl")), served(opened, folder("qwen2_5_vl"))
    engine = attached(opened, base, peer)
    peer.faults.sees_less = True
    with raises(EngineError, kind="images"):
        engine.generate([request(asked(base, ONE, "?"))])


def test_what_is_tried_is_not_kept(opened: ExitStack, folder: Callable[[str], Path], tmp_path: Path) -> None:
    base, peer = loaded(folder("qwen2_5_vl")), served(opened, folder("qwen2_5_vl"))
    vision = vision_of(base.model)
    assert vision is not None
    vision.keep_in(tmp_path / "images")
    attached(opened, base, peer)
    assert len(peer.images) == 1 and not [*(tmp_path / "images").iterdir()] and not vision.noted()


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_shortened_to_what_the_template_renders(folder: Callable[[str], Path], name: str) -> None:
    base = loaded(folder(name))
    vision = vision_of(base.model)
    assert vision is not None
    ids = asked(base, "a", ONE, TWO, "b", ONE)
    short, pictures = vision.shortened(ids)
    assert pictures == [ONE, TWO, ONE] and short.count(vision.token_id) == 3 and not any(map(is_of_image, short))
    assert tuple(vision.expand(short, pictures)) == ids
    cut = next(i for i, token in enumerate(ids) if is_of_image(token)) + 1
    for part in (ids[:cut], ids[cut:]):  # in the midst of an image
        with raises(DataError, kind="image"):
            vision.shortened(part)
    with raises(DataError, kind="image"):
        vision.shortened([FIRST + 5 * PLACES])
