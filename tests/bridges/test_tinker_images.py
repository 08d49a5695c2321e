"""Images on the Tinker wire: the unmodified package's ImageChunk is sampled from, scored, trained and saved as text is;
what cannot be shown is the answer to its request."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from groupwise.bridges.tinker import futures
from groupwise.model.image_tokens import FIRST, vision_of
from groupwise.model.load import load_model
from groupwise.pictures import read_picture
from groupwise.server.images import folder_of
from groupwise.types import PolicyVersion
from seeing_models import drawn, save_seeing
from tinker_wire import PROTOBUF, Wire, datum, listening, package_client, request, sample, tinker_site
from whole_server import Whole

tinker = pytest.importorskip("tinker", "0.38")
types: Any = tinker.types

BEFORE, AFTER = [5, 6, 7], [8, 9, 10, 11]


def file_of(seed: int = 0, *, width: int = 84, height: int = 56, kind: str = "PNG") -> bytes:
    written = io.BytesIO()
    drawn(width, height, seed=seed).save(written, format=kind)
    return written.getvalue()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Whole, str]]:
    model = save_seeing(request.param, tmp_path_factory.mktemp("model"))
    with listening(tmp_path_factory.mktemp("state"), model) as found:
        yield found


@pytest.fixture
def service(site: tuple[Whole, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with package_client(site[1], monkeypatch) as client:
        yield client


@pytest.fixture(scope="module")
def blind(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with tinker_site(tmp_path_factory.mktemp("state"), model_dir) as site:
        yield Wire(site)


@pytest.fixture(scope="module")
def wire(site: tuple[Whole, str]) -> Wire:
    return Wire(site[0])


def width_of(site: Whole, data: bytes) -> int:
    """Places that an image takes."""
    vision = vision_of(site.server.base.tokenizer)
    assert vision is not None
    return len(vision.expand([vision.token_id], [read_picture(data)]))


def shown(*images: bytes, widths: list[int | None] | None = None) -> Any:
    chunks: list[Any] = [types.EncodedTextChunk(tokens=BEFORE)]
    for data, width in zip(images, widths or [None] * len(images), strict=True):
        kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
        chunks.append(types.ImageChunk(data=data, format=kind, expected_tokens=width))
    return types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=AFTER)])


def own_logprobs(model: Any, ids: list[int], data: bytes) -> torch.Tensor:
    """What the model's own forward says of every token but the first."""
    vision = vision_of(model)
    assert vision is not None
    rows = vision.own_logits(ids, read_picture(data)).log_softmax(-1)
    targets = torch.tensor(vision.placeholders(ids[1:]))
    return rows[:-1].gather(1, targets[:, None])[:, 0]


def ids_of(site: Whole, data: bytes) -> list[int]:
    vision = vision_of(site.server.base.tokenizer)
    assert vision is not None
    return [*BEFORE, *vision.expand([vision.token_id], [read_picture(data)]), *AFTER]


def test_a_loop_over_images_samples_rewards_trains_and_saves(site: tuple[Whole, str], service: Any) -> None:
    """What it saves PEFT loads, over transformers' own model, with the log-probabilities that were told."""
    whole, data = site[0], file_of()
    base, width = whole.server.base, width_of(whole, data)
    trainer = service.create_lora_training_client(base_model=base.name, rank=4, seed=1).result()
    prompt = shown(data, widths=[width])
    told: list[float] = []
    for _ in range(3):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        said = sampler.sample(prompt, 4, types.SamplingParams(max_tokens=5, seed=3)).result().sequences
        data_in = []
        for i, each in enumerate(said):
            tokens, zeros = list(each.tokens), [0.0] * (prompt.length - 1)
            inputs = {
                "target_tokens": [*[0] * (prompt.length - 1), *tokens],
                "logprobs": [*zeros, *each.logprobs],
                "advantages": [*zeros, *[1.0 if i % 2 else -1.0] * len(tokens)],
            }
            model_input = types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=tokens[:-1])])
            data_in.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
        backward = trainer.forward_backward(data_in, "importance_sampling").result()
        stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert stepped.metrics["grad_norm:mean"] > 0
        for each, out in zip(said, backward.loss_fn_outputs, strict=True):
            trained = out["logprobs"].data[prompt.length - 1 :]
            assert trained == pytest.approx(list(each.logprobs), abs=2e-4)
    path = trainer.save_weights_for_sampler("seen").result().path
    last = service.create_sampling_client(model_path=path).sample(prompt, 1, types.SamplingParams(max_tokens=5, seed=4))
    (answer,) = last.result().sequences
    told, ids = list(answer.logprobs), [*ids_of(whole, data), *answer.tokens]
    version = PolicyVersion.parse(whole.app.state.server.more["tinker"].checkpoints.find_sampler(path).version)
    again = load_model(base.name, device="cpu", dtype="float32")
    plain = own_logprobs(again.model, ids, data)[-len(told) :].tolist()
    PeftModel.from_pretrained(again.model, str(whole.server.store.path(version)))  # in place
    assert own_logprobs(again.model, ids, data)[-len(told) :].tolist() == pytest.approx(told, abs=3e-4)
    assert plain != pytest.approx(told, abs=1e-2)


def test_prompts_are_scored_and_images_themselves_have_no_score(site: tuple[Whole, str], service: Any) -> None:
    whole, data = site[0], file_of(1, kind="JPEG")
    scored = service.create_sampling_client(base_model=whole.server.base.name).compute_logprobs(shown(data)).result()
    ids = ids_of(whole, data)
    own, images = own_logprobs(whole.server.base.model, ids, data).tolist(), [token >= FIRST for token in ids]
    assert [each is None for each in scored] == [True, *images[1:]]
    for told, mine, is_image in zip(scored[1:], own, images[1:], strict=True):
        assert is_image or told == pytest.approx(mine, abs=2e-4)


def test_supervised_targets_behind_an_image_are_learned(site: tuple[Whole, str], service: Any) -> None:
    """One picture says one thing and another the other, which only who sees tells apart."""
    whole, files = site[0], [file_of(2), file_of(3)]
    trainer = service.create_lora_training_client(base_model=whole.server.base.name, rank=8, seed=2).result()
    batch = []
    for data, answer in zip(files, (20, 30), strict=True):
        prompt = shown(data, widths=[width_of(whole, data)])
        inputs = {
            "target_tokens": [*[0] * (prompt.length - 1), answer],
            "weights": [*[0.0] * (prompt.length - 1), 1.0],
        }
        batch.append(types.Datum(model_input=prompt, loss_fn_inputs=inputs))
    losses = []
    for _ in range(25):
        losses.append(trainer.forward_backward(batch, "cross_entropy").result().metrics["loss:sum"])
        trainer.optim_step(types.AdamParams(learning_rate=2e-2)).result()
    assert losses[-1] < 1.0 < losses[0], losses  # who cannot tell them apart has 2 log 2 at best
    sampler = trainer.save_weights_and_get_sampling_client().result()
    greedy = types.SamplingParams(max_tokens=1, temperature=0.0)
    said = [sampler.sample(shown(data), 1, greedy).result().sequences[0].tokens for data in files]
    assert said == [[20], [30]]


def test_several_images_of_a_prompt_have_places_of_their_own(site: tuple[Whole, str], service: Any) -> None:
    whole, files = site[0], [file_of(4), file_of(5, width=56)]
    sampler = service.create_sampling_client(base_model=whole.server.base.name)
    one = sampler.compute_logprobs(shown(*files)).result()
    other = sampler.compute_logprobs(shown(*reversed(files))).result()
    widths = [width_of(whole, data) for data in files]
    assert len(one) == len(other) == len(BEFORE) + sum(widths) + len(AFTER)
    assert one[-3:] != other[-3:] and one[: len(BEFORE)] == other[: len(BEFORE)]


def test_narrowed_completions_of_images_are_known_again(site: tuple[Whole, str], service: Any) -> None:
    """What top_k left is remembered for a prompt with an image as for any."""
    whole, data = site[0], file_of(6)
    trainer = service.create_lora_training_client(base_model=whole.server.base.name, rank=4, seed=1).result()
    prompt = shown(data, widths=[width_of(whole, data)])
    sampler = trainer.save_weights_and_get_sampling_client().result()
    (said,) = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, top_k=3, seed=5)).result().sequences
    zeros, tokens = [0.0] * (prompt.length - 1), list(said.tokens)
    inputs = {
        "target_tokens": [*[0] * len(zeros), *tokens],
        "logprobs": [*zeros, *said.logprobs],
        "advantages": [*zeros, *[1.0] * len(tokens)],
    }
    model_input = types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=tokens[:-1])])
    given = types.Datum(model_input=model_input, loss_fn_inputs=inputs)
    out = trainer.forward_backward([given], "importance_sampling").result().loss_fn_outputs[0]["logprobs"].data
    assert out[len(zeros) :] == pytest.approx(list(said.logprobs), abs=2e-4)


# ---- what is refused ----
def image_chunk(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": "png", **more}


def asked(wire: Wire, seq: int, *chunks: dict[str, Any]) -> Any:
    made = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=0)
    text = {"type": "encoded_text", "tokens": BEFORE}
    return sample(wire, made["sampling_session_id"], seq, prompt={"chunks": [text, *chunks, text]})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a pointer": ({"type": "image_asset_pointer", "location": "https://169.254.169.254/a.png"}, "invalid_image"),
    "no bytes": ({"type": "image", "format": "png"}, "invalid_image"),
    "no base64": ({"type": "image", "data": "!!!"}, "invalid_image"),
    "text": (image_chunk(b"How many dots?"), "invalid_image"),
    "cut off": (image_chunk(file_of()[:200]), "invalid_image"),
    "another number of tokens": (image_chunk(file_of(), expected_tokens=3), "invalid_value"),
    "another size": (image_chunk(file_of(), override_dimensions={"width": 9, "height": 9}), "invalid_value"),
    "sound": ({"type": "dmel", "dmel": ""}, "invalid_value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused_with_a_code(wire: Wire, name: str) -> None:
    chunk, code = REFUSED[name]
    told = asked(wire, 100 + list(REFUSED).index(name), chunk)
    assert (told["category"], told["code"]) == ("user", code), told


def test_the_number_of_tokens_is_told(wire: Wire) -> None:
    width = width_of(wire.site, file_of())
    assert f"{width} tokens" in asked(wire, 200, image_chunk(file_of(), expected_tokens=width + 1))["error"]
    assert asked(wire, 201, image_chunk(file_of(), expected_tokens=width)).sequences


def test_an_image_waits_as_bytes_and_not_as_numbers(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(7)
    monkeypatch.setattr(futures, "MOST_WAITING_BYTES", 8 * len(data))
    assert asked(wire, 250, image_chunk(data)).sequences


def test_images_are_bounded_in_number_and_in_tokens(wire: Wire) -> None:
    many = asked(wire, 300, *[image_chunk(b"")] * 257)
    assert many["code"] == "limit_exceeded", many
    long = asked(wire, 301, *[image_chunk(file_of())] * 200)
    assert long["code"] == "context_length_exceeded", long


def test_a_model_that_reads_text_says_so(blind: Wire) -> None:
    kept = folder_of(blind.site.server.config)
    assert asked(blind, 1, image_chunk(file_of()))["code"] == "unsupported_content"
    assert not kept.exists()
    model = blind.model()
    message = request(model, 1, [datum([5, 6, 7], weights=[1, 1])])
    message.data[0].model_input.add().image.data = file_of()
    told = trained(blind, message)
    assert (told["category"], told["code"]) == ("user", "unsupported_content")


def trained(wire: Wire, message: Any) -> Any:
    given = wire.http.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=PROTOBUF)
    found = wire.answer(given.json()["request_id"])
    return found if isinstance(found, dict) else {"category": "none"}


def test_datums_are_refused_by_name_and_training_goes_on(wire: Wire) -> None:
    model, width = wire.model(1), width_of(wire.site, file_of())

    def with_image(seq: int, *, targets: list[int] | None = None, data: bytes | None = None) -> Any:
        count = 2 + width
        row = [0] * count if targets is None else targets
        message = request(model, seq, [([5, 6], {"target_tokens": row, "weights": [1.0] * len(row)})])
        message.data[0].model_input.add().image.data = file_of() if data is None else data
        return message

    before = wire.weights(model)
    assert "data[0], chunk 1" in trained(wire, with_image(1, data=b"x"))["error"]
    assert f"{2 + width} tokens" in trained(wire, with_image(2, targets=[0, 0]))["error"]
    wide = with_image(3)
    wide.data[0].model_input[1].image.override_dimensions.SetInParent()
    assert trained(wire, wide)["category"] == "user"
    expected = with_image(4)
    expected.data[0].model_input[1].image.expected_tokens = width + 1
    assert f"expected_tokens to {width}" in trained(wire, expected)["error"]
    own = with_image(5, targets=[FIRST + 5] * (2 + width))  # nobody says an image
    assert trained(wire, own)["category"] == "user"
    assert np.array_equal(wire.weights(model), before)
    assert trained(wire, with_image(6))["category"] == "none"


def test_packages_before_0_25_send_images_in_json(wire: Wire) -> None:
    model, width = wire.model(2), width_of(wire.site, file_of())
    count = len(BEFORE) + width
    chunks = [{"type": "encoded_text", "tokens": BEFORE}, image_chunk(file_of(), expected_tokens=width)]
    inputs = {
        "target_tokens": {"data": [0] * count, "dtype": "int64", "shape": [count]},
        "weights": {"data": [0.0] * (count - 1) + [1.0], "dtype": "float32", "shape": [count]},
    }
    data = [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}]
    body = {"data": data, "loss_fn": "cross_entropy"}
    asked_for = wire.ok("forward_backward", model_id=model, seq_id=1, forward_backward_input=body)
    answer = wire.answer(asked_for["request_id"])
    assert not isinstance(answer, dict) or len(answer["loss_fn_outputs"]) == 1, answer
    chunks[1] = {"type": "image_asset_pointer", "location": "file:///etc/passwd", "format": "png"}
    again = wire.ok("forward_backward", model_id=model, seq_id=2, forward_backward_input=body)
    assert wire.answer(again["request_id"])["code"] == "invalid_image"
