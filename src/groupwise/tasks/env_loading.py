"""Load an environment by name, check that it is one, and make an instance for each episode.

A class has `reset` and `step` (`tasks.env`), or keeps a contract that a package knows (`env_kind.EnvContract`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from groupwise.config.load import load_object, with_folder
from groupwise.errors import ConfigError, DataError, EnvError
from groupwise.extensions import extension, extensions
from groupwise.platform import run_coroutine
from groupwise.tasks.env import shortened
from groupwise.tasks.env_kind import EnvContract, EnvKind, PlayParts
from groupwise.types import Prompt

if TYPE_CHECKING:
    from groupwise.config.run import EnvConfig
    from groupwise.model.load import LoadedModel
    from groupwise.tasks.check.opening import CheckRequest
    from groupwise.tasks.check.play import Opened
    from groupwise.tasks.rollout_sources import Environments, RolloutSource

METHODS = ("reset", "step")


class EnvSpec(Protocol):
    """The specification from which an environment is loaded: an `EnvConfig`, or a worker process's copy of its
    fields."""

    @property
    def environment(self) -> str | None: ...
    @property
    def args(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class EnvFactory(EnvKind):
    """Makes instances of a user's environment class with `env.args`; a `tasks.rollout_sources.Environments`."""

    name: str
    make_one: Callable[..., Any]
    args: Mapping[str, Any]
    patience_s: float = 0.0

    in_workers = True

    @property
    def players(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the players of its episodes, if there are several (`self_play`)."""
        return tuple(getattr(self.make_one, "players", ()))

    def close(self) -> None:
        """Does nothing: instances share no state."""

    def make(self) -> Any:
        """Return an instance, for one episode. Raises EnvError, or ConfigError where the class itself does."""
        try:
            return self.make_one(**self.args)
        except ConfigError:
            raise
        except Exception as error:
            raise EnvError.raised(f"{self.name}()", error) from error

    def cases(self, *, held_out: bool = False) -> list[Prompt] | None:
        """Return what its `cases` (or `eval_cases`) returns, as prompts whose columns the case is; None without the
        method.

        Raises DataError, or EnvError where the method raises; a ConfigError of its own as it is.
        """
        method = "eval_cases" if held_out else "cases"
        instance = self.make()
        if not callable(function := getattr(instance, method, None)):
            return None
        try:
            rows = function()
            rows = run_coroutine(_awaited(rows)) if inspect.isawaitable(rows) else rows
        except ConfigError:
            raise
        except Exception as error:
            raise EnvError.raised(f"{self.name}.{method}", error) from error
        return prompts_of(rows, f"{self.name}.{method}")

    def open_envs(self, config: EnvConfig, folder: Path) -> Environments:
        """Return what makes its instances: processes, as `env.workers` says, or this object."""
        from groupwise.tasks.env_pool import EnvPool

        return EnvPool(config, name=self.name, folder=folder, players=self.players) if config.workers else self

    def open_play(self, parts: PlayParts) -> RolloutSource:
        """Return how a case becomes a group of episodes."""
        from groupwise.tasks.rollout_sources import EpisodeRollouts
        from groupwise.tasks.self_play import Match

        player = partial(Match, players=self.players) if self.players else None
        return EpisodeRollouts(parts.engine, parts.base.tokenizer, parts.envs or self, parts.config, player=player)

    def open_check(self, wanted: CheckRequest, base: LoadedModel | None, say: Callable[[str], None]) -> Opened:
        """See the base class."""
        from groupwise.tasks.check.opening import open_factory

        return open_factory(self, wanted, base, say)


def load_factory(config: EnvSpec, *, folder: str | Path | None = None) -> EnvFactory:
    """Return the environment class that the configuration names, and its arguments.

    Raises LoadError if it cannot be imported, ConfigError if it is not an environment or takes other arguments.
    """
    assert config.environment is not None  # else there is an agent or a harness
    package, _, name = config.environment.partition(":")
    named = extension("groupwise.environments", package) if name else None
    made = load_object(config.environment, folder=folder) if named is None else named
    if inspect.isclass(made):
        _check_methods(made, config.environment)
    _check_players(made, config)
    args = config.args if named is None else {**config.args, named.named_by: name}
    _check_arguments(made, args, config.environment)
    return EnvFactory(name=config.environment.rpartition(":")[2], make_one=made, args=with_folder(made, args, folder))


def contract_of(made: Any) -> EnvContract | None:
    """Return the contract that a class keeps, where that is another than ours."""
    known = extensions("groupwise.environment_contracts").values()
    return next((contract for contract in known if contract.recognises(made)), None)


@lru_cache(maxsize=256)
def load_once(reference: str, *, folder: str | None = None) -> Callable[..., Any]:
    """Load a reference only once, for environments that would load it in every episode (`load_object`)."""
    return load_object(reference, folder=folder)


def prompts_of(rows: Any, source: str) -> list[Prompt]:
    """Return rows of a dataset of cases -> prompts; the whole row is the case. Raises DataError."""
    if isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__iter__"):
        raise DataError(f"{source} returned a {type(rows).__name__}; it must be a list of objects, one per case")
    prompts: list[Prompt] = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{source}: case {i} is {row!r}; a case is an object, its columns by name")
        prompts.append(Prompt(id=f"case:{i}", columns=dict(row)))
    if not prompts:
        raise DataError(f"{source} returned no cases", hint="return at least one")
    return prompts


def _check_methods(made: type, reference: str) -> None:
    missing: Sequence[str] = [name for name in METHODS if not callable(getattr(made, name, None))]
    if not missing or contract_of(made) is not None:
        return
    others = "".join(f", or {each.methods}" for each in extensions("groupwise.environment_contracts").values())
    held = [name for name, value in vars(made).items() if callable(value) and not name.startswith("_")]
    raise ConfigError(
        f"env.environment {reference!r} has no {' and no '.join(missing)}; it has {', '.join(held) or 'no methods'}",
        hint=f"an environment has reset(case, seed) and step(message){others}",
    )


def _check_players(made: Any, config: EnvSpec) -> None:
    if (players := getattr(made, "players", None)) is None:
        return
    valid = isinstance(players, tuple | list) and len({each for each in players if isinstance(each, str) and each}) > 1
    if not valid or len(set(players)) != len(players):
        message = f"env.environment {config.environment!r} has players = {shortened(players)}"
        raise ConfigError(message, hint='players is a tuple of two or more names, as ("first", "second")')


def _check_arguments(made: Callable[..., Any], args: Mapping[str, Any], reference: str) -> None:
    try:
        inspect.signature(made).bind(**args)
    except TypeError as error:
        takes = ", ".join(inspect.signature(made).parameters) or "nothing"
        raise ConfigError(f"env.args does not fit {reference!r}, which takes {takes}: {error}") from None
    except ValueError:  # no signature to look at
        return


async def _awaited(value: Any) -> Any:
    return await value
