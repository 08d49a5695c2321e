"""What one check of `groupwise doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "absent"]


@dataclass(frozen=True)
class DoctorCheck:
    """`remedy` is empty where there is nothing to do."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
