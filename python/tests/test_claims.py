"""What `neap dry` claims is about the whole run, and nothing is claimed of a run that failed."""

from __future__ import annotations

import json
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
MIB = 1 << 20


def dry(neap: str, folder: Path, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    command = [neap, "dry", *flags, "--", sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    form: dict[str, Any] = json.loads(done.stdout)
    return form


@pytest.mark.parametrize("end", ["raise KeyError('labels')", "import sys; sys.exit(4)"])
def test_a_script_that_failed_gets_no_verdict(neap: str, tmp_path: Path, end: str) -> None:
    script = f"import torch\ntorch.ones(9, device='cuda')\n{end}\n"
    said = dry(neap, tmp_path, script)
    assert said.returncode == 3, said.stderr
    assert "peak so far" in said.stdout and "fits" not in said.stdout + said.stderr
    assert "so there is no verdict" in said.stderr
    form = report(dry(neap, tmp_path, script, "--json"))
    assert form["verdicts"] == []
    assert form["smallest_device_bytes"] is None and form["certainty"] is None
    assert form["peak_reserved_bytes"] == 2 * MIB


LATE = """
import torch

model = torch.nn.Linear(64, 64).cuda()
tuned = torch.optim.SGD(model.parameters())
for step in range({steps}):
    if step == {at}:
        held = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
        del held
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    tuned.step()
"""


# The recorded steps are the second and the third.
@pytest.mark.parametrize("at", [2, 5])
def test_recording_leaves_the_whole_runs_peak(neap: str, tmp_path: Path, at: int) -> None:
    script = LATE.format(steps=6, at=at)
    form = report(dry(neap, tmp_path, script, "--json", "--record", "job.graph.json"))
    peak = form["peak_reserved_bytes"]
    assert peak > 300 * MIB
    assert max(p["peak_reserved_bytes"] for p in form["processes"][0]["phases"]) == peak
    own = [v["peak_reserved_bytes"] for v in form["verdicts"] if v["device"] == form["device"]]
    assert own == [peak]
    assert "recording" in form["certainty"]
    plain = report(dry(neap, tmp_path, script, "--json"))
    assert "recording" not in plain["certainty"]
    assert plain["peak_reserved_bytes"] == peak
