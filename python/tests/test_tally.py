"""What a report says of a script's iterations by kind, and whether the budget is met."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from neap.torch._report import Report
from neap.torch._tally import Tally

MIB = 1 << 20


def test_iterations_are_counted_by_how_many_tensors_they_saved() -> None:
    tally = Tally()
    for saved, way, over in ((30, "by_plan", 0), (10, "", 0), (50, "on_demand", 1), (20, "", 0)):
        tally.ended(7, saved * MIB, way, over > 0)
    tally.ended(9, 5 * MIB, "by_plan", False)
    seven, nine = tally.all()
    assert (seven.saved_tensors, seven.iterations, seven.by_plan, seven.on_demand) == (7, 4, 1, 1)
    sizes = seven.least_bytes, seven.median_bytes, seven.most_bytes
    assert sizes == (10 * MIB, 30 * MIB, 50 * MIB)
    assert seven.over == 1 and nine.saved_tensors == 9
    text = str(Report(planned=2, unplanned={"why": 3}, kinds=[seven, nine], met=True))
    assert (
        "7 saved tensors, 10.0 MiB to 50.0 MiB, median 30.0 MiB: 4 iterations, 1 by the plan, "
        "1 on demand, 2 with all kept; 1 reserved more than the budget" in text
    )
    assert "9 saved tensors, 5.0 MiB: 1 iteration, 1 by the plan" in text


def test_many_kinds_are_one_at_last() -> None:
    tally = Tally()
    for kind in range(100):
        tally.ended(kind, kind, "", False)
    rest = tally.all()[0]
    assert (len(tally.all()), rest.saved_tensors, rest.iterations) == (65, -1, 36)
    assert "and 59 more kinds" in str(Report(unplanned={"why": 100}, kinds=tally.all(), met=True))


def test_iterations_that_are_all_alike_need_no_line() -> None:
    tally = Tally()
    for _ in range(3):
        tally.ended(7, MIB, "by_plan", False)
    assert "saved tensors" not in str(Report(planned=3, kinds=tally.all(), met=True))


def test_a_report_begins_with_a_budget_that_is_not_met() -> None:
    missed = Report(planned=1, budget_bytes=10 * MIB, peak_reserved_bytes=12 * MIB)
    first = "neap: the budget of 10.0 MiB is not met: 12.0 MiB were reserved\nneap: 1 iteration "
    assert str(missed).startswith(first)
    lowest = Report(planned=1, budget_bytes=10 * MIB, predicted_peak_bytes=11 * MIB)
    assert lowest.verdict.endswith("is not met: the lowest plan needs 11.0 MiB")
    assert Report(planned=1).verdict == Report(budget_bytes=1, met=True).verdict == ""


TRAIN = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(6):
    model(torch.ones(64, 256)).sum().backward()
    optimizer.step()
raise SystemExit(CODE)
"""


def test_a_strict_budget_that_is_not_met_is_an_exit_code(tmp_path: Path, neap: str) -> None:
    def code(script: int, budget: str, *flags: str) -> int:
        (tmp_path / "train.py").write_text(TRAIN.replace("CODE", str(script)))
        command = [neap, "torch", "--budget", budget, *flags, "--", sys.executable, "train.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True).returncode

    assert code(0, "1KiB") == 0
    assert code(0, "1KiB", "--strict") == 1
    assert code(0, "1GiB", "--strict") == 0
    assert code(7, "1KiB", "--strict") == 7
