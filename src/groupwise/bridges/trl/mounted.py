"""TRL's and Axolotl's routes, as the server finds them (`trainer_routes`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupwise.server.more_routes import MoreRoutes

if TYPE_CHECKING:
    from fastapi import FastAPI

    from groupwise.server.state import Parts


def _mount(app: FastAPI, parts: Parts) -> None:
    from groupwise.bridges.trl.routes import router

    app.include_router(router)


ROUTES = MoreRoutes(wanted=lambda config: config.trainer_routes, mount=_mount, reads=("groupwise.bridges.trl.routes",))
