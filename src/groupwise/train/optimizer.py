"""AdamW (arXiv 1711.05101): torch's, or bitsandbytes' with moments in 8 bits (arXiv 2110.02861), also paged.

`paged_adamw_8bit` keeps them in memory that CUDA moves between GPU and host as it is needed, so a peak that would run
out of memory does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from groupwise.algo.metrics import Metrics
from groupwise.config.run import OptimizerConfig
from groupwise.errors import ConfigError, TrainingError
from groupwise.model.quantized import require_bitsandbytes

ADAM_EPS = 1e-8
_PAGED = "paged_adamw_8bit"
_LEVELS = "qmap"


@dataclass(frozen=True)
class OptimStepResult:
    """Result of one optimizer step. `grad_norm` is before clipping; `applied` is False when the step was refused
    because the gradient was not finite."""

    grad_norm: float
    applied: bool

    def metrics(self) -> Metrics:
        return {"optim/grad_norm": self.grad_norm, "optim/refused": float(not self.applied)}


def make_optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that `config.optimizer` names; its learning rate is set at each step.

    Raises:
        ModelError: bitsandbytes is not installed.
        ConfigError: a paged one is asked for, and the parameters are not on a CUDA GPU.
    """
    options = {"lr": 0.0, "betas": config.betas, "eps": ADAM_EPS, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **options)
    require_bitsandbytes(f"optimizer {config.optimizer}")
    device = next(iter(parameters)).device.type
    if config.optimizer == _PAGED and device != "cuda":  # gpu-aware
        raise ConfigError(
            f"optimizer {_PAGED} moves its moments between a CUDA GPU and the host, and the parameters are on {device}",
            hint="set optimizer: adamw_8bit",
        )
    from bitsandbytes import optim  # pyright: ignore[reportMissingImports]

    kind = optim.PagedAdamW8bit if config.optimizer == _PAGED else optim.AdamW8bit
    return kind(parameters, **options)


def moments_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the optimizer's state of a parameter, on the CPU; empty before its first step. The levels of 8 bits are
    always the same."""
    state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if not key.startswith(_LEVELS)}
    return {key: torch.as_tensor(value).detach().cpu().contiguous() for key, value in state.items()}


def set_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> None:
    """Set the moments from `moments_of`. Raises TrainingError if another kind of optimizer kept them."""
    if not saved:
        optimizer.state.pop(parameter, None)
        return
    if isinstance(optimizer, torch.optim.AdamW):
        mine = {key: value.to(parameter.device) for key, value in saved.items()}
        fits = mine.keys() == {"step", "exp_avg", "exp_avg_sq"}
        if fits:
            optimizer.state[parameter] = mine
    else:
        index = next(i for i, each in enumerate(optimizer.param_groups[0]["params"]) if each is parameter)
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)  # pyright: ignore[reportAttributeAccessIssue]
        mine = optimizer.state[parameter]  # in paged memory, where that is asked for
        fits = {key for key in mine if not key.startswith(_LEVELS)} == saved.keys()
        for key, value in saved.items() if fits else ():
            if isinstance(mine[key], Tensor):
                mine[key].copy_(value)
            else:
                mine[key] = int(value)
    if not fits:
        raise TrainingError(
            f"the saved state of the optimizer has {', '.join(saved)}; {type(optimizer).__name__} has other moments",
            hint="go on with the optimizer that it was saved by",
        )
