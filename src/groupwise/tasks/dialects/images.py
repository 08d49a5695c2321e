"""Images in requests: what clients post becomes pictures here, at the door, in each dialect.

    ImageUrl       a data: URL; it is a `Picture` once its part was checked
    DataUrl        the same, checked and left as it is;  Base64Image  bytes in base64, likewise

A request brings its images' bytes. Addresses are not fetched and files not opened, whatever their scheme.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, InstanceOf, WithJsonSchema

from groupwise.errors import DataError
from groupwise.pictures import Picture, read_picture
from groupwise.tasks.dialects.form import LONGEST_SHOWN, fault

HINT = "send a data: URL (data:image/png;base64,...) of a PNG, JPEG, WebP, GIF, BMP or TIFF"


def _picture(value: Any) -> Any:
    if not isinstance(value, str):
        return value
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
    WithJsonSchema({"type": "string", "format": "uri", "pattern": "^[Dd][Aa][Tt][Aa]:"}),
]


def _readable_url(value: str) -> str:
    _picture(value)
    return value


def _readable_base64(value: str) -> str:
    _picture(as_data_url(value))
    return value


DataUrl = Annotated[str, AfterValidator(_readable_url)]
Base64Image = Annotated[str, AfterValidator(_readable_base64)]


def as_data_url(base64: str) -> str:
    """Return an image's bytes in base64 as a URL. What kind of image it is, its bytes say."""
    return f"data:;base64,{base64}"
