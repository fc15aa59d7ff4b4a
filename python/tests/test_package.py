"""The package where PyTorch is missing."""

from __future__ import annotations

import os
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


def test_each_of_several_calls_for_a_module_is_made(tmp_path: Path) -> None:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    code = (
        "import neap.dry\n"
        "for word in 'first', 'second':\n"
        "    neap.dry.when_imported('late_module', lambda m, w=word: print(w, m.value))\n"
        "import late_module\n"
        "neap.dry.when_imported('late_module', lambda m: print('third', m.value))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("first 1\nsecond 1\nthird 1\n", "")


def test_pytorch_is_there_for_the_other_tests() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed; all other tests need it")
