"""Looks up what the targets of an adapter mean in a model, by names alone: torch and the model are not needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupwise.config.lora import ALL_LINEAR, EXPERTS, KINDS, PROJECTOR, VISION
from groupwise.errors import FieldError

_TARGETS_HINT = (
    f'use "{ALL_LINEAR}", "{EXPERTS}", "{VISION}", "{PROJECTOR}" or names of linear modules, such as [q_proj, v_proj]'
)


@dataclass(frozen=True)
class AdaptableModules:
    """The modules of a model that an adapter can change: names only, so that they can be looked up without the model.

    `refused` has the modules of the text decoder in the model's order, and after fused experts their parameters, and
    why each takes no adapter, or None. `experts` are modules of experts, and what adapters of them change: their fused
    parameters, or their linear layers. `eyes` are the linear layers of a vision tower and of its projector.
    """

    architecture: str
    refused: Mapping[str, str | None]
    all_linear: tuple[str, ...]
    experts: Mapping[str, tuple[str, ...]]
    tensors: tuple[str, ...]
    eyes: Mapping[str, tuple[str, ...]]

    def has(self, target: str) -> bool:
        """Return whether there is a module of this name."""
        return any(means(target, name) and self._may_be_meant(target, name) for name in self.refused)

    def meant(self, targets: str | Sequence[str]) -> list[str]:
        """Return the modules that an adapter with these targets changes: see `adaptable.adapted_modules`."""
        if isinstance(targets, str) and targets not in KINDS:
            raise _target_error(f" is {targets!r}")
        wanted: set[str] = set()
        for target in [targets] if isinstance(targets, str) else targets:
            wanted.update(self._named(target))
        return [name for name in (*self.refused, *self.eyes[VISION], *self.eyes[PROJECTOR]) if name in wanted]

    def _named(self, target: str) -> Sequence[str]:
        """Return what one target means."""
        if target == ALL_LINEAR:
            if not self.all_linear:
                raise _target_error(f": {self.architecture} has no linear layer that {ALL_LINEAR} means", hint=None)
            return self.all_linear
        if target in self.eyes:
            if not self.eyes[target]:
                if any(self.eyes.values()):
                    hint = f"train it without an adapter: train.lora: null and train.parameters: [text, {target}]"
                    raise _target_error(f": {self.architecture} has no linear layer that {target} means", hint=hint)
                raise _target_error(f": {self.architecture} reads text alone, and has no {target}")
            return self.eyes[target]
        found = [name for name in self.refused if means(target, name) and self._may_be_meant(target, name)]
        if not found:
            raise self._not_found(target)
        for name in found:
            if not self.experts.get(name) and (why := self.refused[name]):
                raise _target_error(f": {target[:64]!r} {why}")
        return [each for name in found for each in self.experts.get(name) or (name,)]

    def _may_be_meant(self, target: str, name: str) -> bool:
        """Parameters of experts are meant only by names that say so, as dense layers are called `down_proj` too."""
        return name not in self.tensors or EXPERTS in target.split(".")

    def _not_found(self, target: str) -> FieldError:
        tensor = next((name for name in self.tensors if means(target, name)), None)
        if tensor is None:
            hint = "this model has no experts" if target == EXPERTS else _TARGETS_HINT
            return _target_error(f": {self.architecture} has no module {target[:64]!r}", hint=hint)
        module = tensor.rpartition(".")[0]
        hint = f"write {EXPERTS}.{target}" if tensor in self.experts.get(module, ()) else _TARGETS_HINT
        return _target_error(f": {target[:64]!r} is the tensor {tensor}, not a linear layer", hint=hint)


def means(target: str, name: str) -> bool:
    """Return whether a target is this module's full name or its last parts."""
    return name == target or name.endswith(f".{target}")


def _target_error(message: str, *, hint: str | None = _TARGETS_HINT) -> FieldError:
    return FieldError("{field}" + message, hint=hint, field="train.lora.targets", kind="target")
