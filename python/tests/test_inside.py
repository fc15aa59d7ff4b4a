"""Optimizers that step inside backward, from hooks of their parameters' gradients."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
from fitted import everything, same
from jobs import Job
from neap.torch._fit import Fit
from neap.torch._report import Report
from torch import nn

pytestmark = pytest.mark.usefixtures("small")

Make = Callable[[], Job]


def net(tied: bool = False) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(8)]
    if tied:
        blocks[6][0].weight = blocks[1][0].weight
    return nn.Sequential(*blocks)


def job(model: nn.Module, optimizer: torch.optim.Optimizer) -> Job:
    def iteration() -> torch.Tensor:
        loss = model(torch.randn(512, 16)).square().mean()
        loss.backward()
        return loss.detach()

    return Job(model, optimizer, iteration)


def one_for_each(kind: type[torch.optim.Optimizer], tied: bool = False) -> Job:
    """Each parameter has an optimizer, which steps when its gradient is complete."""
    model = net(tied)
    optimizers = {parameter: kind([parameter], 0.01) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return job(model, next(iter(optimizers.values())))


def at_the_last_gradient() -> Job:
    """One optimizer steps within backward once all gradients are complete."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model[0][0].bias.register_post_accumulate_grad_hook(step)
    return job(model, optimizer)


def ran(make: Make, slow: str | None, count: int = 10) -> tuple[list[torch.Tensor], Report | None]:
    torch.manual_seed(5)
    random.seed(5)
    fitted = None if slow is None else Fit([], [], "60%", slow, lambda line: None)
    made = make()
    losses = [made.iteration().clone() for _ in range(count)]
    report = None if fitted is None else fitted.close()
    assert torch._C._len_torch_dispatch_stack() == 0
    return losses + everything(made), report


@pytest.mark.parametrize(
    "make",
    [
        lambda: one_for_each(torch.optim.AdamW),
        lambda: one_for_each(torch.optim.SGD),
        lambda: one_for_each(torch.optim.AdamW, tied=True),
        at_the_last_gradient,
    ],
    ids=["adamw", "sgd", "tied", "one"],
)
def test_steps_inside_backward_are_planned(slow: str, make: Make) -> None:
    expected, _ = ran(make, None)
    found, report = ran(make, slow)
    assert report is not None and report.planned >= 2, report
    assert report.planned + sum(report.unplanned.values()) >= 10, report
    assert same(expected, found), report


def test_other_optimizers_step_inside_backward(slow: str) -> None:
    def folds(count: int) -> list[torch.Tensor]:
        losses = []
        for _ in range(3):
            gc.collect()
            fold = one_for_each(torch.optim.AdamW)
            losses += [fold.iteration().clone() for _ in range(count)]
        return losses

    torch.manual_seed(5)
    expected = folds(12)
    torch.manual_seed(5)
    said: list[str] = []
    fitted = Fit([], [], "60%", slow, said.append)
    found = folds(12)
    report = fitted.close()
    assert same(expected, found)
    assert report.planned + sum(report.unplanned.values()) >= 34, report
    assert sum("anew" in line and "planning" not in line for line in said) == 2, said
