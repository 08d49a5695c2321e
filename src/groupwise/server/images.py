"""Images of a server: what requests may bring, and what is kept of them, for as long as rollouts are.

images_of    where the images of a prompt are
sees         whether a model does
seeing       reads a conversation with images, or refuses it with a code and the place in the body
folder_of    where they lie: each once, named by its SHA-256
prune        forgets those that were not used for as long as rollouts are kept
GET /v1/images/{digest}   the file, as it was posted
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Response
from starlette.concurrency import run_in_threadpool

from groupwise.config.serve import ServeConfig
from groupwise.errors import DataError, ModelError, RequestError
from groupwise.model.image_tokens import is_first, is_of_image, vision_of
from groupwise.pictures import ImageError, Picture, is_picture, kept_pictures
from groupwise.server.kept_images import ImageNotFoundError, shown_image
from groupwise.server.state import given
from groupwise.server.wire import documented
from groupwise.store.files import writing
from groupwise.store.ledger_schema import KEEP_SECONDS
from groupwise.store.rundir import IMAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.vision import Vision
    from groupwise.store.ledger import Ledger

MOST_IMAGES = 256  # of one conversation
HINT = "images are kept as long as rollouts: 7 days"

_SHOWN = documented(errors=[ImageNotFoundError])
_SHOWN["responses"][200] = {"description": "The file, as it was posted.", "content": {"image/*": {}}}

router = APIRouter(prefix="/v1/images", tags=["rollouts"])


@dataclass(frozen=True, kw_only=True)
class ImageParts:
    """The parts of a server that this route uses."""

    config: ServeConfig


Kept = Annotated[ImageParts, given(ImageParts)]


# ---- what requests bring ----
def sees(vision: Vision | None) -> bool:
    """Return whether a model with these eyes can be given images."""
    return vision is not None and vision.blind is None


@contextmanager
def seeing(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, at: str) -> Iterator[None]:
    """Context manager in which the conversation is encoded that stands at the field `at` of a body.

    Raises:
        RequestError: the model cannot see (unsupported_content); there are too many images (limit_exceeded); one of
            them cannot be decoded, or the model takes none such (invalid_image).
        StorageError: they cannot be kept.
    """
    places = dict(_pictures(messages, at))
    if not places:
        yield
        return
    first = next(iter(places))
    if not sees(vision_of(tokenizer)):
        message = f"{first} is an image, and the model of this server reads text only"
        hint = "serve a model that sees, as `groupwise serve starter-vl` does"
        raise RequestError(message, hint=hint, field=first, kind="image", code="unsupported_content")
    if len(places) > MOST_IMAGES:
        message = f"{at} has {len(places)} images; a conversation has at most {MOST_IMAGES}"
        raise RequestError(message, hint="leave the oldest out", field=at, kind="image", code="limit_exceeded")
    try:
        with writing("keeping an image"):
            yield
    except DataError as error:
        wrong = error.picture if isinstance(error, ImageError) else None
        field = next((where for where, picture in places.items() if picture == wrong), at)
        raise RequestError(
            f"{field}: {error.message}", hint=error.hint, field=field, kind="image", code="invalid_image"
        ) from None
    except ModelError as error:
        raise RequestError(
            f"{at}: {error.message}", hint=error.hint, field=at, kind="image", code="unsupported_content"
        ) from None


def _pictures(messages: Sequence[Mapping[str, Any]], at: str) -> Iterator[tuple[str, Picture]]:
    """Yield the path to each image, and it."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if is_picture(part):
                yield f"{at}[{i}].content[{j}]", part["image"]


# ---- what is kept ----
def images_of(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str | None] | None:
    """Return the addresses of a prompt's images, None for one that is not kept; None where it has none."""
    firsts = [token for token in ids if is_of_image(token) and is_first(token)]
    if not firsts or (vision := vision_of(tokenizer)) is None:
        return None
    return [None if (picture := vision.picture(token)) is None else f"/v1/images/{picture.digest}" for token in firsts]


def folder_of(config: ServeConfig) -> Path:
    """Return where a server keeps images."""
    return config.state_dir.absolute() / IMAGES


def prune(config: ServeConfig, ledger: Ledger) -> None:
    """Remove the images that were not used for as long as rollouts are kept, before the oldest job that the ledger has;
    and the longest unused ones beyond `rollout_bytes`. Raises StorageError."""
    folder = folder_of(config)
    oldest = min((job.created_at for job in (*ledger.jobs(), *ledger.unfinished())), default=time.time())
    with writing("removing old images"):
        used = sorted(((path.stat().st_mtime, path) for path in kept_pictures(folder)), reverse=True)
        total = 0
        for at, path in used:
            total += path.stat().st_size
            if at < oldest - KEEP_SECONDS or total > config.rollout_bytes:
                path.unlink(missing_ok=True)
        for draft in folder.glob("*.tmp"):
            with suppress(FileNotFoundError):
                if draft.stat().st_mtime < time.time() - KEEP_SECONDS:
                    os.unlink(draft)


@router.get("/{digest}", **_SHOWN)
async def show_image(digest: str, parts: Kept) -> Response:
    """Return an image that a request brought, by the SHA-256 of its file, as a rollout names it."""
    return await run_in_threadpool(shown_image, folder_of(parts.config), digest, hint=HINT)
