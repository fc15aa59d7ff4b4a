"""Scripts that change for good while a plan acts."""

from __future__ import annotations

from typing import Any

import neap.torch
import pytest
import torch
from fitted import everything, same
from jobs import Job
from neap.torch._fit import _ATTEMPTS
from neap.torch._kinds import PATIENCE
from neap.torch._report import Report
from torch import nn

pytestmark = pytest.mark.usefixtures("small")
CHANGE = 8
"""The first iteration that is not like those from which the first plan was made."""


def layers() -> nn.Sequential:
    """Five layers with tensors that may leave."""
    parts = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(5)]
    return nn.Sequential(*parts)


def frozen() -> Job:
    """All layers train from an iteration on; before, the last one does."""
    model = layers()
    model[:4].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[4].parameters())
    count = iter(range(1000))

    def iteration() -> torch.Tensor:
        if next(count) == CHANGE:
            rest = model[:4].requires_grad_()
            optimizer.add_param_group({"params": list(rest.parameters()), "lr": 1e-4})
        loss = model(torch.randn(96, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(model, optimizer, iteration)


def lengths(*rows: int, turns: bool = False) -> Any:
    """A job whose iterations have these numbers of rows; with ``turns`` each that has not 96 runs
    another number of layers than the one before.
    """

    def make() -> Job:
        model = layers()
        optimizer = torch.optim.Adam(model.parameters())
        count = iter(rows)

        def iteration() -> torch.Tensor:
            row = next(count)
            few = 2 + row % 2 if turns and row != 96 else len(model)
            loss = model[:few](torch.randn(row, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Job(model, optimizer, iteration)

    return make


def both(make: Any, count: int) -> tuple[Report, list[str]]:
    """The report of a fit that changes no number, and its lines."""
    said: list[str] = []

    def run(fit: bool) -> tuple[list[torch.Tensor], Report]:
        torch.manual_seed(5)
        job = make()
        fitted = neap.torch.fit(job.model, job.optimizer, "60%", "host") if fit else None
        if fitted is not None:
            fitted._say = said.append
        losses = [job.iteration().clone() for _ in range(count)]
        report = Report() if fitted is None else fitted.close()
        return losses + everything(job), report

    expected, _ = run(False)
    found, report = run(True)
    assert same(expected, found), report
    return report, said


def test_a_script_that_trains_more_layers_from_some_step_on_is_planned_anew() -> None:
    report, said = both(frozen, 24)
    # Three watched, then planned, then four that differ, then three watched for the next plan.
    assert report.unplanned["watching"] == 3 + 2, report
    differing = sum(n for why, n in report.unplanned.items() if why != "watching")
    assert differing == PATIENCE, report
    assert report.planned == 24 - 5 - PATIENCE, report
    assert any("watching the script anew" in line for line in said), said
    assert report.swapped_out > 0 or report.state_bytes > 0 or report.remade > 0, report


def test_the_plan_stays_where_no_two_iterations_are_alike() -> None:
    other = range(100, 100 + PATIENCE + _ATTEMPTS)
    rows = [*[96] * 8, *other, *[96] * 6]
    report, said = both(lengths(*rows, turns=True), len(rows))
    assert any("the plan stays: no two iterations in a row were alike" in s for s in said), said
    assert report.planned == 8 - 3 + 6, report


def test_patience_doubles_each_time() -> None:
    rows = [96] * 8 + [64] * 20 + [96] * (2 * PATIENCE + 6)
    report, said = both(lengths(*rows), len(rows))
    watched = [line for line in said if "watching the script anew" in line]
    assert [line.split()[1] for line in watched] == [str(PATIENCE), str(2 * PATIENCE)], said
    assert report.planned == len(rows) - 3 - 2 - 2 - 3 * PATIENCE, report


def test_the_report_says_what_is_not_known() -> None:
    report = Report(budget_bytes=1 << 20, planned=1, met=True)
    report.say_what_is_known(False, 0, False, True, 0, 0)
    assert not report.met and "is not known" in str(report)
    report.say_what_is_known(True, 0, False, True, 0, 0)
    assert report.met and "what was measured is of the one before it" in str(report)
    report.say_what_is_known(True, 3, False, False, 0, 0)
    assert not report.met and "no iteration ran" not in str(report)
    report.say_what_is_known(True, 3, False, True, 0, 0)
    assert report.met and "not yet final" in str(report)
    report.say_what_is_known(True, 3, True, False, 0, 0)
    assert not report.met and "iterations by the plan reserved more" in str(report)
    report.say_what_is_known(True, 3, True, True, 3 << 20, 4 << 20)
    assert not report.met and "not yet final" not in str(report)
    assert "reserved more than the budget: up to 3.0 MiB" in str(report)
    assert "before reserved more than the budget: up to 4.0 MiB" in str(report)


def test_states_of_an_optimizer_that_fit_was_not_given_move_too() -> None:
    """As where a script trains a generator and a discriminator."""

    def run(given: int) -> tuple[list[torch.Tensor], Report]:
        torch.manual_seed(5)
        models = [nn.Sequential(nn.Linear(16, 600), nn.Tanh(), nn.Linear(600, 16)) for _ in "ab"]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        budget = ("70%", "host")
        fitted = neap.torch.fit(models, optimizers[:given], *budget, verbose=False)
        losses = []
        for _ in range(8):
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                loss = model(torch.randn(24, 16)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        schedule, report = fitted.schedule, fitted.close()
        assert schedule is not None and schedule.away, report
        return [*losses, *(p.detach() for model in models for p in model.parameters())], report

    (expected, both), (found, one) = run(2), run(1)
    assert same(expected, found)
    assert both.state_bytes == one.state_bytes > 0, (both, one)
    assert both.predicted_peak_bytes == one.predicted_peak_bytes
