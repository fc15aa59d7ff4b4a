"""Parameters that leave while backward does not use them."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import neap.torch
import pytest
import torch
from fitted import everything, same
from jobs import Block, Job, Transformer, classify, cnn, language, trained
from neap.torch._schedule import Schedule
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("small")
Make = Callable[[], Job]


class Words(nn.Module):
    """A few layers, and logits that are larger than all of their parameters: in the first steps of
    backward these only take room.
    """

    def __init__(self, *layers: nn.Module, again: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 600)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), torch.arange(x.shape[1] * 4))


def words(model: nn.Module, kind: Any = torch.optim.AdamW, **settings: Any) -> Job:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return trained(model, kind(parameters, **settings), lambda: model(torch.randn(4, 24, 16)))


def blocks() -> Job:
    return words(Words(*[Block(16, dropout=0.1) for _ in range(3)]))


def tied() -> Job:
    model = Transformer(dropout=0.1)
    return language(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch=4)


def images() -> Job:
    model = cnn()
    return classify(model, torch.optim.Adam(model.parameters()), size=16)


def frozen() -> Job:
    layers = [nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16)) for _ in range(4)]
    for layer in layers[1:]:
        layer.requires_grad_(False)
    return words(Words(*layers), torch.optim.SGD, lr=0.1)


def again_by_the_script() -> Job:
    return words(Words(*[Block(16, dropout=0.1) for _ in range(3)], again=True))


class Halved(nn.Module):
    """A layer in bf16 between norms in f32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16)).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.wide(self.norm(x).bfloat16()).float()


def of_two_types() -> Job:
    job = words(Words(*[Halved() for _ in range(4)]))
    step = job.iteration

    def iteration() -> torch.Tensor:
        loss = step()
        # PyTorch refuses tensors of different types that share memory.
        torch.save(job.model.state_dict(), io.BytesIO())
        gc.collect()  # PyTorch 2.6 leaves the storages that it saved in a cycle.
        return loss

    return Job(job.model, job.optimizer, iteration)


JOBS = [blocks, tied, images, frozen, again_by_the_script, of_two_types]


def run(make: Make, budget: str | None, iterations: int = 7, **more: Any) -> tuple[Any, Any, Any]:
    """Losses and everything else, the report, and the schedule."""
    torch.manual_seed(5)
    job = make()
    if budget is None:
        return [job.iteration().clone() for _ in range(iterations)] + everything(job), None, None
    fitted = neap.torch.fit(job.model, job.optimizer, budget, "host", verbose=False, **more)
    losses = [job.iteration().clone() for _ in range(iterations)]
    schedule = fitted.schedule
    return losses + everything(job), fitted.close(), schedule


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", JOBS, ids=lambda make: make.__name__)
def test_numbers_are_those_without_neap(make: Make, recompute: bool) -> None:
    expected, _, _ = run(make, None)
    found, report, schedule = run(make, "5%", recompute=recompute)
    assert same(expected, found), report
    assert report.planned == 4
    assert schedule.lent, "no parameter leaves"
    lends = sum(what == "lend" for things in schedule.actions.values() for what, _ in things)
    # Every absence frees a storage, and every copy to the device brings one back.
    assert report.swapped_in == report.freed and report.freed >= report.planned * lends
    assert report.late == 0 and report.kept == 0, report


def test_all_parameters_are_back_when_backward_raises() -> None:
    job = blocks()
    broken = False

    def fail(gradient: torch.Tensor) -> None:
        if broken:
            assert any(p.isnan().any() for p in job.model.parameters()), "none is away"
            raise RuntimeError("the script's own")

    job.model.head.register_forward_hook(lambda m, x, y: y.register_hook(fail) and None)
    with neap.torch.fit(job.model, job.optimizer, "5%", "host", verbose=False) as fitted:
        for _ in range(6):
            job.iteration()
        assert fitted.schedule is not None and fitted.schedule.lent
        before = [p.detach().clone() for p in job.model.parameters()]
        broken = True
        with pytest.raises(RuntimeError, match="the script's own"):
            job.iteration()
        assert same(before, [p.detach() for p in job.model.parameters()])
        broken = False
        for _ in range(3):
            assert torch.isfinite(job.iteration())


def test_a_parameter_whose_memory_the_script_holds_stays() -> None:
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make() -> Job:
        job = frozen()
        held[:] = [(p, p.data.view(-1)) for p in job.model.parameters()]
        return job

    expected, _, _ = run(make, None)
    found, _, schedule = run(make, "5%", recompute=False)
    assert same(expected, found) and schedule.lent
    assert all(p.data_ptr() == view.data_ptr() for p, view in held)


def test_a_script_that_replaces_a_parameters_memory() -> None:
    def make() -> Job:
        job = blocks()

        def swap(*_: Any) -> None:
            for parameter in job.model.parameters():
                parameter.data = parameter.data * 1.5

        job.model.register_forward_pre_hook(swap)
        return job

    expected, _, _ = run(make, None)
    found, report, _ = run(make, "5%", recompute=False)
    assert same(expected, found), report


def test_parameters_that_get_another_storage_after_backward_stay() -> None:
    """As where a step updates one tensor, and forward runs on averages of it."""

    def make() -> Job:
        model = Words(*[Block(16) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updated = {p: p.detach().clone() for p in model.parameters()}

        def iteration() -> torch.Tensor:
            loss: torch.Tensor = model(torch.randn(4, 24, 16))
            loss.backward()
            for parameter in model.parameters():
                parameter.data = updated[parameter]
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data = updated[parameter] * 0.9
            return loss.detach()

        return Job(model, optimizer, iteration)

    expected, _, _ = run(make, None)
    found, report, schedule = run(make, "5%", recompute=False)
    assert same(expected, found), report
    assert schedule is not None and not schedule.lent


def test_iterations_that_differ_keep_their_parameters() -> None:
    def make() -> Job:
        job = blocks()
        whole, count = job.iteration, 0

        def iteration() -> torch.Tensor:
            nonlocal count
            count += 1
            if count % 3:
                return whole()
            job.optimizer.zero_grad()
            x = torch.randn(4, 8, 16)  # Shorter, and two calls of backward.
            loss = job.model(x)
            loss.backward()
            job.model(x).backward()
            job.optimizer.step()
            return loss.detach()

        return Job(job.model, job.optimizer, iteration)

    expected, _, _ = run(make, None, 14)
    found, report, _ = run(make, "5%", 14)
    assert same(expected, found), report


def test_a_schedule_with_parameters_survives_its_file(tmp_path: Any) -> None:
    _, _, schedule = run(blocks, "5%")
    schedule.save(tmp_path / "plan.json")
    loaded = Schedule.load(tmp_path / "plan.json")
    assert loaded == schedule and loaded.borrowed
    expected, _, _ = run(blocks, None)
    torch.manual_seed(5)
    job = blocks()
    with neap.torch.apply(job.model, job.optimizer, loaded, verbose=False) as fitted:
        found = [job.iteration().clone() for _ in range(7)] + everything(job)
        assert fitted.report().planned >= 6
    assert same(expected, found)
