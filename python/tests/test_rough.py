"""What scripts do that is rough on a tool: exceptions anywhere, closures, hooks in hooks."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import neap.torch
import pytest
import torch
from fitted import everything, same
from jobs import Block, Job, Transformer, language, squared
from neap.torch._states import DIVISIBLE
from torch import nn

pytestmark = pytest.mark.usefixtures("small")
Make = Callable[[], Job]


def compared(make: Make, iterations: int = 8, budget: str = "60%") -> neap.torch.Report:
    """Runs without and within a budget; the report of the second."""
    torch.manual_seed(5)
    job = make()
    expected = [job.iteration().clone() for _ in range(iterations)] + everything(job)
    torch.manual_seed(5)
    job = make()
    with neap.torch.fit(job.model, job.optimizer, budget, "host", verbose=False) as fitted:
        found = [job.iteration().clone() for _ in range(iterations)] + everything(job)
    assert same(expected, found), fitted.report()
    return fitted.report()


@pytest.mark.parametrize("kind", DIVISIBLE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_with_a_closure_runs_in_pieces(kind: Any, foreach: bool) -> None:
    def make() -> Job:
        model = nn.Sequential(*[Block(16) for _ in range(3)])
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.01, foreach=foreach, **more)

        def iteration() -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.randn(4, 8, 16)).square().mean()
                loss.backward()
                return loss.detach()

            return optimizer.step(closure)

        return Job(model, optimizer, iteration)

    report = compared(make, budget="40%")
    assert report.planned == 5 and report.state_bytes > 0, report


def test_an_optimizer_that_calls_its_closure_often() -> None:
    def make() -> Job:
        model = nn.Sequential(Block(16), Block(16))
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
        data = torch.randn(4, 8, 16)

        def iteration() -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(data).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return Job(model, optimizer, iteration)

    compared(make)


def failing(where: str) -> Make:
    """A job whose sixth iteration raises an exception, which the script survives."""

    def make() -> Job:
        model = Transformer(depth=3)
        optimizer = torch.optim.AdamW(model.parameters())
        job = language(model, optimizer, batch=4)
        count = [0]

        def fail(*_: Any) -> None:
            if count[0] == 6:
                raise KeyError("the script's own")

        if where == "forward":
            model.blocks[2].mlp.register_forward_hook(fail)
        elif where == "backward":
            model.blocks[1].norm1.weight.register_hook(fail)
        else:
            optimizer.register_step_post_hook(fail)

        def iteration() -> torch.Tensor:
            count[0] += 1
            try:
                return job.iteration()
            except KeyError:
                return torch.zeros(())

        return Job(model, optimizer, iteration)

    return make


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_exception_that_the_script_survives(where: str) -> None:
    report = compared(failing(where), 12, "40%")
    assert 7 <= report.planned <= 8, report


def around(inner: Callable[[nn.Module], Any]) -> Make:
    """A job that does something besides in each iteration."""

    def make() -> Job:
        model = nn.Sequential(*[Block(16) for _ in range(4)])
        job = squared(model, torch.optim.AdamW(model.parameters()), 4, 8, 16)

        def iteration() -> torch.Tensor:
            loss = job.iteration()
            inner(model)
            return loss

        return Job(model, job.optimizer, iteration)

    return make


def test_copies_of_a_model_in_every_iteration() -> None:
    def inner(model: nn.Module) -> None:
        copy.deepcopy(model)(torch.ones(1, 2, 16)).sum().backward()
        pickle.loads(pickle.dumps(model))

    assert compared(around(inner)).planned == 5


def test_iterations_in_threads_run_as_they_are() -> None:
    def make() -> Job:
        job = around(lambda model: None)()

        def iteration() -> torch.Tensor:
            found: list[torch.Tensor] = []
            thread = threading.Thread(target=lambda: found.append(job.iteration()))
            thread.start()
            thread.join()
            return found[0]

        return Job(job.model, job.optimizer, iteration)

    report = compared(make)
    assert report.planned == 0 and "another thread" in report.notes[0], report


def test_a_second_fit_takes_the_place_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    job = around(lambda model: None)()
    first = neap.torch.fit(job.model, job.optimizer, "60%", "host")
    for _ in range(5):
        job.iteration()
    second = neap.torch.fit(job.model, job.optimizer, "60%", "host")
    assert "an earlier fit was still acting" in capsys.readouterr().err
    for _ in range(6):
        job.iteration()
    assert first.close().planned == 2 and second.close().planned == 3
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    assert top is None or top(True) is None  # PyTorch 2.6 lacks it.
    assert not torch.nn.modules.module._global_forward_hooks


def test_hooks_of_the_scripts_own_run_around_the_whole_step() -> None:
    """Hooks that change gradients before the step, registered early and late; a scheduler."""

    def make() -> Job:
        model = nn.Sequential(*[Block(16) for _ in range(3)])
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        job, count, seen = squared(model, optimizer, 4, 8, 16), [0], []

        def halve(inner: torch.optim.Optimizer, *_: Any) -> None:
            for parameter in inner.param_groups[0]["params"]:
                parameter.grad.mul_(0.5)

        def look(inner: torch.optim.Optimizer, *_: Any) -> None:
            seen.append(len(inner.param_groups[0]["params"]))

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(look)

        def iteration() -> torch.Tensor:
            count[0] += 1
            if count[0] == 6:
                optimizer.register_step_pre_hook(halve)
            loss = job.iteration()
            schedule.step()
            return loss + seen[-1]

        return Job(model, optimizer, iteration)

    report = compared(make, budget="40%")
    assert report.state_bytes > 0, report


def test_an_exception_in_a_step_leaves_all_groups_as_they_were() -> None:
    model = nn.Sequential(*[Block(16) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    job = squared(model, optimizer, 4, 8, 16)
    with neap.torch.fit(model, optimizer, "40%", "host", verbose=False) as fitted:
        for _ in range(5):
            job.iteration()
        assert fitted.report().state_bytes
        whole = list(optimizer.param_groups[0]["params"])
        optimizer.param_groups[0]["betas"] = None
        with pytest.raises(TypeError):
            job.iteration()
        assert [*map(id, whole)] == [*map(id, optimizer.param_groups[0]["params"])]
        assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
