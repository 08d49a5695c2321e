"""Opens the base model of a run: whole, or, if its weights are sharded (`train.parallel: fsdp`), read in parts.

With sharded weights only rank 0 has the whole base, and only if something other than the learner computes with it
(`RunConfig.keeps_base`). A model that can only be read whole is read whole on every rank, and a warning says why.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from groupwise.config.run import RunConfig
from groupwise.model.load import LoadedModel, load_configured, resolve_dtype
from groupwise.model.parts import NotInParts, Parts, open_parts

if TYPE_CHECKING:
    from groupwise.train.ranks import Ranks


def open_base(config: RunConfig, ranks: Ranks | None, *, remote: bool = False) -> tuple[LoadedModel, Parts | None]:
    """Return the base model, and where the learner reads its parts from; None: it is `base` itself.

    Args:
        remote: engines are elsewhere, and opened by others than this process.

    Raises ModelError, ConfigError as `load_configured`, and RankLostError.
    """
    if ranks is None:
        return load_configured(config), None
    if config.train.parallel != "fsdp":
        return load_configured(config, device=str(ranks.device)), None
    parts, why = None, None
    try:
        parts = _parts(config, ranks)
    except NotInParts as error:
        why = str(error)
    why = next(filter(None, ranks.gather(why, phase="looking at the model's files")), None)
    if why is not None or parts is None:
        if ranks.leads:
            warnings.warn(
                f"{config.model} is read whole by every process before it is cut, in whose memory there must be room "
                f"for that: {why}",
                stacklevel=2,
            )
        dtype = str(resolve_dtype(config.dtype, ranks.device)).removeprefix("torch.")
        return load_configured(config, device=str(ranks.device) if ranks.leads else "cpu", dtype=dtype), None
    if ranks.leads and (remote or config.keeps_base):
        return load_configured(config, device=str(ranks.device)), parts
    return parts.base, parts


def _parts(config: RunConfig, ranks: Ranks) -> Parts:
    if config.train.lora is not None and config.train.lora.use_dora:
        raise NotInParts("DoRA begins with the norms of whole weights")
    return open_parts(config, device=ranks.device)
