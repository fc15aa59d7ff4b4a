"""Plans that are given to a script act in its first iteration, on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys, torch
from torch import nn
model = nn.Sequential(*[one for _ in range(8) for one in (nn.Linear(512, 512), nn.GELU())]).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(int(sys.argv[1])):
    torch.cuda.reset_peak_memory_stats()
    optimizer.zero_grad()
    model(torch.randn(8192, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    print("peak", torch.cuda.max_memory_allocated(), flush=True)
"""


SETTLED = 40
"""Iterations after which the search for a plan that keeps the allocator to the budget has ended."""


def peaks(folder: Path, neap: str, iterations: int, *more: str) -> list[int]:
    """The most bytes given out in each iteration on the dry device."""
    (folder / "train.py").write_text(SCRIPT)
    script = [sys.executable, "train.py", str(iterations)]
    command = [neap, "dry", "--", neap, "torch", *more, "--", *script]
    environment = {**os.environ, "NEAP_TORCH_PYTHON": sys.executable, "NEAP": neap}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak")]


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch that is built for CUDA")
def test_a_plan_acts_in_the_first_iteration(tmp_path: Path, neap: str) -> None:
    plan = ["--no-recompute", "--save-plan", "made.plan"]
    made = peaks(tmp_path, neap, SETTLED, "--budget", "60%", *plan)
    given = peaks(tmp_path, neap, 8, "--plan", "made.plan")
    assert len(given) == 8
    # All that its layers give, and parameters and gradients, take 408 MiB.
    assert max(given) == made[-1] < 250 << 20, (made, given)
