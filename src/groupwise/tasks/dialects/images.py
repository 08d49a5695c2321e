"""Images in requests: what clients post becomes pictures here, at the door, in each dialect.

    ImageUrl       a data: URL; it is a `Picture` once its part was checked
    DataUrl        the same, checked and left as it is;  Base64Image  bytes in base64, likewise

A request brings its images' bytes. Addresses of any scheme are not fetched here, and files are not opened; the pictures
that the request's reader has fetched before are in `FETCHED`, by address.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, InstanceOf, WithJsonSchema

from groupwise.errors import DataError
from groupwise.pictures import Picture, read_picture
from groupwise.tasks.dialects.form import LONGEST_SHOWN, fault

HINT = "send a data: URL (data:image/png;base64,...) of a PNG, JPEG, WebP, GIF, BMP or TIFF"

FETCHED: ContextVar[Mapping[str, Picture]] = ContextVar("FETCHED", default={})  # noqa: B039


def _picture(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if (picture := FETCHED.get().get(value)) is not None:
        return picture
    if value[:5].lower() != "data:":
        shown = repr(value[:LONGEST_SHOWN])
        raise fault(
            "invalid_image", "is {shown}; addresses are not fetched, and files not opened", shown=shown, hint=HINT
        )
    try:
        return read_picture(f"data:{value[5:]}", where="this")
    except DataError as error:
        raise fault("invalid_image", "{why}", why=error.message, hint=error.hint or HINT) from None


ImageUrl = Annotated[
    InstanceOf[Picture],
    BeforeValidator(_picture),
    WithJsonSchema({"type": "string", "format": "uri", "pattern": "^([Dd][Aa][Tt][Aa]|[Hh][Tt][Tt][Pp][Ss]?):"}),
]


def _readable_url(value: str) -> str:
    _picture(value)
    return value


def _readable_base64(value: str) -> str:
    _picture(as_data_url(value))
    return value


DataUrl = Annotated[str, AfterValidator(_readable_url)]
Base64Image = Annotated[str, AfterValidator(_readable_base64)]


def fetched_base64(address: Any) -> str | None:
    """Return the bytes of an image that was fetched, in base64; None where it was not."""
    picture = FETCHED.get().get(address) if isinstance(address, str) else None
    return None if picture is None else base64.b64encode(picture.data).decode()


def as_data_url(encoded: str) -> str:
    """Return an image's bytes in base64 as a URL. What kind of image it is, its bytes say."""
    return f"data:;base64,{encoded}"
