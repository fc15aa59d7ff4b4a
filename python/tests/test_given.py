"""Plans that are given to a script act in its first iteration, on a device."""

from __future__ import annotations

import json
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


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch that is built for CUDA")
def test_a_given_plan_is_not_said_to_meet_what_was_measured_above(
    tmp_path: Path, neap: str
) -> None:
    peaks(tmp_path, neap, 6, "--budget", "60%", "--no-recompute", "--save-plan", "made.plan")
    form = json.loads((tmp_path / "made.plan").read_text())
    # What the allocator reserves is in whole pages, and so above what the plan gives out.
    form["budget_bytes"], form["trims"] = form["peak_bytes"], []
    (tmp_path / "made.plan").write_text(json.dumps(form))
    command = [neap, "dry", "--", neap, "torch", "--plan", "made.plan", "--json", "--"]
    command += [sys.executable, "train.py", "12"]
    environment = {**os.environ, "NEAP_TORCH_PYTHON": sys.executable, "NEAP": neap}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    begin = done.stdout.find("[")  # The dry run's own report follows.
    report = json.JSONDecoder().raw_decode(done.stdout, begin)[0][0]
    assert report["planned"] > 0
    assert report["peak_reserved_bytes"] > report["budget_bytes"]
    assert not report["met"]
    # The dry device computes nothing, and its copies take no time.
    assert report["compared"] == 0 and not report["link_bytes_per_s"]


ATTENTION = """
import torch
from torch import nn
from torch.nn import functional as F
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
    def forward(self, x):
        q, k, v = self.inner(x).view(16, 512, 3, 4, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.out(y.reshape(x.shape))
model = nn.Sequential(*[Layer() for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
about = torch.cuda.get_device_properties(0)
print("card", about.major, about.minor, about.multi_processor_count, about.total_memory >> 20)
for _ in range(5):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(torch.randn(16, 512, 256, device="cuda")).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch that is built for CUDA")
def test_a_script_that_does_not_fit_at_first_is_planned_on_its_own_card(
    tmp_path: Path, neap: str
) -> None:
    (tmp_path / "train.py").write_text(ATTENTION)
    train = ["--", neap, "torch", "--budget", "210MiB", "--", sys.executable, "train.py"]
    # Attention saves other tensors there than on the card that dry runs are for by default.
    card = ["--device", "a6000", "--device-bytes", "230MiB", "--no-second-run"]
    environment = {**os.environ, "NEAP": neap}
    done = subprocess.run(
        [neap, "dry", *card, *train], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert "the first iterations do not fit" in said, said
    assert "instead of" not in said and "not this script's" not in said, said
    assert "done" in said and "the budget is met" in said, said
