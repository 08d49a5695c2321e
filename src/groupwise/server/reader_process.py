"""The process that readers of long bodies are forked from: `python -m groupwise.server.reader_process DESCRIPTOR`.

`reader` starts it and speaks with it over a socket. First comes a pickled (TextModel, ServeConfig), answered with READY
when everything is imported. Then each GO brings three descriptors, and a process is forked that gets them:

    conversation   a socket. GO goes out, a pickled (niceness, function, args, kwargs) comes, and DONE goes out when the
                   answer is in its file. When the other end closes before, nobody wants it, and the process ends.
    body           a file, whose bytes are the function's first argument
    answer         a file, for the pickled Outcome

A fork costs milliseconds, shares the tokenizer, and gives all memory back when it ends. This process has one thread,
so that a fork of it is safe; while readers live it looks at their memory and kills the one that has too much. (Under a
limit of the kernel's an allocation fails, and what happens then inside compiled code is anything: some of it hangs.) It
ends with the server, whose end of the socket then closes.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from groupwise import platform
from groupwise.config.serve import ServeConfig
from groupwise.errors import BodyTooLargeError, GroupwiseError
from groupwise.model.chat import encode_prompt, encode_supervised, least_tokens
from groupwise.server.reader import DONE, GO, READY, ReadResult, receive_frame
from groupwise.types import Message, Prompt

if TYPE_CHECKING:
    from groupwise.server.reader import TextModel

ROUTES = ("openai", "rollouts", "train", "trl")  # whose functions read bodies
ROOM, FACTOR = 256 << 20, 24  # bytes of memory for any body, and for each of its bytes
LOOK_S = 0.02  # between two looks at the readers' memory
OOM_SCORE = 1000  # the first to go when memory runs out


def main(arguments: Sequence[str] | None = None) -> int:
    """Fork readers until the other end closes."""
    channel = socket.socket(fileno=int((arguments or sys.argv[1:])[0]))
    platform.set_oom_score(OOM_SCORE)
    base, config = pickle.loads(receive_frame(channel))
    _warm_up(base)
    channel.sendall(READY)
    readers: dict[int, int] = {}  # and the memory that each may have, shared with this process or not
    while True:
        if not select.select([channel], [], [], LOOK_S if readers else None)[0]:
            _look_at(readers)
            continue
        told, descriptors, _, _ = socket.recv_fds(channel, len(GO), 3)
        if not told:
            return 0
        most = _most_bytes(os.fstat(descriptors[1]).st_size, config)
        with suppress(OSError):  # no more processes, or no memory for one: the conversation ends
            if (reader := os.fork()) == 0:
                channel.close()
                _be_a_reader(descriptors, most, base, config)
            readers[reader] = platform.resident_bytes(os.getpid()) + most
        for descriptor in descriptors:
            os.close(descriptor)


def _most_bytes(size: int, config: ServeConfig) -> int:
    """The memory that a body of so many bytes may take: a list of numbers, as objects, takes twenty times its text."""
    return min(config.reading_bytes, ROOM + FACTOR * size)


def _look_at(readers: dict[int, int]) -> None:
    """Forget those that have ended, and kill those that have too much memory."""
    for reader, most in list(readers.items()):
        if os.waitpid(reader, os.WNOHANG)[0] == reader:
            del readers[reader]
        elif platform.resident_bytes(reader) > most:
            os.kill(reader, signal.SIGKILL)


def _warm_up(base: TextModel) -> None:
    """Import and compile what every reader would, and keep the collector from touching it: forks share its pages."""
    for route in ROUTES:
        importlib.import_module(f"groupwise.server.{route}")
    least_tokens(1, base.tokenizer)
    asked = Message(role="user", content="?")
    with suppress(GroupwiseError, ValueError):  # a model without a chat template has only its tokenizer
        encode_prompt(Prompt(id="warm up", messages=(asked,)), base.tokenizer)
        encode_supervised([asked, Message(role="assistant", content="!")], base.tokenizer)
    gc.collect()
    gc.freeze()


def _be_a_reader(descriptors: Sequence[int], most: int, base: TextModel, config: ServeConfig) -> None:
    """Never returns."""
    try:
        conversation, body, answer = descriptors
        platform.limit_process(cpu_s=int(config.request_timeout_s) + 1, more_bytes=2 * most)
        stream = socket.socket(fileno=conversation)
        stream.sendall(GO)
        niceness, *task = pickle.loads(receive_frame(stream))
        os.nice(niceness)
        threading.Thread(target=_end_with, args=(stream,), daemon=True).start()
        outcome = _outcome(body, base, config, *task)
        with os.fdopen(answer, "wb") as file:
            pickle.dump(outcome, file)
        stream.sendall(DONE)
    finally:
        os._exit(0)


def _end_with(stream: socket.socket) -> None:
    """The other end says nothing more; that it closes means that nobody waits."""
    with suppress(OSError):
        stream.recv(1)
    os._exit(1)


def _outcome(body: int, base: TextModel, config: ServeConfig, read: Any, args: Any, kwargs: Any) -> ReadResult:
    try:
        with os.fdopen(body, "rb") as file:
            file.seek(0)
            raw = file.read()
        return ReadResult(result=read(raw, base, config, *args, **kwargs))
    except GroupwiseError as error:
        return ReadResult(refused=error.with_traceback(None))
    except MemoryError:
        message = f"reading the body takes more memory than it may (reading_bytes is {config.reading_bytes})"
        return ReadResult(refused=BodyTooLargeError(message, hint="send several smaller requests"))
    except Exception:
        return ReadResult(bug=traceback.format_exc())


if __name__ == "__main__":
    sys.exit(main())
