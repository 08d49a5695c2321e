"""torch's threads in the tests and in the processes that they start: one, or as many as TEST_THREADS says."""

from __future__ import annotations

import os

THREADS = os.environ.get("TEST_THREADS", "1")
