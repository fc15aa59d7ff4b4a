"""Optimizer states that are on the device around their early update only: numbers, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import neap.torch
import pytest
import torch
from fitted import everything, same
from jobs import Job, Transformer, language, squared
from neap.torch._schedule import Schedule
from torch import nn

pytestmark = pytest.mark.usefixtures("small")

BEFORE = 5
"""Iterations until the plan acts, and one more."""
AFTER = 6


def wide(optimizer: Callable[..., Any], **settings: Any) -> Job:
    """Mostly parameters, and so mostly states."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    return squared(model, optimizer(model.parameters(), **settings), 2, 64)


def words() -> Job:
    model = Transformer()
    return language(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def halves() -> Job:
    """Parameters of two types; the states of each lie apart."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model[1].to(torch.bfloat16)

    def iteration() -> torch.Tensor:
        optimizer.zero_grad()
        x = model[0](torch.randn(2, 64))
        x = model[1](x.to(torch.bfloat16)).float()
        loss = model[3](model[2](x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizer = torch.optim.Adam(model.parameters())
    return Job(model, optimizer, iteration)


JOBS: dict[str, Callable[[], Job]] = {
    "momentum": lambda: wide(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": lambda: wide(torch.optim.Adam),
    "amsgrad": lambda: wide(torch.optim.AdamW, amsgrad=True),
    "rmsprop": lambda: wide(torch.optim.RMSprop, centered=True),
    "adagrad": lambda: wide(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "adadelta": lambda: wide(torch.optim.Adadelta),
    "adamax": lambda: wide(torch.optim.Adamax),
    "words": words,
    "halves": halves,
}

Between = Callable[[Job, int], None]


def run(
    make: Callable[[], Job], fit: bool, between: Between, link: str = "host"
) -> tuple[Any, Any, Any]:
    """Everything after the iterations, with something done between them; report and schedule."""
    torch.manual_seed(3)
    job = make()
    fitted = None
    if fit:
        fitted = neap.torch.fit(
            job.model, job.optimizer, "45%", link, verbose=False, early_updates=True
        )
    losses, schedule = [], None
    for number in range(BEFORE + AFTER):
        losses.append(job.iteration())
        if fitted is not None and number == BEFORE:  # It may be watched anew after that.
            schedule = fitted.schedule
        between(job, number)
    report = None if fitted is None else fitted.close()
    return [*losses, *everything(job)], report, schedule


def moved(schedule: Any) -> None:
    assert schedule is not None and schedule.early and schedule.turns, schedule


def nothing(job: Job, number: int) -> None:
    pass


@pytest.mark.parametrize("name", JOBS)
def test_numbers_are_those_of_the_step(name: str) -> None:
    expected, _, _ = run(JOBS[name], False, nothing)
    found, report, schedule = run(JOBS[name], True, nothing)
    assert same(expected, found), report
    moved(schedule)
    assert report.state_bytes > 0 and report.early_updates > 0
    assert report.planned == BEFORE + AFTER - 3


def test_checkpoints_are_the_same_at_each_iteration() -> None:
    def keep(job: Job, number: int, into: list[Any]) -> None:
        if number >= BEFORE:  # What the script reads in a watched iteration does not move.
            into.append(copy.deepcopy(job.optimizer.state_dict()["state"]))

    plain: list[Any] = []
    planned: list[Any] = []
    run(JOBS["adam"], False, lambda job, number: keep(job, number, plain))
    _, _, schedule = run(JOBS["adam"], True, lambda job, number: keep(job, number, planned))
    moved(schedule)
    assert len(plain) == AFTER
    for one, other in zip(plain, planned, strict=True):
        assert one.keys() == other.keys()
        for number in one:
            assert one[number].keys() == other[number].keys()
            assert all(torch.equal(one[number][key], other[number][key]) for key in one[number])


def load_all(job: Job, number: int) -> None:
    """A checkpoint of before is loaded."""
    if number == BEFORE:
        state = copy.deepcopy(job.optimizer.state_dict())
        for one in state["state"].values():
            one["exp_avg"] *= 0.5
        job.optimizer.load_state_dict(state)


def replace_one(job: Job, number: int) -> None:
    """Another tensor for one of two states."""
    if number == BEFORE:
        for state in job.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 0.5


def change_one(job: Job, number: int) -> None:
    """The state is changed where it is."""
    if number == BEFORE:
        for state in job.optimizer.state.values():
            state["exp_avg_sq"].mul_(0.5)


def differ(job: Job, number: int) -> None:
    """Another batch, an evaluation, and a part that gets no gradient."""
    if number >= BEFORE:
        with torch.no_grad():
            job.model(torch.randn(3, 64))
        job.optimizer.zero_grad()
        job.model(torch.randn(5, 64)).sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.model[2:](torch.randn(2, 64)).sum().backward()
        job.optimizer.step()


def gradients_by_hand(job: Job, number: int) -> None:
    """Updates that only the step makes."""
    if number >= BEFORE:
        job.optimizer.zero_grad()
        for parameter in list(job.model.parameters())[:4]:
            parameter.grad = torch.ones_like(parameter)
        job.optimizer.step()


@pytest.mark.parametrize(
    "between",
    [load_all, replace_one, change_one, differ, gradients_by_hand],
    ids=lambda f: f.__name__,
)
def test_what_the_script_does_between_iterations(between: Between) -> None:
    expected, _, _ = run(JOBS["adam"], False, between)
    found, report, schedule = run(JOBS["adam"], True, between)
    assert same(expected, found), report
    moved(schedule)


def test_states_are_on_the_host_between_and_after_an_exception() -> None:
    torch.manual_seed(3)
    job = wide(torch.optim.Adam)
    with neap.torch.fit(
        job.model, job.optimizer, "45%", "host", verbose=False, early_updates=True
    ) as fitted:
        for _ in range(BEFORE):
            job.iteration()
        moved(fitted.schedule)
        turns = fitted.runtime.turns
        assert turns is not None
        hosts = [
            host for turn in turns._turns for slab in turn.slabs for _, _, host in slab.hosts()
        ]

        def here() -> int:
            known = {id(s) for state in job.optimizer.state.values() for s in state.values()}
            return sum(id(host) not in known for host in hosts)

        assert hosts and here() == 0
        seen: list[int] = []

        def fail(gradient: torch.Tensor) -> None:
            seen.append(here())
            raise KeyboardInterrupt

        x = job.model[:3](torch.randn(2, 64))
        x.register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            job.model[3:](x).square().mean().backward()
        assert seen and here() == 0
        job.optimizer.zero_grad()
        job.optimizer.step()
        job.iteration()
        assert here() == 0


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    _, _, schedule = run(JOBS["adam"], True, nothing)
    moved(schedule)
    schedule.save(tmp_path / "plan.json")
    assert Schedule.load(tmp_path / "plan.json") == schedule
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "bad.json").write_text(text.replace('["come", 0]', '["come", 99]', 1))
    with pytest.raises(ValueError, match="out of range"):
        Schedule.load(tmp_path / "bad.json")
    found = []
    for by_plan in (False, True):
        torch.manual_seed(3)
        job = wide(torch.optim.Adam)
        if by_plan:
            fitted = neap.torch.apply(
                job.model, job.optimizer, tmp_path / "plan.json", verbose=False
            )
        losses = [job.iteration() for _ in range(BEFORE + AFTER)]
        states = job.optimizer.state_dict()["state"]
        values = [
            states[number][key] for number in sorted(states) for key in sorted(states[number])
        ]
        found.append([*losses, *(p.detach() for p in job.model.parameters()), *values])
    report = fitted.close()
    assert same(*found), report
    assert report.state_bytes > 0 and report.planned == BEFORE + AFTER
