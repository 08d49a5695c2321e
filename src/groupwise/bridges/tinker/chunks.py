"""Chunks of the Tinker wire's prompts -> token ids: texts as they are, images as the model's processor writes them.

    chunks_of_message     the chunks of a datum;  chunks_of_body  those of a prompt in JSON
    written_out           their token ids, an image's made of its content (`model.image_tokens`)

An image chunk stands for all that the processor writes in the place of a template's image: of Qwen's families the
image's own tokens, of others also the markers around them and between its tiles. So many places it takes among a
datum's targets; `expected_tokens`, where it is given, has to be that number.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from groupwise.bridges.tinker import schema as bodies
from groupwise.errors import ChatError, ContextLengthError, DataError, ModelError, RequestError
from groupwise.pictures import read_picture
from groupwise.server.errors import echo
from groupwise.server.images import MOST_IMAGES, sees
from groupwise.store.files import writing

if TYPE_CHECKING:
    from groupwise.model.vision import Vision

BYTES_HINT = "send the image's bytes: ImageChunk(data=..., format='png')"


@dataclass(frozen=True)
class ImageBytes:
    """An image as the wire brings it. Its format is what its bytes say, not what the client calls it."""

    data: bytes
    expected_tokens: int | None


Pieces = Sequence[Sequence[int] | ImageBytes]


def chunks_of_message(chunks: Iterable[Any], where: str) -> Pieces:
    """Return the chunks of a protobuf datum. Raises RequestError: audio, tokens that are not whole, an image that is to
    be shown in another size than its own."""
    pieces: list[Sequence[int] | ImageBytes] = []
    for chunk in chunks:
        if chunk.HasField("image"):
            image = chunk.image
            if image.HasField("override_dimensions"):
                raise _other_size(where)
            expected = image.expected_tokens if image.HasField("expected_tokens") else None
            pieces.append(ImageBytes(image.data, expected))
            continue
        if not chunk.HasField("encoded_text"):
            kind = "audio" if chunk.HasField("dmel") else "an empty chunk"
            message = f"{where} has {kind}, which no model of this server takes"
            raise RequestError(message, hint="send encoded_text chunks, or images")
        raw = chunk.encoded_text.tokens
        if len(raw) % 4:
            raise RequestError(f"{where} has {len(raw)} bytes of tokens; they are int32, four bytes each")
        pieces.append(np.frombuffer(raw, "<i4").tolist())
    return pieces


def chunks_of_body(chunks: Iterable[bodies.Chunk], where: str) -> Pieces:
    """Return the chunks of a JSON prompt. Raises RequestError: a kind that is not read, an image without its bytes."""
    return [chunk.tokens if chunk.type == bodies.TEXT else image_of_body(chunk, where) for chunk in chunks]


def image_of_body(chunk: bodies.Chunk, where: str) -> ImageBytes:
    """Return the image that a JSON chunk has. Raises RequestError: it is none, names one that is elsewhere, or is to be
    shown in another size than its own."""
    if chunk.type == "image_asset_pointer":
        message = f"{where} has an image_asset_pointer to {echo(chunk.location)}, and this server keeps no assets"
        raise RequestError(message, hint=BYTES_HINT, field=where, kind="image", code="invalid_image")
    if chunk.type != "image":
        message = f"{where} has a chunk of type {echo(chunk.type)}; encoded_text and image are read"
        raise RequestError(message, hint="send encoded_text chunks, or images", field=where)
    if chunk.override_dimensions is not None:
        raise _other_size(where)
    try:
        return ImageBytes(base64.b64decode(chunk.data or "", validate=True), chunk.expected_tokens)
    except (binascii.Error, ValueError) as error:
        message = f"{where} has an image whose data is no base64: {error}"
        raise RequestError(message, hint=BYTES_HINT, field=where, kind="image", code="invalid_image") from None


def _other_size(where: str) -> RequestError:
    message = f"{where} has an image with override_dimensions, which is not supported"
    return RequestError(message, hint="send it in that size", field=where, kind="image")


def written_out(pieces: Pieces, vision: Vision | None, *, where: str, most: int) -> list[int]:
    """Return the token ids of chunks, for a model with these eyes that reads `most` tokens. For a thread: images are
    decoded.

    Raises:
        RequestError: an image for a model that reads text only (unsupported_content); too many (limit_exceeded), one
            that cannot be read (invalid_image), or one of another number of tokens than was expected.
        StorageError: images cannot be kept.
        ContextLengthError: more than `most` tokens. Images after the first that is too much are not decoded.
    """
    ids, images = list[int](), sum(isinstance(piece, ImageBytes) for piece in pieces)
    if images and not sees(vision):
        message = f"{where} has an image, and this model reads text only"
        hint = "serve a model that sees, such as starter-vl, or send encoded_text chunks"
        raise RequestError(message, hint=hint, field=where, kind="image", code="unsupported_content")
    if images > MOST_IMAGES:
        message = f"{where} has {images} images; a sequence has at most {MOST_IMAGES}"
        raise RequestError(message, hint="leave the oldest out", field=where, kind="image", code="limit_exceeded")
    for place, piece in enumerate(pieces):
        if isinstance(piece, ImageBytes):
            assert vision is not None
            ids += _of_image(piece, vision, before=images - 1, where=f"{where}, chunk {place}")
        else:
            ids += piece
        if len(ids) > most:
            total = f"more than {most}" if place + 1 < len(pieces) else str(len(ids))
            raise ContextLengthError(f"{where} has {total} tokens; the model reads at most {most}", hint="shorten it")
    return ids


def _of_image(image: ImageBytes, vision: Vision, *, before: int, where: str) -> list[int]:
    """Return the token ids of an image that comes after `before` other images."""
    try:
        with writing("keeping an image"):
            ids = vision.expand([vision.rendered_id], [read_picture(image.data, where="it")], before=before)
    except (DataError, ModelError, ChatError) as error:
        code = "invalid_image" if isinstance(error, DataError) else "unsupported_content"
        raise RequestError(
            f"{where}: {error.message}", hint=error.hint or BYTES_HINT, field=where, kind="image", code=code
        ) from None
    if image.expected_tokens not in (None, len(ids)):
        message = f"{where}: the image has {len(ids)} tokens here, and {image.expected_tokens} were expected"
        raise RequestError(message, hint=f"set expected_tokens to {len(ids)}", field=where, kind="image")
    return ids
