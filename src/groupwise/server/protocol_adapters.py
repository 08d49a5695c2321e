"""The bodies of /v1/adapters/*."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from groupwise.config.yaml import Name, NullIsAbsent
from groupwise.server.protocol import MAX_COMPOSED, Selector
from groupwise.server.wire import Answer, OwnPart, OwnRequest, absent, fault


class LoadRequest(OwnRequest):
    """The body of POST /v1/adapters/load: what requests that name no adapter get from now on."""

    elsewhere: ClassVar = {"adapter": "name", "adapter_name": "name", "version": "name, as in 'math@3'"}

    name: Selector


class ActivateRequest(OwnRequest):
    """The body of POST /v1/adapters/{name}/activate."""

    version: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """The version's number; null is the newest."""


class MergeSource(OwnPart):
    name: Selector
    weight: Annotated[float, Field(ge=-100, le=100)]


class MergeRequest(NullIsAbsent, OwnRequest):
    """The body of POST /v1/adapters/merge."""

    elsewhere: ClassVar = {"adapters": "sources, a list of objects with name and weight", "name": "output_name"}

    sources: Annotated[list[MergeSource], Field(min_length=1, max_length=MAX_COMPOSED)]
    output_name: Name
    mode: Literal["weighted_average", "ties", "concat"] = "weighted_average"
    density: Annotated[float, Field(gt=0, le=1)] | None = None
    """The fraction of each source's entries that `ties` keeps; default 0.2."""

    @model_validator(mode="after")
    def _acts(self) -> MergeRequest:
        if self.density is not None and self.mode != "ties":
            message = "density acts with mode 'ties' only; the mode is '{mode}'"
            raise fault("invalid_value", message, mode=self.mode, param="density")
        return self


# ---- answers ----
class AdapterVersion(Answer):
    """One version, and where it came from."""

    version: str
    """`name@number`."""
    number: int
    active: bool
    created_at: str
    size_bytes: int
    base_model: str
    parent: str
    """The version that its training started from."""
    step: int
    job_id: str | None
    unhealthy: str | None
    """What was wrong at the end of the job that made it. Such a version becomes active, answers to its adapter's name
    and is continued only by hand: activated, or named with its number."""
    surplus: bool
    """Older than the newest `keep_versions` that jobs made: removed once it is neither active, nor the one active
    before, nor in use, nor what a job that has not ended begins from."""
    metrics: dict[str, float]


class AdapterSummary(Answer):
    """An adapter. `files`, sizes and times are those of its newest version."""

    name: str
    has_config: bool
    has_weights: bool
    size_bytes: int
    modified_at: str | None
    files: list[str]
    versions: list[str]
    active_version: str | None
    """The version of this adapter that is active, if one is."""


class AdapterList(Answer):
    """The answer of GET /v1/adapters."""

    active: str | None
    """The active adapter's name; null is the base model."""
    active_version: str
    """The active version: `name@number`, or `base`."""
    keep_versions: int | None
    """How many versions that jobs made are kept of each adapter; null keeps all."""
    available: list[AdapterSummary]


class AdapterDetail(AdapterSummary):
    """The answer of GET /v1/adapters/{name}."""

    history: list[AdapterVersion]
    """Its versions, oldest first."""


class AdapterLoaded(Answer):
    status: Literal["loaded", "activated", "rolled_back"]
    name: str
    version: str


class AdapterUnloaded(Answer):
    status: Literal["unloaded"] = "unloaded"


class AdapterDeleted(Answer):
    status: Literal["deleted"] = "deleted"
    name: str
    versions: list[str]


class AdapterUploaded(Answer):
    name: str
    version: str
    size_bytes: int
    files: list[str]


class AdapterMerged(Answer):
    status: Literal["merged"] = "merged"
    output_name: str
    version: str
    mode: Literal["weighted_average", "ties", "concat"]
    sources: list[dict[str, Any]]
    num_tensors: int
    density: float | None = absent()
