"""What a module of routes gets of a server: the parts that it names, and no others."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.testclient import TestClient

import groupwise.server
from groupwise.server.state import Parts, Server, given, select

SERVER = Path(groupwise.server.__file__).parent
KNOW_IT = {"app.py", "assemble.py", "state.py", "tenants.py"}  # what builds, makes, hands on and divides the parts


@dataclass(frozen=True, kw_only=True)
class Two:
    config: str
    ledger: str


router = APIRouter()


@router.get("/two")
async def two(parts: Annotated[Two, given(Two)]) -> dict[str, Any]:
    return {each: getattr(parts, each) for each in vars(parts)}


def test_a_route_gets_the_parts_that_it_names() -> None:
    app = FastAPI()
    app.include_router(router)
    app.state.server = SimpleNamespace(config="c", ledger="l", engine="e")
    assert TestClient(app).get("/two").json() == {"config": "c", "ledger": "l"}
    app.state.server = SimpleNamespace(config="c", ledger="another", engine="e")
    assert TestClient(app).get("/two").json()["ledger"] == "another"


def test_what_a_route_needs_is_not_in_the_api() -> None:
    app = FastAPI()
    app.include_router(router)
    assert "parameters" not in app.openapi()["paths"]["/two"]["get"]


def test_a_part_that_no_server_has_is_refused_at_import() -> None:
    @dataclass(frozen=True)
    class Wrong:
        ledger: str
        leger: str

    with pytest.raises(TypeError, match="leger"):
        given(Wrong)


def test_parts_that_are_no_routes_are_selected_the_same_way() -> None:
    names = {each.name: each.name for each in fields(Server)}
    server: Any = SimpleNamespace(**names)
    assert vars(select(Parts, server)) == {each.name: each.name for each in fields(Parts)}


def test_only_what_builds_the_server_knows_all_of_it() -> None:
    """Nothing else reads `app.state.server` or takes a `Server`: it would reach every part."""
    sources = [*SERVER.glob("*.py"), *(SERVER.parent / "bridges").rglob("*.py")]
    reach = re.compile(r"\bstate\.server\b(?! import)(?!\.given)|import [\w, ]*\bServer\b|: Server\b")
    assert {path.name for path in sources if reach.search(path.read_text(encoding="utf-8"))} == KNOW_IT
