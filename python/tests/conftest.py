"""Tests of the Python package. Without PyTorch they are skipped, which pytest says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

try:
    import torch  # noqa: F401
except ImportError:
    # `test_package.py` says so; the others can't even be read.
    needing = ("record", "dry", "fit", "again", "jobs", "loops")
    collect_ignore = [f"test_{name}.py" for name in needing]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def neap() -> str:
    """The executable: $NEAP, or the release build, or the one on the PATH."""
    built = [ROOT / "target" / kind / "neap" for kind in ("release", "debug")]
    for found in [os.environ.get("NEAP"), *built, shutil.which("neap")]:
        if found and os.access(found, os.X_OK):
            return str(found)
    pytest.skip("there is no neap executable; build it, or set NEAP")
