"""The package where PyTorch is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_it_imports_without_pytorch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import neap, neap.dry\n"
        "neap.dry.install()\n"
        "print(neap.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_pytorch_is_there_for_the_other_tests() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed; all other tests need it")
