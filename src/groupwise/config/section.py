"""The base of every part of a configuration: strict, frozen, with errors that point at the key.

Section         a part of a configuration
NullIsAbsent    a model in whose input null stands for a field that is left out
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from groupwise.types import BASE


def _is_not_base(name: str) -> str:
    if name == BASE:
        raise ValueError(f"{name!r} is what the model without an adapter is called; choose another name")
    return name


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]

AdapterName = Annotated[Name, AfterValidator(_is_not_base)]

Text = Annotated[str, Field(min_length=1)]

Place = Annotated[Text, AfterValidator(os.path.expanduser)]  # of a directory; no shell has read the `~` of a file

Folder = Annotated[Path, Field(strict=False), AfterValidator(lambda path: Path(os.path.expanduser(path)))]

Temperature = Annotated[float, Field(gt=0, le=10)]

Texts = Annotated[tuple[Text, ...], Field(strict=False)]  # strict=False: a YAML list becomes a tuple


class Section(BaseModel):
    """A part of the configuration: no unknown keys, no silent conversions, no changes after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class NullIsAbsent(BaseModel):
    """Reads null in an optional field as the field's default: some clients send every field, with null if it is not
    set."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {key: value for key, value in data.items() if value is not None or key not in optional}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        document = handler(schema)
        model = handler.resolve_ref_schema(document)
        for name, known in model.get("properties", {}).items():
            if name not in model.get("required", ()):
                model["properties"][name] = _or_null(known)
        return document


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that takes null too; what describes the field stays outside."""
    null = {"type": "null"}
    if null in schema.get("anyOf", ()):
        return schema
    about = {key: value for key, value in schema.items() if key in ("title", "description", "default")}
    return {"anyOf": [{key: value for key, value in schema.items() if key not in about}, null], **about}


def missing(*keys: str | int) -> ValidationError:
    """Return an error of a model validator for a key that must be said and is not."""
    return ValidationError.from_exception_data("missing", [InitErrorDetails(type="missing", loc=keys, input=None)])


def conflict(*keys_and_message: str | int) -> ValidationError:
    """Return an error of a model validator that points at one of its keys: pydantic passes on the location of this
    kind."""
    *keys, message = keys_and_message
    kind = PydanticCustomError("conflict", "{message}", {"message": message})
    return ValidationError.from_exception_data("conflict", [InitErrorDetails(type=kind, loc=tuple(keys), input=None)])
