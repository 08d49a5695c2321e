"""A training job's payload: the token ids that it trains on, as the server writes them and the worker reads them.

    grpo   {"groups": [{"prompt_ids": [..], "completions": [{"ids": [..], "logprobs": [..] | null, "reward": r,
            "kept": null, "routed_experts": null, "teacher_logprobs": null}]}], "temperature": 1.0}
    sft    {"examples": [{"prompt_ids": [..], "completion_ids": [..], "mask": [..]}]}

`logprobs` are those of the policy that sampled, at `temperature`; null if they were not recorded. `kept` is the part of
the vocabulary from which each token was sampled, and `logprobs` are those of the policy restricted to this part; null
is the whole vocabulary (`recorded.SamplingMask`, its bytes in base64). `routed_experts` are the experts that a
mixture's routers chose for the tokens of prompt and completion (`recorded.RoutedExperts`, likewise); null if they were
not recorded. `teacher_logprobs` are a teacher's for the same tokens, null without a teacher. This module does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Self

from pydantic import Base64Bytes, Field, ValidationError, model_validator

from groupwise.config.section import Section
from groupwise.errors import DataError
from groupwise.recorded import RoutedExperts, SamplingMask

Id = Annotated[int, Field(ge=0)]
Ids = Annotated[tuple[Id, ...], Field(strict=False)]
PromptIds = Annotated[tuple[Id, ...], Field(strict=False, min_length=1)]
Logprobs = Annotated[tuple[float, ...], Field(strict=False)]
Mask = Annotated[tuple[Annotated[int, Field(ge=0, le=1)], ...], Field(strict=False)]


class EncodedCompletion(Section):
    """A completion with its reward; `logprobs` has an entry per id, and so has `kept`."""

    ids: Ids
    logprobs: Logprobs | None = None
    reward: float
    kept: Base64Bytes | None = None
    routed_experts: Base64Bytes | None = None
    teacher_logprobs: Logprobs | None = None

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """Return `kept` as a SamplingMask."""
        return None if self.kept is None else SamplingMask.from_bytes(self.kept)

    @property
    def routing(self) -> RoutedExperts | None:
        """Return `routed_experts` as RoutedExperts."""
        return None if self.routed_experts is None else RoutedExperts.from_bytes(self.routed_experts)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.ids)} ids; give one per id, or null")
        if self.teacher_logprobs is not None and len(self.teacher_logprobs) != len(self.ids):
            raise ValueError(f"{len(self.teacher_logprobs)} teacher_logprobs for {len(self.ids)} ids; give one per id")
        if (mask := self.sampling_mask) is not None:
            if self.logprobs is None or len(mask) != len(self.ids):
                raise ValueError(
                    f"kept is of {len(mask)} tokens, for {len(self.ids)} ids; give logprobs and it of each"
                )
            if not all(mask.has(self.ids)):
                raise ValueError("an id is not in the part of the vocabulary that kept says it was drawn from")
        return self


class EncodedGroup(Section):
    """The completions of one prompt."""

    prompt_ids: PromptIds
    completions: Annotated[tuple[EncodedCompletion, ...], Field(strict=False)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for completion in self.completions:
            tokens = len(self.prompt_ids) + len(completion.ids)
            if (routing := completion.routing) is not None and routing.shape[0] > tokens:
                raise ValueError(f"routed_experts is of {routing.shape[0]} tokens, and prompt and ids are {tokens}")
        return self


class GrpoPayload(Section):
    """The groups that a GRPO job trains on; `temperature` is that at which the completions were sampled."""

    groups: Annotated[tuple[EncodedGroup, ...], Field(strict=False)]
    temperature: float = Field(default=1.0, gt=0)


class EncodedExample(Section):
    """A tokenised conversation that is trained on: `mask[t]` is 1 where `completion_ids[t]` is to be learned."""

    prompt_ids: PromptIds
    completion_ids: Ids
    mask: Mask

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.mask) != len(self.completion_ids):
            raise ValueError(f"the mask has {len(self.mask)} entries for {len(self.completion_ids)} completion_ids")
        return self


class SftPayload(Section):
    examples: Annotated[tuple[EncodedExample, ...], Field(strict=False)]


PAYLOADS: Mapping[str, type[GrpoPayload] | type[SftPayload]] = {"grpo": GrpoPayload, "sft": SftPayload}


def parse_payload(kind: str, data: bytes) -> GrpoPayload | SftPayload:
    """Return the spooled payload of a job. Raises DataError if it is not one."""
    try:
        return PAYLOADS[kind].model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"the job's payload cannot be read: {where}: {first['msg']}", hint="submit it again") from None


def dump_payload(payload: GrpoPayload | SftPayload) -> bytes:
    """Return the inverse of `parse_payload`."""
    return payload.model_dump_json().encode()


def dump_groups(groups: Iterable[EncodedGroup], *, temperature: float) -> bytes:
    """Write a payload of groups that are made one after another, without keeping all in memory."""
    return _dump(groups, GrpoPayload(groups=(), temperature=temperature))


def dump_examples(examples: Iterable[EncodedExample]) -> bytes:
    """Write a payload of examples that are made one after another, without keeping all in memory."""
    return _dump(examples, SftPayload(examples=()))


def _dump(items: Iterable[EncodedGroup | EncodedExample], empty: GrpoPayload | SftPayload) -> bytes:
    before, after = dump_payload(empty).split(b"[]", 1)
    return before + b"[" + b",".join(item.model_dump_json().encode() for item in items) + b"]" + after
