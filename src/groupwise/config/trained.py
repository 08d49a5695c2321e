"""Which parameters train where there is no adapter (`train.lora: null`): of the text decoder, of what sees, or all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from groupwise.config.lora import EYES, PROJECTOR, VISION

if TYPE_CHECKING:
    from groupwise.config.run import TrainConfig

TEXT, ALL = "text", "all"
PARTS = (TEXT, VISION, PROJECTOR)


def _parts(value: Any) -> tuple[str, ...]:
    if value == ALL:
        return PARTS
    given = [value] if isinstance(value, str) else value
    if isinstance(given, list | tuple) and given and all(each in PARTS for each in given):
        return tuple(part for part in PARTS if part in given)
    raise ValueError(f"{value!r} is not valid; write {ALL}, or a list of {', '.join(PARTS)}")


Parts = Annotated[tuple[str, ...], BeforeValidator(_parts)]


def changes_eyes(train: TrainConfig) -> bool:
    """Return whether what the model makes of an image is trained, by itself or with an adapter."""
    return not set(EYES).isdisjoint(train.parameters) if train.lora is None else train.lora.changes_eyes
