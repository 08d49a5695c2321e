"""Reward functions that do what reward functions do, in the end. Loaded by reference, as a user's are."""

import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
import time

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


def returns(completions, what):
    return what[0]


def lengths(completions, scale=1.0):
    return [scale * len(text) for text in completions]


def by_kind(completions, kind, answer=None):
    """What the prompt's `kind` says; 1 for any other."""
    act(kind[0])
    return [1.0] * len(completions)


async def by_kind_async(completions, kind):
    await asyncio.sleep(0)
    act(kind[0])
    if kind[0] == "await for ever":
        await asyncio.sleep(1e6)
    if kind[0] == "await for ever and refuse to be cancelled":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1e6)
    return [1.0] * len(completions)


class Unprintable(BaseException):
    def __str__(self):
        raise ValueError("not even that")


def act(kind):
    match kind.split():
        case ["raise"]:
            raise KeyError("no such thing")
        case ["raise", "SystemExit"]:
            sys.exit("bye")
        case ["raise", "KeyboardInterrupt"]:
            raise KeyboardInterrupt
        case ["raise", "Unprintable"]:
            raise Unprintable
        case ["print", "and", "raise"]:
            print("so far so good")
            raise ValueError("then not")
        case ["hang", *_]:
            print("about to hang")
            while True:
                pass
        case ["sleep", *_]:
            time.sleep(1e6)
        case ["exit", *_]:
            os._exit(3)
        case ["crash", *_]:
            print("about to crash")
            ctypes.string_at(0)
        case ["kill", *_]:
            os.kill(os.getpid(), 9)
        case ["close", "everything"]:
            os.closerange(0, 256)
        case ["breed", marker]:
            for _ in range(5):
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        os.execv(SLEEP[0], [*SLEEP, marker])
                    os._exit(0)
            os._exit(1)


def spawn(completions, marker):
    subprocess.Popen([*SLEEP, marker[0]], start_new_session=True)
    return [1.0] * len(completions)


def forks_and_goes_on(completions):
    os.fork()
    return [float(os.getpid())] * len(completions)


def disturbs(completions):
    """1 if nothing is disturbed yet; then it disturbs."""
    fine = [os.path.isdir("rewards_home"), sys.stdout.closed, os.fstat(0) is None]
    print("x", flush=True)
    os.chdir("/")
    sys.stdout.close()
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    return [float(fine == [True, False, False])] * len(completions)


def prints(completions, megabytes):
    for _ in range(megabytes[0]):
        sys.stdout.write("x" * (1 << 20))
    os.write(2, b"the end")
    raise ValueError("enough")


def reads_stdin(completions):
    return [float(len(sys.stdin.read()))] * len(completions)


def takes_memory(completions):
    return [float(len(bytearray(8 << 30)))] * len(completions)


def where(completions):
    return [float(os.getpid())] * len(completions)


def when(completions, log_metric, seconds):
    log_metric("began", time.monotonic())
    time.sleep(seconds[0])
    log_metric("ended", time.monotonic())
    return [1.0] * len(completions)


async def waits(completions, seconds):
    await asyncio.sleep(seconds[0])
    return [1.0] * len(completions)


def with_a_loop_of_its_own(completions):
    return asyncio.run(waits(completions, [0.0]))


def logs(completions, log_metric, trainer_state, kind):
    for number, text in enumerate(completions):
        log_metric("length", len(text) + number)
    if kind[0] == "nan":
        log_metric("length", float("nan"))
    return [trainer_state.global_step + trainer_state.max_steps / 100] * len(completions)


async def logs_async(completions, log_metric, **columns):
    assert "trainer_state" not in columns
    log_metric("columns", len(columns))
    return [1.0] * len(completions)


def spoils(completions, **columns):
    completions.clear()
    return [1.0, 1.0]


async def prints_and_answers(completions, text):
    print(text[0])
    return [float(os.getpid())] * len(completions)
