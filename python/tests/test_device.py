"""The device library of `neap dry`, asked from inside scripts that run on it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

LIBRARIES = Path(torch.__file__).parent / "lib"

pytestmark = pytest.mark.skipif(
    not (LIBRARIES / "libtorch_cuda.so").exists(), reason="this PyTorch is built for the CPU"
)


def dry(neap: str, folder: Path, script: str, device: str) -> subprocess.CompletedProcess[str]:
    """Runs a script on a device."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return subprocess.run(
        [neap, "dry", "--device", device, "--", sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )


def printed(neap: str, folder: Path, script: str, device: str) -> list[str]:
    """What a script prints before the report."""
    done = dry(neap, folder, script, device)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(" reserved  allocated")[0].splitlines()[:-1]


def test_a_workspace_is_what_cublas_was_given(neap: str, tmp_path: Path) -> None:
    script = """
    import torch
    from neap.dry._library import Library

    library = Library.found()
    a = torch.ones(64, 64, device="cuda")
    like_one = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    print(len(library.workspace_allocations()))
    first = library.allocations()
    product = a @ a
    found = library.workspace_allocations()
    print(len(found), min(found) >= first, library.allocation_at(product.data_ptr()) in found)
    """
    lines = printed(neap, tmp_path, script, "h100")
    assert lines == ["0", "1 True False"]
