"""The bodies of /v1/adapters/*."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from groupwise.config.section import Name, NullIsAbsent
from groupwise.server.schema_openai import MAX_COMPOSED, Selector
from groupwise.server.wire import OwnPart, OwnRequest
from groupwise.store.adapters import MAX_NOTE
from groupwise.tasks.dialects.form import fault


# ---- what is answered ----
class LoadRequest(OwnRequest):
    """The body of POST /v1/adapters/load: what requests that name no adapter get from now on."""

    elsewhere: ClassVar = {"adapter": "name", "adapter_name": "name", "version": "name, as in 'math@3'"}

    name: Selector


class ActivateRequest(OwnRequest):
    """The body of POST /v1/adapters/{name}/activate."""

    version: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """The version's number; null is the newest."""


class NoteRequest(OwnRequest):
    """The body of PUT /v1/adapters/{name}/notes."""

    elsewhere: ClassVar = dict.fromkeys(("notes", "text"), "note")

    note: Annotated[str, Field(max_length=MAX_NOTE)] | None
    """One line of text; null or an empty one removes what is there."""


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
