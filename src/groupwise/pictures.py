"""Reads images: from files, bytes and data URLs to bounded, content-addressed pictures.

    read_picture    whatever a dataset's cell or a message's part has -> Picture
    Picture         the bytes of an image file, known by their SHA-256; `pixels` decodes them
    decoding        a bound of the pixels that a thread decodes, for work that others wait for
    pictures_in     the pictures of a conversation
    text_of         a message's content as people read it, images or not

A picture is checked before it is decoded: its bytes, its format, its pixels and that it is one frame. Decoding turns it
as its EXIF tag says, as people see it, and gives RGB. Formats that run code or hold documents (SVG, PDF, EPS) are not
read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from groupwise.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMNS = ("images", "image")  # of rows, and of what rewards get
NAMED = "sha256:"  # what records call a picture begins so, and ends with its digest
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MOST_BYTES = 32 << 20
MOST_PIXELS = 50_000_000  # 150 MB once decoded
HINT = "give a path, a file: or data: URL, the file's bytes, or a PIL image, of PNG, JPEG, WebP, GIF, BMP or TIFF"


class ImageError(DataError):
    """A picture cannot be decoded, or is one that a model does not take."""

    def __init__(self, picture: Picture, message: str, *, hint: str):
        super().__init__(message, hint=hint, kind="image")
        self.picture = picture


class TooManyPixels(Exception):
    """An image was not decoded here: with it there were more pixels than `decoding` allows."""


@dataclass
class _Allowance:
    """Pixels that are still decoded."""

    left: int


_ALLOWANCE = ContextVar[_Allowance | None]("_ALLOWANCE", default=None)


@contextmanager
def decoding(pixels: int) -> Iterator[None]:
    """Context manager in which images of this many pixels are decoded, all together. `Picture.pixels` raises
    TooManyPixels for the first one beyond them, once its head is read."""
    token = _ALLOWANCE.set(_Allowance(pixels))
    try:
        yield
    finally:
        _ALLOWANCE.reset(token)


class Picture:
    """An image file, known by the SHA-256 of its bytes, in hexadecimal digits: its `digest`. Two are equal where these
    are. The bytes of one that has a `path` are read again where they are needed, so that a set of many images takes no
    memory; `data` raises DataError where the file is not there any more, or is another one."""

    def __init__(self, data: bytes, *, path: Path | None = None):
        self.digest = hashlib.sha256(data).hexdigest()
        self.path = None if path is None else path.absolute()
        self._held = data if path is None else None

    @property
    def data(self) -> bytes:
        """Return the bytes of the file."""
        if self._held is not None:
            return self._held
        assert self.path is not None
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise DataError(f"an image cannot be read again: {error}", kind="image") from error
        if hashlib.sha256(data).hexdigest() != self.digest:
            message = f"{self.path} is another image than the one that was read before"
            raise DataError(message, hint="leave the files of a dataset as they are while it is used", kind="image")
        return data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Picture({self})"

    def __str__(self) -> str:
        """Return the picture as records name it."""
        return f"{NAMED}{self.digest}"

    @property
    def url(self) -> str:
        """Return the image as a data: URL, which `read_picture` reads."""
        return f"data:;base64,{base64.b64encode(self.data).decode()}"

    def keep(self, folder: Path) -> Picture:
        """Write the file `<digest>.<format>` into `folder`. Returns the picture of that file."""
        with _opened(data := self.data) as image:
            path = folder / f"{self.digest}.{str(image.format).lower()}"
        if not (kept := Picture(data, path=path)).used(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (draft := path.with_suffix(f".{os.getpid()}-{get_ident()}.tmp")).write_bytes(data)
            draft.replace(path)
        return kept

    def used(self, folder: Path) -> bool:
        """Note at its file, if that is in `folder`, that it was used now. Returns whether it is there."""
        if self.path is None or self.path.parent != folder.absolute():
            return False
        try:
            os.utime(self.path)
        except FileNotFoundError:
            return False
        return True

    def pixels(self) -> Image:
        """Return the decoded image, RGB, upright.

        Raises:
            ImageError: it cannot be decoded, as where the file was cut off.
            TooManyPixels: it is to be decoded elsewhere (`decoding`).
        """
        from PIL import ImageOps

        data = self.data
        try:
            with _opened(data) as image:
                _take(*image.size)
                return ImageOps.exif_transpose(image).convert("RGB")
        except TooManyPixels:
            raise
        except Exception as error:  # PIL's readers raise anything
            raise ImageError(self, f"an image cannot be decoded: {error}", hint=HINT) from error


def read_picture(given: Any, *, folder: Path = Path(), where: str = "an image") -> Picture:
    """Return the picture that a cell or a part holds: a Picture, a PIL image, bytes, Hugging Face's {"bytes", "path"},
    a path (relative ones from `folder`), or a `file:` or `data:` URL.

    Raises:
        DataError: `where` is not an image, cannot be read, or is beyond the bounds. Nothing of it was decoded.
    """
    if isinstance(given, Picture):
        return given
    try:
        path = _path_of(given, folder)
        data = _bytes_of(given) if path is None else _of_file(path)
        _check(data)
    except Exception as error:  # PIL's readers raise anything, and a file may be hostile
        raise DataError(
            f"{where} is {_shown(given)}, which cannot be read as an image: {error}", hint=HINT, kind="image"
        ) from error
    return Picture(data, path=path)


def _path_of(given: Any, folder: Path) -> Path | None:
    """Return the file that is named; None where the image itself is given."""
    if isinstance(given, Mapping) and given.get("bytes") is None and given.get("path") is not None:
        return _path_of(given["path"], folder)
    if isinstance(given, str) and not given.startswith("data:"):
        parts = urlsplit(given)
        if parts.scheme in ("http", "https", "ftp", "s3", "gs"):
            raise ValueError(f"{parts.scheme} addresses are not fetched here; download it, or see images.allowed_hosts")
        if parts.scheme == "file":
            from urllib.request import url2pathname  # it imports an HTTP client

            return Path(url2pathname(unquote(parts.path)))
        return folder / Path(given).expanduser()
    return folder / given.expanduser() if isinstance(given, Path) else None


def _bytes_of(given: Any) -> bytes:
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, Mapping) and given.get("bytes") is not None:
        return _bytes_of(given["bytes"])
    if isinstance(given, str):
        return _of_data_url(given)
    if is_image(given):
        return _of_pil(given)
    raise ValueError(f"it is a {type(given).__name__}")


def _of_file(path: Path) -> bytes:
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"the file has {size:,} bytes; at most {MOST_BYTES:,} are read")
    return path.read_bytes()


def _of_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise ValueError("a data: URL has a comma in front of its content")
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(unquote(body), validate=True)
    except binascii.Error as error:
        raise ValueError(f"its base64 is wrong: {error}") from error


def _of_pil(image: Any) -> bytes:
    """Return a PNG of the image."""
    written = io.BytesIO()
    image.convert("RGB").save(written, format="PNG")
    return written.getvalue()


def _check(data: bytes) -> None:
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data):,} bytes; at most {MOST_BYTES:,} are read")
    with _opened(data) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise ValueError(f"it has {width} x {height} pixels; at most {MOST_PIXELS:,} are read")
        if (frames := getattr(image, "n_frames", 1)) > 1:
            raise ValueError(f"it has {frames} frames; a still image has one")


def _take(width: int, height: int) -> None:
    """Take an image's pixels from what may be decoded here. Raises TooManyPixels."""
    if (allowance := _ALLOWANCE.get()) is not None:
        if width * height > allowance.left:
            raise TooManyPixels
        allowance.left -= width * height


def _opened(data: bytes) -> Image:
    """Return the image with its header read, and nothing decoded."""
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=FORMATS)


def _shown(given: Any) -> str:
    if isinstance(given, bytes | bytearray | memoryview):
        return f"{len(given)} bytes"
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:77]}..."


def pictures_in(messages: Iterable[Mapping[str, Any]]) -> list[Picture]:
    """Return the pictures of a conversation, in order: those of its image parts."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = chain.from_iterable(content for content in contents if isinstance(content, list | tuple))
    return [part["image"] for part in parts if is_picture(part)]


def kept_pictures(folder: Path, beginning: str = "") -> list[Path]:
    """Return the files of pictures that are kept in `folder` (`Picture.keep`) and whose digests begin so. What they are
    to begin with may be anything: it is compared with names, and names no file."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in names if name.startswith(beginning) and not name.endswith(".tmp")]


def is_image(value: Any) -> bool:
    """Return whether a value is a picture, or an image of PIL's."""
    pil = sys.modules.get("PIL.Image")  # who has one has imported it
    return isinstance(value, Picture) or (pil is not None and isinstance(value, pil.Image))


def is_picture(part: Any) -> bool:
    """Return whether a message's part is an image whose bytes are here."""
    return isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("image"), Picture)


def text_of(content: Any) -> str:
    """Return a message's content as people read it: its text, and [image] in the place of each image."""
    if isinstance(content, list | tuple):
        return " ".join(map(_text_of_part, content))
    return content if isinstance(content, str) else "" if content is None else str(content)


def _text_of_part(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "image":
        return "[image]"
    return str(part["text"]) if isinstance(part, Mapping) and isinstance(part.get("text"), str) else str(part)
