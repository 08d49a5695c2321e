"""The Tinker wire, as the server finds it (`tinker`): it needs the extra `tinker`, imported when it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupwise.server.more_routes import MoreRoutes

if TYPE_CHECKING:
    from fastapi import FastAPI

    from groupwise.server.state import Parts


def _mount(app: FastAPI, parts: Parts) -> None:
    from groupwise.bridges.tinker.routes import mount

    mount(app)


def _make(parts: Parts) -> object:
    from groupwise.bridges.tinker.routes import make

    return make(parts)


ROUTES = MoreRoutes(wanted=lambda config: config.tinker, mount=_mount, make=_make)
