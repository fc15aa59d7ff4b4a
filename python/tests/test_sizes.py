"""`neap dry` predicts the peak of a size that the script did not run with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="needs a PyTorch that is built for CUDA"
)

SCRIPT = """
import random, sys, torch
from torch import nn
random.seed(1)
sizes = [int(n) for n in sys.argv[1:]]
model = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for size in sizes:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(torch.randn(8, size, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SEEN = ["160", "64", "128", "256", "96", "320", "192", "352", "224"]


def dry(neap: str, folder: Path, *flags: str, sizes: list[str]) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [neap, "dry", "--device", "a6000", *flags, "--", sys.executable, str(script), *sizes]
    return subprocess.run(command, capture_output=True, text=True)


def form(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_larger_size_is_predicted(neap: str, tmp_path: Path) -> None:
    picture = tmp_path / "sizes.svg"
    device = ("--device-bytes", "700MiB", "--no-second-run")
    flags = (*device, "--json", "--at", "512", "--plot-sizes", str(picture))
    sizes = form(dry(neap, tmp_path, *flags, sizes=SEEN))["sizes"]
    assert sizes["names"] == ["args[0].shape[1]"] and sizes["off_by_thousandths"] <= 20, sizes
    assert "reserved, predicted" in picture.read_text()
    real = form(dry(neap, tmp_path, "--json", sizes=["512"] * 3))
    peak = real["peak_allocated_bytes"]
    assert abs(sizes["predicted"]["peak_allocated_bytes"] - peak) < peak // 30, (sizes, peak)
    most = sizes["most_that_fits"]
    assert most > 512
    done = dry(neap, tmp_path, *device, sizes=[str(most * 9 // 10)] * 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert dry(neap, tmp_path, *device, sizes=[str(most * 3 // 2)] * 2).returncode == 1


def test_the_table_says_what_is_predicted(neap: str, tmp_path: Path) -> None:
    said = dry(neap, tmp_path, "--at", "512", "--device-bytes", "700MiB", sizes=SEEN).stdout
    assert re.search(r"^ +64 .*least seen$", said, re.M), said
    assert re.search(r"^ +512 .*predicted, within [\d.]+ % in the steps seen$", said, re.M), said
    assert re.search(
        r"^By these, up to \d+ fit on a6000 with 700\.0 MiB\. This is predicted", said, re.M
    ), said


def test_why_nothing_is_predicted(neap: str, tmp_path: Path) -> None:
    one = dry(neap, tmp_path, "--at", "512", sizes=["64"] * 3)
    assert one.returncode == 0 and "with one size only" in one.stderr, one.stderr
    few = dry(neap, tmp_path, "--at", "512", sizes=SEEN[:3])
    assert "run more steps" in few.stderr, few.stderr
    several = dry(neap, tmp_path, "--at", "8x512", sizes=SEEN)
    assert "1 size varies (args[0].shape[1]); give one" in several.stderr, several.stderr
    picture = tmp_path / "none.svg"
    bad = dry(neap, tmp_path, "--plot-sizes", str(picture), sizes=["64"] * 3)
    assert bad.returncode == 2 and not picture.exists(), bad.stderr
    assert dry(neap, tmp_path, "--at", "0", sizes=["64"]).returncode == 2
