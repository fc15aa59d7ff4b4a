"""Scripts that change from step to step keep their budget, as the dry device's allocator has it."""

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

HEAD = """
import json, random, torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook as after
from torch.optim.optimizer import register_optimizer_step_pre_hook as before
random.seed(1)
seen = [0, 0, 0]
def look(*_):
    found = torch.cuda.memory_stats()
    if seen[2] >= SETTLED:
        seen[0] = max(seen[0], found["reserved_bytes.all.peak"])
    seen[1] = found["num_alloc_retries"]
def count(*_):
    look()
    seen[2] += 1
    if seen[2] == SETTLED:
        torch.cuda.reset_peak_memory_stats()
before(look)
after(count)
layers = nn.ModuleList(
    nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)
).cuda()
optimizer = torch.optim.OPTIMIZER(layers.parameters())
def train(x, order):
    for one in order:
        x = x + layers[one](x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

TELL = """
look()
json.dump(seen, open("seen", "w"))
"""

BRANCHES = """
for step in range(40):
    order = [random.randrange(6) for _ in range(4 + step % 4)]
    train(torch.randn(4096, 512, device="cuda"), order)
"""

SIZES = """
for step in range(40):
    train(torch.randn(random.randrange(512, 8192, 64), 512, device="cuda"), range(6))
"""

LATER = """
for step in range(40):
    rows = 6144 if step in (24, 30) else random.randrange(1024, 4096, 64)
    train(torch.randn(rows, 512, device="cuda"), range(6))
"""

FITTED = """
for step in range(40):
    rows = 8192 if step in (26, 33) else random.randrange(512, 2048, 64)
    train(torch.randn(rows, 512, device="cuda"), range(6))
"""
"""Until the larger iterations come, nothing has to leave."""


def ran(
    folder: Path,
    neap: str,
    script: str,
    budget: int | None,
    optimizer: str,
    settled: int = 25,
    scout: int = 0,
) -> tuple[list[int], dict[str, Any]]:
    """What was reserved at most after ``settled`` steps, how often the allocator had to try again,
    and the steps; and the report.
    """
    head = HEAD.replace("OPTIMIZER", optimizer).replace("SETTLED", str(settled))
    (folder / "train.py").write_text(head + script + TELL)
    inner = [sys.executable, "train.py"]
    if budget is not None:
        ahead = ["--scout", str(scout)] if scout else []
        inner = [neap, "torch", "--budget", str(budget), "--json", *ahead, "--", *inner]
    environment = {**os.environ, "NEAP": neap, "NEAP_TORCH_CACHE": "0"}
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [neap, "dry", "--no-second-run", "--device", "a6000", "--", *inner]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    begin = done.stdout.find("[")
    reports = json.JSONDecoder().raw_decode(done.stdout, begin)[0] if budget is not None else [{}]
    return json.loads((folder / "seen").read_text()), reports[0]


@pytest.mark.parametrize(
    ("script", "share", "optimizer"),
    [
        (BRANCHES, 60, "SGD"),
        (BRANCHES, 50, "Adam"),
        (SIZES, 55, "SGD"),
        (LATER, 65, "Adam"),
        (FITTED, 60, "SGD"),
    ],
)
def test_changing_scripts_keep_their_budget(
    tmp_path: Path, neap: str, script: str, share: int, optimizer: str
) -> None:
    (most, _, _), _ = ran(tmp_path, neap, script, None, optimizer)
    budget = most * share // 100
    (reserved, retries, steps), report = ran(tmp_path, neap, script, budget, optimizer)
    assert reserved <= budget and retries == 0, report
    assert report["by_policy"] + report["planned"] > 0, report
    assert report["budget_bytes"] == budget, report
    assert report["planned"] + sum(report["unplanned"].values()) == steps == 40


@pytest.mark.parametrize(("scout", "planned"), [(10, 30), (40, 40), (60, 40)])
def test_a_plan_for_what_was_scouted_keeps_every_step_within(
    tmp_path: Path, neap: str, scout: int, planned: int
) -> None:
    (most, _, _), _ = ran(tmp_path, neap, SIZES, None, "Adam")
    budget = most * 60 // 100
    (reserved, retries, _), report = ran(tmp_path, neap, SIZES, budget, "Adam", 0, scout)
    assert reserved <= budget and retries == 0, report
    fits = report["unplanned"].get("it fits without the plan", 0)
    assert report["planned"] + fits >= planned, report
    assert report["met"] and report["kinds"][0]["over"] == 0, report
