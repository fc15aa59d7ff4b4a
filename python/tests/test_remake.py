"""Operators that run again from what they saved: same numbers, and only where that is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neap.torch
import pytest
import torch
from fitted import ITERATIONS, run, same
from jobs import Job, classify, squared, trained
from neap.torch import _recipe
from neap.torch._holder import Counts
from neap.torch._loans import COPY, LEND, Loans
from neap.torch._remake import Remake, Remakes
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("small", "operators_alone")


def stack(part: type[nn.Module], *shape: int, depth: int = 6) -> Job:
    model = nn.Sequential(*[part() for _ in range(depth)])
    return squared(model, torch.optim.AdamW(model.parameters()), *shape)


class Mlp(nn.Module):
    """Products with biases, and an activation that is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x), approximate="tanh"))


class Gated(nn.Module):
    """Products without biases, an activation, and one times the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 48, bias=False), nn.Linear(16, 48, bias=False)
        self.down = nn.Linear(48, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class Convolutions(nn.Module):
    """With a group norm between, and channels last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm, self.second = nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.hardswish(self.norm(self.first(x.to(memory_format=torch.channels_last))))
        return x + functional.leaky_relu(self.second(y), 0.2)


class Attention(nn.Module):
    """Batched products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + torch.bmm(torch.bmm(x, x.transpose(1, 2)).softmax(-1), x) * x)


def gelu() -> Job:
    return stack(Mlp, 8, 8, 16)


def gated() -> Job:
    return stack(Gated, 32, 16)


def convolutions() -> Job:
    return stack(Convolutions, 2, 8, 12, 12)


def products() -> Job:
    model = nn.Sequential(nn.Linear(8, 8), *[Attention() for _ in range(4)])
    return squared(model, torch.optim.SGD(model.parameters(), 0.01), 4, 24, 8)


def norms() -> Job:
    blocks = [
        nn.Sequential(
            nn.Conv2d(8 if n else 3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)
        )
        for n in range(5)
    ]
    end = nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(800, 4)
    model = nn.Sequential(*blocks, *end)
    return classify(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), size=24)


def autocast() -> Job:
    job = gelu()
    inner = job.iteration

    def iteration() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner()

    return Job(job.model, job.optimizer, iteration)


class Complex(nn.Module):
    """Saves conjugates and negatives that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.cfloat)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.linear(torch.complex(x, x * 0.5))
        return functional.layer_norm(z.abs() + (z.conj() * z).real * z.conj().imag, (16,))


def conjugates() -> Job:
    return stack(Complex, 128, 16)


@pytest.mark.parametrize(
    "make",
    [gelu, gated, convolutions, products, norms, autocast, conjugates],
    ids=lambda make: make.__name__,
)
def test_operators_that_run_again_change_no_number(make: Any, slow: str) -> None:
    expected, _ = run(make, None)
    found, report = run(make, slow, "70%")
    assert same(expected, found), report
    assert report.planned == ITERATIONS - 3, report
    assert report.remade > 0 and report.remade == report.remade_deaths, report
    assert report.compared > 0 and not report.replans, report
    assert report.predicted_peak_bytes < report.unplanned_peak_bytes


def test_settings_are_those_of_the_iteration(slow: str) -> None:
    class Changing(nn.Module):
        """Its slope is another in each iteration."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.slope = nn.Linear(16, 64), 0.1
            self.down = nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.slope += 0.01
            return x + self.down(functional.leaky_relu(self.linear(x), self.slope))

    expected, _ = run(lambda: stack(Changing, 64, 16), None)
    found, report = run(lambda: stack(Changing, 64, 16), slow, "70%")
    assert same(expected, found), report
    assert report.remade > 0 and report.planned == ITERATIONS - 3, report


@pytest.mark.parametrize("how", ["another function", "changed in place"])
def test_what_the_operator_did_not_give_is_kept(how: str, slow: str) -> None:
    def make() -> Job:
        job = gelu()
        count = [0]

        def loss(x: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            for block in job.model:
                y = functional.gelu(block.up(x))
                # The next function still saves the same view of it.
                if count[0] == 5 and how == "another function":
                    y = (y + 0.1).view_as(y)
                elif count[0] == 5:
                    y.detach().add_(0.1)
                x = x + block.down(y)
            return x.square().mean()

        return trained(job.model, job.optimizer, loss, lambda: (torch.randn(8, 8, 16),))

    expected, _ = run(make, None)
    found, report = run(make, slow, "70%")
    assert same(expected, found), report
    assert report.remade > 0, report
    assert report.planned == ITERATIONS - 4, report
    assert any("can't be made again by GeluBackward0" in why for why in report.unplanned), report


def test_what_is_changed_in_place_raises_what_pytorch_raises(slow: str) -> None:
    torch.manual_seed(5)
    job = gelu()
    with neap.torch.fit(job.model, job.optimizer, "70%", slow, verbose=False) as fitted:
        for _ in range(5):
            job.iteration()
        assert fitted.schedule is not None and fitted.schedule.remade
        ran = fitted.report().remade
        made = []
        handles = [
            block.down.register_forward_pre_hook(lambda m, x: made.append(x[0]))
            for block in job.model
        ]
        loss = job.model(torch.randn(8, 8, 16)).square().mean()
        made[0].detach().mul_(2)
        made.clear()
        for handle in handles:
            handle.remove()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert fitted.report().remade > ran


def test_backward_may_go_through_the_graph_twice(slow: str) -> None:
    def make() -> Job:
        job = gelu()

        def iteration() -> torch.Tensor:
            job.optimizer.zero_grad()
            loss = job.model(torch.randn(8, 8, 16)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            job.optimizer.step()
            return loss.detach()

        return Job(job.model, job.optimizer, iteration)

    expected, _ = run(make, None)
    found, report = run(make, slow, "70%")
    assert same(expected, found), report


def test_a_bias_that_has_left_comes_home_first() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    loans = Loans("cpu", lambda: {"bias": linear.bias}, Counts())
    loans.follow([[("bias", linear.bias.nbytes)]])
    loans.resolve()
    loans.begin()

    def unpack(saved: Any) -> torch.Tensor:
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = linear(x)
    expected = y.detach().clone()
    remakes = Remakes(unpack, lambda saved: saved, loans.ensure)
    remakes.compare = False
    remakes.follow([Remake("AddmmBackward0", "", [0], y.nbytes)])
    made = remakes.pack(0, 0, y)
    assert made is not None
    loans.enter()
    loans.give([(COPY, 0), (LEND, 0)])
    assert linear.bias.isnan().all()
    assert torch.equal(remakes.unpack(made), expected)
    loans.leave()


def test_what_comes_back_different_is_noticed_and_kept(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = _recipe.KINDS["GeluBackward0"]
    wrong = _recipe.Kind(
        kind.operator, kind.saved, kind.settings, lambda x, how: kind.call(x, how) + 1
    )
    expected, _ = run(gelu, None)
    monkeypatch.setitem(_recipe.KINDS, "GeluBackward0", wrong)
    found, report = run(gelu, slow, "70%")
    assert same(expected, found), report
    assert report.replans and any("came back different" in note for note in report.notes), report


def test_nothing_runs_again_where_that_is_not_wanted(slow: str) -> None:
    torch.manual_seed(5)
    job = gelu()
    with neap.torch.fit(
        job.model, job.optimizer, "70%", slow, verbose=False, recompute=False
    ) as fitted:
        for _ in range(5):
            job.iteration()
        assert fitted.schedule is not None and not fitted.schedule.remade


def test_what_other_hooks_saved_is_not_taken(slow: str) -> None:
    class Elsewhere(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = self.up(x)
            with torch.autograd.graph.save_on_cpu():
                y = functional.gelu(up)
            return x + self.down(y)

    expected, _ = run(lambda: stack(Elsewhere, 8, 8, 16), None)
    found, report = run(lambda: stack(Elsewhere, 8, 8, 16), slow, "70%")
    assert same(expected, found), report
    assert report.remade == 0, report


def test_a_schedule_with_operators_survives_its_file(slow: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    job = gelu()
    path = tmp_path / "plan.json"
    with neap.torch.fit(job.model, job.optimizer, "70%", slow, verbose=False) as fitted:
        for _ in range(4):
            job.iteration()
        assert fitted.schedule is not None and fitted.schedule.remade
        fitted.schedule.save(path)
        assert neap.torch.Schedule.load(path) == fitted.schedule
    path.write_text(path.read_text().replace('"GeluBackward0"', '"PowBackward0"'))
    with pytest.raises(ValueError, match="damaged"):
        neap.torch.Schedule.load(path)
