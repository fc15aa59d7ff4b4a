"""A dry run's peak against that of an earlier run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="needs a PyTorch that is built for CUDA"
)

SCRIPT = """
import sys, torch
layer = torch.nn.Linear(1024, int(sys.argv[1]), device="cuda")
layer(torch.ones(64, 1024, device="cuda")).sum().backward()
"""


def dry(folder: Path, neap: str, width: int, *flags: str) -> tuple[int, str]:
    """Exit code, and what is said, of a layer with this many outputs."""
    (folder / "train.py").write_text(SCRIPT)
    command = [neap, "dry", *flags, "--", sys.executable, "train.py", str(width)]
    environment = {**os.environ, "NEAP": neap}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout if "--json" in flags else done.stdout + done.stderr


def test_a_peak_above_the_baseline_fails(tmp_path: Path, neap: str) -> None:
    code, text = dry(tmp_path, neap, 4096, "--json")
    assert code == 0
    (tmp_path / "memory.json").write_text(text)
    gate = ["--baseline", "memory.json"]
    assert dry(tmp_path, neap, 4096, *gate)[0] == 0
    code, said = dry(tmp_path, neap, 8192, *gate)
    rows = [line for line in said.splitlines() if line.startswith("weight") and "+16.0 MiB" in line]
    assert code == 1 and "peak reserved" in said and rows, said
    assert dry(tmp_path, neap, 8192, *gate, "--tolerance", "100%")[0] == 0
    code, said = dry(tmp_path, neap, 4096, *gate, "--device", "a6000")
    assert code == 2 and "--device h100" in said, said
    code, text = dry(tmp_path, neap, 8192, *gate, "--json")
    form = json.loads(text)["baseline"]
    assert code == 1 and form["grew"]
    assert form["rows"][0]["what"] == "peak reserved"
    assert form["rows"][0]["now_bytes"] > form["rows"][0]["before_bytes"]
