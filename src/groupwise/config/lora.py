"""The LoRA adapter that is trained: its rank, its scale, and the modules that it changes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from groupwise.config.section import Section

ALL_LINEAR, EXPERTS, VISION, PROJECTOR = "all-linear", "experts", "vision", "projector"
KINDS = (ALL_LINEAR, EXPERTS, VISION, PROJECTOR)  # what stands for many modules; others are names of modules
EYES = (VISION, PROJECTOR)
EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")  # 3-D, in the order in which transformers registers them
MAX_ALPHA = 1e6  # in practice it is a few times the rank; far beyond that float32 overflows


def targets_of(value: Any) -> Any:
    """Return targets as they are kept. Raises ValueError for what can be none, whatever the model."""
    if isinstance(value, list | tuple) and value and all(isinstance(x, str) for x in value):
        return tuple(value)
    if value in KINDS:
        return value
    names = "a list of these and of module names, such as [q_proj, v_proj]"
    raise ValueError(f"{value!r} is not valid; write {', '.join(KINDS)} or {names}")


Targets = Annotated[str | tuple[str, ...], BeforeValidator(targets_of)]
Rank = Annotated[int, Field(ge=1, le=4096)]
Alpha = Annotated[float, Field(gt=0, le=MAX_ALPHA)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class LoraSpec(Section):
    """The adapter that is trained, in a run's `train.lora`, of a job and in the SDK."""

    rank: Rank = 16
    """Rank of the two matrices."""
    alpha: Alpha = 32.0
    """Scale: the update is multiplied by alpha / rank."""
    dropout: Dropout = 0.0
    """Dropout on the adapter's input while training. Ratios are then taken against the trainer's own forward, unless
    `algo.anchor` says otherwise: what was sampled without dropout differs by its noise."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    use_dora: bool = False
    """Also train a magnitude of each output (DoRA, arXiv 2402.09353). Not with experts, a quantised base, or vLLM
    except with vllm.push: merged."""
    targets: Targets = "all-linear"
    """`all-linear`: the projections of attention and of dense MLPs, shared experts included, not the LM head;
    `experts`: the routed experts of a mixture; of a model that sees, `vision`: the linear layers of the tower, and
    `projector`: those between it and the text decoder; or a list of these and of names of the text decoder's modules,
    which may be routers."""

    @property
    def changes_eyes(self) -> bool:
        """Return whether what the model makes of an image is trained."""
        return bool(set(EYES).intersection([self.targets] if isinstance(self.targets, str) else self.targets))
