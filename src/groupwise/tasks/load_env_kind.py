"""Load what plays the episodes of a run: the environment, agent or harness that its configuration names."""

from __future__ import annotations

from pathlib import Path

from groupwise.config.run import EnvConfig
from groupwise.tasks.agents import load_agent
from groupwise.tasks.env_kind import EnvKind
from groupwise.tasks.env_loading import contract_of, load_factory
from groupwise.tasks.harness import load_harness


def load_env_kind(config: EnvConfig, *, folder: Path, model: str, scored: bool) -> EnvKind:
    """Return the kind of environment, before the model is loaded.

    Args:
        folder: the folder at which relative paths and modules of the configuration begin.
        model: the run's, whose tokenizer some need to make their prompts.
        scored: reward functions score the episodes too.

    Raises LoadError if it cannot be imported, ConfigError if it is not an environment or cannot be played on this
    machine, EnvError for a class that fails.
    """
    if config.harness is not None:
        return load_harness(config, folder=folder, scored=scored)
    if config.agent is not None:
        return load_agent(config, folder=folder)
    factory = load_factory(config, folder=folder)
    contract = contract_of(factory.make_one)
    return factory if contract is None else contract.load(factory, config, model)
