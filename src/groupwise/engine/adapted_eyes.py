"""Computes the features of images as each policy sees them, under adapters that change the vision tower or its
projector.

A packed row may have one image under several policies. Under the base, and under an adapter that does not change the
vision tower or its projector, an image's features are those that sampling and training share (`Vision.features`). Under
any other adapter they are computed by the engine's own modules, with only that adapter in force, and kept for the next
prompt of that version.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from groupwise.engine.multi_lora import AdapterBank, AdapterWeights
from groupwise.model.image_tokens import PLACES
from groupwise.model.vision import Features, Vision, eyes_of

KEPT_BYTES = 256 << 20  # of features

Key = tuple[int, int]  # of the adapter, and of the image


class AdaptedEyes:
    """`vision.See` of one decoder: for each token of an image, its features under the adapter whose the token is."""

    def __init__(self, model: PreTrainedModel, bank: AdapterBank, vision: Vision):
        self._model, self._bank, self._vision = model, bank, vision
        self._names = frozenset(eyes_of(model))
        self._kept = OrderedDict[Key, tuple[weakref.ref[AdapterWeights], Features]]()  # oldest first
        self._lock = threading.Lock()

    def __call__(self, tokens: Sequence[int], places: Sequence[int]) -> list[Features]:
        owners = self._bank.owners
        every = dict[Key, Features]()
        found = list[Features]()
        for token, place in zip(tokens, places, strict=True):
            weights = owners[place]
            if weights is None or self._names.isdisjoint(weights.pairs):
                weights = None
            key = (id(weights), token // PLACES)
            if key not in every:
                every[key] = self._vision.features(token) if weights is None else self._under(weights, token)
            found.append(every[key])
        self._bank.select(owners)
        return found

    def _under(self, weights: AdapterWeights, token: int) -> Features:
        """Return the features of an image under an adapter."""
        key = (id(weights), token // PLACES)
        with self._lock:
            of, features = self._kept.get(key, (None, None))
            if of is not None and of() is weights and features is not None:
                self._kept.move_to_end(key)
                return features
        self._bank.select([weights])
        with torch.no_grad():
            features = self._vision.computed(token, self._model)
        with self._lock:
            self._kept[key] = weakref.ref(weights), features
            for gone in [key for key, (of, _) in self._kept.items() if of() is None]:
                del self._kept[gone]
            while len(self._kept) > 1 and sum(each.nbytes for _, each in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return features
