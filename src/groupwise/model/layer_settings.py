"""Settings of a model that may differ from layer to layer: Gemma 4's layers without a window have other heads."""

from __future__ import annotations

from typing import Any


def of_layers(config: Any, name: str) -> list[Any]:
    """Return the values that a setting of a transformers text configuration has, each once; None is one where a layer
    has no such setting."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else (config,)
    return list(dict.fromkeys(getattr(each, name, None) for each in layers))
