"""The first plan that keeps to the budget acts while a better one is looked for."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from fitted import everything, run, same
from jobs import Job, squared
from neap.torch import _planning, fit
from torch import nn, optim
from waits import until

pytestmark = pytest.mark.usefixtures("small")

SEARCHES = """#!/usr/bin/env python3
import os, subprocess, sys, time
given = sys.stdin.read() if sys.argv[1:3] == ["script", "plan"] else None
if given is not None and '"effort": null' in given:
    open({began!r}, "w").write(str(os.getpid()))
    while not os.path.exists({goes_on!r}):
        time.sleep(0.01)
sys.exit(subprocess.run([{neap!r}, *sys.argv[1:]], input=given, text=True).returncode)
"""


class Slow:
    """An executable that waits for a file before it plans with the usual effort."""

    def __init__(self, folder: Path, neap: str) -> None:
        self.began, self.may_go_on = folder / "began", folder / "goes-on"
        self.path = folder / "neap"
        paths = {"began": str(self.began), "goes_on": str(self.may_go_on), "neap": neap}
        self.path.write_text(SEARCHES.format(**paths))
        self.path.chmod(0o755)

    def runs(self) -> bool:
        """Whether the process that waits runs still. It is waited for until it has begun."""
        until(lambda: self.began.exists() and self.began.read_text())
        try:
            os.kill(int(self.began.read_text()), 0)
        except ProcessLookupError:
            return False
        return True


@pytest.fixture
def slow(neap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Plans are first made quickly, and then by an executable that waits."""
    monkeypatch.setattr(_planning, "_EFFORT", None)
    monkeypatch.setattr(_planning, "_MANY", 0)
    made = Slow(tmp_path, neap)
    monkeypatch.setenv("NEAP", str(made.path))
    return made


def layers() -> Job:
    parts = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*parts)
    return squared(model, optim.Adam(model.parameters()), 256, 64)


def test_a_plan_acts_before_the_best_is_found(slow: Slow) -> None:
    expected, _ = run(layers, None, iterations=40)
    torch.manual_seed(5)
    random.seed(5)
    job = layers()
    fitted = fit(job.model, job.optimizer, "70%", "a6000", verbose=False)
    losses = [job.iteration().clone() for _ in range(8)]
    report = fitted.report()
    assert report.planned > 0 and not fitted.settled, report
    assert slow.runs()
    slow.may_go_on.touch()
    for _ in range(32):
        losses.append(job.iteration().clone())
        until(lambda: not slow.runs())
    assert fitted.settled
    report = fitted.close()
    assert report.planned > 32, report
    assert same(expected, losses + everything(job)), report


def test_nobody_waits_for_a_plan_when_the_script_ends(slow: Slow) -> None:
    torch.manual_seed(5)
    random.seed(5)
    job = layers()
    fitted = fit(job.model, job.optimizer, "70%", "a6000", verbose=False)
    losses = [job.iteration().clone() for _ in range(7)]
    assert slow.runs()
    report = fitted.close()
    assert not slow.runs()
    assert report.planned > 0 and not report.replans, report
    assert same(run(layers, None, iterations=7)[0], losses + everything(job))


def test_where_no_quick_plan_fits_the_best_is_waited_for(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_planning.Planner, "quick", lambda self, asked: None)
    slow.may_go_on.touch()
    _, report = run(layers, "a6000")
    assert report.planned > 0 and not slow.runs(), report
