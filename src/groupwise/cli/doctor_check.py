"""The result of one check of `groupwise doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "absent"]


@dataclass(frozen=True)
class DoctorCheck:
    """Result of one check; `remedy` is empty where there is nothing to do."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
