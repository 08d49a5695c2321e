"""The process from which readers of long bodies are forked: `python -m groupwise.server.reader_process DESCRIPTOR`.

`reader` starts it (`forks`), and sends it a (TextModel, ServeConfig). Each forked process gets three descriptors:

    conversation   a socket. The process sends GO, receives a pickled (niceness, function, args, kwargs), and sends DONE
                   when the answer is in its file. If the other end closes before that, the process ends.
    body           a file, whose bytes are the function's first argument
    answer         a file, for the pickled `ReadResult`
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from groupwise import platform
from groupwise.config.serve import ServeConfig
from groupwise.engine.forks import GO, end_with, receive_frame, receive_setup, serve_forks
from groupwise.errors import BodyTooLargeError, GroupwiseError
from groupwise.model.chat import encode_prompt
from groupwise.model.chat_length import least_tokens
from groupwise.model.image_tokens import vision_of
from groupwise.model.supervised import encode_supervised
from groupwise.server.more_routes import more_routes
from groupwise.server.reader import DONE, ReadResult
from groupwise.types import Message, Prompt

if TYPE_CHECKING:
    from groupwise.server.reader import TextModel

ROUTES = ("chat", "completions", "rollouts", "train")  # whose functions read bodies
ROOM, FACTOR = 256 << 20, 24  # bytes of memory for any body, and for each of its bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Fork readers until the other end closes."""
    channel, (base, config) = receive_setup((arguments or sys.argv[1:])[0])
    _warm_up(base, config)
    sees = vision_of(base.tokenizer) is not None
    return serve_forks(
        channel,
        3,
        most_bytes=lambda descriptors: _most_bytes(os.fstat(descriptors[1]).st_size, config, sees=sees),
        work=lambda descriptors, most: _be_a_reader(descriptors, most, base, config),
    )


def _most_bytes(size: int, config: ServeConfig, *, sees: bool) -> int:
    """Return the memory that a body of this many bytes may take: a list of numbers, as objects, takes twenty times its
    text, and an image, decoded and prepared, any number of times its file."""
    return config.reading_bytes if sees else min(config.reading_bytes, ROOM + FACTOR * size)


def _warm_up(base: TextModel, config: ServeConfig) -> None:
    """Import and compile what every reader would, and keep the collector from touching it: forks share its pages."""
    others = [module for each in more_routes(config).values() for module in each.reads]
    for module in (*(f"groupwise.server.{route}" for route in ROUTES), *others):
        importlib.import_module(module)
    least_tokens(1, base.tokenizer)
    asked = Message(role="user", content="?")
    with suppress(GroupwiseError, ValueError):  # a model without a chat template has only its tokenizer
        encode_prompt(Prompt(id="warm up", messages=(asked,)), base.tokenizer)
        encode_supervised([asked, Message(role="assistant", content="!")], base.tokenizer)
    if (vision := vision_of(base.tokenizer)) is not None:
        vision.warm_up()
    platform.spare()


def _be_a_reader(descriptors: Sequence[int], most: int, base: TextModel, config: ServeConfig) -> None:
    """Never returns."""
    try:
        conversation, body, answer = descriptors
        platform.limit_process(cpu_s=int(config.request_timeout_s) + 1, more_bytes=2 * most)
        stream = socket.socket(fileno=conversation)
        stream.sendall(GO)
        niceness, *task = pickle.loads(receive_frame(stream))
        os.nice(niceness)
        threading.Thread(target=end_with, args=(stream,), daemon=True).start()
        outcome = _outcome(body, base, config, *task)
        with os.fdopen(answer, "wb") as file:
            pickle.dump(outcome, file)
        stream.sendall(DONE)
    finally:
        os._exit(0)


def _outcome(body: int, base: TextModel, config: ServeConfig, read: Any, args: Any, kwargs: Any) -> ReadResult:
    try:
        with os.fdopen(body, "rb") as file:
            file.seek(0)
            raw = file.read()
        result = read(raw, base, config, *args, **kwargs)
        vision = vision_of(base.tokenizer)
        return ReadResult(result=result, seen={} if vision is None else vision.noted())
    except GroupwiseError as error:
        return ReadResult(refused=error.with_traceback(None))
    except MemoryError:
        message = f"reading the body takes more memory than it may (reading_bytes is {config.reading_bytes})"
        return ReadResult(refused=BodyTooLargeError(message, hint="send several smaller requests"))
    except Exception:
        return ReadResult(bug=traceback.format_exc())


if __name__ == "__main__":
    sys.exit(main())
