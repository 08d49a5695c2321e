"""The calls of `client.adapters`: list, show, note, activate, roll back, delete, merge, upload, download."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO, Any
from urllib.parse import quote

import httpx2

from groupwise.errors import AdapterNotFoundError, StorageError
from groupwise.sdk.drivers import Awaiting, Awaits, Blocking, Blocks, ClientMethod
from groupwise.sdk.transport import ASK_S, MOVE_S, NEXT, SUBMIT_S, Flow, Flows, Form, Open, Send, breakdown
from groupwise.sdk.types import (
    AdapterDeleted,
    AdapterDetail,
    AdapterList,
    AdapterLoaded,
    AdapterMerged,
    AdapterNoted,
    AdapterUploaded,
    read,
)


class AdapterCalls(Flows):
    """The methods of `client.adapters`. A `name` may be "name@3" where one version is meant."""

    @ClientMethod
    def list(self, *, timeout: float = ASK_S) -> Flow[AdapterList]:
        """Return every adapter, and which version is active."""
        return self.ask(AdapterList, "/v1/adapters", timeout=timeout)

    @ClientMethod
    def show(self, name: str, *, timeout: float = ASK_S) -> Flow[AdapterDetail]:
        """Return one adapter, with where each of its versions came from."""
        return self.ask(AdapterDetail, _path(name), timeout=timeout)

    @ClientMethod
    def note(self, name: str, text: str | None, *, timeout: float = ASK_S) -> Flow[AdapterNoted]:
        """Keep one line of text about a version, in place of the one before; None removes it."""
        return self.tell(AdapterNoted, f"{_path(name)}/notes", {"note": text}, timeout=timeout, method="PUT")

    @ClientMethod
    def activate(self, name: str, *, timeout: float = SUBMIT_S) -> Flow[AdapterLoaded]:
        """Let a version answer from now on: "name@3", "name" for its newest, or "base". It is verified first."""
        return self.tell(AdapterLoaded, f"{_path(name)}/activate", timeout=timeout)

    @ClientMethod
    def rollback(self, *, timeout: float = SUBMIT_S) -> Flow[AdapterLoaded]:
        """Go back to the version that was active before."""
        return self.tell(AdapterLoaded, "/v1/adapters/rollback", timeout=timeout)

    @ClientMethod
    def delete(self, name: str, *, timeout: float = ASK_S) -> Flow[AdapterDeleted]:
        """Delete an adapter with all its versions, or one version; the active one is refused."""
        return self.tell(AdapterDeleted, _path(name), timeout=timeout, method="DELETE")

    @ClientMethod
    def merge(
        self,
        sources: Mapping[str, float],
        output_name: str,
        *,
        mode: str = "weighted_average",
        density: float | None = None,
        timeout: float = MOVE_S,
    ) -> Flow[AdapterMerged]:
        """Make a new adapter from `sources`, name -> weight. Modes: weighted_average, ties (with `density`), concat."""
        body: dict[str, Any] = {"output_name": output_name, "mode": mode}
        body["sources"] = [{"name": name, "weight": weight} for name, weight in sources.items()]
        body |= {} if density is None else {"density": density}
        return self.tell(AdapterMerged, "/v1/adapters/merge", body, timeout=timeout)

    @ClientMethod
    def upload(
        self,
        name: str,
        source: Path | str,
        *,
        new_version: bool = False,
        any_base: bool = False,
        timeout: float = MOVE_S,
    ) -> Flow[AdapterUploaded]:
        """Upload a directory that PEFT saved, or a tar.gz of one, as an adapter; `new_version` adds to one that exists,
        and `any_base` takes one that names another base model than the one that is served."""
        flags = {"new_version": new_version, "any_base": any_base}
        fields = {"name": name} | {field: "true" for field, is_set in flags.items() if is_set}
        with _archive(Path(source), name) as file:
            answer = yield from self.exchange(Send("POST", "/v1/adapters/upload", timeout, form=Form(fields, file)))
        return read(AdapterUploaded, answer.json())

    @ClientMethod
    def download(self, name: str, target: Path | str, *, timeout: float = MOVE_S) -> Flow[Path]:
        """Write an adapter's newest version, or one version, to the file `target` (tar.gz), whole or not at all."""
        deadline = time.monotonic() + timeout
        step = Open("GET", f"{_path(name)}/download", timeout)
        yield from self.exchange(step)
        target = Path(target)
        with _storing(target), NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            part = Path(file.name)
            try:
                while piece := (yield NEXT):
                    file.write(piece)
                    if time.monotonic() > deadline:
                        raise httpx2.ReadTimeout("the archive came too slowly")
                file.flush()
                part.replace(target)
            except httpx2.RequestError as broken:
                raise breakdown(broken, step, url=self._url) from broken
            finally:
                part.unlink(missing_ok=True)
        return target


class Adapters(Blocks, AdapterCalls):
    """The adapters of a server, blocking."""

    def __init__(self, drive: Blocking, *, url: str, retries: int):
        super().__init__(url=url, retries=retries)
        self._drive = drive


class AsyncAdapters(Awaits, AdapterCalls):
    """The adapters of a server, asyncio."""

    def __init__(self, drive: Awaiting, *, url: str, retries: int):
        super().__init__(url=url, retries=retries)
        self._drive = drive


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='@')}"


@contextmanager
def _archive(source: Path, name: str) -> Iterator[IO[bytes]]:
    """Yield an open tar.gz: `source` itself, or one of the directory that it is."""
    from groupwise.store.archive import stream_archive

    try:
        with source.open("rb") if not source.is_dir() else TemporaryFile() as file:
            if source.is_dir():
                file.writelines(stream_archive(source, top=name))
                file.seek(0)
            yield file
    except FileNotFoundError as error:
        raise AdapterNotFoundError(
            f"there is no {error.filename}", hint="name a directory that PEFT saved, or a tar.gz of one"
        ) from None


@contextmanager
def _storing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError.of(
            error, f"cannot write {target}: {error.strerror or error}", hint="name another file"
        ) from error
