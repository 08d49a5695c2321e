"""Checks on a few tokens how far a server's log-probabilities are from the trainer's, and whether that is too far.

In float32 two computations of one model differ by 1e-5 nats, and anything else differs by more than 1e-4. In 16 bits
rounding alone is 0.01 to 0.05 nats a token, and in a mixture of experts, whose routers choose other experts now and
then, single tokens differ by whole nats: 0.1 in the mean and more, in a server that is what it should be. So there

    limit      of the mean distance is the tolerance, or `RATIO` times what this run's servers were off by so far (the
               median), where that is more; at first, and at most, `MOST` times the tolerance
    both ways  beyond the tolerance the mean difference, with its sign, is within it: rounding goes both ways. The
               log-probabilities of another model, or those without the temperature, all go one way
    again      what seems too far is looked at once more, over `AGAIN` times as many other tokens, and all count
    a warning  what is further off than the tolerance and within the limit

A tolerance that is configured (`vllm.tolerance`) is the limit, as is float32's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from groupwise.engine.vllm.client import VllmServer, sampling_body
from groupwise.engine.vllm.images import images_of
from groupwise.model.vision import Vision
from groupwise.types import PolicyVersion, SamplingParams

if TYPE_CHECKING:
    from groupwise.engine.vllm.publish import TrainerScores

CANARY = SamplingParams(temperature=0.5, max_tokens=12, ignore_eos=True)
"""At a temperature that is not 1, so that a server which reports untempered log-probabilities (`raw_logprobs`, vLLM's
default) does not pass."""

CANARY_N = 2

RATIO, MOST, AGAIN, SEEN = 3.0, 5.0, 8, 20

log = logging.getLogger(__name__)


class Gaps:
    """Compares the servers' log-probabilities of sampled tokens with the trainer's (`reference`). `rounded`: both
    compute in 16 bits, or a server in fewer, and the configuration sets no tolerance. `vision` has the images of
    prompts."""

    def __init__(self, reference: TrainerScores, *, tolerance: float, rounded: bool, vision: Vision | None = None):
        self.tolerance, self._reference, self._rounded, self._vision = tolerance, reference, rounded, vision
        self._seen: deque[float] = deque(maxlen=SEEN)

    @property
    def limit(self) -> float:
        """Return the present limit of the mean difference, in nats."""
        if not self._rounded:
            return self.tolerance
        usual = RATIO * median(self._seen) if self._seen else MOST * self.tolerance
        return min(max(self.tolerance, usual), MOST * self.tolerance)

    async def too_far(
        self,
        server: VllmServer,
        name: str,
        version: PolicyVersion,
        prompt_ids: Sequence[int],
        *,
        params: SamplingParams = CANARY,
        n: int = CANARY_N,
    ) -> float | None:
        """Return by how many nats a server that samples as `name` is off from the trainer's `version` in the mean,
        where that is too far; None where it is not. Raises ServerLost, EngineError."""
        differences = await self._differences(server, name, version, prompt_ids, params, n=n, seed=0)
        if self._rounded and not self._near(differences):
            differences += await self._differences(server, name, version, prompt_ids, params, n=AGAIN * n, seed=n)
        off = _distance(differences)
        if not self._near(differences):
            return off
        if off > self.tolerance:
            log.warning(
                "%s: log-probabilities of %s are off by %.3g nats in the mean, more than %g; up to %.3g is taken for "
                "rounding (mismatch/* has every trained token's; algo.correction weighs them)",
                *(server.url, name, off, self.tolerance, self.limit),
            )
        self._seen.append(off)
        return None

    def _near(self, differences: Sequence[float]) -> bool:
        off = _distance(differences)
        if off <= self.tolerance:
            return True
        return off <= self.limit and abs(sum(differences) / len(differences)) <= self.tolerance

    async def _differences(
        self,
        server: VllmServer,
        name: str,
        version: PolicyVersion,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        n: int,
        seed: int,
    ) -> list[float]:
        body = sampling_body(prompt_ids, params, n=n, max_tokens=params.max_tokens, seed=seed, eos_ids=())
        body |= images_of(prompt_ids, self._vision)
        found: list[float] = []
        for each in await server.complete(name, body):
            score, ids = self._reference.score, each.token_ids
            trainers = await asyncio.to_thread(score, prompt_ids, ids, version, temperature=params.temperature)
            found += [a - b for a, b in zip(each.logprobs, trainers, strict=True)]
        return found


def _distance(differences: Sequence[float]) -> float:
    """Return the mean of their sizes; nan where one is."""
    return sum(map(abs, differences)) / len(differences)
