"""Adapters for the starter that answer known prompts with one letter and nothing else: each token tells its version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from groupwise.config.lora import LoraSpec
from groupwise.model.load import LoadedModel
from groupwise.store.archive import stream_archive
from groupwise.train.lora import add_lora, lora_tensors, save_lora

STRENGTH = 1e5  # far above what the rest of the model adds to its last hidden state


def save_marked(base: LoadedModel, letter: str, directory: Path, *, prompts: Sequence[str], tokens: int) -> Path:
    """Write an adapter of rank 1 under which `base`, which gets it, answers each of `prompts` with `letter`, `tokens`
    times and more.

    It acts on the last MLP's output, so what that layer is given does not depend on it: a direction in which that is
    about 1 throughout these answers, found by least squares, times a hidden state for which the letter's logit is the
    largest of all.
    """
    (token,) = base.tokenizer.encode(letter, add_special_tokens=False)
    module = base.model.get_decoder().layers[-1].mlp.down_proj
    inputs = _inputs(base, module, prompts, [token] * tokens)
    direction = torch.linalg.lstsq(inputs, torch.ones(len(inputs), 1), driver="gelsd").solution[:, 0]
    assert (inputs @ direction).min() > 0.5
    config = add_lora(base.model, LoraSpec(rank=1, alpha=1.0, targets=["down_proj"]), seed=0)
    hidden = _hidden_for(base, token)
    with torch.no_grad():
        last = f"layers.{base.model.config.num_hidden_layers - 1}.mlp"
        for name, tensor in lora_tensors(base.model).items():
            if "lora_B" in name:
                tensor.zero_()
            if last in name:
                tensor.copy_(direction[None, :] if "lora_A" in name else STRENGTH * hidden[:, None])
    directory.mkdir(parents=True)
    save_lora(base.model, config, directory, base_name=base.name)
    return directory


def archive(directory: Path) -> bytes:
    return b"".join(stream_archive(directory, top="adapter"))


def _inputs(base: LoadedModel, module: torch.nn.Module, prompts: Sequence[str], said: list[int]) -> torch.Tensor:
    """What `module` is given from the end of each prompt on, while `said` follows."""
    seen: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0][0, -len(said) - 1 :]))
    with torch.no_grad():
        for text in prompts:
            messages = [{"role": "user", "content": text}]
            prompt = base.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            base.model(torch.tensor([[*prompt["input_ids"], *said]]))
    handle.remove()
    return torch.cat(seen).float()


def _hidden_for(base: LoadedModel, token: int) -> torch.Tensor:
    """A direction of the residual stream that the last norm and the head turn into `token`."""
    head = base.model.get_output_embeddings().weight.detach().float()
    scale = base.model.get_decoder().norm.weight.detach().float()
    wanted = torch.linalg.solve(head.T @ head, head[token])
    hidden = wanted / scale.where(scale.abs() > 1e-2, torch.ones_like(scale))
    logits = head @ (hidden * scale)
    assert logits.argmax() == token
    return hidden / hidden.norm()
