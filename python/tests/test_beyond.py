"""What a plan does not cover may go beyond the budget where the device has room."""

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
    torch.version.cuda is None, reason="needs a PyTorch that is built for CUDA"
)

TRAINING = """
import torch
from torch import nn
kept = []
model = nn.Sequential(*[one for _ in range(8) for one in (nn.Linear(512, 512), nn.GELU())]).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8192, 512, device="cuda")).square().mean().backward()
        optimizer.step()
"""
"""Without a plan an iteration gives out 280 MiB, of which activations are 256 MiB."""

EVALUATION = """
train(8)
with torch.no_grad():
    model(torch.randn(16 * 8192, 512, device="cuda"))
train(3)
"""

HOLDING = """
train(9)
kept.append(torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"))
train(9)
"""

CHANGING = """
train(9)
model = model[:8]
train(5)
"""
"""It ends while it is watched anew."""

WHOLE = """
import torch
from torch import nn
def layer(channels):
    return nn.Sequential(nn.Conv2d(channels, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
model = nn.Sequential(*[layer(3 if n == 0 else 64) for n in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(12):
    optimizer.zero_grad()
    model(torch.randn(64, 3, 64, 64, device="cuda")).square().mean().backward()
    optimizer.step()
"""
"""A normalisation saves its statistics before its caller lets go of its input."""

FROZEN = """
import torch
from torch import nn
frozen = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)]).requires_grad_(False)
model = nn.Sequential(frozen, nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)).cuda()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for _ in range(12):
    optimizer.zero_grad()
    model(torch.randn(8192, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
"""
"""Much of forward runs before the first tensor is saved."""


def ran(
    folder: Path, neap: str, script: str, *more: str, budget: str = "70%"
) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and messages of a script within a part of its memory, on a large device."""
    (folder / "train.py").write_text(script)
    command = [neap, "dry", "--no-second-run", "--", neap, "torch", "--budget", budget, "--json"]
    command += [*more, "--", sys.executable, "train.py"]
    environment = {**os.environ, "NEAP": neap}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    begin = done.stdout.find("[")  # The dry run's own report follows.
    reports = json.JSONDecoder().raw_decode(done.stdout, begin)[0] if begin >= 0 else []
    return done.returncode, reports[0] if reports else {}, done.stderr


def test_an_evaluation_may_need_more_than_the_budget(tmp_path: Path, neap: str) -> None:
    code, report, said = ran(tmp_path, neap, TRAINING + EVALUATION)
    assert code == 0, said
    assert report["beyond"] == 1 and not report["met"]
    assert any("what did not run by the plan" in note for note in report["notes"])
    assert said.count("for what is no iteration by the plan") == 1


def test_a_strict_budget_binds_an_evaluation(tmp_path: Path, neap: str) -> None:
    code, _, said = ran(tmp_path, neap, TRAINING + EVALUATION, "--strict")
    assert code != 0 and "OutOfMemoryError" in said


def test_what_the_script_keeps_later_is_planned_for(tmp_path: Path, neap: str) -> None:
    """Iterations from the tenth on need 64 MiB more: the plan is made anew, and keeps to the
    budget.
    """
    code, report, said = ran(tmp_path, neap, TRAINING + HOLDING)
    assert code == 0, said
    assert any("more than the budget" in why for why in report["replans"]), report
    assert report["peak_reserved_bytes"] <= report["budget_bytes"]


@pytest.mark.parametrize("script", [WHOLE, FROZEN], ids=["normalised", "frozen"])
def test_the_predicted_peak_is_what_is_given_out(tmp_path: Path, neap: str, script: str) -> None:
    code, report, said = ran(tmp_path, neap, script, budget="50%")
    assert code == 0, said
    predicted, given = report["predicted_peak_bytes"], report["peak_allocated_bytes"]
    assert abs(given - predicted) <= predicted // 100, (predicted, given)
    assert report["beyond"] == 0, report["notes"]


def test_a_script_that_ends_while_it_is_watched_anew_has_its_peaks(
    tmp_path: Path, neap: str
) -> None:
    code, report, said = ran(tmp_path, neap, TRAINING + CHANGING)
    assert code == 0 and "watching the script anew" in said, said
    assert 0 < report["peak_reserved_bytes"] <= report["budget_bytes"], report
    assert report["met"] and "is not met" not in said
