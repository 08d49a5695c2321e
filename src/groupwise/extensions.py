"""Find what installed packages add to Groupwise, through entry points that their `pyproject.toml` declares.

    [project.entry-points."groupwise.config_formats"]
    mytrainer = "mytrainer.groupwise_format:FORMAT"

    groupwise.config_formats           a format of configuration files      `config.formats.format.ConfigFormat`
    groupwise.environments             an environment class that is called by a name, as in `textarena:Wordle-v0`; its
                                       attribute `named_by` is the argument that the name becomes
    groupwise.environment_contracts    methods that make a class an environment       `tasks.env_kind.EnvContract`
    groupwise.data_sources             data that is generated                         `tasks.data_source.DataSource`
    groupwise.algorithms               advantages and weights of tokens               `algo.algorithm.Algorithm`
    groupwise.routes                   routes of the server                           `server.more_routes.MoreRoutes`

Groupwise's own bridges to other systems are found in the same way, so that the core imports none of them. An entry
point whose module cannot be imported is left out with a warning, so a broken package stops no run that does not use it.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any


def extensions(group: str) -> dict[str, Any]:
    """Return the objects of one group by the names of their entry points, in the order of the names."""
    found = {name: extension(group, name) for name in extension_names(group)}
    return {name: made for name, made in found.items() if made is not None}


def extension_names(group: str) -> list[str]:
    """Return the names of a group's entry points, in order; nothing is imported."""
    return sorted({point.name for point in _points(group)})


@cache
def extension(group: str, name: str) -> Any:
    """Return the object of this name alone, None where there is none: others may take seconds to import."""
    for point in _points(group):
        if point.name != name:
            continue
        try:
            return point.load()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            warnings.warn(f"{point.value}, an extension of {group}, cannot be imported: {said}", stacklevel=2)
    return None


@cache
def _points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))
