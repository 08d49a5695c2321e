"""Learning failures that would otherwise be silent, named with their cause and what to do."""

from groupwise.health.history import Report, examine, examine_job
from groupwise.health.watch import Event, Finding, Health

__all__ = ["Event", "Finding", "Health", "Report", "examine", "examine_job"]
