"""Builds the tree of `groupwise`'s commands once a process: typer builds it anew for each command, in a tenth of
a second, and the tests call thousands."""

from __future__ import annotations

import functools

import typer.main
import typer.testing


def build_once() -> None:
    """Make typer keep the tree that it builds of an app."""
    if not hasattr(typer.main.get_command, "cache_info"):
        typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)
