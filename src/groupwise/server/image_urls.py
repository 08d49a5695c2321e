"""Fetches images that requests name by an address: finds them in a body, fetches them without blocking the event loop,
and provides them while the body is read.

    find_addresses(raw, ...)     the addresses and their places, without reading the body otherwise
    RemoteImages.fetched(...)    the pictures of these addresses, by address
    knowing(pictures, read)      `read` with these pictures for their addresses (`dialects.images.FETCHED`)

Used only if the configuration allows hosts (`images.allowed_hosts`) and the model takes images. The number of images
fetched at once is limited for all requests together, and for each request to a part of that; a request's images may
have together no more bytes than a body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from groupwise.config.serve import ServeConfig
from groupwise.errors import DataError, RequestError
from groupwise.model.image_tokens import vision_of
from groupwise.pictures import MOST_BYTES, Picture
from groupwise.server.images import MOST_IMAGES, folder_of
from groupwise.store.files import writing
from groupwise.tasks.dialects.images import FETCHED
from groupwise.tasks.fetching import fetch_picture
from groupwise.tasks.image_urls import addresses_in

if TYPE_CHECKING:
    from groupwise.server.reader import TextModel

AT_ONCE = 16  # images that are fetched
OF_ONE = 4  # ... for one request
SECONDS = 60.0  # for all of a request
CODE = "invalid_image"

Found = list[tuple[str, str]]


class RemoteImages:
    """Fetches images for the requests of one server."""

    def __init__(self, config: ServeConfig, base: TextModel):
        vision = vision_of(base.tokenizer)
        self.are_allowed = bool(config.images.allowed_hosts) and vision is not None
        self._hosts, self._most, self._folder = config.images.hosts, config.chat_body_bytes, folder_of(config)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="groupwise-fetch")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetched(self, found: Found) -> Mapping[str, Picture]:
        """Return the pictures of the addresses that `find_addresses` found, each kept as posted ones are.

        Raises:
            RequestError: there are too many (limit_exceeded), or one is not fetched (invalid_image), with its place.
            StorageError: one cannot be kept.
        """
        first: dict[str, str] = {}
        for place, address in found:
            first.setdefault(address, place)
        if len(first) > MOST_IMAGES:
            message = f"the body names {len(first)} images by their addresses; at most {MOST_IMAGES} are fetched"
            raise RequestError(message, hint="leave the oldest out", kind="image", code="limit_exceeded")
        mine, left = asyncio.Semaphore(OF_ONE), [self._most]

        async def get(address: str, place: str) -> tuple[str, Picture]:
            async with mine:
                work = partial(self._get, address, place, min(MOST_BYTES, left[0]))
                picture, size = await asyncio.get_running_loop().run_in_executor(self._threads, work)
            left[0] -= size
            if left[0] < 0:
                message = f"the images that the body names have more than {self._most:,} bytes together"
                raise RequestError(message, hint="raise chat_body_bytes", field=place, kind="image", code=CODE)
            return address, picture

        tasks = [asyncio.ensure_future(get(address, place)) for address, place in first.items()]
        try:
            async with asyncio.timeout(SECONDS):
                return dict(await asyncio.gather(*tasks))
        except TimeoutError:
            message = f"the {len(first)} images that the body names were not there within {SECONDS:g} s"
            raise RequestError(message, hint="name fewer, or send their bytes", kind="image", code=CODE) from None
        finally:
            for task in tasks:
                task.cancel()

    def _get(self, address: str, place: str, most: int) -> tuple[Picture, int]:
        """Return the picture at an address, kept in the server's folder, and its bytes."""
        try:
            picture = fetch_picture(address, self._hosts, where=place, most=most)
        except DataError as error:
            raise RequestError(error.message, hint=error.hint, field=place, kind="image", code=CODE) from None
        with writing("keeping an image"):
            return picture.keep(self._folder), len(picture.data)


def find_addresses(raw: bytes, base: TextModel, config: ServeConfig, *_: Any, **known: Any) -> Found:
    """Return the addresses of images, with their places, in a body and in the conversation that it continues
    (`history`). A body that is not JSON has none; its reader reports the error."""
    try:
        body = from_json(raw)
    except ValueError:
        return []
    return [*addresses_in(body), *addresses_in(known.get("history") or (), "history")]


def knowing(pictures: Mapping[str, Picture], read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `read` for which these addresses are pictures."""
    return partial(_read_knowing, pictures, read)


def _read_knowing(pictures: Mapping[str, Picture], read: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    token = FETCHED.set(pictures)
    try:
        return read(*args, **kwargs)
    finally:
        FETCHED.reset(token)
