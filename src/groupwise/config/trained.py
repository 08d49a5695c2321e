"""The parameters that train where there is no adapter (`train.lora: null`): of the text decoder, of what sees, or
all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from groupwise.config.lora import EYES, PROJECTOR, VISION
from groupwise.config.section import conflict
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config.run import RunConfig

TEXT, ALL = "text", "all"
PARTS = (TEXT, VISION, PROJECTOR)


def parts_of(value: Any) -> tuple[str, ...]:
    """Return the parts that a list of them, the name of one, or `all` means, in their order. Raises ValueError."""
    if value == ALL:
        return PARTS
    given = [value] if isinstance(value, str) else value
    if isinstance(given, list | tuple) and given and all(each in PARTS for each in given):
        return tuple(part for part in PARTS if part in given)
    raise ValueError(f"{value!r} is not valid; write {ALL}, or a list of {', '.join(PARTS)}")


Parts = Annotated[tuple[str, ...], BeforeValidator(parts_of)]


def checked_parts(parameters: Any, *, adapter: bool) -> tuple[str, ...]:
    """Return `parts_of(parameters)` for training with or without an adapter. Raises ConfigError."""
    try:
        parts = parts_of(parameters)
    except ValueError as error:
        raise ConfigError(f"parameters: {error}", field="parameters", kind="invalid") from None
    if adapter and parts != (TEXT,):
        message = f"parameters {parameters!r} act without an adapter; what one changes its targets say"
        raise ConfigError(message, field="parameters", kind="conflict")
    return parts


def check_eyes(config: RunConfig) -> None:
    """Raise ConfigError for a run that sets `parameters` together with an adapter, or that trains vision parts in a
    configuration that cannot."""
    train, lora = config.train, config.train.lora
    if lora is not None and train.parameters != (TEXT,):
        message = "acts with train.lora: null; what an adapter changes its lora.targets say"
        raise conflict("train", "parameters", message)
    if not (lora.changes_eyes if lora is not None else set(EYES).intersection(train.parameters)):
        return
    key = ("parameters",) if lora is None else ("lora", "targets")
    if lora is not None and config.engine == "vllm" and config.vllm.push == "adapter":
        why = "engine vllm, which adapts text decoders; set vllm.push: merged, or engine: local"
        raise conflict("train", *key, f"vision and projector do not go with {why}")
    if train.parallel == "fsdp":
        why = "parallel fsdp, where not every process sees images; set ddp"
        raise conflict("train", *key, f"vision and projector do not go with {why}")
