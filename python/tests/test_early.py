"""Updates inside backward: numbers as without, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import neap.torch
import pytest
import torch
from fitted import everything, same
from jobs import Job, Transformer, classify, cnn, language, squared
from torch import nn

pytestmark = pytest.mark.usefixtures("small")

ITERATIONS = 9


def wide(optimizer: Callable[..., Any], **settings: Any) -> Job:
    """Mostly parameters, and so mostly gradients."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    return squared(model, optimizer(model.parameters(), **settings), 2, 64)


def groups() -> Job:
    model = Transformer()
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    both = [{"params": decays, "weight_decay": 0.1}, {"params": others, "lr": 1e-2}]
    return language(model, torch.optim.AdamW(both, lr=1e-3))


JOBS: dict[str, Callable[[], Job]] = {
    "sgd": lambda: wide(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": lambda: wide(torch.optim.Adam),
    "tied": groups,
    "rmsprop": lambda: wide(torch.optim.RMSprop),
    "cnn": lambda: (lambda m: classify(m, torch.optim.AdamW(m.parameters())))(cnn()),
}


def run(make: Callable[[], Job], budget: str | None, scheduled: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(3)
    job = make()
    fitted = None
    if budget is not None:
        fitted = neap.torch.fit(
            job.model, job.optimizer, budget, "host", verbose=False, early_updates=True
        )
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 2, 0.5) if scheduled else None
    losses = []
    for _ in range(ITERATIONS):
        losses.append(job.iteration())
        if scheduler is not None:
            scheduler.step()
    report = None if fitted is None else fitted.close()
    return [*losses, *everything(job)], report


@pytest.mark.parametrize("name", JOBS)
def test_numbers_are_those_of_the_step(name: str) -> None:
    expected, _ = run(JOBS[name], None, scheduled=True)
    found, report = run(JOBS[name], "60%", scheduled=True)
    assert same(expected, found), report
    assert report.planned == ITERATIONS - 3
    if name in ("sgd", "adam", "rmsprop"):
        assert report.early_updates == 12 * report.planned, report


def test_gradients_are_gone_when_backward_ends() -> None:
    torch.manual_seed(3)
    job = wide(torch.optim.SGD, lr=0.1)
    parameters = list(job.model.parameters())
    seen: list[int] = []
    step = job.optimizer.register_step_pre_hook
    with neap.torch.fit(
        job.model, job.optimizer, "60%", "host", verbose=False, early_updates=True
    ) as fitted:
        for _ in range(4):
            job.iteration()
        assert fitted.schedule is not None and fitted.schedule.early
        step(lambda *_: seen.append(sum(p.grad is not None for p in parameters)))
        job.iteration()
        report = fitted.report()
    assert seen == [0]
    assert report.predicted_peak_bytes <= report.unplanned_peak_bytes * 6 // 10


def clipped() -> Job:
    job = wide(torch.optim.SGD, lr=0.1)

    def iteration() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.model(torch.randn(2, 64)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
        return loss.detach()

    return Job(job.model, job.optimizer, iteration)


def accumulated() -> Job:
    job = wide(torch.optim.SGD, lr=0.1)

    def iteration() -> torch.Tensor:
        job.optimizer.zero_grad()
        for _ in range(2):
            loss = job.model(torch.randn(2, 64)).square().mean()
            loss.backward()
        job.optimizer.step()
        return loss.detach()

    return Job(job.model, job.optimizer, iteration)


def kept() -> Job:
    job = wide(torch.optim.SGD, lr=0.1)

    def iteration() -> torch.Tensor:
        job.optimizer.zero_grad(set_to_none=False)
        loss = job.model(torch.randn(2, 64)).square().mean()
        loss.backward()
        job.optimizer.step()
        return loss.detach()

    return Job(job.model, job.optimizer, iteration)


def closure() -> Job:
    job = wide(torch.optim.SGD, lr=0.1)

    def iteration() -> torch.Tensor:
        def loss_of() -> torch.Tensor:
            job.optimizer.zero_grad()
            loss = job.model(torch.randn(2, 64)).square().mean()
            loss.backward()
            return loss

        return job.optimizer.step(loss_of).detach()

    return Job(job.model, job.optimizer, iteration)


def late_rate() -> Job:
    job = wide(torch.optim.SGD, lr=0.1)

    def iteration() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.model(torch.randn(2, 64)).square().mean()
        loss.backward()
        job.optimizer.param_groups[0]["lr"] *= 0.9
        job.optimizer.step()
        return loss.detach()

    return Job(job.model, job.optimizer, iteration)


def scaled() -> Job:
    job = wide(torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def iteration() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.model(torch.randn(2, 64)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(job.optimizer)
        scaler.update()
        return loss.detach()

    return Job(job.model, job.optimizer, iteration)


REFUSED: dict[str, tuple[Callable[[], Job], str]] = {
    "clipping": (clipped, "between backward and the step"),
    "scaled": (scaled, "GradScaler"),
    "accumulation": (accumulated, "more than once"),
    "kept gradients": (kept, "from one iteration to the next"),
    "closure": (closure, "closure"),
    "late rate": (late_rate, "settings change between backward and the step"),
    "NAdam": (lambda: wide(torch.optim.NAdam), "not known to treat parameters alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_unsound_stays_in_the_step(name: str) -> None:
    make, why = REFUSED[name]
    expected, _ = run(make, None)
    found, report = run(make, "80%")
    assert same(expected, found), report
    assert report.early_updates == 0
    assert any(why in note for note in report.notes), report.notes


def looks() -> Job:
    job = wide(torch.optim.Adam)

    def iteration() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.model(torch.randn(2, 64)).square().mean()
        loss.backward()
        size = job.model[0].weight.detach().norm()
        job.optimizer.step()
        return loss.detach() + size

    return Job(job.model, job.optimizer, iteration)


def test_a_parameter_that_is_read_before_the_step_is_updated_there() -> None:
    expected, _ = run(looks, None)
    found, report = run(looks, "60%")
    assert same(expected, found), report
    assert report.early_updates == 11 * report.planned > 0, report


def test_what_changes_later_is_an_error() -> None:
    torch.manual_seed(3)
    job = wide(torch.optim.SGD, lr=0.1)
    with neap.torch.fit(job.model, job.optimizer, "60%", "host", verbose=False, early_updates=True):
        for _ in range(5):
            job.iteration()
        job.optimizer.zero_grad()
        job.model(torch.randn(2, 64)).sum().backward()
        with pytest.raises(RuntimeError, match="accumulated again"):
            job.model(torch.randn(2, 64)).sum().backward()
        job.optimizer.step()
        job.model(torch.randn(2, 64)).sum().backward()
        job.optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(RuntimeError, match="settings"):
            job.optimizer.step()


def test_no_two_iterations_are_alike() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = neap.torch.fit(model, optimizer, "60%", "host", False, early_updates=True)
    for layers in (1, 2, 3, 1, 3, 2, 3, 1, 2, 1, 3, 1, 2, 3, 2, 1):
        optimizer.zero_grad()
        model[:layers](torch.randn(8, 16)).sum().backward()
        optimizer.step()
    report = fitted.close()
    assert report.notes[0] == "no two iterations in a row were alike", report
    assert sum(report.unplanned.values()) == 16
