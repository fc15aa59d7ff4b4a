"""Python's garbage collector runs when it would run without neap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="needs a PyTorch that is built for CUDA"
)

TRAINING = """
import gc, sys, torch
from torch import nn
device = sys.argv[1]
inside = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Sequential(nn.Linear(48, 48), nn.Tanh()))
model = nn.Sequential(inside, nn.LayerNorm(48), nn.Linear(48, 3)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
def step():
    optimizer.zero_grad()
    model(torch.ones(8, 32, device=device)).square().mean().backward()
    optimizer.step()
"""

LEFT = """
for _ in range(5):
    step()
gc.collect()
gc.disable()
for _ in range(20):  # Python's stores of freed tuples and lists, which a collection empties, fill.
    step()
before, containers = gc.get_count()[0], len(gc.get_objects())
for _ in range(40):
    step()
print((gc.get_count()[0] - before) / 40, (len(gc.get_objects()) - containers) / 40, gc.collect())
"""

KNOTS = """
alive, found = 0, []
class Knot:
    def __init__(self, held):
        global alive
        self.held, self.me = held, self
        alive += 1
    def __del__(self):
        global alive
        alive -= 1
gc.collect()
for _ in range(20):
    step()
gc.collect(0)
gc.callbacks.append(lambda phase, info: found.append(alive) if phase == "start" else None)
for _ in range(500):
    step()
    Knot(torch.empty(1 << 10, device=device))
gc.callbacks.clear()
print(found)
"""

ALLOCATIONS = """
import gc, torch
def inner(sizes):
    return [torch.empty(size, device="cuda") for size in sizes]
def outer(sizes):
    return inner(sizes)
gc.collect()
gc.disable()
outer([4])
before = gc.get_count()[0]
def count():
    return torch.empty(8, device="cuda"), gc.get_count()[0] - before
print(max(count()[1] for _ in range(10)))
"""


def lines(neap: str, folder: Path, script: str, device: str) -> list[str]:
    """What a script prints on the CPU, or on the dry device ahead of the report."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, str(path), device]
    if device == "cuda":
        command = [neap, "dry", "--device", "a6000", "--", *command]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(" reserved  allocated")[0].splitlines()


def test_a_step_leaves_no_more_containers_than_without_neap(neap: str, tmp_path: Path) -> None:
    there, here = (lines(neap, tmp_path, TRAINING + LEFT, d)[0].split() for d in ("cuda", "cpu"))
    assert abs(float(there[0]) - float(here[0])) < 1
    assert float(there[1]) <= float(here[1]) + 0.2
    assert there[2] == here[2] == "0"


def test_as_many_cycles_are_alive_at_each_collection(neap: str, tmp_path: Path) -> None:
    there, here = (
        [int(n) for n in lines(neap, tmp_path, TRAINING + KNOTS, d)[0].strip("[]").split(",")]
        for d in ("cuda", "cpu")
    )
    assert len(there) == len(here) > 1
    # The first steps fill Python's stores of free containers.
    assert abs(there[0] - here[0]) <= 10
    assert max(abs(a - b) for a, b in zip(there[1:], here[1:])) <= 2, (there, here)


def test_asking_for_the_line_makes_no_frame_objects(neap: str, tmp_path: Path) -> None:
    assert int(lines(neap, tmp_path, ALLOCATIONS, "cuda")[0]) <= 4


CYCLES = """
import gc, torch
class Knot:
    def __init__(self, held):
        self.held, self.me = held, self
STEP
gc.disable()
for turn in range(8):
    if turn == 2:
        gc.collect()  # What the script asks for is no matter of luck.
    Knot(torch.empty(40 << 20, dtype=torch.uint8, device="cuda"))
    END
"""


@pytest.mark.parametrize("steps", [False, True])
def test_what_waits_for_the_collector_is_said(neap: str, tmp_path: Path, steps: bool) -> None:
    made = 'w = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda")); '
    made += "o = torch.optim.SGD([w], 1.0); w.grad = torch.zeros_like(w)"
    script = CYCLES.replace("STEP", made if steps else "").replace("END", "o.step()" * steps)
    (tmp_path / "train.py").write_text(script)
    command = [neap, "dry", "--device", "a6000", "--", sys.executable, "train.py"]
    done = subprocess.run(
        [*command[:2], "--json", *command[2:]], cwd=tmp_path, capture_output=True, text=True
    )
    peak = json.loads(done.stdout)["processes"][0]["peak"]
    model = 8 << 20 if steps else 0
    turn = 40 << 20
    line = next(n for n, text in enumerate(script.splitlines()) if text.startswith("    Knot("))
    assert peak["allocated_bytes"] == model + 6 * turn
    assert peak["cycles"] == {
        "bytes": 6 * turn,
        "lines": [{"line": f"train.py:{line + 1}", "bytes": 6 * turn}],
        # The first two wait for the collection that the script asks for.
        "peak_at_once_bytes": model + 2 * turn,
        "peak_never_bytes": model + 6 * turn,
    }
    assert f"note: 240.0 MiB of the peak are in reference cycles made at train.py:{line + 1}" in (
        done.stderr
    )
