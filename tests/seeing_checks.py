"""What the tests, and docs/models.md, say of a family that sees: that a sampler, the trainer, transformers' own forward
and PEFT say the same of an image; how it is sampled, trained and placed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.model.chat import encode_prompt
from groupwise.model.image_tokens import is_of_image, vision_of
from groupwise.model.load import LoadedModel, share_weights
from groupwise.model.packed_check import why_blind, why_not_packed
from groupwise.model.packing import micro_batches, padded_batches
from groupwise.model.vision import Vision, linear_of_eyes
from groupwise.pictures import Picture, read_picture
from groupwise.train.forward import packed_logprobs, plain_logprobs
from groupwise.train.lora import add_lora, save_lora
from groupwise.types import Completion, Message, PolicyVersion, Prompt, Sample, SamplingParams, SamplingRequest
from seeing_models import FAMILIES, drawn, load_seeing

ONE, TWO = read_picture(drawn(90, 60)), read_picture(drawn(40, 80, seed=1))
ADAPTED = PolicyVersion("seen", 1)


def user(*parts: Picture | str) -> Message:
    content = [
        {"type": "image", "image": each} if isinstance(each, Picture) else {"type": "text", "text": each}
        for each in parts
    ]
    return {"role": "user", "content": content}


def asked(base: LoadedModel, *messages: Message) -> tuple[int, ...]:
    return encode_prompt(Prompt(id="1", messages=messages), base.tokenizer).token_ids


def eyes(base: LoadedModel) -> Vision:
    vision = vision_of(base.model)
    assert vision is not None
    return vision


def own_logits(base: LoadedModel, ids: Sequence[int], pictures: Sequence[Picture], model: Any = None) -> Tensor:
    """Of a row, by transformers' processor and forward alone."""
    vision = eyes(base)
    inputs, _ = vision.processor._process_images(
        [[each.pixels() for each in pictures]],
        **vision.processor._merge_kwargs(
            vision.processor.valid_processor_kwargs,
            tokenizer_init_kwargs=vision.processor.tokenizer.init_kwargs,
            return_tensors="pt",
        )["images_kwargs"],
    )
    row = torch.tensor([vision.placeholders(ids)])
    told = {"pixel_values": inputs["pixel_values"].to(base.model.dtype)}
    others = ("image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids")
    told |= {name: inputs[name] for name in others if name in inputs}
    if not {"image_grid_thw", "image_position_ids"}.isdisjoint(inputs):
        told["mm_token_type_ids"] = (row == vision.token_id).int()
    if base.model.config.model_type == "gemma3":
        told["token_type_ids"] = (row == vision.token_id).int()
    return (model or base.model)(input_ids=row, use_cache=False, **told).logits[0]


def sampled(base: LoadedModel, prompt: Sequence[int], n: int = 4) -> list[Completion]:
    with closing(LocalEngine(base, max_rows=8)) as engine:
        params = SamplingParams(max_tokens=9, seed=3, ignore_eos=True)
        return engine.generate([SamplingRequest(prompt_ids=tuple(prompt), n=n, params=params)])[0]


def samples_of(prompt: Sequence[int], said: Sequence[Completion]) -> list[Sample]:
    return [
        Sample(
            prompt_ids=tuple(prompt),
            completion_ids=each.token_ids,
            mask=(1,) * len(each.token_ids),
            behaviour_logprobs=each.logprobs,
            advantage=i - 1.5,
        )
        for i, each in enumerate(said)
    ]


def trained(model: Any, samples: Sequence[Sample], *, packed: bool = True) -> list[list[float]]:
    rows: list[list[float]] = [[] for _ in samples]
    cut, logprobs = (micro_batches, packed_logprobs) if packed else (padded_batches, plain_logprobs)
    for batch in cut(samples, token_budget=10_000):
        for row, value in zip(batch.row_N.tolist(), logprobs(model, batch)[0].tolist(), strict=True):
            rows[batch.rows[row]].append(value)
    return rows


def adapter_of(base: LoadedModel, folder: Path, *, seed: int, targets: Sequence[str] = ("vision",)) -> Any:
    """Write a random adapter, of the projector too where that can have one. -> The model with it."""
    folder.mkdir()
    model = share_weights(base.model)
    projector = ("projector",) if linear_of_eyes(model, projector=True) else ()
    config = add_lora(model, LoraSpec(rank=4, targets=(*targets, *projector)), seed=seed)
    for i, parameter in enumerate(each for each in model.parameters() if each.requires_grad):
        wave = torch.sin(torch.arange(parameter.numel(), dtype=base.model.dtype) * seed + i)
        parameter.data = wave.view_as(parameter) / 9
    save_lora(model, config, folder, base_name="tiny")
    return model


def facts_of(name: str, base: LoadedModel) -> dict[str, Any]:
    """Return how many rotary positions a token has, which tokens of an image see each other, and to how many layers
    deepstack adds."""
    vision = eyes(base)
    (first, *_) = (token for token in asked(base, user(ONE, "How many?")) if is_of_image(token))
    ahead = "in layers with a window" if vision.in_windows else "everywhere"
    return {
        "name": FAMILIES[name].name,
        "class": type(base.model).__name__,
        "positions": vision.axes,
        "ahead": ahead if vision.both_ways else "",
        "deepstack": len(vision.features(first).deep),
    }


def row_of(name: str, folder: Path) -> dict[str, Any]:
    """Return what docs/models_seeing.json has of a family: how images are computed, and in float32, of an adapter of
    all parts, the largest differences in nats between a token's log-probability when it was sampled and the trainer's
    (`gap`), and between that and PEFT's over transformers' own forward (`peft_gap`)."""
    base = load_seeing(name, folder / "model", dtype="float32")
    twin = share_weights(base.model)
    model = adapter_of(base, folder / "adapter", seed=1, targets=("vision", "all-linear"))
    prompt = asked(base, user(ONE, "How many?"))
    with closing(LocalEngine(base, max_rows=8)) as engine:
        engine.load(ADAPTED, folder / "adapter")
        params = SamplingParams(max_tokens=9, seed=3, ignore_eos=True)
        said = engine.generate([SamplingRequest(prompt_ids=prompt, n=4, params=params, version=ADAPTED)])[0]
        packed = engine.packed
    found = trained(model, samples_of(prompt, said))
    own = peft_logprobs(name, folder, base, prompt, said)
    return {
        **facts_of(name, base),
        "sampled": "packed" if packed else "own forward and cache",
        "trained": "packed" if why_not_packed(twin) is None else "padded rows",
        "images": why_blind(twin) or "packed",
        "gap": _largest(found, [each.logprobs for each in said]),
        "peft_gap": _largest(found, own),
    }


def peft_logprobs(
    name: str, folder: Path, base: LoadedModel, prompt: Sequence[int], said: Sequence[Completion]
) -> list[list[float]]:
    """By PEFT over transformers' own model, loaded anew."""
    model = load_seeing(name, folder / "model", dtype="float32").model
    model = PeftModel.from_pretrained(model, str(folder / "adapter"), autocast_adapter_dtype=False)
    rows = list[list[float]]()
    for each in said:
        with torch.no_grad():
            own = own_logits(base, (*prompt, *each.token_ids), [ONE], model).log_softmax(-1)
        rows.append([float(own[len(prompt) - 1 + i, token]) for i, token in enumerate(each.token_ids)])
    return rows


def _largest(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    return max(abs(a - b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
