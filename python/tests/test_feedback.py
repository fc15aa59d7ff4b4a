"""What a run shows of the link goes into the next plan."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from fitted import everything, same
from jobs import cnn, squared
from neap.torch import Report, _latencies, _meter, fit
from neap.torch._meter import Meter, drifted, measured_link

pytestmark = pytest.mark.usefixtures("small")

LINK = {
    "d2h": 1_000,
    "d2h_contended": 750,
    "h2d": 2_000,
    "h2d_contended": 1_000,
    "overhead_ns": 5,
}


def test_rates_are_averages_in_which_the_newest_weighs_most() -> None:
    meter = Meter("cpu")
    for size in (10 << 20, 20 << 20):
        meter.start()
        meter.copied("to host", "a", size, 0, 10**9)
        meter.copied("to device", "a", _meter.SMALLEST - 1, 0, 1)
        assert not meter.turn()
        assert meter.turn()
    assert meter.rates == {"to host": pytest.approx((0.9 * 20 + 0.1 * 10) * (1 << 20))}


def test_one_iteration_of_several_is_timed() -> None:
    meter = Meter("cpu")
    turns = []
    for _ in range(3 * _meter.EVERY):
        turns.append(meter.on)
        meter.turn()
    assert sum(turns) == 2


def test_a_link_drifts_where_a_rate_is_far_from_the_assumed_one() -> None:
    assert drifted({"to host": 1_200.0, "to device": 1_600.0}, LINK) is None
    assert "to device" in (drifted({"to device": 1_400.0}, LINK) or "")
    found = measured_link({"to device": 1_400.0}, LINK)
    assert found == {**LINK, "h2d": 1_400, "h2d_contended": 700}


def test_a_link_that_is_quicker_than_the_profile_says_makes_a_new_plan(
    neap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_meter, "EVERY", 1)
    monkeypatch.setattr(_meter, "SMALLEST", 1)
    monkeypatch.setattr(_latencies, "THRESHOLD", 1e9)
    shown = subprocess.run([neap, "device", "show", "host", "--json"], capture_output=True)
    form = json.loads(shown.stdout)
    form["name"] = "far"
    # A thousandth of what any memory does.
    form["link"] = {**dict.fromkeys(form["link"], 2_000_000), "overhead_ns": 0}
    path = tmp_path / "far.device.json"
    path.write_text(json.dumps(form))

    def run(budget: str | None) -> tuple[list[torch.Tensor], list[Report]]:
        torch.manual_seed(5)
        model = cnn()
        job = squared(model, torch.optim.SGD(model.parameters(), lr=0.1), 4, 3, 32, 32)
        if budget is None:
            return [job.iteration().clone() for _ in range(14)] + everything(job), []
        fitted = fit(
            job.model, job.optimizer, budget, device=str(path), verbose=False, recompute=False
        )
        losses = [job.iteration().clone() for _ in range(5)]
        first = fitted.report().predicted_iteration_ns
        losses += [job.iteration().clone() for _ in range(9)]
        report = fitted.close()
        assert report.swapped_out > 0, report
        assert any(why.startswith("copies to") for why in report.replans), report
        assert report.link_bytes_per_s["to host"] > 4_000_000, report
        assert report.predicted_iteration_ns < first, report
        assert "copies measured at" in str(report)
        return losses + everything(job), [report]

    expected, _ = run(None)
    found, _ = run("70%")
    assert same(expected, found)
