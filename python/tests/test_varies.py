"""Scripts whose batches have another length in each iteration."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from neap.torch import fit
from neap.torch._runtime import FITS
from neap.torch._schedule import Schedule
from neap.torch._wanted import differs
from torch import nn

ITERATIONS = 24


class Aligned(nn.Module):
    """Scales each row, by a tensor that takes another operator where the length is not even."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.linspace(1, 2, x.shape[1])
        if x.shape[1] % 2:
            scale = nn.functional.pad(scale, (0, 1))[: x.shape[1]]
        scaled: torch.Tensor = x * scale.unsqueeze(-1)
        return scaled


def train(
    longest: list[int], budget: str | None = None, aligned: bool = False
) -> tuple[list[torch.Tensor], Any]:
    """Losses, parameters and states after some iterations, and the report."""
    torch.manual_seed(0)
    layers = [one for _ in range(5) for one in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    layers = [Aligned(), *layers] if aligned else layers
    model = nn.Sequential(nn.Embedding(50, 64), *layers, nn.Linear(64, 50))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fitted = None if budget is None else fit(model, optimizer, budget=budget)
    found = []
    for length in longest:
        words = torch.randint(0, 50, (4, length))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    report = None if fitted is None else fitted.close()
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [*found, *(p.detach() for p in model.parameters()), *states], report


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", [1, 2])
def test_iterations_no_larger_than_those_watched_run_by_their_plan(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randrange(8, 120) for _ in range(ITERATIONS)]
    alone, _ = train(lengths)
    planned, report = train(lengths, "60%")
    assert all(torch.equal(a, b) for a, b in zip(alone, planned, strict=True))
    watched = report.unplanned.pop("watching")
    largest = max(lengths[1:watched])
    beyond = sum(length > largest for length in lengths[watched:])
    assert report.unplanned.get("it is larger than the plan's", 0) == beyond
    fits = report.unplanned.get(FITS, 0)
    assert 0 < fits <= sum(length < 0.7 * largest for length in lengths[watched:])
    assert report.planned == ITERATIONS - watched - beyond - fits > 0
    assert report.swapped_out >= report.swapped_in > 0
    assert any("sizes vary" in note for note in report.notes)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_iterations_that_save_the_same_run_by_one_plan_though_operators_differ(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randrange(8, 120) for _ in range(ITERATIONS)]
    alone, _ = train(lengths, aligned=True)
    planned, report = train(lengths, "60%", aligned=True)
    assert all(torch.equal(a, b) for a, b in zip(alone, planned, strict=True))
    fits = report.unplanned.get(FITS, 0)
    watched = report.unplanned["watching"]
    assert watched < 10 and report.planned + fits > (ITERATIONS - watched) // 2, report


@pytest.mark.usefixtures("small")
def test_a_pair_of_alike_iterations_is_planned_as_ever() -> None:
    lengths = [40, 30, *[50] * 12]
    alone, _ = train(lengths)
    planned, report = train(lengths, "60%")
    assert all(torch.equal(a, b) for a, b in zip(alone, planned, strict=True))
    assert report.planned and not any("sizes vary" in note for note in report.notes)


def test_another_kind_of_tensor_differs_although_sizes_may_vary() -> None:
    view = (torch.float32, (4, 8), (8, 1), 0)
    expected = [(view, "")]
    assert differs(expected, 0, torch.zeros(4, 9)) is not None
    assert differs(expected, 0, torch.zeros(4, 9), True) is None
    for other in (torch.zeros(4), torch.zeros(4, 8, dtype=torch.float64)):
        assert differs(expected, 0, other, True) is not None
    assert not Schedule(expected, [None], [], {}).varies
