"""Bodies: short ones are read in a thread, long ones in a process that is limited and ends with who asked for it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from groupwise.config.serve import MIB, ServeConfig
from groupwise.errors import (
    BodyTooLargeError,
    ChatError,
    ContextLengthError,
    MediaTypeError,
    NotReadyError,
    RequestError,
)
from groupwise.model.chat import encode_prompt
from groupwise.server import reader as reading
from groupwise.server.chat import ChatPrompt, read_chat
from groupwise.server.completions import read_completions
from groupwise.server.event_stream import ClientGone
from groupwise.server.reader import SHORT, SHORT_TO_TRAIN, RawBody, Reader, TextModel, receive_body
from groupwise.server.reader_process import _most_bytes
from groupwise.server.submit import Submission, read_grpo, read_sft
from groupwise.store.adapters import AdapterStore
from groupwise.store.ledger import Ledger
from groupwise.types import Message, Prompt
from processes import becomes
from reading_functions import die, imported, linger, refuse, swell, swell_inside, where
from serving import starter
from wording import raises

pytestmark = pytest.mark.xdist_group("reader")  # they share a process that takes seconds to start


# ---- a request without a server ----
class Client:
    """Sends a body in pieces, and leaves when it is told to."""

    def __init__(self, *pieces: bytes, content_type: str = "application/json"):
        self._pieces, self.leaves = list(pieces), asyncio.Event()
        headers = [(b"content-type", content_type.encode())]
        self.http = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, self._receive)

    async def _receive(self) -> Any:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self.leaves.wait()
        return {"type": "http.disconnect"}


@pytest.fixture(scope="module")
def make_reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Reader]]:
    made: list[Reader] = []

    def make(**config: Any) -> Reader:
        settings = ServeConfig(state_dir=tmp_path_factory.mktemp("state"), api_key="sk-planted", **config)
        made.append(Reader(TextModel.of(starter()), settings))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
        yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def reader(make_reader: Callable[..., Reader]) -> Reader:
    return make_reader(reading_bytes=256 * MIB)


LONG = b" " * (SHORT + 1)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await work()

    return asyncio.run(bounded())


def read(reader: Reader, function: Any, *pieces: bytes, **options: Any) -> Any:
    return run(lambda: reader.read_json(Client(*pieces).http, function, **options))


def read_to_train(reader: Reader, function: Any, raw: bytes, **options: Any) -> Any:
    async def work() -> Any:
        client = Client(raw)
        async with receive_body(client.http, reader) as body:
            return await reader.read_to_train(client.http, body, function, **options)

    return run(work)


# ---- receiving ----
@pytest.mark.parametrize("pieces", [[b""], [b"ab"], [b"x" * 1000] * 3, [b"x" * SHORT], [b"x" * SHORT, b"y"]])
def test_a_body_is_what_was_sent(reader: Reader, pieces: list[bytes]) -> None:
    async def work() -> tuple[RawBody, bytes, Any]:
        async with receive_body(Client(*pieces).http, reader) as body:
            return body, body.raw if body.file is None else os.pread(body.file.fileno(), 1 << 30, 0), body.file

    body, content, file = run(work)
    whole = b"".join(pieces)
    assert content == whole and body.size == len(whole) and body.digest == hashlib.sha256(whole).hexdigest()
    assert (file is None) == (len(whole) <= SHORT)
    assert file is None or becomes(lambda: file.closed)


def test_a_long_body_is_on_the_disk_and_nowhere_under_a_name(reader: Reader) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * MIB

    async def work() -> None:
        request = Client().http
        request.stream = pieces  # type: ignore[method-assign]
        async with receive_body(request, reader) as body:
            assert body.file is not None and body.raw == b""
            assert os.fstat(body.file.fileno()).st_size == 64 * MIB == body.size
            assert list(reader.directory.iterdir()) == [] and reader.directory.stat().st_mode & 0o077 == 0

    run(work)


def test_a_client_that_leaves_while_it_sends_leaves_no_file(reader: Reader) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 3 * MIB
        raise ConnectionError

    async def work() -> None:
        request = Client().http
        request.stream = pieces  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            async with receive_body(request, reader):
                pass

    before = set(os.listdir("/proc/self/fd"))
    run(work)
    assert becomes(lambda: len(set(os.listdir("/proc/self/fd")) - before) <= 1)


def test_a_body_of_another_type_is_refused(reader: Reader) -> None:
    with pytest.raises(MediaTypeError):
        run(lambda: reader.read_json(Client(b"{}", content_type="text/plain").http, where))


# ---- where it is read ----
def test_short_bodies_are_read_here_and_long_ones_elsewhere(reader: Reader) -> None:
    pid, digest, _, _ = read(reader, where, b"x" * SHORT)
    assert pid == os.getpid() and digest == hashlib.sha256(b"x" * SHORT).hexdigest()
    pid, digest, nice, key = read(reader, where, LONG)
    assert pid != os.getpid() and digest == hashlib.sha256(LONG).hexdigest() and key is None
    assert nice == min(19, os.nice(0) + 5)
    assert becomes(lambda: not Path(f"/proc/{pid}").exists())


def test_what_is_to_be_trained_is_read_elsewhere_sooner_and_behind(reader: Reader) -> None:
    assert read_to_train(reader, where, b"x" * SHORT_TO_TRAIN)[0] == os.getpid()
    for size in (SHORT_TO_TRAIN + 1, SHORT + 1):
        pid, digest, nice, _ = read_to_train(reader, where, b"y" * size)
        assert pid != os.getpid() and digest == hashlib.sha256(b"y" * size).hexdigest()
        assert nice == min(19, os.nice(0) + 10)


def test_a_reader_of_text_does_without_torch(reader: Reader) -> None:
    there = read(reader, imported, LONG)
    assert "transformers" in there and "torch" not in there


@pytest.mark.parametrize(
    "error",
    [
        RequestError("it is wrong", hint="mend it", field="groups[0]", code="no_signal"),
        ContextLengthError("too long", hint="shorten it"),
        ChatError("refused"),
    ],
)
def test_a_refusal_is_the_same_from_either(reader: Reader, error: Any) -> None:
    for raw in (b"{}", LONG):
        with pytest.raises(type(error)) as caught:
            read(reader, refuse, raw, error=error)
        assert vars(caught.value) == vars(error) and caught.value.as_dict() == error.as_dict()


def test_a_bug_is_told_with_its_place(reader: Reader) -> None:
    with raises(RuntimeError):
        read(reader, refuse, LONG, error=ZeroDivisionError("told"))


# ---- limits ----
def test_a_body_that_takes_too_much_memory_is_refused(reader: Reader) -> None:
    with raises(BodyTooLargeError):
        read(reader, swell, LONG)
    with pytest.raises(BodyTooLargeError):
        read(reader, swell_inside, LONG)


def test_the_memory_that_a_body_may_take_goes_by_its_size() -> None:
    config = ServeConfig()
    assert _most_bytes(1 << 20, config, sees=False) == (256 + 24) * MIB
    assert _most_bytes(8 * MIB, config, sees=False) == (256 + 8 * 24) * MIB
    assert _most_bytes(1 << 30, config, sees=False) == config.reading_bytes
    assert _most_bytes(1, config, sees=True) == config.reading_bytes  # an image is any number of times its file


def test_a_process_that_dies_is_told_and_the_next_one_lives(reader: Reader) -> None:
    with raises(BodyTooLargeError):
        read(reader, die, LONG)
    assert read(reader, where, LONG)[0] != os.getpid()


@pytest.mark.slow
def test_the_process_that_forks_is_replaced(reader: Reader) -> None:
    run(reader.start)
    process = reader._forks._process
    assert process is not None
    process.kill()
    process.wait()
    assert read(reader, where, LONG)[0] != os.getpid()
    assert reader._forks._process is not process


def test_a_process_that_cannot_be_started_is_a_503(make_reader: Callable[..., Reader], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with raises(NotReadyError, words=False, code="not_ready"):
        read(make_reader(), where, LONG)


def test_closing_does_not_wait_for_what_is_being_started(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader()
    starting = threading.Thread(target=lambda: suppressed(reader._forks.start))
    starting.start()
    assert becomes(lambda: reader._forks._process is not None)
    process = reader._forks._process
    reader.close()
    starting.join(10)
    assert not starting.is_alive() and process is not None and process.poll() is not None


def suppressed(work: Callable[[], None]) -> None:
    with suppress(NotReadyError):
        work()


@pytest.mark.parametrize("ends", ["client leaves", "time is over"])
def test_nobody_waits_and_the_process_ends(reader: Reader, tmp_path: Path, ends: str) -> None:
    note = tmp_path / "pid"

    async def work() -> None:
        client = Client(LONG)
        task = asyncio.ensure_future(reader.read_json(client.http, linger, note=str(note)))
        while not (note.exists() and note.read_text()):
            await asyncio.sleep(0.01)
        if ends == "client leaves":
            client.leaves.set()
            with pytest.raises(ClientGone):
                await task
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(work)
    assert becomes(lambda: not Path(f"/proc/{note.read_text()}").exists())


def test_few_read_at_once_and_who_trains_does_not_keep_others_waiting(
    make_reader: Callable[..., Reader], reader: Reader, tmp_path: Path
) -> None:
    own, forks = make_reader(), reader._forks  # another event loop's lanes before the same process
    own._forks, reader = forks, own

    async def train(note: str) -> None:
        client = Client(LONG)
        async with receive_body(client.http, reader) as body:
            await reader.read_to_train(client.http, body, linger, note=str(tmp_path / note))

    async def work() -> list[str]:
        tasks = [asyncio.ensure_future(train(f"train {i}")) for i in range(2)]
        while not any(tmp_path.iterdir()):
            await asyncio.sleep(0.01)
        assert (await reader.read_json(Client(LONG).http, where))[0] != os.getpid()
        tasks += [
            asyncio.ensure_future(reader.read_json(Client(LONG).http, linger, note=str(tmp_path / f"sample {i}")))
            for i in range(3)
        ]
        while sum(path.name.startswith("sample") for path in tmp_path.iterdir()) < 2:
            await asyncio.sleep(0.01)
        began = sorted(path.name for path in tmp_path.iterdir())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return began

    began = run(work)
    assert [name.split()[0] for name in began] == ["sample", "sample", "train"]


# ---- what is read ----
def chat_body(text: str, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


def test_a_chat_is_the_same_from_either(reader: Reader) -> None:
    text, padding = "What is 12 + 34? " * 20, {"metadata": {"note": "x" * SHORT}}
    for body in (chat_body(text), chat_body(text, **padding)):
        asked, prompt = read(reader, read_chat, body, context=1024)
        assert isinstance(prompt, ChatPrompt) and asked.messages[0].content == text
        expected = encode_prompt(Prompt(id="", messages=(Message(role="user", content=text),)), starter().tokenizer)
        assert prompt.ids == expected.token_ids


def test_a_job_is_the_same_from_either(reader: Reader, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    state = {"store": AdapterStore(tmp_path / "adapters"), "pending": frozenset[str]()}
    completions = [{"text": f"it is {i}", "reward": float(i)} for i in range(40)]
    group = {"messages": [{"role": "user", "content": "2 + 3 = ?"}], "completions": completions}
    example = {"messages": [{"role": "user", "content": "2 + 3 = ?"}, {"role": "assistant", "content": "5"}]}
    for function, few, many, more in (
        (read_grpo, {"groups": [group]}, {"groups": [group] * 40}, {"ledger": ledger.path, "tenant": None}),
        (read_sft, {"examples": [example]}, {"examples": [example] * 1000}, {}),
    ):
        for body in (few, many):
            raw = json.dumps(body | {"config": {"output_name": "math"}}).encode()
            far: Submission = read_to_train(reader, function, raw, **state, **more)
            near = function(raw, TextModel.of(starter()), ServeConfig(), **state, **more)
            assert len({far.id, near.id}) == 2 and replace(far, id=near.id) == near
    ledger.close()


def test_what_cannot_fit_is_refused_before_the_tokenizer_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = TextModel.of(starter())

    def untouched(*_: Any, **__: Any) -> None:
        raise AssertionError("the tokenizer was called")

    read_chat(chat_body("hi"), base, ServeConfig(), context=1024)  # what is made once
    monkeypatch.setattr(base.tokenizer, "encode", untouched)
    text = "x" * 100_000
    with raises(ContextLengthError):
        read_chat(chat_body(text), base, ServeConfig(), context=1024)
    with raises(ContextLengthError):
        read_completions(json.dumps({"prompt": text}).encode(), base, ServeConfig(), context=1024)
    with raises(ContextLengthError):
        read_completions(json.dumps({"prompt": [1] * 2000}).encode(), base, ServeConfig(), context=1024)
    example = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]}
    scored = [{"text": "a", "reward": 1}, {"text": "b", "reward": 0}]
    group = {"messages": [{"role": "user", "content": text}], "completions": scored}
    for function, body, at in (
        (read_sft, {"examples": [example]}, "examples[0].messages"),
        (read_grpo, {"groups": [group]}, "groups[0].messages"),
    ):
        more = {"ledger": Path("nowhere"), "tenant": None} if function is read_grpo else {}
        store = AdapterStore(tmp_path / "adapters")
        with pytest.raises(RequestError) as caught:
            function(json.dumps(body).encode(), base, ServeConfig(), store=store, pending=(), **more)
        assert caught.value.code == "context_length_exceeded" and caught.value.field == at


def test_a_completion_that_cannot_fit_is_refused_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, sizes = TextModel.of(starter()), list[int]()
    encode = base.tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        sizes.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(base.tokenizer, "encode", counted)
    completions = [{"text": "a", "reward": 1}, {"text": "x" * 100_000, "reward": 0}]
    body = {"groups": [{"messages": [{"role": "user", "content": "hi"}], "completions": completions}]}
    store = AdapterStore(tmp_path / "adapters")
    with raises(RequestError) as caught:
        read_grpo(
            json.dumps(body).encode(), base, ServeConfig(), store=store, ledger=Path("nowhere"), tenant=None, pending=()
        )
    assert caught.value.field == "groups[0].completions[1].text" and max(sizes) < 100


@pytest.mark.slow
def test_a_long_answer_is_in_memory_once(tmp_path: Path):
    """What a job trains on comes to twice its body."""
    file = tmp_path / "answer"
    file.write_bytes(pickle.dumps(reading.ReadResult(result=bytes(32 * MIB))))
    tracemalloc.start()
    try:
        outcome = reading._load(os.open(file, os.O_RDONLY))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(outcome.result) == 32 * MIB and peak < 40 * MIB
