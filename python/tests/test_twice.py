"""Backward runs several times through one graph: what it saved leaves in between, too."""

from __future__ import annotations

from typing import Any

import neap.torch
import pytest
import torch
from fitted import run, same
from jobs import Job
from neap.torch._due import asked
from neap.torch._schedule import Schedule
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("small")


def model(*layers: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    blocks = [nn.Sequential(nn.Linear(16, 16), *layers) for _ in range(8)]
    net = nn.Sequential(*blocks)
    return net, torch.optim.SGD(net.parameters(), 0.1)


def retained(*layers: nn.Module, times: int = 2) -> Job:
    """Several losses of one forward, each with a backward of its own."""
    net, optimizer = model(*layers or (nn.Sigmoid(),))

    def iteration() -> torch.Tensor:
        optimizer.zero_grad()
        y = net(torch.randn(512, 16))
        losses = [(y ** (n + 1)).mean() for n in range(times)]
        for n, loss in enumerate(losses):
            loss.backward(retain_graph=n + 1 < times)
        optimizer.step()
        return losses[-1].detach()

    return Job(net, optimizer, iteration)


def held() -> Job:
    """Two losses of an input that the script holds."""
    net, optimizer = model(nn.GELU())

    def iteration() -> torch.Tensor:
        optimizer.zero_grad()
        x = torch.randn(512, 16, requires_grad=True)
        loss = net(x * 1.0).square().mean()
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        optimizer.step()
        return loss.detach()

    return Job(net, optimizer, iteration)


def penalty(activation: nn.Module) -> Job:
    """A loss with the norm of the gradient by its input: backward saves what the forward saved."""
    net, optimizer = model(activation)

    def iteration() -> torch.Tensor:
        optimizer.zero_grad()
        x = torch.randn(512, 16, requires_grad=True)
        loss = net(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
        return loss.detach()

    return Job(net, optimizer, iteration)


def curved() -> Job:
    return penalty(nn.GELU())


def smooth() -> Job:
    return penalty(nn.Sigmoid())


def reentrant() -> Job:
    """Calls that PyTorch's checkpoint runs again, within backward."""
    net, optimizer = model(nn.GELU())

    def iteration() -> torch.Tensor:
        optimizer.zero_grad()
        x = torch.randn(512, 16, requires_grad=True)
        for block in net:
            x = checkpoint(block, x, use_reentrant=True)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(net, optimizer, iteration)


class Spoils(torch.autograd.Function):
    """The square, whose backward doubles what was saved without autograd's knowledge."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        slope = 2 * slopes[0] * y
        y.data.mul_(0.5)
        return slope


class Spoiling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(Spoils.apply(x))


def leaves_between(schedule: Schedule) -> bool:
    """Whether an activation comes back when backward asks for something for the second time."""
    saved = len(schedule.expected)
    again = [things for (kind, n), things in schedule.actions.items() if n >= saved]
    return any(what == "in" for things in again for what, _ in things)


@pytest.mark.parametrize("times", [2, 3])
def test_what_backward_asks_for_again_leaves_in_between(slow: str, times: int) -> None:
    torch.manual_seed(5)
    job = retained(times=times)
    with neap.torch.fit(job.model, job.optimizer, "70%", slow, verbose=False) as fitted:
        for _ in range(5):
            job.iteration()
        schedule = fitted.schedule
        assert schedule is not None and schedule.met and leaves_between(schedule)
        report = fitted.report()
        assert report.swapped_in > (times - 1) * len(schedule.sizes), report
        assert report.late == 0 and report.kept == 0, report


@pytest.mark.parametrize("make", [held, curved, smooth, reentrant])
def test_all_that_leaves_is_back_in_time(slow: str, make: Any) -> None:
    for budget in ("70%", "50%"):
        _, report = run(make, slow, budget)
        assert report.swapped_in and report.late == 0 and report.kept == 0, report


@pytest.mark.parametrize(
    "make",
    [retained, lambda: retained(times=3), smooth, lambda: retained(Spoiling()), held, curved],
    ids=["retained", "three_times", "smooth", "changed_unseen", "held", "curved"],
)
def test_backward_twice_computes_the_same(slow: str, make: Any) -> None:
    expected, _ = run(make, None)
    for budget in ("80%", "60%"):
        found, report = run(make, slow, budget)
        assert report.planned and same(expected, found), report


def test_what_is_due_when_asked_for_again() -> None:
    view = (torch.float32, (1,), (1,), 0)
    schedule = Schedule(expected=[(view, "")] * 3, owner=[0, None, None], sizes=[4], actions={})
    schedule.actions = {("unpack", 1): [("in", 0)], ("unpack", 8): [("out", 0), ("drop", 0)]}
    first, second, third, none = asked(schedule)
    assert first is None and none is None
    assert second is not None and second.back == [0] and second.then is None
    # The third tensor is asked for at 2, 5 and 8.
    assert third is not None and third.away == [] and third.then is not None
    last = third.then.then
    assert third.then.away == [] and last is not None and last.then is None
    assert last.away == [("out", 0), ("drop", 0)]
