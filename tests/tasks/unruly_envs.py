"""Environments that do what environments do, in the end. Loaded by reference, as a user's are."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import time
from pathlib import Path
from typing import Any

from groupwise.tasks.env import Observation, StepResult
from groupwise.tasks.tool_env import ToolEnv


class Steady:
    """Three turns, whose rewards follow from the case, the seed and what is said. `kind` says what goes wrong, and
    `when` in which turn; `diary` is a folder to which every call is written down, with the process it was made in."""

    def __init__(self, diary: str | None = None, turns: int = 3):
        self.diary, self.turns, self.taken = diary, turns, 0

    def cases(self) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(8)]

    def reset(self, case: dict[str, Any], seed: int) -> str:
        self.case, self.drawn = case, random.Random(seed)
        self.note("reset")
        return f"What is {case.get('number', 1)} + {case.get('number', 1)}?"

    def step(self, message: dict[str, Any]) -> StepResult:
        self.taken += 1
        self.note(f"step {self.taken}")
        if self.taken == self.case.get("when", 2):
            self.act()
        reward = 0.5 + len(message["content"]) / 1000
        return StepResult(
            messages=[{"role": "user", "content": f"Go on: {self.drawn.random():.6f}."}],
            reward=reward,
            done=self.taken == self.turns,
            info={"taken": self.taken},
        )

    def close(self) -> None:
        self.note("close")

    def note(self, what: str) -> None:
        if self.diary is not None:
            with (Path(self.diary) / f"{self.case.get('number', 0)}").open("a") as file:
                file.write(f"{os.getpid()} {what}\n")

    def act(self) -> None:
        match self.case.get("kind"):
            case "loop":
                print("about to loop")
                while True:
                    pass
            case "hold the lock":
                ctypes.PyDLL(None).sleep(1000)  # without giving other threads their turn
            case "exit":
                print("about to exit")
                os._exit(3)
            case "exit later":  # in a thread, while nothing is asked
                import threading

                threading.Timer(0.05, os._exit, (4,)).start()
            case "crash":
                ctypes.string_at(0)
            case "kill":
                os.kill(os.getpid(), 9)
            case "raise":
                raise ValueError("no luck")
            case "wait":
                time.sleep(1.0)


class Aio(Steady):
    """The same with async methods, in one event loop with everybody's."""

    async def reset(self, case, seed):  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(case, seed)

    async def step(self, message):  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(message)


class Forgetful(Steady):
    """Not the same when it is played again."""

    def reset(self, case: dict[str, Any], seed: int) -> str:
        super().reset(case, seed)
        return f"Now it is {time.perf_counter()}."


class Shop(ToolEnv):
    """A tool environment whose method changes its state in the episode's thread."""

    def first_message(self, case, seed):
        self.sold = 0
        return "Call sell."

    def sell(self, count: int) -> int:
        """Sell some.

        Args:
            count: How many.
        """
        self.sold += count
        return self.sold

    tools = (sell,)

    def score(self, episode):
        return float(self.sold)


class Odd:
    """Returns what JSON has not."""

    def reset(self, case, seed):
        import numpy as np

        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        return Observation(messages=[{"role": "user", "content": "1+1=", "number": np.int64(3)}], tools=[tool])

    def step(self, message):
        import numpy as np

        return [], np.float32(0.5), np.bool_(True).item(), {"n": 2}


class Broken:
    def __init__(self):
        raise RuntimeError("no licence")

    def reset(self, case, seed):
        return "x"

    def step(self, message):
        return None


class Reads:
    """Shows the document of its case."""

    def reset(self, case, seed):
        return case["document"]

    def step(self, message):
        return None
