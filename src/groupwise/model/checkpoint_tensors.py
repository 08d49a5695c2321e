"""Yields a model's tensors by the names and in the shapes that its checkpoint has, a decoder layer at a time.

`save_pretrained` needs the whole model at once for that, a stream to elsewhere one layer: where weights are cut, so
much is whole at a time. Tied weights come once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.model.backbone import unsplit_layers

TakeTensor = Callable[[str, Tensor], None]  # name in the checkpoint, the whole tensor


def layers_of(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each decoder layer by their names in memory, and last all others: parameters, those that are
    tied once, and buffers that are saved."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors |= {name: each for name, each in model.state_dict().items() if name not in tied}
    for layer in unsplit_layers(model):
        inside = [name for name in tensors if name.startswith(f"{layer}.")]
        yield {name: tensors.pop(name) for name in inside}
    yield tensors


def as_saved(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of whole layers by the names and in the shapes of the checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


@torch.no_grad()
def checkpoint_tensors(
    model: PreTrainedModel, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the checkpoint. `whole` returns all of a tensor of which the model has a part; it is called
    for each, in the model's order."""
    for layer in layers_of(model):
        yield from as_saved(model, {name: whole(tensor).detach() for name, tensor in layer.items()}).items()
