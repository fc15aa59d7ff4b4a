"""Scripts whose iterations are never alike are held to their budget by what autograd saves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fitted import same
from neap.torch import _spill
from neap.torch._fit import Fit
from neap.torch._holder import Counts
from neap.torch._pinned import HostPool
from neap.torch._policy import Policy
from neap.torch._schedule import Needs
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
        kinds = (nn.Tanh, nn.GELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.ELU)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), kind(), nn.Dropout(0.1)) for kind in kinds
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


def accumulated(budget: str | None, seed: int) -> tuple[list[torch.Tensor], Any, list[str]]:
    """One to four batches for each step, in no order."""
    torch.manual_seed(3)
    draws = random.Random(seed)
    parts = [one for _ in range(4) for one in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1))]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    said: list[str] = []
    fit = None if budget is None else Fit([model], [optimizer], budget, "host", said.append)
    found = []
    for _ in range(40):
        for _ in range(draws.randint(1, 4)):
            loss = model(torch.randn(64, 32)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    report = None if fit is None else fit.close()
    states = [value for one in optimizer.state.values() for value in one.values()]
    return [*found, *model.parameters(), *states, torch.get_rng_state()], report, said


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_steps_after_fewer_batches_run_by_the_plan_for_most(seed: int) -> None:
    right, _, _ = accumulated(None, seed)
    found, report, _ = accumulated("60%", seed)
    assert same(right, found)
    assert report.planned + sum(report.unplanned.values()) == 40
    assert report.planned >= 40 - report.unplanned["watching"] - 8, report
    assert report.swapped_in + report.recomputed + report.remade > 0


@pytest.mark.parametrize("budget", ["50%", "40%"])
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


def adversaries(budget: str | None, steps: int = 40) -> tuple[list[torch.Tensor], Any, list[str]]:
    """Two critic's steps for each step of the maker, as generative adversarial networks train."""
    torch.manual_seed(3)
    maker = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh())
    first = torch.optim.Adam(critic.parameters(), 1e-3)
    second = torch.optim.Adam(maker.parameters(), 1e-3)
    said: list[str] = []
    fit = None
    if budget is not None:
        fit = Fit([critic, maker], [first, second], budget, "host", said.append)
    found = []
    for step in range(steps):
        fake = maker(torch.randn(96, 8)).detach()
        loss = critic(fake).mean() - critic(torch.randn(96, 64)).mean()
        first.zero_grad()
        loss.backward()
        first.step()
        if step % 2:
            second.zero_grad()
            loss = -critic(maker(torch.randn(96, 8))).mean()
            loss.backward()
            second.step()
        found.append(loss.detach().clone())
    report = None if fit is None else fit.close()
    states = [v for one in (first, second) for s in one.state.values() for v in s.values()]
    return [*found, *maker.parameters(), *critic.parameters(), *states], report, said


@pytest.mark.parametrize("budget", ["70%", "55%"])
def test_steps_in_turn_are_one_iteration(budget: str) -> None:
    right, _, _ = adversaries(None)
    found, report, said = adversaries(budget)
    assert same(right, found)
    assert any("2 steps in turn" in line for line in said), said
    assert report.planned >= 20 and report.met, report
    assert report.planned + sum(report.unplanned.values()) == 40
    assert report.swapped_in + report.recomputed + report.remade > 0


def saved(policy: Policy, *sizes: int) -> list[Any]:
    """Tensors of these many bytes that nothing else holds, as autograd would keep them."""
    return [policy.pack(torch.full((size,), size % 100, dtype=torch.uint8)) for size in sizes]


def test_the_oldest_leaves_and_what_is_asked_for_stays() -> None:
    policy = Policy("cpu", Counts())
    policy.begin(250)
    first, second, third = saved(policy, 100, 100, 100)
    policy.look()
    assert [one.here is None for one in (first, second, third)] == [True, False, False]
    policy.begin(50)
    policy.wanted(third)
    assert third.here is not None and second.here is None
    policy.wanted(first)
    assert first.here is not None and int(first.here[0]) == 0
    policy.begin(None)
    policy.wanted(second)
    assert second.here is not None


def test_without_room_on_the_host_everything_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPool, "take", lambda self, size: None)
    policy = Policy("cpu", Counts())
    policy.begin(100)
    kept = saved(policy, 100, 100, 100)
    policy.look()
    assert all(one.here is not None for one in kept)


def test_regions_of_the_host_are_used_again() -> None:
    pool = HostPool(False)
    one, other = pool.take(1_000_000), pool.take(1_000_000)
    assert one is not None and other is not None and one.memory.numel() == 1_000_000
    assert other.memory.data_ptr() != one.memory.data_ptr()
    one.give()
    third = pool.take(2_000_000)
    assert third is not None and third.memory.data_ptr() > other.memory.data_ptr()
    other.give()
    third.give()
    larger = pool.take(3_000_000)
    assert larger is not None and larger.memory.data_ptr() == one.memory.data_ptr()


def test_what_is_lent_is_used_again_once_its_user_is_gone() -> None:
    pool = HostPool(False)
    user = torch.nn.Identity()
    first, second = pool.lend(user, 1_000_000), pool.lend(user, 2_000_000)
    assert first is not None and second is not None and pool.is_lent
    place = first.data_ptr()
    del user
    assert not pool.is_lent
    again = pool.lend(torch.nn.Identity(), 3_000_000)
    assert again is not None and again.data_ptr() == place


def test_what_came_back_may_leave_again() -> None:
    policy = Policy("cpu", Counts())
    policy.begin(0)
    first, second = saved(policy, 100, 120)
    policy.look()
    for holder in (second, first):
        assert holder.here is None
        policy.wanted(holder)
        assert holder.here is not None
    policy.wanted(second)
    assert first.here is None and int(second.here[0]) == 20
    policy.wanted(first)
    assert int(first.here[0]) == 0 and second.here is None


def test_nothing_is_kept_of_what_is_gone() -> None:
    policy = Policy("cpu", Counts())
    policy.begin(1 << 40)
    for _ in range(3):
        kept = saved(policy, *range(1, 20))
        policy.look()
        del kept
        policy.ended(0)
    assert not policy._waiting and not policy._known and not policy._away


def test_the_margin_grows_where_it_was_missed_and_for_larger_iterations() -> None:
    policy = Policy("cpu", Counts())
    policy.knows(Needs(100 << 20, 200 << 20, 50 << 20))
    policy.begin(1600 << 20)
    least = policy.margin
    assert least == 300 << 20
    policy.ended(50 << 20)
    missed = policy.margin
    assert least + (50 << 20) < missed < least + (100 << 20)
    assert policy.floor == 150 << 20
    policy.expects_more(6, 5)
    policy.expects_more(9, 0)
    assert policy.floor == 170 << 20
    assert policy.margin == missed * 6 // 5
    policy.ended(-1)
    assert policy.margin == missed
    policy.begin(100 << 20)
    assert policy.margin == 50 << 20
