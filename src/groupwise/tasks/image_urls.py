"""Finds the addresses of images in rows and in requests, and puts the fetched pictures in their place.

    addresses_in    (path, address) of every image part that names one, in nested lists and mappings
    fetched         a row with pictures in place of its addresses;  kept_at  where they are kept

A picture that was fetched for a row stays in the user's cache under its address, so that a resumed run, and the next
run, see the same picture. `groupwise` removes nothing there; remove the folder to have images fetched again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from groupwise.config.images import ImagesConfig, allowed, is_address
from groupwise.pictures import COLUMNS, Picture, read_picture
from groupwise.tasks.fetching import fetch_picture, not_fetched
from groupwise.tasks.row_images import HOLDERS, KINDS

AT_ONCE = 8  # images of rows


def addresses_in(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield where each image part stands that has an address, as errors name it, and that address."""
    open_ends: list[tuple[str, Any]] = [(path, value)]
    while open_ends:
        path, value = open_ends.pop()
        if isinstance(value, list | tuple):
            open_ends += [(f"{path}[{i}]", each) for i, each in reversed([*enumerate(value)])]
        elif isinstance(value, Mapping):
            if (found := _held(value)) is not None:
                keys, address = found
                yield ".".join((path, *keys)).removeprefix("."), address
                continue
            open_ends += [(f"{path}.{key}".removeprefix("."), value[key]) for key in reversed([*value])]


def _held(part: Mapping[Any, Any]) -> tuple[tuple[str, ...], str] | None:
    """Return the keys to the address that an image part holds, and it."""
    if part.get("type") not in KINDS:
        return None
    for name in HOLDERS:
        held: Any = part.get(name)
        if is_address(held):
            return (name,), held
        if isinstance(held, Mapping) and is_address(within := held.get("url")):
            return (name, "url"), within
    return None


def fetched(row: Any, config: ImagesConfig, *, id: str) -> Any:
    """Return a row with pictures in place of the addresses of its image columns and image parts; as it is where none is
    allowed.

    Raises:
        DataError: an address is not allowed, or what is there is no image. It names the row and the column or part.
    """
    if not config.allowed_hosts or not isinstance(row, Mapping):
        return row

    def get(address: str, where: str) -> Picture:
        return _kept(address, config, where=where)

    columns = {name: _of_column(row[name], get, f"{id}: {name}") for name in COLUMNS if row.get(name) is not None}
    said = {name: _of_parts(row[name], get, f"{id}: {name}") for name in row if _is_said(row[name])}
    return {**row, **columns, **said}


Get = Callable[[str, str], Picture]


def _is_said(value: Any) -> bool:
    """Return whether a column holds a message, or several."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, Mapping) and "role" in first


def _of_column(value: Any, get: Get, where: str) -> Any:
    if isinstance(value, list | tuple):
        return [_of_column(each, get, f"{where}[{i}]") for i, each in enumerate(value)]
    address = value.get("path") if isinstance(value, Mapping) and value.get("bytes") is None else value
    return get(address, where) if is_address(address) else value


def _of_parts(value: Any, get: Get, where: str) -> Any:
    if isinstance(value, list | tuple):
        return [_of_parts(each, get, f"{where}[{i}]") for i, each in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if (found := _held(value)) is not None:
        return {"type": "image", "image": get(found[1], where)}
    return {key: _of_parts(each, get, f"{where}.{key}") for key, each in value.items()}


def kept_at(address: str) -> Path:
    """Return where the image of an address is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "groupwise" / "images" / hashlib.sha256(address.encode()).hexdigest()


def _kept(address: str, config: ImagesConfig, *, where: str) -> Picture:
    """Return the picture at an address, fetched if it was not before."""
    hosts, path = config.hosts, kept_at(address)
    try:
        allowed(address, hosts)  # also of what was fetched under another configuration
    except ValueError as error:
        raise not_fetched(address, str(error), where=where) from None
    if not path.exists():
        data = fetch_picture(address, hosts, where=where).data
        from groupwise.store import files  # it imports numpy, and most rows name no address

        with files.writing("keeping an image"):
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(path, data)
    return read_picture(path, where=where)
