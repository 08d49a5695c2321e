"""Reads request bodies: parsed, validated, rendered and tokenised; long ones in worker processes.

    receive_body    a request's body as it arrives: in memory while it is short, then in a file without a name
    Reader          read(body, function): the function's result, from a thread or from a process that is forked for it
    TextModel       what such a function knows of the model: the tokenizer and a few numbers, and no weights

Parsing and tokenising keep Python's interpreter lock, which every request and the engine wait for; and a body can be
made so that either takes minutes and gigabytes. A short body costs milliseconds, and is read in a thread, unless it has
images of many pixels, which a file of a few kilobytes may. Such a one, once their heads are read, and a long one are
read in a process with a lower priority and a limit on its memory, which ends when the client leaves, when the request's
time is over, or with the server. Few run at once, and others wait for their turn; what they wait with is on the disk.

The processes are forked from one that has imported everything and holds the tokenizer (`reader_process`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from starlette.requests import Request

from groupwise.config.serve import MIB, ServeConfig
from groupwise.engine.forks import GO, ForkServer, frame
from groupwise.errors import BodyTooLargeError, GroupwiseError, NotReadyError
from groupwise.model.image_tokens import is_of_image, vision_of
from groupwise.pictures import TooManyPixels, decoding
from groupwise.recorded import RoutingShape
from groupwise.server.bodies import check_content_type
from groupwise.server.event_stream import while_connected
from groupwise.server.image_urls import RemoteImages, find_addresses, knowing
from groupwise.server.listen import INCOMING
from groupwise.store.files import writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.load import LoadedModel
    from groupwise.model.targets import AdaptableModules
    from groupwise.model.vision import Seen

SHORT = 1 << 16  # bytes of a body that is kept in memory, and read in a thread
PIXELS = 1 << 21  # of the images of a body that is read in a thread: some 30 ms of a processor
SHORT_TO_TRAIN = 1 << 14  # ... where a conversation comes to many more steps of work
THREADS = 2
LANES = {
    "sample": (2, 5),
    "train": (1, 10),
}  # processes that read at once, and by how much the server goes first (nice)
DONE = b"done"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A base model without its weights: enough to read what is asked of it."""

    name: str
    hash: str
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    vocabulary: int
    adaptable: AdaptableModules
    routing: RoutingShape | None

    @classmethod
    def of(cls, base: LoadedModel) -> TextModel:
        return cls(
            name=base.name,
            hash=base.hash,
            tokenizer=base.tokenizer,
            context_length=base.context_length,
            vocabulary=base.vocabulary,
            adaptable=base.adaptable,
            routing=base.routing,
        )

    def has(self, ids: Sequence[int]) -> bool:
        """Return whether a prompt's token ids are of this model: of its vocabulary, and of whole images that are kept
        here."""
        texts = [token for token in ids if not is_of_image(token)]
        if any(not 0 <= token < self.vocabulary for token in texts):
            return False
        vision = vision_of(self.tokenizer)
        return len(texts) == len(ids) or (vision is not None and vision.has(ids))


Read = Callable[Concatenate[bytes, TextModel, ServeConfig, P], T]


# ---- bodies ----
@dataclass(frozen=True)
class RawBody:
    """The bytes of a request. A long one is in `file`, and `raw` is empty. `digest` is its sha256, in hexadecimal."""

    size: int
    digest: str
    raw: bytes
    file: IO[bytes] | None = None


@asynccontextmanager
async def receive_body(http: Request, reader: Reader) -> AsyncIterator[RawBody]:
    """Yield the whole body of a request. The guard counts its bytes and its time.

    Raises BodyTooLargeError, SlowBodyError, OverloadedError as the guard, StorageError if the disk does not take it.
    """
    digest, size, pieces, pending = hashlib.sha256(), 0, list[bytes](), 0
    with ExitStack() as files:
        spool: _Spool | None = None
        async for piece in http.stream():
            size, pending = size + len(piece), pending + len(piece)
            pieces.append(piece)
            if size > SHORT and spool is None:
                spool = files.enter_context(_Spool(reader))
            if spool is not None and pending >= MIB:
                await spool.append(pieces, digest)
                pieces, pending = [], 0
        if spool is None:
            raw = b"".join(pieces)
            digest.update(raw)
            yield RawBody(size, digest.hexdigest(), raw)
        else:
            await spool.append(pieces, digest)
            yield RawBody(size, digest.hexdigest(), b"", spool.file)


class _Spool:
    """A file without a name in the state directory; the disk has it back when it is closed. Raises StorageError."""

    def __init__(self, reader: Reader):
        self._reader, self._busy = reader, Future[None]()
        self._busy.set_result(None)
        with writing("receiving a body"):
            reader.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=reader.directory, buffering=0)  # noqa: SIM115

    async def append(self, pieces: Sequence[bytes], digest: Any = None) -> None:
        """Write in a thread, and count into the digest."""
        self._busy = self._reader.submit(self._write, pieces, digest)
        await asyncio.wrap_future(self._busy)

    def _write(self, pieces: Sequence[bytes], digest: Any) -> None:
        with writing("receiving a body"):
            for piece in pieces:
                if digest is not None:
                    digest.update(piece)
                rest = memoryview(piece)
                while rest:
                    rest = rest[self.file.write(rest) :]

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        """Closed once no thread writes any more: its descriptor's number may be another file's at once."""
        self._busy.add_done_callback(lambda _: self.file.close())


# ---- reading ----
class Reader:
    """Reads the bodies of one server. Make it anywhere, use it in one event loop."""

    def __init__(self, base: TextModel, config: ServeConfig):
        self._base, self._config = base, config
        self.directory = config.state_dir.absolute() / INCOMING
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="groupwise-read")
        self._remote = RemoteImages(config, base)
        self._lanes = {lane: asyncio.Semaphore(count) for lane, (count, _) in LANES.items()}
        secretless = config.model_copy(update={"api_key": None, "webhook_secret": None})
        self._forks = ForkServer(
            "groupwise.server.reader_process", (base, secretless), without="long bodies cannot be read"
        )
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Have the process that forks before it is needed: it takes seconds to import everything."""
        async with self._starting:
            await asyncio.to_thread(self._forks.start)

    def close(self) -> None:
        self._forks.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._remote.close()

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `work` in one of this reader's threads; the threads that all routes share stay free."""
        return self._threads.submit(work, *args, **kwargs)

    async def read_json(self, http: Request, read: Read[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `read`'s result for a request's body, which is JSON.

        Raises:
            MediaTypeError: the content type is another.
            BodyTooLargeError: reading it takes more memory than one body may (reading_bytes).
            ClientGone: the client left while it was read.
            GroupwiseError: whatever `read` or `receive_body` raise.
        """
        async with receive_body(http, self) as body:
            check_content_type(http)
            return await self.read(http, body, read, *args, **kwargs)

    async def read(self, http: Request, body: RawBody, read: Read[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `read_json`, of a body that was received and whose content type was checked."""
        by_process = body.file is not None
        return await self._whole(http, "sample", body, read, *args, by_process=by_process, **kwargs)

    async def read_to_train(
        self, http: Request, body: RawBody, read: Read[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `read`, for what is to be trained: behind others of its kind, and not before requests that sample."""
        by_process = body.size > SHORT_TO_TRAIN
        return await self._whole(http, "train", body, read, *args, by_process=by_process, **kwargs)

    async def _whole(
        self, http: Request, lane: str, body: RawBody, read: Read[..., T], *args: Any, by_process: bool, **kwargs: Any
    ) -> T:
        """Return what `read` makes of a body, once the images are there whose addresses it has."""

        async def run(read: Read[..., Any]) -> Any:
            if not by_process:
                with suppress(TooManyPixels):
                    return await self._in_thread(read, body, *args, **kwargs)
            return await self._by_process(http, lane, body, (read, args, kwargs))

        if self._remote.are_allowed and (found := await run(find_addresses)):
            pictures = await while_connected(http, self._remote.fetched(found))
            return await run(knowing(pictures, read))
        return await run(read)

    async def _in_thread(self, read: Read[P, T], body: RawBody, *args: P.args, **kwargs: P.kwargs) -> T:
        work = partial(read, body.raw, self._base, self._config, *args, **kwargs)
        return await asyncio.wrap_future(self.submit(_of_few_pixels, work))

    async def _by_process(self, http: Request, lane: str, body: RawBody, task: tuple[Any, ...]) -> Any:
        async def work() -> ReadResult | None:
            async with self._lanes[lane]:
                return await self._fork(body, pickle.dumps((LANES[lane][1], *task)))

        outcome = await while_connected(http, work())
        if outcome is None:
            raise BodyTooLargeError(
                f"reading {body.size} bytes took more memory than they may take (reading_bytes is "
                f"{self._config.reading_bytes}), or more than {self._config.request_timeout_s:g} s of a processor",
                hint="send several smaller requests",
            )
        if outcome.refused is not None:
            raise outcome.refused
        if outcome.bug is not None:
            raise RuntimeError(f"a body could not be read:\n{outcome.bug}")
        if outcome.seen and (vision := vision_of(self._base.tokenizer)) is not None:
            vision.learn(outcome.seen)  # and does not decode them here to find out what they are
        return outcome.result

    async def _fork(self, body: RawBody, task: bytes) -> ReadResult | None:
        """Return what a new process makes of the task; None where it ended before it said so. It ends when this
        does."""
        loop, file = asyncio.get_running_loop(), body.file
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs, _Spool(self) as answer, _Spool(self) as copy:
            if file is None:
                file = copy.file
                await copy.append([body.raw])
            async with self._starting:
                await asyncio.to_thread(self._forks.start)
                self._forks.fork(theirs.fileno(), file.fileno(), answer.file.fileno())  # now: they are open
            theirs.close()
            with suppress(ConnectionError):
                await loop.sock_sendall(ours, frame(task))
                if await loop.sock_recv(ours, len(GO)) != GO:
                    raise NotReadyError("there is no process to read a long body", hint="try again", retry_after=5)
                if await loop.sock_recv(ours, len(DONE)) == DONE:
                    return await asyncio.to_thread(_load, os.dup(answer.file.fileno()))
        return None


def _of_few_pixels(read: Callable[[], T]) -> T:
    """Return what `read` returns. Raises TooManyPixels where it would decode more than `PIXELS`."""
    with decoding(PIXELS):
        return read()


def _load(answer: int) -> ReadResult:
    """Load from the file itself: what a long job trains on is there once, and not in the file's bytes as well."""
    with os.fdopen(answer, "rb") as file:
        file.seek(0)
        return pickle.load(file)


# ---- what the process says ----
@dataclass(frozen=True, kw_only=True)
class ReadResult:
    """The answer of a reading process: its function's result and the images that it looked at, the error that it
    raised, or the traceback of a bug."""

    result: Any = None
    seen: Mapping[int, Seen] = field(default_factory=dict)
    refused: GroupwiseError | None = None
    bug: str | None = None
