"""Shared by `groupwise rewards lint` and `groupwise env check`: options in JSON, and findings as lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from groupwise.cli.output import print_line
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.rewards.check import CheckResult


def json_options(text: str, *, example: str = '{"tag": "answer"}') -> dict[str, Any]:
    """Parse `--args` to a mapping. Raises ConfigError."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--args is not JSON: {error}", hint=f"as in --args '{example}'") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--args is a {type(options).__name__}; it must be an object of options by name")
    return options


def print_findings(result: CheckResult, about: str) -> None:
    print_line(f"{result.name}: {result.verdict} ({about})")
    for finding in result.findings:
        probe = f"{finding.probe!r}: " if finding.probe else ""
        print_line(f"  {finding.severity:<8}{finding.check:<14}{probe}{finding.message}")
