"""Puts the images of a row into the messages of its prompt.

    {"prompt": [{"role": "user", "content": "How many dots?"}], "image": "dots/7.png", "answer": "7"}
    {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ".."}]}], "images": ["7.png"]}
    {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,.."}}]}]}

An image part that holds no image gets the next one of the columns `images` or `image`; where the messages have no image
part, the column's images stand in front of the first message of the user's. What an image may be: `read_picture`. Every
image part becomes {"type": "image", "image": Picture}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from groupwise.errors import DataError
from groupwise.pictures import COLUMNS, Picture, read_picture
from groupwise.types import Message

KINDS = ("image", "image_url", "input_image")  # of parts: Hugging Face's and Anthropic's, OpenAI's, OpenAI's Responses
HOLDERS = ("image", "image_url", "url", "path", "base64", "source")  # where a part may have its image


def with_images(
    messages: tuple[Message, ...], columns: Mapping[str, Any], *, folder: Path, id: str
) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """Return the messages with their images, and the columns with theirs as pictures.

    Raises:
        DataError: an image cannot be read, there are two columns of images, or there are not as many images as the
            messages have places for.
    """
    held = {name: columns[name] for name in COLUMNS if _any(columns.get(name))}
    if len(held) > 1:
        raise DataError(f"{id}: there are images in both 'images' and 'image'", hint="leave one of the columns out")
    pictures = {name: _pictures(value, folder=folder, where=f"{id}: {name}") for name, value in held.items()}
    given = iter([*next(iter(pictures.values()), ())])
    if not any(_is_image(part) for message in messages for part in _parts(message)):
        messages = _in_front(messages, [*given])
    else:
        messages = tuple(
            _filled(message, given, folder=folder, where=f"{id}: message {i}") for i, message in enumerate(messages)
        )
        if left := len([*given]):
            raise DataError(f"{id}: {left} more images than image parts in the messages")
    one = {name: each if isinstance(held[name], list | tuple) else each[0] for name, each in pictures.items()}
    return messages, {**columns, **one}


def read_images(message: Mapping[str, Any], *, where: str, folder: Path = Path()) -> Message:
    """Return a message with its images as pictures. Raises DataError where an image part has none, or one that cannot
    be read."""
    return _filled(cast(Message, message), iter(()), folder=folder, where=where)


def _any(value: Any) -> bool:
    return value is not None and not (isinstance(value, list | tuple) and not value)


def _pictures(value: Any, *, folder: Path, where: str) -> list[Picture]:
    if not isinstance(value, list | tuple):
        return [read_picture(value, folder=folder, where=where)]
    return [read_picture(each, folder=folder, where=f"{where}[{i}]") for i, each in enumerate(value)]


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def _in_front(messages: tuple[Message, ...], pictures: Sequence[Picture]) -> tuple[Message, ...]:
    """Return the messages with pictures before the text of the first message of the user's."""
    if not pictures:
        return messages
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    content = messages[at].get("content")
    text = list(content) if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
    whole = [*({"type": "image", "image": picture} for picture in pictures), *text]
    return (*messages[:at], cast(Message, {**messages[at], "content": whole}), *messages[at + 1 :])


def _filled(message: Message, given: Iterator[Picture], *, folder: Path, where: str) -> Message:
    if not any(map(_is_image, _parts(message))):
        return message
    parts = [
        {"type": "image", "image": _held(part, given, folder=folder, where=f"{where}, part {i}")}
        if _is_image(part)
        else part
        for i, part in enumerate(_parts(message))
    ]
    return cast(Message, {**message, "content": parts})


def _held(part: Mapping[str, Any], given: Iterator[Picture], *, folder: Path, where: str) -> Picture:
    """Return the image that a part holds, or the next of the column's."""
    value = next((part[name] for name in HOLDERS if part.get(name) is not None), None)
    if value is None:
        if (picture := next(given, None)) is None:
            raise DataError(f"{where} is an image, and there is none for it", hint="name it in a column 'images'")
        return picture
    if isinstance(value, Mapping) and "url" in value:  # OpenAI's
        value = value["url"]
    elif isinstance(value, Mapping) and value.get("type") == "base64":  # Anthropic's
        value = f"data:{value.get('media_type', 'image/png')};base64,{value.get('data', '')}"
    elif part.get("base64") is value:
        value = f"data:image/png;base64,{value}"
    return read_picture(value, folder=folder, where=where)
