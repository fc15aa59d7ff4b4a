"""Waiting for what other processes do."""

from __future__ import annotations

import time
from typing import Any


def until(found: Any, seconds: float = 200) -> None:
    """Waits until ``found`` gives something true, and fails after ``seconds``."""
    ends = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < ends
        time.sleep(0.02)
