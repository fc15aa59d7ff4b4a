"""Scripts that let go of their first optimizer, and of models; what a closed fit holds."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import neap.torch
import pytest
import torch
from neap.torch._first import is_held
from neap.torch._fit import Fit
from neap.torch._report import Report
from neap.torch._watch import Watch
from torch import nn

pytestmark = pytest.mark.usefixtures("small")


def layers() -> nn.Sequential:
    """Five layers with tensors that may leave."""
    parts = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(5)]
    return nn.Sequential(*parts)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Trains for some iterations; their losses."""
    losses = []
    for _ in range(count):
        loss = model(torch.randn(96, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def watched(script: Callable[[], Any]) -> tuple[Any, Report, list[str]]:
    """What a script gives that ``neap torch`` runs, the report, and the lines."""
    said: list[str] = []
    torch.manual_seed(3)
    plain = script()
    torch.manual_seed(3)
    fitted = Fit([], [], "60%", "host", said.append)
    found = script()
    report = fitted.close()
    assert found == plain
    return found, report, said


def anew(said: list[str]) -> list[str]:
    """The lines that say why the script is watched anew."""
    return [line for line in said if "anew" in line and "planning" not in line]


def test_a_model_and_an_optimizer_for_each_fold() -> None:
    first: list[weakref.ref[Any]] = []

    def script() -> list[float]:
        losses: list[float] = []
        for _ in range(3):
            gc.collect()
            first[:] = [one for one in first if one() is not None]
            model = layers()
            first.append(weakref.ref(model[0][0].weight))
            losses += train(model, torch.optim.AdamW(model.parameters()), 10)
        return losses

    _, report, said = watched(script)
    assert report.planned + sum(report.unplanned.values()) == 30 and report.planned >= 20
    assert len(anew(said)) == 2 and all("is gone" in line for line in anew(said))
    assert len(first) == 2, "the first fold's model is still there in the third"


def test_an_optimizer_that_steps_once() -> None:
    def script() -> list[float]:
        model = layers()
        warm = torch.optim.SGD(model[4].parameters(), 0.1)
        losses = train(model, warm, 1)
        return losses + train(model, torch.optim.Adam(model.parameters()), 30)

    _, report, said = watched(script)
    assert report.planned >= 12 and ["steps no more" in line for line in anew(said)] == [True]
    assert report.planned + sum(report.unplanned.values()) == 31


def test_optimizers_that_step_by_turns_are_not_taken_to_be_gone() -> None:
    def script() -> list[float]:
        critic, model = layers(), layers()
        critics = torch.optim.RMSprop(critic.parameters())
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        for _ in range(8):
            losses += train(critic, critics, 1)
            losses += train(model, optimizer, 5)
        return losses

    _, report, said = watched(script)
    assert anew(said) == [] and report.planned + sum(report.unplanned.values()) == 8


def test_an_optimizer_for_each_parameter() -> None:
    def script() -> list[float]:
        model = layers()
        optimizers = [torch.optim.AdamW([one]) for one in model.parameters()]
        losses = []
        for _ in range(12):
            loss = model(torch.randn(96, 16)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    _, report, said = watched(script)
    assert anew(said) == [] and report.planned >= 7
    assert report.planned + sum(report.unplanned.values()) == 12


def test_backward_in_another_thread_counts() -> None:
    def script() -> list[float]:
        model = layers()
        warm = torch.optim.SGD(model[4].parameters(), 0.1)
        losses = train(model, warm, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(20):
            loss = model(torch.randn(96, 16)).square().mean()
            optimizer.zero_grad()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            optimizer.step()
            losses.append(loss.item())
        return losses

    _, report, said = watched(script)
    assert ["steps no more" in line for line in anew(said)] == [True]
    assert report.planned + sum(report.unplanned.values()) == 21


def test_a_plan_that_was_given_stays() -> None:
    model = layers()
    fitted = neap.torch.fit(model, torch.optim.SGD(model.parameters(), 0.1), "60%", "host")
    train(model, fitted._optimizers[0], 5)
    schedule = fitted.schedule
    assert schedule is not None
    fitted.close()
    said: list[str] = []
    given = Fit([], [], schedule.budget_bytes, "", said.append, schedule=schedule)
    assert given.schedule is None and given.has_plan
    for _ in range(2):
        model = layers()
        train(model, torch.optim.SGD(model.parameters(), 0.1), 4)
    report = given.close()
    assert report.planned == 8 and report.unplanned == {}
    assert report.swapped_out > 0 and report.swapped_out % 8 == 0
    assert len([line for line in said if "stays" in line]) == 1


def test_a_root_without_a_name_that_is_gone_is_not_found() -> None:
    watch = Watch()
    model = layers()
    watch.name_root(model)
    name = watch.name_of(model)
    assert watch.module_of(name) is model
    del model
    gc.collect()
    assert watch.module_of(name) is None
    other = layers()
    watch.name_root(other, "other")
    assert watch.module_of(name) is None and watch.module_of("other") is other


def test_what_is_held() -> None:
    class Ours:
        pass

    Ours.__module__ = "neap.torch.test"
    ours: Any = Ours()
    ours.known = Ours()
    ours.list = [ours.known, (2, ours.known)]
    # Pytest would hold what an assertion contains.
    found = [is_held(ours.known)]
    variable = ours.known
    found.append(is_held(ours.known))
    del variable
    found.append(is_held(ours.known))
    outside = {"known": ours.known}
    found.append(is_held(ours.known))
    assert found == [False, True, False, True] and outside


def test_a_closed_fit_holds_nothing() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = neap.torch.fit(model, optimizer, "60%", "host", verbose=False)
    train(model, optimizer, 6)
    report = fitted.close()
    assert report.state_bytes > 0 and fitted.report() is report
    left = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0][0].weight)]
    del model, optimizer
    gc.collect()
    assert [one() for one in left] == [None, None, None]
