"""Adapters as tar.gz: what an upload may hold, and the stream of a download.

    adapter_config.json, adapter_model.safetensors     at the top, or both inside one directory; the only files read
    other plain files and directories                  skipped (README.md, tokenizer files, ...)
    everything else                                    refused: links, devices, FIFOs, paths that lead out, pickles,
                                                       a second file of the same name

Nothing is extracted by its path: a member's name only decides which of two fixed names its bytes are written to. Every
part has a byte budget, counted in what comes OUT of gzip, so that a bomb costs its sender what it costs the server.

Python's tarfile is not used for reading. It takes extended headers of any length into memory and follows sizes that
the archive states (CVE-2024-6232, CVE-2025-8194); the part of the format that an adapter needs is one struct.

    tar: records of 512 bytes. A header says name and size, the data follows, filled up to whole records; two records
    of zeros end it. Types x, g, L and K are headers that describe the next member: x and L may carry its long name.
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, NoReturn

from groupwise.errors import AdapterError
from groupwise.store.files import CONFIG, MAX_CONFIG_BYTES, MAX_HEADER_BYTES, MAX_WEIGHTS_BYTES, WEIGHTS, check_adapter

MAX_HEADERS = 1024
MAX_SKIPPED_BYTES = 64 << 20  # of files that are not read
MAX_DESCRIPTION_BYTES = 16 << 10  # of an x, g, L or K header
MAX_GZIP_MEMBERS = 1024  # one after another; gzip and PEFT write one
MAX_EMPTY_BYTES = 1 << 16  # of gzip that come to no byte of the archive: names, comments, empty blocks and members

_BLOCK = 512
_CHUNK = 1 << 20
_READ = 1 << 14  # bytes of gzip that are looked at together
_FILE, _DIRECTORY, _DESCRIPTIONS = (b"0", b"\0"), b"5", (b"x", b"g", b"L", b"K")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a FIFO"}
_BUDGETS = {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: MAX_WEIGHTS_BYTES}
_HINT = f"send a tar.gz of the directory that PEFT saved: {CONFIG} and {WEIGHTS}"


class Member(NamedTuple):
    """A tar header."""

    name: str
    kind: bytes
    size: int


# --- reading ---


def read_archive(stream: BinaryIO, directory: Path) -> None:
    """Write an uploaded archive's two files into `directory`, which is empty.

    Raises:
        AdapterError: it is not a whole tar.gz, holds something that an adapter does not, or is over a limit.
    """
    reader = _Reader(stream)
    found: dict[str, str] = {}  # file name -> the directory it is in
    skipped = 0
    for member in _members(reader):
        name = _wanted(member, found)
        if name:
            _write(reader, member, directory / name)
            continue
        skipped += member.size
        if skipped > MAX_SKIPPED_BYTES:
            _refuse(f"its other files have more than {MAX_SKIPPED_BYTES:,} bytes")
        reader.skip(member.size)
    for name in _BUDGETS:
        if name not in found:
            _refuse(f"it has no {name}")
    if len(set(found.values())) > 1:
        _refuse(f"{CONFIG} is in {found[CONFIG]!r} and {WEIGHTS} is in {found[WEIGHTS]!r}")
    check_adapter(directory)


class _Reader:
    """The bytes that come out of gzip, whole records or none."""

    def __init__(self, stream: BinaryIO):
        self._stream, self._inflate = stream, _new_member()
        self._begun, self._members, self._empty = False, 1, 0
        self._in, self._out = b"", bytearray()

    def read(self, size: int) -> bytes:
        """Read `size` bytes. Only the end of the archive may have none."""
        data = self.rest(size)
        if data and len(data) < size:
            _refuse("it ends in the middle of a member")
        return data

    def _more(self, size: int) -> bool:
        """Unpack more of the archive. Return False at the end."""
        self._in = self._in or self._stream.read(_READ)
        if not self._in:
            if self._begun and not self._inflate.eof:
                _refuse("it is not a whole gzip file: it ends before its checksum")
            return False
        if self._inflate.eof:
            self._in = self._in.lstrip(b"\0")  # tapes are filled up with zeros
            if self._in:
                self._next_member()
            return True
        try:
            data = self._inflate.decompress(self._in, max(_CHUNK, size))
        except zlib.error as error:
            _refuse(f"it is not a whole gzip file: {error}")
        used = len(self._in) - len(self._inflate.unconsumed_tail) - len(self._inflate.unused_data)
        self._begun, self._in = True, self._inflate.unconsumed_tail or self._inflate.unused_data
        self._out += data
        self._empty = 0 if data else self._empty + used
        if self._empty > MAX_EMPTY_BYTES:
            _refuse(f"more than {MAX_EMPTY_BYTES:,} bytes of gzip in a row unpack to nothing")
        return True

    def _next_member(self) -> None:
        self._members += 1
        if self._members > MAX_GZIP_MEMBERS:
            _refuse(f"it is more than {MAX_GZIP_MEMBERS} gzip files in a row")
        self._inflate = _new_member()

    def rest(self, size: int) -> bytes:
        """Read at most `size` of the remaining bytes."""
        while len(self._out) < size and self._more(size):
            pass
        data = bytes(self._out[:size])
        del self._out[:size]
        return data

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield a member's data; what fills up its last record is dropped."""
        left = size
        while left:
            data = self.read(min(left, _CHUNK))
            if not data:
                _refuse("it ends in the middle of a member")
            left -= len(data)
            yield data
        self.read(-size % _BLOCK)

    def skip(self, size: int) -> None:
        for _ in self.chunks(size):
            pass


def _new_member() -> Any:
    return zlib.decompressobj(16 + zlib.MAX_WBITS)


def _members(reader: _Reader) -> Iterator[Member]:
    """Yield the files, directories and special files, each under its long name. The consumer reads or skips the
    data."""
    long_name = ""
    for _ in range(MAX_HEADERS):
        header = reader.read(_BLOCK)
        if not header.strip(b"\0"):  # or none at all: gzip's checksum says that nothing is missing
            _drain(reader)
            return
        member = _parse(header)
        if member.kind not in _DESCRIPTIONS:
            yield member._replace(name=long_name or member.name)
            long_name = ""
            continue
        if member.size > MAX_DESCRIPTION_BYTES:
            _refuse(f"a header describes a member in {member.size:,} bytes; the limit is {MAX_DESCRIPTION_BYTES:,}")
        text = b"".join(reader.chunks(member.size))
        if member.kind == b"L":
            long_name = text.rstrip(b"\0").decode("utf-8", "replace")
        elif member.kind == b"x":
            long_name = _pax_path(text) or long_name
    _refuse(f"it has more than {MAX_HEADERS} members")


def _drain(reader: _Reader) -> None:
    """Read to gzip's checksum. Only zeros may follow the end: GNU tar fills up to 10 kB."""
    for _ in range(MAX_SKIPPED_BYTES // _CHUNK):
        filling = reader.rest(_CHUNK)
        if not filling:
            return
        if filling.strip(b"\0"):
            break
    _refuse("something follows its end")


def _parse(header: bytes) -> Member:
    """name[100] mode[8] uid[8] gid[8] size[12] mtime[12] checksum[8] type[1] link[100] magic[8] ... prefix[155]"""
    checksum = sum(header[:148]) + sum(header[156:]) + 8 * ord(" ")
    size = _octal(header[124:136])
    if size is None or _octal(header[148:156]) != checksum:
        _refuse("a header is damaged: its size or its checksum is wrong")
    name, kind = _text(header[:100]), header[156:157]
    if header[257:263] == b"ustar\0" and (prefix := _text(header[345:500])):
        name = f"{prefix}/{name}"
    return Member(name, kind, 0 if kind == _DIRECTORY else size)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "replace")


def _octal(field: bytes) -> int | None:
    """Return a number of a header; None if it is not octal (base 256, for files over 8 GiB, is not)."""
    digits = field.strip(b" \0")
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else None


def _pax_path(text: bytes) -> str | None:
    """Return the `path` of an extended header: lines of "<length> <key>=<value>"."""
    while text:
        length, _, _ = text.partition(b" ")
        if not re.fullmatch(rb"[0-9]{1,5}", length) or not len(length) < int(length) <= len(text):
            _refuse("an extended header is damaged")
        line, text = text[: int(length)], text[int(length) :]
        key, _, value = line[len(length) + 1 :].rstrip(b"\n").partition(b"=")
        if key == b"path":
            return value.decode("utf-8", "replace")
    return None


def _wanted(member: Member, found: dict[str, str]) -> str | None:
    """Return which of the two files `member` is, if any; notes it in `found`. Raises AdapterError if it must not be
    there."""
    shown = repr(member.name[:120])
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts or "\\" in member.name or "\0" in member.name:
        _refuse(f"{shown} leads out of it")
    if member.kind == _DIRECTORY or (member.kind in _FILE and member.name.endswith("/")):
        return None
    if member.kind not in _FILE:
        _refuse(f"{shown} is {_KINDS.get(member.kind, 'neither a file nor a directory')}")
    name = parts[-1] if parts else ""
    if Path(name).suffix.lower() in _PICKLES:
        raise AdapterError(
            f"{shown} may hold a pickle, which can run code when it is loaded",
            hint=f"leave it out; the weights belong in {WEIGHTS} (PEFT: safe_serialization=True)",
        )
    if name not in _BUDGETS or len(parts) > 2:
        return None
    if name in found:
        _refuse(f"{name} is in it twice")
    found[name] = "".join(parts[:-1])
    return name


def _write(reader: _Reader, member: Member, path: Path) -> None:
    if member.size > _BUDGETS[path.name]:
        _refuse(f"{path.name} has {member.size:,} bytes; the limit is {_BUDGETS[path.name]:,}")
    with path.open("xb") as file:
        for index, data in enumerate(reader.chunks(member.size)):
            if index == 0 and path.name == WEIGHTS and int.from_bytes(data[:8], "little") > MAX_HEADER_BYTES:
                _refuse(f"{WEIGHTS} is not a safetensors file: it does not begin with a header's length")
            file.write(data)


def _refuse(what: str) -> NoReturn:
    raise AdapterError(f"the archive cannot be read as an adapter: {what}", hint=_HINT)


# --- writing ---


def stream_archive(directory: Path, *, top: str) -> Iterator[bytes]:
    """Return the tar.gz of an adapter directory, its two files under `top`/. The same version gives the same bytes.

    The files are opened at once: the version may be deleted while it is sent.
    """
    files: list[tuple[str, IO[bytes]]] = [(name, (directory / name).open("rb")) for name in _BUDGETS]
    return _compressed(_records(files, top))


def _compressed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    gzipped = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # trained weights hardly compress
    for piece in pieces:
        if data := gzipped.compress(piece):
            yield data
    yield gzipped.flush()


def _records(files: list[tuple[str, IO[bytes]]], top: str) -> Iterator[bytes]:
    with ExitStack() as stack:
        for name, file in files:
            stack.enter_context(file)
            header = tarfile.TarInfo(f"{top}/{name}")
            header.size = file.seek(0, 2)
            file.seek(0)
            yield header.tobuf(tarfile.USTAR_FORMAT)
            while data := file.read(_CHUNK):
                yield data
            yield bytes(-header.size % _BLOCK)
    yield bytes(2 * _BLOCK)
