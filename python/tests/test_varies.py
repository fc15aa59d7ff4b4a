"""Scripts whose batches have another length in each iteration."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from neap.torch import _spill, fit
from neap.torch._calls import View
from neap.torch._grown import Larger, predicted
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
def test_iterations_of_one_kind_run_by_the_plan_for_the_largest(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randrange(8, 120) for _ in range(ITERATIONS)]
    alone, _ = train(lengths)
    planned, report = train(lengths, "60%")
    assert all(torch.equal(a, b) for a, b in zip(alone, planned, strict=True))
    watched = report.unplanned.pop("watching")
    largest = max(lengths[1:watched])
    fits = report.unplanned.get(FITS, 0)
    assert 0 < fits <= sum(length < 0.7 * largest for length in lengths[watched:])
    assert report.planned == ITERATIONS - watched - fits > 0
    assert report.swapped_out >= report.swapped_in > 0
    assert any("sizes vary" in note for note in report.notes)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("budget", ["70%", "50%"])
def test_larger_iterations_run_by_the_plan_and_what_it_keeps_leaves_too(
    budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_spill, "SMALLEST", 1)
    chance = random.Random(4)
    lengths = [chance.randrange(40, 64) for _ in range(14)]
    lengths += [120, 60, 128, 50, 500, 55]
    alone, _ = train(lengths)
    planned, report = train(lengths, budget)
    assert all(torch.equal(a, b) for a, b in zip(alone, planned, strict=True))
    assert report.planned + report.unplanned.get(FITS, 0) + report.unplanned["watching"] == 20
    assert report.planned >= 8 and 3 <= report.by_policy <= 4, report
    assert report.swapped_out >= report.swapped_in > 0


@pytest.mark.usefixtures("small")
def test_a_plan_for_larger_iterations_is_made_without_watching_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_spill, "SMALLEST", 1)
    chance = random.Random(4)
    lengths = [chance.randrange(40, 64) for _ in range(9)]
    lengths += [160] * 12
    alone, _ = train(lengths)
    planned, report = train(lengths, "60%")
    assert all(torch.equal(a, b) for a, b in zip(alone, planned, strict=True))
    assert report.unplanned["watching"] < 10 and report.planned >= 12, report
    assert report.by_policy == 4, report  # Then the plan is for them.
    assert report.kinds[0].most_bytes > 2 * report.kinds[0].least_bytes


def view_of(size: int) -> View:
    return torch.uint8, (size,), (1,), 0


def test_the_largest_of_each_tensor_and_of_all_are_known() -> None:
    larger = Larger()
    larger.ended({1: view_of(4), 2: view_of(9)}, 14)
    larger.ended({1: view_of(5), 2: view_of(7)}, 13)
    assert (larger.most, larger.saved) == ({1: view_of(5), 2: view_of(9)}, 14)
    assert larger.largest == {1: view_of(4), 2: view_of(9)}


class Parts(nn.Module):
    """Each layer sees a part of the rows, of its own length each time."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        rows = zip(x.split(lengths), self.parts)
        return x + torch.cat([part(one) for one, part in rows])


def in_parts(budget: str | None) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    chance = random.Random(0)
    layers = nn.ModuleList(Parts() for _ in range(3))
    optimizer = torch.optim.Adam(layers.parameters(), 1e-3)
    fitted = None if budget is None else fit(layers, optimizer, budget=budget)
    found = []
    for _ in range(24):
        x = torch.randn(128, 32)
        for one in layers:
            cuts = sorted(chance.randrange(1, 128) for _ in range(3))
            x = one(x, [b - a for a, b in zip([0, *cuts], [*cuts, 128])])
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    report = None if fitted is None else fitted.close()
    return [*found, *(p.detach() for p in layers.parameters())], report


@pytest.mark.usefixtures("small")
def test_tensors_that_vary_apart_from_each_other_run_by_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_spill, "SMALLEST", 1)
    alone, _ = in_parts(None)
    planned, report = in_parts("60%")
    assert all(torch.equal(a, b) for a, b in zip(alone, planned, strict=True))
    assert set(report.unplanned) == {"watching"}, report
    assert report.planned >= 24 - 9, report
    assert report.swapped_in + report.recomputed + report.remade > 0


@pytest.mark.parametrize(
    ("column", "size"),
    [
        ((10, 10, 10), 10),
        ((4, 8, 12), 40),  # As a saved tensor.
        ((9, 17, 25), 81),  # A multiple of it and a constant.
        ((16, 64, 144), 1600),  # As another saved tensor.
        ((1, 30, 7), 333),  # Like none: as much larger as what grew most.
    ],
)
def test_what_is_not_saved_grows_with_what_is(column: tuple[int, ...], size: int) -> None:
    assert predicted(column, {(5, 5, 5): 5, (4, 8, 12): 40, (16, 64, 144): 1600}) == size


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
