"""Recomputation by module ranges: same numbers, what may not be run again stays, nothing is left
behind.
"""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import neap.torch
import pytest
import torch
from fitted import ITERATIONS, everything, run, same
from jobs import Block, Job, Transformer, classify, language, squared, trained
from neap.torch._runtime import Runtime
from torch import nn

pytestmark = pytest.mark.usefixtures("small", "calls_alone")


def deep_transformer() -> Job:
    model = Transformer(depth=6, width=32, dropout=0.1)
    return language(model, torch.optim.AdamW(model.parameters()), batch=8, length=16)


def deep_cnn() -> Job:
    blocks = [
        nn.Sequential(
            nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        for n in range(6)
    ]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return classify(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), size=24)


def autocast() -> Job:
    model = Transformer(depth=6, width=32, tied=False)
    job = language(model, torch.optim.AdamW(model.parameters()), batch=8, length=16)
    inner = job.iteration

    def iteration() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner()

    return Job(model, job.optimizer, iteration)


def pythons_own_randomness() -> Job:
    class Droppable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.block(x) * random.random()

    model = nn.Sequential(*[Droppable() for _ in range(6)])
    optimizer = torch.optim.Adam(model.parameters())

    return squared(model, optimizer, 8, 8, 16)


def arguments_by_name_and_in_tuples() -> Job:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(
            self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], mask: Any = None
        ) -> tuple[torch.Tensor, None]:
            y = self.second(torch.tanh(self.first(x * turn[0] + x.flip(-1) * turn[1])))
            return torch.where(mask, y, x), None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Rotated() for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            angle = torch.arange(16.0)
            mask = x > 0
            for layer in self.layers:
                x, _ = layer(x, turn=(angle.cos(), angle.sin()), mask=mask)
            return x

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())

    return squared(model, optimizer, 64, 16)


def the_model_itself_several_times() -> Job:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.sigmoid(torch.sin(torch.exp(torch.sin(self.inner(x)))))

    model = Cell()

    def loss(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = model(x)
        return x.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return trained(model, optimizer, loss, lambda: (torch.randn(128, 16),))


def slices_of_one_tensor() -> Job:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.out = nn.Linear(16, 128), nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, other = self.both(x).chunk(2, -1)
            return x + self.out(one * torch.sin(other))

    model = nn.Sequential(*[Gated() for _ in range(6)])
    return squared(model, torch.optim.SGD(model.parameters(), 0.01), 64, 16)


JOBS = [
    deep_transformer,
    the_model_itself_several_times,
    slices_of_one_tensor,
    deep_cnn,
    autocast,
    pythons_own_randomness,
    arguments_by_name_and_in_tuples,
]


@pytest.mark.parametrize("make", JOBS, ids=lambda make: make.__name__)
def test_calls_that_run_again_change_no_number(make: Any, slow: str) -> None:
    expected, _ = run(make, None)
    found, report = run(make, slow, "60%")
    assert same(expected, found), report
    assert report.planned == ITERATIONS - 3, report
    # What the calls had saved was gone in between, and came back the same.
    assert report.recomputed >= 4 and report.recomputed_deaths > 0 and report.compared > 0, report
    assert not report.replans, report
    assert report.predicted_peak_bytes < report.unplanned_peak_bytes
    assert not any(hasattr(kind.forward, "_neap_plain") for kind in (Block, nn.Sequential))


def test_two_models_of_one_class(slow: str) -> None:
    def losses(fitted: bool) -> tuple[list[float], Any]:
        def net(first: int, last: int) -> nn.Sequential:
            inner = nn.Linear(first, 64), nn.Softplus(), nn.Softplus(), nn.Linear(64, 64)
            return nn.Sequential(*inner, nn.Softplus(), nn.Linear(64, last))

        torch.manual_seed(4)
        maker, critic = net(8, 32), net(32, 1)
        makes = torch.optim.Adam(maker.parameters())
        judges = torch.optim.Adam(critic.parameters())
        fit = None
        if fitted:
            both = [maker, critic], [makes, judges]
            fit = neap.torch.fit(*both, "60%", slow, verbose=False)
        found = []
        for _ in range(8):
            real, fake = torch.randn(256, 32), maker(torch.randn(256, 8))
            judges.zero_grad()
            (critic(fake.detach()).mean() - critic(real).mean()).backward()
            judges.step()
            makes.zero_grad()
            loss = -critic(fake).mean()
            loss.backward()
            makes.step()
            found.append(loss.item())
        again = [] if fit is None or fit.schedule is None else fit.schedule.again
        return found, (None if fit is None else fit.close(), {one.module for one in again})

    expected, _ = losses(False)
    found, (report, modules) = losses(True)
    assert found == expected and report.planned >= 4, report
    assert {"Sequential", "Sequential_2"} <= modules, modules
    assert report.recomputed >= 2 * report.planned, report


class Counting(nn.Module):
    """A block whose forward leaves something behind."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block, self.how, self.calls, self.seen = Block(16), how, 0, []
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "attribute":
            self.calls += 1
        if self.how == "list":
            self.seen.append(float(x.detach().sum()))
        if self.how == "buffer":
            self.total.add_(x.detach().sum())
        if self.how == "argument":
            x.mul_(1.5)
        return self.block(x)


def counting(how: str) -> Job:
    layers = nn.Sequential(*[Counting(how) for _ in range(6)])
    model = nn.Sequential(nn.Linear(16, 16), layers)
    if how == "hook":
        for layer in layers:
            layer.block.mlp.register_forward_hook(lambda m, a, o, layer=layer: layer.seen.append(1))
    optimizer = torch.optim.Adam(model.parameters())

    return squared(model, optimizer, 8, 8, 16)


@pytest.mark.parametrize("how", ["attribute", "list", "buffer", "argument", "hook"])
def test_a_forward_that_leaves_something_behind_is_not_run_again(how: str, slow: str) -> None:
    left: list[Any] = []

    def make() -> Job:
        job = counting(how)
        left.append([layer for layer in job.model[1]])
        return job

    expected, _ = run(make, None)
    found, report = run(make, slow, "60%")
    assert same(expected, found), report
    plain, fitted = left
    assert [m.calls for m in plain] == [m.calls for m in fitted]
    assert [m.seen for m in plain] == [m.seen for m in fitted]
    assert any("Counting" in why for why in report.excluded), report.excluded


def test_what_comes_back_different_is_noticed_and_kept(slow: str) -> None:
    calls = [0]

    class Unsteady(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1  # Nothing shows that the result depends on it.
            return torch.tanh(self.linear(x) * (1 + calls[0] / 100)).exp()

    def make() -> Job:
        calls[0] = 0
        model = nn.Sequential(*[Unsteady() for _ in range(6)])
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def iteration() -> torch.Tensor:
            calls[0] = 0
            optimizer.zero_grad()
            loss = model(torch.randn(64, 16)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Job(model, optimizer, iteration)

    expected, _ = run(make, None)
    found, report = run(make, slow, "60%")
    assert same(expected, found), report
    assert report.replans and any("did not come back" in note for note in report.notes), report


def test_copies_and_pickles_of_a_model_hold_nothing_of_it(slow: str) -> None:
    torch.manual_seed(1)
    job = deep_transformer()
    with neap.torch.fit(job.model, job.optimizer, "60%", slow, verbose=False) as fitted:
        for _ in range(5):
            job.iteration()
        assert fitted.report().recomputed
        before = vars(job.model.blocks[0]).keys()
        other = copy.deepcopy(job.model)
        again = pickle.loads(pickle.dumps(job.model))
        tokens = torch.randint(0, 32, (2, 8))
        for model in (other, again):
            model.eval()
            job.model.eval()
            assert torch.equal(model(tokens), job.model(tokens))
        assert "forward" not in before


def test_a_schedule_survives_its_file(slow: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    job = deep_transformer()
    with neap.torch.fit(job.model, job.optimizer, "60%", slow, verbose=False) as fitted:
        for _ in range(4):
            job.iteration()
        assert fitted.schedule is not None
        fitted.schedule.save(tmp_path / "plan.json")
        assert neap.torch.Schedule.load(tmp_path / "plan.json") == fitted.schedule

    expected, _ = run(deep_transformer, None)
    torch.manual_seed(5)
    random.seed(5)
    job = deep_transformer()
    with neap.torch.apply(job.model, job.optimizer, tmp_path / "plan.json", verbose=False) as fit:
        losses = [job.iteration().clone() for _ in range(ITERATIONS)]
    assert same(expected, losses + everything(job))
    assert fit.report().planned == ITERATIONS and fit.report().recomputed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("{}", "no neap.torch.schedule"),
        ('{"format": "neap.torch.schedule", "version": 9}', "version 9"),
        ('{"format": "neap.torch.schedule", "version": 1}', "damaged"),
    ],
)
def test_files_that_are_no_schedule_are_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        neap.torch.Schedule.load(path)


def test_an_iteration_may_begin_with_a_call_that_runs_again() -> None:
    """The first saved tensor, also one of such a call, tells what ran before the iteration, such as
    an evaluation, from what the plan needs.
    """
    runtime = Runtime("cpu")
    began = []
    runtime.saves = lambda: began.append(runtime.count)
    for diverged in (False, True):
        runtime.begin()
        if diverged:
            runtime.diverge("a call had other arguments")
        for number in range(3):
            runtime.counted(torch.zeros(1))
            runtime.packed(number)
    assert began == [1]
