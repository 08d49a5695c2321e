"""Rewards of the slow tests: some prompts make them hang, crash, fork or shout; the others are scored."""

import ctypes
import os
import sys
import time


def now_and_then(completions, answer, **columns):
    """By the last digit of the answer; the rest is graded by length, so that there is something to learn."""
    match int(answer[0]) % 10:
        case 0:
            time.sleep(1e6)
        case 1:
            ctypes.string_at(0)
        case 2:
            for _ in range(3):
                if os.fork() == 0:
                    time.sleep(1e6)
        case 3:
            for _ in range(1024):
                sys.stdout.write("x" * (1 << 20))
        case 4:
            return "these are not numbers"
        case 5:
            return [1.0] * (len(completions) + 1)
        case 6:
            raise RuntimeError("no")
    return [float(len(c[0]["content"]) + i) for i, c in enumerate(completions)]


def always_hangs(completions, **columns):
    while True:
        time.sleep(1)
