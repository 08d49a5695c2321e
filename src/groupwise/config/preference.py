"""The configuration of learning from preference pairs (`kind: dpo`): the loss, and how strongly the reference holds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from groupwise.config.section import Section


class PreferenceConfig(Section):
    """Learning from preference pairs, with `kind: dpo` (docs/preferences.md)."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO's (arXiv 2305.18290). ipo: IPO's squared distance to a margin, by token (arXiv 2310.12036)."""
    beta: float = Field(default=0.1, gt=0)
    """The strength of the pull to the reference; with ipo, its tau. The implicit reward of a completion is this times
    the log-ratio to the reference (`algo.reference`: by default the policy from which the run starts)."""
