"""The protocol of routes that packages add to the server: other systems' wires, under their own paths.

A package makes some known by an entry point of the group `groupwise.routes`. They stand behind the server's guard, keys
and limits as its own routes do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from groupwise.config.serve import ServeConfig
from groupwise.extensions import extensions

if TYPE_CHECKING:
    from fastapi import FastAPI

    from groupwise.server.state import Parts


@dataclass(frozen=True, kw_only=True)
class MoreRoutes:
    """Routes of another system.

    Args:
        wanted: whether a server has them.
        mount: adds them to the application; called once, when the model is loaded. What it imports is not needed
            where they are not wanted. Routes name the parts that they use as the server's own do, by
            `server.state.given`; what lives as long as the application is made of the `Parts`.
        make: makes what the routes keep of the owner, or of a tenant, of its parts; it is found in `Server.more`. None
            where they keep nothing.
        reads: the modules whose functions read bodies in another process (`server.reader_process`).
    """

    wanted: Callable[[ServeConfig], bool]
    mount: Callable[[FastAPI, Parts], None]
    make: Callable[[Parts], object] | None = None
    reads: tuple[str, ...] = ()


def more_routes(config: ServeConfig) -> dict[str, MoreRoutes]:
    """Return the routes of installed packages that this server is to have, by the packages' names."""
    known: dict[str, MoreRoutes] = extensions("groupwise.routes")
    return {name: each for name, each in known.items() if each.wanted(config)}
