"""Tests of the Python package. Without PyTorch they are skipped, which pytest says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

try:
    import torch
except ImportError:
    # `test_package.py` says so; the others can't even be read.
    collect_ignore = [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if re.search(r"^(import|from) (torch|neap\.(torch|dry))", path.read_text("utf-8"), re.M)
    ]

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def neap() -> str:
    """The executable: $NEAP, or the release build, or the one on the PATH."""
    built = [ROOT / "target" / kind / "neap" for kind in ("release", "debug")]
    for found in [os.environ.get("NEAP"), *built, shutil.which("neap")]:
        if found and os.access(found, os.X_OK):
            return str(found)
    pytest.skip("there is no neap executable; build it, or set NEAP")


def missing(why: str) -> None:
    """Skips a test, or fails where a browser is required."""
    if os.environ.get("NEAP_REQUIRE_BROWSER"):
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        missing("Playwright is not installed (pip install playwright)")
    found = [os.environ.get("NEAP_CHROMIUM"), *map(shutil.which, BROWSERS)]
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(
                executable_path=next((path for path in found if path), None),
                args=["--no-sandbox"],
            )
        except Error as error:
            missing(f"no Chromium starts: {error.message.splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def pipe(tmp_path: Path) -> tuple[Path, Callable[[], str]]:
    """A pipe that is read, and what gives all that its reader got: one that still waits for a
    writer is let go.
    """
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(path.read_text()), daemon=True)
    reader.start()

    def content() -> str:
        if path.is_fifo():
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        reader.join(10)
        return "".join(got)

    return path, content


@pytest.fixture(scope="session")
def slow(neap: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A device whose link is so slow that nearly nothing is worth a copy."""
    shown = subprocess.run([neap, "device", "show", "host", "--json"], capture_output=True)
    form = json.loads(shown.stdout)
    form["name"] = "slow"
    form["link"] = {**dict.fromkeys(form["link"], 20_000_000), "overhead_ns": 200_000}
    path = tmp_path_factory.mktemp("device") / "slow.device.json"
    path.write_text(json.dumps(form))
    return str(path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, neap: str) -> None:
    """Tests' tensors are small, and all of them may be moved, in small pieces.

    Plans are made without the planner's longest searches: what must hold does not depend on them.
    """
    from neap.torch import _planning, _states

    monkeypatch.setattr(_states, "SMALLEST", 1)
    monkeypatch.setattr(_states, "PIECE", 8)
    monkeypatch.setattr(_planning, "_EFFORT", 0)
    monkeypatch.setattr(_planning, "_MANY", 1 << 30)
    monkeypatch.setenv("NEAP", neap)
    monkeypatch.setenv("NEAP_TORCH_STRICT", "1")  # A defect must not hide.
    torch.set_num_threads(1)


@pytest.fixture
def calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of modules may run again, and operators may not."""
    from neap.torch import _planning, _recompute

    if not _recompute.possible():
        pytest.skip("this PyTorch does not show its checkpoint's hooks")
    monkeypatch.setattr(_planning, "operators", lambda *about: [])


@pytest.fixture
def operators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators may run again, and calls of modules may not."""
    from neap.torch import _planning

    if not hasattr(torch._C._autograd.SavedTensor, "data"):
        pytest.skip("this PyTorch does not show what hooks keep")
    monkeypatch.setattr(_planning, "candidates", lambda *about: ([], {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A table of what the plans of `test_jobs.py` did."""
    rows = [
        f"| {report.nodeid.split('[')[-1].rstrip(']')} | {budget} | {' | '.join(map(str, did))} |"
        for report in terminalreporter.getreports("passed")
        for budget, did in report.user_properties
    ]
    if rows:
        terminalreporter.write_line("| job | budget | swapped | ran again | states, KiB | met |")
        terminalreporter.write_line("| --- | --- | ---: | ---: | ---: | --- |")
        for row in rows:
            terminalreporter.write_line(row)
