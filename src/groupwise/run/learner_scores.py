"""Scores completions with the learner, where no engine over the base weights can.

With cut weights (`train.parallel: fsdp`) only all ranks together have the model. So the version that vLLM is to sample
from is compared with the learner's own forward, under that version's adapter. The learner samples nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from groupwise.errors import AdapterNotFoundError, ConfigError
from groupwise.sampler import Scores
from groupwise.train.learner import Learner
from groupwise.train.lora import read_lora
from groupwise.types import Completion, PolicyVersion, Sample, SamplingRequest, SequenceScores


class LearnerScores(Scores):
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

    def score_sequence(
        self,
        ids: Sequence[int],
        version: PolicyVersion,
        *,
        first: int,
        top: int = 0,
        cells: tuple[Sequence[int], Sequence[int]] = ((), ()),
        temperature: float = 1.0,
    ) -> SequenceScores:
        """See `Scores.score_sequence`; of the sequence's own tokens alone. Raises ConfigError where others are asked
        for."""
        if top or cells[0]:
            raise ConfigError(
                "log-probabilities of other tokens than those that were sampled are asked for, and with "
                "train.parallel: fsdp no process has a model that could say them",
                hint="set train.parallel: ddp, or sample with engine: local",
            )
        if version not in self._adapters and not version.is_base:
            raise AdapterNotFoundError(f"adapter version {str(version)!r} is not loaded")
        own = tuple(ids[first:])
        sample = Sample(prompt_ids=tuple(ids[:first]), completion_ids=own, mask=(1,) * len(own), advantage=0.0)
        if self._learner.lora is None:
            logprobs = self._learner.forward([sample], temperature=temperature)[0]
        else:
            adapter = self._adapters.get(version)
            logprobs = self._learner.forward_of(adapter, [sample], temperature=temperature)[0]
        return SequenceScores(logprobs=logprobs, top=((),) * len(own))

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        self._refuse()

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError("this run samples nothing, and was opened without an engine")
