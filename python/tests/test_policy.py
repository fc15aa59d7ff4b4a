"""Scripts whose iterations are never alike are held to their budget by what autograd saves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fitted import same
from neap.torch import _spill
from neap.torch._fit import Fit
from torch import nn

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(autouse=True)
def all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors leave too."""
    monkeypatch.setattr(_spill, "SMALLEST", 1)


class Branches(nn.Module):
    """Runs another sequence of its layers each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for one in order:
            x = x + self.layers[one](x)
        return x


def trained(budget: str | None, steps: int = 24) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(3)
    draws = random.Random(3)
    model = Branches()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    said: list[str] = []
    fit = None if budget is None else Fit([model], [optimizer], budget, "host", said.append)
    found = []
    for step in range(steps):
        order = [draws.randrange(6) for _ in range(3 + step % 5)]
        loss = model(torch.randn(32, 16), order).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    report = None if fit is None else fit.close()
    states = [value for one in optimizer.state.values() for value in one.values()]
    return [*found, *model.parameters(), *states, torch.get_rng_state()], report


@pytest.mark.parametrize("budget", ["70%", "50%"])
def test_iterations_that_are_never_alike_give_the_same(budget: str) -> None:
    right, _ = trained(None)
    found, report = trained(budget)
    assert same(right, found)
    assert report.by_policy > 5 and report.swapped_out > 20
    assert 0 < report.swapped_in <= report.swapped_out
    assert any("nears the budget" in note for note in report.notes)


def test_a_budget_that_everything_fits_in_moves_nothing() -> None:
    right, _ = trained(None)
    found, report = trained("400%")
    assert same(right, found)
    assert report.swapped_out == report.by_policy == 0
