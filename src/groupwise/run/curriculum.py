"""A curriculum: draw the prompts that the policy can learn from now, by how often it solved them so far.

Every prompt has a pass rate p, the running mean of its groups' mean rewards, which later groups move by half of the
difference; rewards outside [0, 1] are scaled by the smallest and the largest one seen. A prompt is drawn as often as
ever until it was seen `min_seen` times. After that,

    filter [low, high]   those with p outside are passed over (as in online difficulty filtering, arXiv 2504.03380),
                         but looked at again every fourth epoch, for the policy changes
    weight               each is drawn in proportion to  p (1 - p) + 0.05  (the reward's variance, on which the
    gradient
                         depends, arXiv 2502.12272), at most once an epoch

Both walk through the epochs of a PromptSource and pass over some of its prompts, so that tickets and cursor are its
own. Whether a prompt is passed over depends on the seed, the epoch, and what `observe` was shown by then.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import ConfigError, DataError
from groupwise.tasks.prompt_stream import Issued, PromptSource, WrappedStream
from groupwise.types import RolloutGroup

MOMENTUM = 0.5  # of the running mean

REVISIT = 4  # epochs

FLOOR = 0.05  # of the weight: what is always or never solved is drawn a sixth as often as what is solved half the time


class Curriculum(WrappedStream):
    """A PromptSource of which some prompts are passed over; equations at the head of this file.

    Raises ConfigError if it would do nothing, or for a filter that is not 0 <= low < high <= 1.
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        filter: tuple[float, float] | None = None,
        weight: bool = False,
        min_seen: int = 1,
        seed: int = 0,
    ):
        if filter is None and not weight:
            raise ConfigError("a curriculum with neither filter nor weight does nothing; set one")
        if filter is not None and not 0 <= filter[0] < filter[1] <= 1:
            raise ConfigError(f"filter {list(filter)} is not valid; write [low, high] with 0 <= low < high <= 1")
        super().__init__(source)
        self._filter, self._weight, self._min_seen, self._seed = filter, weight, min_seen, seed
        self._means: dict[str, tuple[float, int]] = {}  # prompt id -> running mean reward, groups seen
        self._lowest, self._highest = math.inf, -math.inf
        self._passed_over = 0

    def issue(self, n: int) -> list[Issued]:
        """Return the next n prompts that are wanted. What was on its way when a run stopped is wanted whatever its
        rate."""
        issued: list[Issued] = []
        while len(issued) < n:
            [each] = self._source.issue(1)
            if each.again or self._wanted(each):
                issued.append(each)
            else:
                self._source.resolve(each.ticket)
                self._passed_over += 1
        return issued

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Learn from scored groups, each once and when it is fresh; a group without rewards is ignored."""
        for group in groups:
            rewards = [r.reward for r in group.rollouts if r.reward is not None and math.isfinite(r.reward)]
            if not rewards:
                continue
            self._lowest, self._highest = min(self._lowest, *rewards), max(self._highest, *rewards)
            mean = math.fsum(rewards) / len(rewards)
            before, seen = self._means.get(group.prompt.id, (mean, 0))
            self._means[group.prompt.id] = (MOMENTUM * before + (1 - MOMENTUM) * mean, seen + 1)

    def rate(self, id: str) -> float | None:
        """Return the prompt's pass rate in [0, 1]; None while it was seen too seldom, or no two rewards have differed
        yet."""
        mean, seen = self._means.get(id, (0.0, 0))
        if seen < self._min_seen:
            return None
        if self._lowest >= 0 and self._highest <= 1:
            return mean
        width = self._highest - self._lowest
        return (mean - self._lowest) / width if width > 0 else None

    @property
    def cursor(self) -> dict[str, Any]:
        """Return where the stream stands and what is known of the prompts, for `restore`; goes through JSON."""
        means = {id: list(each) for id, each in self._means.items()}
        extremes = [self._lowest, self._highest] if means else None
        return self._source.cursor | {
            "curriculum": {"means": means, "range": extremes, "passed_over": self._passed_over}
        }

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue where `cursor` was taken; from one of a run without a curriculum, nothing is known yet.

        Raises DataError when the dataset has another number of rows, or for a value that is not a cursor.
        """
        state = cursor.get("curriculum") or {"means": {}, "range": None, "passed_over": 0}
        try:
            means = {str(id): (float(mean), int(seen)) for id, (mean, seen) in state["means"].items()}
            lowest, highest = (math.inf, -math.inf) if state["range"] is None else map(float, state["range"])
            passed_over = int(state["passed_over"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not the cursor of a curriculum: {type(error).__name__}: {error}") from error
        self._source.restore(cursor)
        self._means, self._lowest, self._highest, self._passed_over = means, lowest, highest, passed_over

    def metrics(self) -> dict[str, float]:
        """Return the share of the prompts that were seen at all, and how many were passed over so far."""
        return {
            "curriculum/seen": len(self._means) / len(self._source),
            "curriculum/passed_over": float(self._passed_over),
        }

    def _wanted(self, issued: Issued) -> bool:
        id, epoch = issued.prompt.id, issued.ticket.epoch
        rate = self.rate(id)
        if rate is None:
            return True
        if self._filter is not None and not self._filter[0] <= rate <= self._filter[1]:
            return (epoch + _hash(id)) % REVISIT == 0
        if not self._weight:
            return True
        # of all weights p (1 - p) + FLOOR the largest is at p = 1/2
        return _hash(self._seed, epoch, id) / 2**64 < (rate * (1 - rate) + FLOOR) / (0.25 + FLOOR)


def _hash(*parts: object) -> int:
    """Return 64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
