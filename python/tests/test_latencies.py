"""Operator times that are measured in a script go into the next plan, and into tables."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fitted import everything, same
from jobs import Job, squared
from neap.torch import Fit, Report, fit, record
from neap.torch._clock import Clock, Span, aside
from neap.torch._latencies import _divided
from neap.torch._watch import Watch
from torch import nn

pytestmark = pytest.mark.usefixtures("small")

CHANGE = 15
"""The first iteration that is slow."""
SLOW = ("1", "3.2")
"""The modules that are."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Others on the machine disturb a single thread least."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layers() -> Job:
    parts = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*parts)
    return squared(model, torch.optim.Adam(model.parameters()), 256, 64)


def slowed(by_plan: bool) -> tuple[list[torch.Tensor], list[int], Report]:
    """A script whose two modules sleep from an iteration on: its numbers, the iterations before
    which there were new plans, and the report.
    """
    torch.manual_seed(5)
    job, now = layers(), [0]

    def sleep(*about: object) -> None:
        if by_plan:
            time.sleep(0.03 if now[0] < CHANGE else 0.12)

    for path in SLOW:
        job.model.get_submodule(path).register_forward_hook(sleep)
    fitted = fit(job.model, job.optimizer, "70%", "host", False) if by_plan else None
    losses, plans = [], [-1]
    for now[0] in range(CHANGE + 6):
        losses.append(job.iteration().clone())
        if fitted is not None and len(fitted.report().replans) >= len(plans):
            plans.append(now[0])
    report = Report() if fitted is None else fitted.close()
    return losses + everything(job), plans[1:], report


def test_a_script_that_becomes_slower_is_planned_anew_within_five_steps() -> None:
    expected, _, _ = slowed(False)
    found, plans, report = slowed(True)
    assert same(expected, found), report
    why = [why for at, why in zip(plans, report.replans) if CHANGE <= at < CHANGE + 5]
    named = [one for one in why if all(f" {path} " in one for path in SLOW)]
    assert len(named) == 1, (plans, report.replans)
    assert report.predicted_iteration_ns > 200_000_000, report
    assert report.times_from == {"measured": sum(report.times_from.values())}, report


def test_a_table_comes_back_and_a_first_plan_goes_by_it(neap: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    job = layers()
    fitted = fitted_to_host(job)
    with pytest.raises(ValueError, match="no operator was measured"):
        fitted.latencies(path)
    for _ in range(8):
        job.iteration()
    count = fitted.latencies(path)
    fitted.close()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == count > 50
    assert {row["device"] for row in rows} == {"host"}
    assert {"aten::addmm", "aten::tanh", "neap::adam"} <= {row["kind"] for row in rows}

    graph = tmp_path / "job.graph.json"
    other = layers()
    record(other.iteration, other.model, other.optimizer, graph)
    plan = [neap, "plan", graph, "--budget", "90%", "--latencies", path, "--device", "host"]
    made = subprocess.run(
        [*plan, "-o", tmp_path / "job.plan.json"], capture_output=True, text=True, check=True
    )
    assert f"latencies: {count} measured" in made.stdout, made.stdout

    third = layers()
    fitted = fit(third.model, third.optimizer, "70%", "host", verbose=False, latencies=path)
    for _ in range(4):
        third.iteration()
    report = fitted.close()
    assert report.times_from["table"] == count, report
    measured = sum(int(row["ns"]) for row in rows)
    assert measured <= report.unplanned_iteration_ns < 2 * measured, report
    assert f"operator times: {count} from the table" in str(report)
    with pytest.raises(ValueError, match="is no file"):
        fit(third.model, third.optimizer, "70%", latencies=tmp_path / "missing")


def fitted_to_host(job: Job) -> Fit:
    return fit(job.model, job.optimizer, "70%", "host", verbose=False)


SCRIPT = """
import torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
"""


def test_the_command_writes_and_reads_tables(neap: str, tmp_path: Path) -> None:
    script, table = tmp_path / "train.py", tmp_path / "measured.csv"
    script.write_text(SCRIPT)

    def run(*flags: str | Path) -> subprocess.CompletedProcess[str]:
        command = [neap, "torch", "--budget", "80%", "--device", "host", *flags]
        return subprocess.run(
            [*command, "--", sys.executable, script],
            capture_output=True,
            text=True,
            env={**os.environ, "NEAP_TORCH_CACHE": "0"},
        )

    first = run("--latencies-out", table)
    assert first.returncode == 0 and "measured.csv has the times of" in first.stderr, first.stderr
    second = run("--latencies", table)
    assert second.returncode == 0, second.stderr
    assert "from the table" in second.stderr or "measured in the script" in second.stderr
    table.write_text("key,ns\n")
    third = run("--latencies", table)
    assert third.returncode == 2 and "no rows" in third.stderr, third.stderr


def test_what_is_put_aside_does_not_count() -> None:
    with Watch().installed() as watch:
        clock = Clock("cpu", watch)
        clock.start()
        clock.passes("enter", "a")
        time.sleep(0.01)
        with aside(), aside():
            time.sleep(0.05)
        clock.passes("leave", "a", 0)
        time.sleep(0.02)
        clock.comes("pack", 0)
        clock.goes_on()
        clock.stop()
    assert clock.ended
    points = {("enter", "a", 0): 0, ("leave", "a", 0): 2, ("pack", 0, 0): 2}
    (span,) = clock.spans(points, 2)
    assert (span.first, span.after) == (0, 2)
    assert 28_000_000 < span.ns < 45_000_000, span
    assert 9_000_000 < span.inside["a"] < 20_000_000, span


def test_operators_of_a_span_add_up_to_its_time() -> None:
    assert _divided(10, [1, 1, 1]) == [3, 3, 4]
    assert _divided(7, [0, 0]) == [0, 0]
    assert Span(0, 1, 5).inside == {}
