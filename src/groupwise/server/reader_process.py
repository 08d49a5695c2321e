"""The process that readers of long bodies are forked from: `python -m groupwise.server.reader_process DESCRIPTOR`.

`reader` starts it and speaks with it over a socket. First comes a pickled (TextModel, ServeConfig), answered with READY
when everything is imported. Then each GO brings three descriptors, and a process is forked that gets them:

    conversation   a socket. GO goes out, a pickled (niceness, function, args, kwargs) comes, and DONE goes out when the
                   answer is in its file. When the other end closes before, nobody wants it, and the process ends.
    body           a file, whose bytes are the function's first argument
    answer         a file, for the pickled Outcome

A fork costs milliseconds, shares the tokenizer, and gives all memory back when it ends. This process has one thread and
does nothing else, so that a fork of it is safe. It ends with the server, whose end of the socket then closes.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.chat import encode_prompt, encode_supervised, least_tokens
from groupwise.errors import BodyTooLargeError, GroupwiseError
from groupwise.server.config import ServeConfig
from groupwise.server.reader import DONE, GO, READY, Outcome, receive_frame
from groupwise.types import Message, Prompt

if TYPE_CHECKING:
    from groupwise.server.reader import TextModel

ROUTES = ("chat", "completions", "rollouts", "train", "trainer_routes")  # whose functions read bodies
OOM_SCORE = "1000"  # the first to go when memory runs out


def main(arguments: Sequence[str] | None = None) -> int:
    """Fork readers until the other end closes."""
    channel = socket.socket(fileno=int((arguments or sys.argv[1:])[0]))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, encoding="ascii")
    base, config = pickle.loads(receive_frame(channel))
    _warm_up(base)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets readers that have ended
    channel.sendall(READY)
    while True:
        told, descriptors, _, _ = socket.recv_fds(channel, len(GO), 3)
        if not told:
            return 0
        with suppress(OSError):  # no more processes, or no memory for one: the conversation ends
            if os.fork() == 0:
                channel.close()
                _be_a_reader(descriptors, base, config)
        for descriptor in descriptors:
            os.close(descriptor)


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


def _be_a_reader(descriptors: Sequence[int], base: TextModel, config: ServeConfig) -> None:
    """Never returns."""
    try:
        conversation, body, answer = descriptors
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _limit(config)
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


def _limit(config: ServeConfig) -> None:
    """So much memory more than now, so much time of a processor, and no core dump."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: int(config.request_timeout_s) + 1}
    with suppress(OSError, ValueError):  # not Linux
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + config.reading_bytes
    for which, most in limits.items():
        with suppress(OSError, ValueError):
            resource.setrlimit(which, (most, most))


def _end_with(stream: socket.socket) -> None:
    """The other end says nothing more; that it closes means that nobody waits."""
    with suppress(OSError):
        stream.recv(1)
    os._exit(1)


def _outcome(body: int, base: TextModel, config: ServeConfig, read: Any, args: Any, kwargs: Any) -> Outcome:
    try:
        with os.fdopen(body, "rb") as file:
            file.seek(0)
            raw = file.read()
        return Outcome(result=read(raw, base, config, *args, **kwargs))
    except GroupwiseError as error:
        return Outcome(refused=error.with_traceback(None))
    except MemoryError:
        message = f"reading the body takes more than {config.reading_bytes} bytes of memory (reading_bytes)"
        return Outcome(refused=BodyTooLargeError(message, hint="send several smaller requests"))
    except Exception:
        return Outcome(bug=traceback.format_exc())


if __name__ == "__main__":
    sys.exit(main())
