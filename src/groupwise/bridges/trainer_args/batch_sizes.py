"""Batches counted in completions, as TRL and what is built on it count them, in prompts, groups and minibatches.

    completions per optimizer step   S = micro batch x accumulation x processes
    completions per rollout batch    R = generation batch, by default S
    here                             R / G prompts a step, R / S minibatches (optimizer steps on a rollout batch)

R must hold whole groups and whole micro-batches. Where an accumulation reaches over several generation batches
(R < S), they are all sampled by one policy, which here is one rollout batch of S. A minibatch here is made of whole
groups: where S is not, the nearest coarser cut is taken, and said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from groupwise.config.formats.translation import Translation


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names that a system gives the five sizes, for messages."""

    micro: str
    accumulate: str
    group: str
    generation: str
    processes: str


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rollout batch here. `steps_there`: optimizer steps on it in the other system; `minibatches`: here."""

    prompts: int
    minibatches: int
    steps_there: int


class SizeError(ValueError):
    """The sizes do not fit together; the message names the nearest that do. `key` is the one to look at."""

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The five sizes, in completions; `generation` is None where it is not given."""

    micro: int
    accumulate: int
    group: int
    generation: int | None = None
    processes: int = 1

    @property
    def step(self) -> int:
        """Return the completions per optimizer step."""
        return self.micro * self.accumulate * self.processes

    @property
    def rollout(self) -> int:
        """Return the completions per rollout batch."""
        return max(self.step, self.generation or self.step)

    @property
    def fault(self) -> str | None:
        """Return the sizes that do not fit together, in words with their own names; None if all fit."""
        generation = self.step if self.generation is None else self.generation
        if generation % (self.micro * self.processes):
            processes = f" x {{processes}} {self.processes}" if self.processes > 1 else ""
            return f"{generation} completions are not whole batches of {{micro}} {self.micro}{processes}"
        if generation % self.group:
            processes = f" x {{processes}} {self.processes}" if self.processes > 1 else ""
            product = f"{{micro}} {self.micro} x {{accumulate}} {self.accumulate}{processes} = {self.step}"
            of = (
                f"{product} completions per optimizer step"
                if self.generation is None
                else f"{{generation}} {generation}"
            )
            return f"{of} are not whole groups of {{group}} {self.group}"
        if max(generation, self.step) % min(generation, self.step):
            product = f"{self.step} ({{micro}} x {{accumulate}})"
            return f"{generation} completions and optimizer steps of {product} are not whole numbers of each other"
        return None


def batch_sizes(sizes: Sizes, names: Names) -> Batch:
    """Return the batch of these sizes. Raises SizeError."""
    given = {key: size for key, size in vars(sizes).items() if size is not None}
    for key, size in given.items():
        if size < 1:
            raise SizeError(getattr(names, key), f"{size} is not valid; it must be 1 or more")
    if sizes.group < 2:
        raise SizeError(names.group, f"{sizes.group} is not valid; completions are compared: {names.group} >= 2")
    if sizes.fault is not None:
        fault = sizes.fault.format(**vars(names))
        if sizes.generation is None:
            valid = [
                f"{vars(names)[key]}: {size}" for key in ("accumulate", "micro", "group") for size in _near(sizes, key)
            ]
            raise SizeError(names.group, f"{fault}; write {', or '.join(valid)}")
        valid = [str(size) for size in _near(sizes, "generation")]
        raise SizeError(names.generation, f"{fault}; the nearest are {' and '.join(valid)}")
    prompts, steps = sizes.rollout // sizes.group, sizes.rollout // sizes.step
    minibatches = next(parts for parts in range(steps, 0, -1) if prompts % parts == 0)
    return Batch(prompts=prompts, minibatches=minibatches, steps_there=steps)


def _near(sizes: Sizes, key: str) -> list[int]:
    """Return the next smaller and the next larger value of one size with which all fit together."""
    now, smallest = vars(sizes)[key], 2 if key == "group" else 1
    most = now + math.lcm(sizes.step, sizes.group)
    below = next((size for size in range(now - 1, smallest - 1, -1) if _fits(sizes, key, size)), None)
    above = next((size for size in range(now + 1, most + 1) if _fits(sizes, key, size)), None)
    return [size for size in (below, above) if size is not None]


def _fits(sizes: Sizes, key: str, size: int) -> bool:
    return Sizes(**vars(sizes) | {key: size}).fault is None


def put_batch(t: Translation, names: Names, *, generation: int | None, said: str) -> Batch:
    """Return prompts and minibatches of a translation; `said` is the key that gave `generation`. Raises ConfigError."""
    for name in vars(names).values():
        if name in t.unread:
            t.problem(name, f"{t.unread[name].why}; write {t.unread[name].instead}")
    t.raise_problems()
    try:
        sizes = Sizes(
            micro=t[names.micro],
            accumulate=t[names.accumulate],
            group=t[names.group],
            generation=generation,
            processes=t[names.processes],
        )
        batch = batch_sizes(sizes, names)
    except SizeError as error:
        t.problem(said if error.key == names.generation else error.key, str(error))
        t.raise_problems()
        raise
    of = (said,) if generation is not None else (names.micro, names.accumulate, names.processes)
    t.put("rollout.prompts_per_step", batch.prompts, *of, names.group)
    t.put("train.minibatches", batch.minibatches if batch.minibatches > 1 else None, *of)
    t.put("rollout.refill", 1.0, origin="groups without a learning signal are not replaced there")
    if batch.minibatches != batch.steps_there:
        what = f"{batch.steps_there} optimizer steps on {batch.prompts} groups become {batch.minibatches}"
        t.note_difference(of[0], f"{what}: a group is not cut")
    return batch
