"""The tables of bench/paper and bench/xmem are those of their CSV files, and a missing row is an
error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "bench/paper"
FILES = [
    *("results", "budgets", "several", "crowd", "arrivals", "prediction", "published", "salus"),
    *("mlp", "links", "capuchin"),
]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """bench/paper without its recordings."""
    folder = tmp_path / "bench/paper"
    shutil.copytree(PAPER, folder, ignore=shutil.ignore_patterns("jobs", "__pycache__"))
    return folder


def tables(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "run"), "--tables"]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_page_has_the_tables_of_its_files(copied: Path) -> None:
    done = tables(copied)
    assert done.returncode == 0, done.stderr
    page = (PAPER / "README.md").read_text("utf-8")
    assert (copied / "README.md").read_text("utf-8") == page


@pytest.mark.parametrize("name", FILES)
def test_a_missing_row_is_an_error(copied: Path, name: str) -> None:
    file = copied / f"{name}.csv"
    head, *rows = file.read_text("utf-8").splitlines(keepends=True)
    # Rows after those of the budgets follow from the others' plans, and need not be there.
    rows = [row for row in rows if name != "several" or "peak of " not in row]
    for without in {0, len(rows) // 2, len(rows) - 1}:
        file.write_text(head + "".join(rows[:without] + rows[without + 1 :]), "utf-8")
        done = tables(copied)
        assert done.returncode == 1, (name, without, rows[without])
        assert f"the first of them {name}.csv" in done.stderr, done.stderr
    file.unlink()
    assert tables(copied).returncode == 1


@pytest.mark.parametrize("name", ["results", "results-xmem", "small"])
def test_a_job_or_device_that_xmem_lacks_is_an_error(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "bench/xmem"
    shutil.copytree(ROOT / "bench/xmem", folder, ignore=shutil.ignore_patterns("*.svg", "*.gz"))
    file = folder / f"{name}.csv"
    file.write_text("".join(file.read_text("utf-8").splitlines(keepends=True)[:-1]), "utf-8")
    # The drawings come after the check of jobs, and need matplotlib and neap.
    without = "import sys; sys.modules['matplotlib'] = None; import runpy; sys.argv = sys.argv[1:]"
    path = f"sys.path.insert(0, {str(folder)!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
    asked = [str(folder / "run"), "--tables", "--neap", "neap"]
    done = subprocess.run(
        [sys.executable, "-c", f"{without}; {path}", *asked], capture_output=True, text=True
    )
    assert done.returncode == 1 and f"{name}.csv lacks" in done.stderr, done.stderr
