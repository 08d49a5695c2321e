"""A prompt with images as vLLM takes it, by /inference/v1/generate: token ids as the chat template renders them, with
one placeholder for each image, and the images.

vLLM expands the placeholders itself and says what it read: any other token ids than the trainer's are an error. An
image is sent as the trainer's pixels, once, as PNG; from then on by its name, the SHA-256 of its content, under which
the server keeps what its processor makes of it, and again where it did not keep it (kind "image_missing").
"""

from __future__ import annotations

import base64
import io
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.engine.vllm.answers import Sampled, likeliest
from groupwise.errors import EngineError
from groupwise.model.image_tokens import is_of_image
from groupwise.model.vision import Vision
from groupwise.pictures import Picture

GENERATE = "/inference/v1/generate"

OPTIONS = (  # of a completion that vLLM's SamplingParams have, too
    *("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "min_tokens", "structured_outputs", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "skip_special_tokens", "logprobs"),
)


@dataclass(frozen=True)
class Images:
    """The images of a prompt, in order; `ids` is what vLLM is to read in place of the `short` token ids that it is
    sent."""

    pictures: tuple[Picture, ...]
    ids: tuple[int, ...]
    short: int

    @property
    def names(self) -> frozenset[str]:
        return frozenset(each.digest for each in self.pictures)

    def parts(self, known: Container[str]) -> list[dict[str, str]]:
        """Return the images as parts of a request; those that are `known` by name alone."""
        parts = [{"type": "image_url", "uuid": each.digest} for each in self.pictures]
        for part, each in zip(parts, self.pictures, strict=True):
            if each.digest not in known:
                part["url"] = _url(each)
        return parts

    def check(self, prompt: Sequence[int], read: Sequence[int], where: str) -> None:
        """Raise EngineError where vLLM read other token ids than the trainer has for a `prompt` that it was sent."""
        expected = [*self.ids, *prompt[self.short :]]
        if list(read) == expected:
            return
        at = next((i for i, (a, b) in enumerate(zip(expected, read, strict=False)) if a != b), len(read))
        raise EngineError(
            f"{where} reads a prompt with {len(self.pictures)} images as {len(read)} tokens, and the trainer as "
            f"{len(expected)}; they differ from token {at} on",
            hint="serve the model that is trained, with its own preprocessor_config.json and no --mm-processor-kwargs",
            kind="images",
        )


def images_of(ids: Sequence[int], vision: Vision | None) -> dict[str, Any]:
    """Return what `client.sampling_body` has otherwise where a prompt has images: its `prompt`, and its `images`.

    Raises:
        DataError: an image is not known here.
    """
    if vision is None or not any(map(is_of_image, ids)):
        return {}
    short, pictures = vision.shortened(ids)
    return {"prompt": short, "images": Images(tuple(pictures), tuple(vision.placeholders(ids)), len(short))}


def generate_body(model: str, body: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return the request that a `client.sampling_body` with images is."""
    asked = {name: body[name] for name in OPTIONS if body[name] is not None}
    return {
        "model": model,
        "token_ids": body["prompt"],
        "content_parts": body["images"].parts(known),
        "sampling_params": asked | {"detokenize": bool(body["stop"])},
        "return_token_ids": True,
        **({"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}),
    }


def read_generated(answer: Mapping[str, Any], *, top: int) -> list[Sampled]:
    """Return the completions of an answer, or of an event of a stream, in order; of one that has none, none. Raises
    KeyError or TypeError for what has no token ids or log-probabilities."""
    return [_sampled(choice, top) for choice in sorted(answer.get("choices", ()), key=lambda each: each["index"])]


def _sampled(choice: Mapping[str, Any], top: int) -> Sampled:
    content, ids = (choice["logprobs"] or {}).get("content") or [], tuple(choice["token_ids"] or ())
    pairs = [[(each["token_id"], each["logprob"]) for each in token["top_logprobs"]] for token in content if top]
    return Sampled(
        token_ids=ids,
        logprobs=tuple(token["logprob"] for token in content) if ids else (),
        finish_reason=choice["finish_reason"],
        tops=tuple(likeliest(each, top) for each in pairs),
    )


def _url(picture: Picture) -> str:
    """Return the trainer's pixels, without loss, as a data URL."""
    file = io.BytesIO()
    picture.pixels().save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
