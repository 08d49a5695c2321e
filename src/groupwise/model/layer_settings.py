"""Settings of a model that may differ from layer to layer: Gemma 4's layers without a window have other heads, and the
last ones of its small models no keys and values of their own."""

from __future__ import annotations

from typing import Any


def of_layers(config: Any, name: str) -> list[Any]:
    """Return the values that a setting of a transformers text configuration has, each once; None is one where a layer
    has no such setting."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else (config,)
    return list(dict.fromkeys(getattr(each, name, None) for each in layers))


def keys_from(config: Any) -> dict[int, int]:
    """Return the layers of a transformers text configuration that attend with the keys and values of an earlier one,
    each with that one: the last of their type that has some (Gemma 4 E2B: 20 of 35)."""
    modes = getattr(config, "kv_sharing_modes", None) or ()
    kinds = getattr(config, "layer_types", None) or ()
    of_kind = {kinds[layer]: layer for layer, mode in enumerate(modes) if mode == "store"}
    reused = ((layer, of_kind.get(kinds[layer])) for layer, mode in enumerate(modes) if mode == "reuse")
    return {layer: owner for layer, owner in reused if owner is not None}
