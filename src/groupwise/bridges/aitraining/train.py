"""aitraining's Python interface as it is called: `LLMTrainingParams` and `train(params)`.

    from groupwise.bridges.aitraining.train import LLMTrainingParams, train

    result = train(LLMTrainingParams(model="starter", trainer="grpo", project_name="hotel", peft=True, lr=1e-5,
                                     rl_env_module="my_envs.hotel", rl_env_class="HotelEnv", rl_num_generations=4))

What becomes of each parameter is in docs/migrating.md. Modules are imported from where you are.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from groupwise.config.run import RunConfig
from groupwise.config.yaml import Document
from groupwise.run.config_file import understand
from groupwise.run.loop import RunResult, run_loop

__all__ = ["LLMTrainingParams", "train"]


class LLMTrainingParams:
    """The parameters, by aitraining's names; None is its default."""

    def __init__(self, **params: Any):
        self._params = {name: value for name, value in params.items() if value is not None}

    def __repr__(self) -> str:
        return f"LLMTrainingParams({', '.join(f'{name}={value!r}' for name, value in self._params.items())})"

    def run_config(self) -> RunConfig:
        """Return the run; warns of what comes out otherwise than there. Raises ConfigError for what is unknown or not
        here."""
        document = Document(dict(self._params), "LLMTrainingParams")
        loaded = understand(document, (), folder=Path.cwd(), system="aitraining")
        config = loaded.runnable()
        for note in loaded.differs:
            warnings.warn(f"not as in aitraining: {note}", stacklevel=3)
        return config


def train(params: LLMTrainingParams) -> RunResult:
    """Train as the parameters say. Raises ConfigError as `run_config`, and what a run raises."""
    return run_loop(params.run_config())
