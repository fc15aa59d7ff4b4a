"""Large parameters whose step runs in parts."""

from __future__ import annotations

from typing import Any

import neap.torch
import pytest
import torch
from fitted import everything, same
from jobs import Job, squared
from neap.torch import _states
from neap.torch._states import DIVISIBLE, States, bounds, full
from neap.torch._watch import Watch
from torch import nn

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(autouse=True)
def _tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_states, "PIECE_BYTES", 4096)


def test_bounds_cover_a_parameter_and_hold_a_piece_each() -> None:
    for size in range(512, 40_000, 1004):
        cuts = bounds(size, 2 * size, 4096)
        assert cuts[0][0] == 0 and cuts[-1][1] == size
        assert all(a[1] == b[0] for a, b in zip(cuts, cuts[1:]))
        assert len(cuts) == 1 or all(2 * (b - a) >= 4096 for a, b in cuts[:-1])


def test_a_piece_is_at_most_half_larger_than_asked_for() -> None:
    """Unless one parameter makes it so. Two parameters of 56 and 65 MiB came together before."""
    sizes = [56, 65, 65, 3, 60, 1, 200, 10, 64, 40, 40, 40]
    pieces: list[list[int]] = [[]]
    for size in sizes:
        if full(len(pieces[-1]), sum(pieces[-1]), size, 64):
            pieces.append([])
        pieces[-1].append(size)
    assert pieces == [[56], [65], [65], [3, 60, 1], [200], [10, 64], [40, 40], [40]]


@pytest.mark.usefixtures("neap")
def test_pieces_are_no_smaller_than_the_budget_asks_for() -> None:
    """What is lower than any plan has the smallest pieces, and trains to the same."""
    trained: list[list[torch.Tensor]] = []
    for budget, piece in (("100%", 4096), ("1%", 1024), (None, None)):
        one = job(torch.optim.Adam)
        if budget is None:
            losses = [iterate(one, seed) for seed in range(8)]
        else:
            with neap.torch.fit(
                one.model, one.optimizer, budget, "host", recompute=False, verbose=False
            ) as fitted:
                losses = [iterate(one, seed) for seed in range(8)]
                assert fitted.schedule is not None and fitted.schedule.piece == piece
        trained.append([*losses, *one.model.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*trained))


def job(kind: Any, **settings: Any) -> Job:
    """A large matrix, a large kernel in the channels-last layout, and small parameters."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 70)
    ).to(memory_format=torch.channels_last)
    optimizer = kind(model.parameters(), lr=0.01, **settings)
    return squared(model, optimizer, 2, 16, 4, 4)


def iterate(job: Job, seed: int = 0) -> torch.Tensor:
    """An iteration whose random numbers follow from the seed alone."""
    torch.manual_seed(seed)
    return job.iteration()


def steps(optimizer: torch.optim.Optimizer) -> States:
    """All its states stay on the host between steps from now on."""
    states = States(optimizer, Watch())
    states.start([p for group in optimizer.param_groups for p in group["params"]])
    return states


SETTINGS: list[dict[str, Any]] = [{}, {"foreach": True}, {"weight_decay": 0.1, "maximize": True}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", DIVISIBLE, ids=lambda kind: kind.__name__)
def test_a_step_in_parts_computes_the_same(kind: Any, settings: dict[str, Any]) -> None:
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    more = {"amsgrad": True} if kind is torch.optim.Adam else more
    plain, parted = job(kind, **settings, **more), job(kind, **settings, **more)
    for each in (plain, parted):
        iterate(each)
    states = steps(parted.optimizer)
    for seed in range(4):
        assert torch.equal(iterate(plain, seed), iterate(parted, seed))
    assert states.pieces > 4 * 8 and states.bytes_in > 0
    assert len(parted.optimizer.state) == 4
    assert same(everything(plain), everything(parted))
    states.stop()
    assert same(everything(plain), everything(parted))


def test_states_that_the_script_loads_are_used_whole_and_then_in_parts() -> None:
    plain, parted = job(torch.optim.AdamW), job(torch.optim.AdamW)
    states = None
    for each in (plain, parted):
        iterate(each)
        kept = each.optimizer.state_dict()
        kept = {**kept, "state": {k: _copy(v) for k, v in kept["state"].items()}}
        if each is parted:
            states = steps(each.optimizer)
        iterate(each)
        each.optimizer.load_state_dict(kept)
        for _ in range(3):
            iterate(each)
    assert same(everything(plain), everything(parted))
    hosts = [host for kinds in states._away.values() for host in kinds.values()]
    now = [v for s in parted.optimizer.state.values() for v in s.values()]
    assert all(any(host is state for state in now) for host in hosts)


def _copy(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: state.clone() for key, state in states.items()}


def test_a_gradient_in_another_layout_is_used_whole() -> None:
    plain, parted = job(torch.optim.AdamW), job(torch.optim.AdamW)
    for each in (plain, parted):
        iterate(each)
    steps(parted.optimizer)
    iterate(parted)
    iterate(plain)
    for each in (plain, parted):
        for parameter in each.model.parameters():
            assert parameter.grad is not None
            turned = parameter.grad.clone(memory_format=torch.contiguous_format)
            parameter.grad = turned.transpose(0, -1).contiguous().transpose(0, -1)
        each.optimizer.step()
    assert same(everything(plain), everything(parted))


def test_an_exception_between_parts_leaves_no_part_behind() -> None:
    parted = job(torch.optim.AdamW)
    iterate(parted)
    states = steps(parted.optimizer)
    iterate(parted)
    before = len(parted.optimizer.state)
    parted.optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        iterate(parted)
    assert len(parted.optimizer.state) == before == 4 and not states._here
    assert all(state["exp_avg"].shape == p.shape for p, state in parted.optimizer.state.items())
