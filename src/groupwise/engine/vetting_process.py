"""The process in whose forks grammars are vetted: `python -m groupwise.engine.vetting_process DESCRIPTOR`.

`vetting` starts it (`forks`), and tells it a `TokenizerParts`. Each process that is forked here gets one descriptor, a
socket: GO goes out, and then for each pickled `Grammar` that comes a pickled `Vetted` goes out. When the other end
closes, the process ends, whatever it is at. One whose grammar took little goes on with the next, for a while; one whose
grammar takes longer than others' steps aside for them, and is not used again.

It does what compiling it elsewhere will do, on a smaller stack: recursion that is just deep enough here has room there.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from groupwise import platform
from groupwise.engine.forks import GO, end_with, frame, receive_frame, receive_setup, serve_forks
from groupwise.engine.grammar import compile_grammar
from groupwise.engine.vetting import CPU_S, MOST_BYTES, STACK, Vetted
from groupwise.errors import GrammarError
from groupwise.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

QUICK_S = 0.1  # after which a grammar's process steps aside for all others
NICE = 10  # how far
ARENA = 512 << 20  # bytes of address space, not memory, that malloc wants for a thread; without, it is slow
IDLE_S = 30.0  # that a process waits for its next grammar
MOST_GROWN = 8 << 20  # bytes by which a process may have grown that continues with the next
COMMON = Grammar.of_json({"type": "object", "properties": {"a": {"pattern": "b"}, "c": {"type": "number"}}})


def main(arguments: Sequence[str] | None = None) -> int:
    """Fork processes that vet until the other end closes."""
    channel, parts = receive_setup((arguments or sys.argv[1:])[0])
    tokenizer = parts.open()
    compile_grammar(COMMON, tokenizer)
    platform.spare()
    return serve_forks(
        channel,
        1,
        most_bytes=lambda _: MOST_BYTES,
        work=lambda descriptors, most: _vet(descriptors[0], most, tokenizer),
    )


def _vet(conversation: int, most: int, tokenizer: LLTokenizer) -> None:
    """Vet a grammar in this process and end it; never return. The library's output before an abort is not logged."""
    platform.limit_process(cpu_s=None, more_bytes=2 * most + ARENA)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    threading.stack_size(STACK)
    compile_grammar(COMMON, tokenizer)  # its pages belong to no grammar
    began = platform.resident_bytes(os.getpid())
    stream = socket.socket(fileno=conversation)
    stream.sendall(GO)
    while select.select([stream], [], [], IDLE_S)[0]:
        platform.limit_processor(CPU_S)
        grammar = pickle.loads(receive_frame(stream))
        outcome = _outcome(grammar, tokenizer, stream)
        grown = platform.resident_bytes(os.getpid()) - began
        outcome = replace(outcome, again=outcome.again and grown < MOST_GROWN)
        stream.sendall(frame(pickle.dumps(outcome)))
        if not outcome.again:
            break
    os._exit(0)


def _outcome(grammar: Grammar, tokenizer: LLTokenizer, stream: socket.socket) -> Vetted:
    """Compile a grammar in another thread and return the outcome; meanwhile this thread checks that the server still
    waits for it."""
    said: list[Vetted] = []
    done, tell = os.pipe()

    def work() -> None:
        said.append(_compiled(grammar, tokenizer))
        os.close(tell)

    threading.Thread(target=work, daemon=True).start()
    quick = True
    while not (ready := select.select([done, stream], [], [], QUICK_S if quick else None)[0]):
        quick = False
        os.nice(NICE)
    if done not in ready:
        end_with(stream)
    os.close(done)
    return replace(said[0], again=quick)


def _compiled(grammar: Grammar, tokenizer: LLTokenizer) -> Vetted:
    before, began = platform.resident_bytes(os.getpid()), time.thread_time()
    try:
        kept = compile_grammar(grammar, tokenizer)
        taken = platform.resident_bytes(os.getpid()) - before
        del kept
        return Vetted(size=max(0, taken))
    except GrammarError as error:
        error.seconds = time.thread_time() - began
        return Vetted(refused=error.with_traceback(None))
    except MemoryError:
        os._exit(1)  # as if it had been killed for it
    except Exception:
        return Vetted(bug=traceback.format_exc())


if __name__ == "__main__":
    sys.exit(main())
