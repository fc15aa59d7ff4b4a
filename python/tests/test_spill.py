"""A plan that is not the script's is replaced; until then what backward needs is on the host."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from fitted import everything, same
from jobs import Job, Transformer, classify, cnn, language
from neap.torch import _form, _graph, _spill
from neap.torch._fit import Fit
from neap.torch._record import device_of
from neap.torch._recorder import Recorder
from neap.torch._schedule import Schedule
from neap.torch._watch import Watch

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(autouse=True)
def all_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors go to the host too."""
    monkeypatch.setattr(_spill, "SMALLEST", 1)


def words(depth: int = 2) -> Job:
    model = Transformer(depth, dropout=0.1)
    return language(model, torch.optim.AdamW(model.parameters()))


def images() -> Job:
    model = cnn()
    return classify(model, torch.optim.Adam(model.parameters()))


def recorded(make: Any, spills: bool) -> tuple[dict[str, Any], int, list[torch.Tensor]]:
    """The graph of an iteration, the most bytes on the host at once, and what came of it."""
    torch.manual_seed(5)
    job = make()
    watch = Watch()
    watch.name_root(job.model)
    most = 0
    with watch.installed():
        job.iteration()
        recorder = Recorder(device_of([job.model]), watch, True, spills)

        def look() -> None:
            nonlocal most
            most = max(most, recorder._away)

        watch.before_backward.append(look)
        recorder.start([job.optimizer])
        gc.collect()
        for _ in range(3):
            job.iteration()
            recorder.cut()
        assert recorder._away == 0
        recorder.stop()
    return _form.graph(_graph.iteration(recorder, "job", 2)), most, everything(job)


@pytest.mark.parametrize("make", [words, images])
def test_what_is_on_the_host_is_recorded_as_if_it_stayed(make: Any) -> None:
    plain, none, right = recorded(make, False)
    spilled, most, found = recorded(make, True)
    assert none == 0 and most > 0
    assert same(right, found)
    assert spilled == plain


def fitted(job: Job, budget: int, plan: Schedule | None, count: int) -> Any:
    said: list[str] = []
    fit = Fit([job.model], [job.optimizer], budget, "host", said.append, schedule=plan)
    losses = [job.iteration().clone() for _ in range(count)]
    schedule = fit.schedule
    return [*losses, *everything(job)], fit.close(), schedule, said


def test_a_given_plan_of_another_script_is_replaced() -> None:
    torch.manual_seed(5)
    job = words(3)
    losses = [job.iteration().clone() for _ in range(9)]
    right = [*losses, *everything(job)]
    _, _, other, _ = fitted(words(2), 110_000, None, 5)
    assert other is not None
    torch.manual_seed(5)
    found, report, schedule, said = fitted(words(3), other.budget_bytes, other, 9)
    assert same(right, found), said
    assert any("not this script's" in line for line in said)
    assert schedule is not None and schedule is not other
    assert len(schedule.expected) > len(other.expected)
    assert report.planned == 9 - 1 - 2 and sum(report.unplanned.values()) == 3


def test_a_given_plan_stays_once_it_was_seen_to_be_the_scripts() -> None:
    _, _, plan, _ = fitted(words(2), 110_000, None, 5)
    torch.manual_seed(5)
    job = words(2)
    said: list[str] = []
    fit = Fit([job.model], [job.optimizer], 110_000, "host", said.append, schedule=plan)
    job.iteration()
    assert fit.runtime.policy.limit == plan.limit
    job.model.eval()
    job.iteration()
    job.model.train()
    job.iteration()
    assert fit.schedule is plan and fit.close().planned == 2
    assert not any("not this script's" in line for line in said)
