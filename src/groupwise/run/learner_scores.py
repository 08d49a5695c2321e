"""What the learner thinks of a completion, where there is no engine over the base weights that could say it.

With cut weights (`train.parallel: fsdp`) only the ranks together have the model, so that the version which vLLM is to
sample from is compared with the learner's own forward, under that version's adapter. It samples nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from groupwise.errors import AdapterNotFoundError, ConfigError
from groupwise.train.learner import Learner
from groupwise.train.lora import read_lora
from groupwise.types import Completion, PolicyVersion, Sample, SamplingRequest


class LearnerScores:
    """A `TrainerScores` of a learner; a `Sampler` only where nothing is sampled (`RunConfig.never_samples`)."""

    def __init__(self, learner: Learner):
        self._learner = learner
        self._adapters: dict[PolicyVersion, Mapping[str, Tensor] | None] = {}  # None: what all parameters are now

    @property
    def context_length(self) -> int:
        return self._learner.base.context_length

    def load(self, version: PolicyVersion, directory: Path) -> None:
        """See `Sampler.load`."""
        if version not in self._adapters and not version.is_base and self._learner.lora is not None:
            self._adapters[version] = read_lora(self._learner.model, self._learner.lora, directory)

    def adopt(self, version: PolicyVersion) -> None:
        self._adapters[version] = None

    def unload(self, version: PolicyVersion) -> None:
        self._adapters.pop(version, None)

    def close(self) -> None:
        self._adapters.clear()

    def score(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        version: PolicyVersion,
        *,
        temperature: float = 1.0,
    ) -> tuple[float, ...]:
        """See `Scores.score`."""
        if version not in self._adapters and not version.is_base:
            raise AdapterNotFoundError(f"adapter version {str(version)!r} is not loaded")
        ids = tuple(completion_ids)
        sample = Sample(prompt_ids=tuple(prompt_ids), completion_ids=ids, mask=(1,) * len(ids), advantage=0.0)
        if self._learner.lora is None:
            return self._learner.forward([sample], temperature=temperature)[0]
        return self._learner.forward_of(self._adapters.get(version), [sample], temperature=temperature)[0]

    def score_top(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        version: PolicyVersion,
        *,
        temperature: float = 1.0,
        top: int,
    ) -> tuple[tuple[float, tuple[tuple[int, float], ...]], ...]:
        """See `Scores.score_top`; with no likeliest tokens. Raises ConfigError where any are asked for."""
        if top:
            raise ConfigError(
                "log-probabilities of other tokens than those that were sampled are asked for, and with "
                "train.parallel: fsdp no process has a model that could say them",
                hint="set train.parallel: ddp, or sample with engine: local",
            )
        scored = self.score(prompt_ids, completion_ids, version, temperature=temperature)
        return tuple((logprob, ()) for logprob in scored)

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        self._refuse()

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError("this run samples nothing, and was opened without an engine")
