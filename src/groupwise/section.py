"""What every part of a configuration is: strict, frozen, with errors that point at the key."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from groupwise.types import BASE


def _is_not_base(name: str) -> str:
    if name == BASE:
        raise ValueError(f"{name!r} is what the model without an adapter is called; choose another name")
    return name


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
AdapterName = Annotated[Name, AfterValidator(_is_not_base)]
Text = Annotated[str, Field(min_length=1)]
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


def conflict(*keys_and_message: str) -> ValidationError:
    """An error of a model validator that points at one of its keys: pydantic passes on the location of this kind."""
    *keys, message = keys_and_message
    kind = PydanticCustomError("conflict", "{message}", {"message": message})
    return ValidationError.from_exception_data("conflict", [InitErrorDetails(type=kind, loc=tuple(keys), input=None)])
