"""The host's memory for what leaves the device: exact sizes, and no more than there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from neap.torch import _pinned

SCRIPT = """
import gc, torch
from neap.torch import _pinned
torch.cuda.init()
size = (9 << 19) + 7
pool = _pinned.host_memory(size, True)
print(pool.nbytes == size, pool.is_pinned(), _pinned.standing() - size < 4096)
print(torch.cuda.host_memory_stats()["allocated_bytes.allocated"])
part = pool[100:300]
there = torch.ones(200, dtype=torch.uint8, device="cuda")
part.copy_(there, non_blocking=True)
del pool
print(_pinned.standing() > 0)
del part
print(_pinned.standing())
_pinned.room = lambda: 1 << 20
try:
    _pinned.host_memory(2 << 20, True)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch that is built for CUDA")
def test_a_pool_pins_its_size_and_not_the_next_power_of_two(tmp_path: Path, neap: str) -> None:
    path = tmp_path / "pool.py"
    path.write_text(SCRIPT)
    command = [neap, "dry", "--device", "a6000", "--", neap, "torch", "--budget", "1GiB", "--"]
    environment = {**os.environ, "NEAP": neap}
    done = subprocess.run(
        [*command, sys.executable, str(path)], capture_output=True, text=True, env=environment
    )
    lines = done.stdout.splitlines()
    assert lines[:4] == ["True True True", "0", "True", "0"], done.stdout + done.stderr
    assert lines[4] == (
        "the plan needs 2097152 bytes of pinned memory, and the host has 1048576 left"
    )


def test_what_the_host_has_left_is_known() -> None:
    free = _pinned.room()
    if not Path("/proc/meminfo").exists():
        assert free is None
    else:
        assert free is not None and 1 << 20 < free < 1 << 50


def test_memory_that_is_not_pinned_is_of_the_size() -> None:
    assert _pinned.host_memory(3 << 20, False).untyped_storage().nbytes() == 3 << 20
