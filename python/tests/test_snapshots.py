"""Snapshots that PyTorch's allocator writes on the dry device, replayed row by row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or sys.platform != "linux",
    reason="needs a CUDA build of PyTorch, on Linux",
)
REQUESTS = Path(__file__).parents[2] / "tests" / "dry" / "requests.py"


def dumped(neap: str, folder: Path, conf: str, flags: list[str], script: list[str]) -> Path:
    """The snapshot that a script writes to its argument FILE."""
    path = folder / "job.pickle"
    script = [str(path) if part == "FILE" else part for part in script]
    done = subprocess.run(
        [neap, "dry", *flags, "--", sys.executable, *script],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf},
        capture_output=True,
        text=True,
    )
    assert path.exists(), done.stdout + done.stderr
    return path


def checked(neap: str, path: Path) -> dict[str, Any]:
    """What the replay of a snapshot says, which must be as it was recorded."""
    done = subprocess.run(
        [neap, "replay", "--json", "--check", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    form: dict[str, Any] = json.loads(done.stdout)
    assert form["matches"]
    return form


@pytest.mark.parametrize(
    "conf",
    [
        "expandable_segments:True",
        "max_split_size_mb:64",
        "garbage_collection_threshold:0.6",
        "garbage_collection_threshold:0.5,max_split_size_mb:40,expandable_segments:True",
    ],
)
@pytest.mark.parametrize("fraction", [None, "0.4"])
def test_calls_of_empty_cache_are_found(
    neap: str, tmp_path: Path, conf: str, fraction: str | None
) -> None:
    flags = ["--device-bytes", "3GiB", *(["--late"] if fraction else [])]
    script = [str(REQUESTS), str(len(conf)), "900", "FILE", *([fraction] if fraction else [])]
    checked(neap, dumped(neap, tmp_path, conf, flags, script))


PENDING = """
import sys, torch

MIB = 1 << 20
def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

whole = block(300)
del whole
first, second = block(150), block(150)
rest = block(((torch.cuda.mem_get_info()[0] // MIB - 6) // 2) * 2)
other = torch.cuda.Stream()
with torch.cuda.stream(other):
    second.add_(1)
second.record_stream(other)
del second
failures = 0
for _ in range(2):
    try:
        third = block(150)
    except torch.OutOfMemoryError:
        failures += 1
assert failures == 1
torch.cuda.memory._dump_snapshot(sys.argv[1])
"""


def test_a_pending_free_fails_the_request_again(neap: str, tmp_path: Path) -> None:
    script = tmp_path / "pending.py"
    begin = "import torch\ntorch.cuda.memory._record_memory_history()\n"
    script.write_text(begin + PENDING)
    flags = ["--late", "--device-bytes", "1GiB"]
    form = checked(neap, dumped(neap, tmp_path, "", flags, [str(script), "FILE"]))
    assert form["ooms"] == 1
