"""What a script changes while a plan acts: all comes out as without neap, or an error says why."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import neap.torch
import pytest
import torch
from neap.torch._recompute import possible
from torch import nn

pytestmark = pytest.mark.usefixtures("small")
Body = Callable[[int, nn.Module, torch.optim.Optimizer, Any], float]
again = pytest.mark.skipif(
    not possible(), reason="this PyTorch does not show its checkpoint's hooks"
)
LATER = 6
"""The first iteration that is not like those from which the plan was made."""


class Layer(nn.Module):
    """Reads a buffer and an attribute that autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop, self.up = 1.0, nn.Dropout(0.1), nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.register_buffer("place", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(x) + self.place) * self.scale
        return x + self.down(self.drop(inner))


class Drawing(Layer):
    """Draws its random numbers from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(x))
        return x + self.down(inner * torch.empty_like(inner).bernoulli_(0.8, generator=self.own))


class Complex(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.fft.fft(torch.tanh(self.up(x)))
        return x + self.down((inner * inner.conj()).real.tanh())


class Large(nn.Module):
    """Mostly parameters: some must leave during backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 600), nn.Linear(600, 16)
        self.c, self.head = nn.Linear(16, 3000), nn.Linear(3000, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.b(torch.tanh(torch.sin(torch.tanh(self.a(x)))))
        return self.head(torch.tanh(self.c(inner.mean(0)))).square().mean()


def layers(kind: type[nn.Module] = Layer) -> nn.Module:
    return nn.Sequential(*[kind() for _ in range(4)])


def ran(make: Callable[[], nn.Module], body: Body, **asked: Any) -> tuple[list[Any], Any]:
    """What ten iterations gave and left, and the report of a fit if one is asked for."""
    torch.manual_seed(5)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted = neap.torch.fit(model, optimizer, verbose=False, **asked) if asked else None
    try:
        found: list[Any] = [body(n, model, optimizer, fitted) for n in range(10)]
    finally:
        report = None if fitted is None else fitted.close()
    left = [p.detach().clone() for p in model.parameters()]
    return found + [one.tolist() for one in (*left, torch.get_rng_state())], report


def step(model: nn.Module, optimizer: torch.optim.Optimizer, between: Any = None) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(96, 16)).square().mean()
    if between is not None:
        between(loss)
    loss.backward()
    optimizer.step()
    return loss.item()


def scaled(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
    """An attribute changes between forward and backward."""

    def between(loss: torch.Tensor) -> None:
        for layer in model:
            layer.scale *= 0.9

    return step(model, optimizer, between if n >= LATER else None)


def evaluated(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
    """An evaluation between forward and backward leaves the model in its mode."""
    model.train()
    return step(model, optimizer, (lambda loss: model.eval()) if n >= LATER else None)


def twice(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
    """A gradient is asked for before backward, over the same graph."""

    def between(loss: torch.Tensor) -> None:
        torch.autograd.grad(loss, model[0].up.weight, retain_graph=True)

    return step(model, optimizer, between if n >= LATER else None)


def functional(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
    if n >= LATER:
        torch.func.grad(lambda x: model(x).sum())(torch.randn(2, 16))
    return step(model, optimizer)


def plain(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
    return step(model, optimizer)


@again
@pytest.mark.usefixtures("calls_alone")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Layer, scaled),
        (Layer, evaluated),
        (Layer, twice),
        (Layer, functional),
        (Drawing, plain),
        (Complex, plain),
    ],
)
def test_calls_that_run_again_find_all_as_it_was(
    kind: type[nn.Module], body: Body, slow: str
) -> None:
    expected, _ = ran(lambda: layers(kind), body)
    found, report = ran(lambda: layers(kind), body, budget="70%", device=slow)
    assert found == expected
    assert report.planned and (report.recomputed or kind is Drawing), report


@again
@pytest.mark.usefixtures("calls_alone")
@pytest.mark.parametrize("name", ["place", "up.bias"])
def test_a_call_does_not_run_again_with_a_tensor_that_was_written_to(name: str, slow: str) -> None:
    def body(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
        def between(loss: torch.Tensor) -> None:
            with torch.no_grad():
                for layer in model:
                    (layer.place if name == "place" else layer.up.bias).mul_(0.9)

        return step(model, optimizer, between if n >= LATER else None)

    ran(layers, body)
    with pytest.raises(RuntimeError, match=rf"{name} was changed between forward and backward"):
        ran(layers, body, budget="70%", device=slow)


def once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(96, 16)).backward()


LENDING = {"budget": "40%", "device": "host", "recompute": False}


def test_a_parameter_that_a_hook_writes_to_in_backward_stays() -> None:
    def body(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
        def write(parameter: torch.Tensor) -> None:
            if n >= LATER:
                with torch.no_grad():
                    parameter.add_(1.0)

        handle = model.head.bias.register_post_accumulate_grad_hook(write)
        once(model, optimizer)
        handle.remove()
        optimizer.step()
        return float(model.head.bias.detach().sum())

    assert ran(Large, body, **LENDING)[0] == ran(Large, body)[0]


def test_what_the_script_holds_of_parameters_stays_theirs_after_close() -> None:
    held: dict[str, torch.Tensor] = {}

    def body(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
        if n == 5:
            held.update(model.state_dict())
        if n == 7 and fitted is not None:
            assert fitted.schedule.lent
            fitted.close()
        once(model, optimizer)
        optimizer.step()
        return float(held["a.weight"].sum()) if held else 0.0

    expected, _ = ran(Large, body)
    held.clear()
    assert ran(Large, body, **LENDING)[0] == expected


def test_parameters_are_back_though_another_thread_is_in_backward() -> None:
    def body(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
        inside, end = threading.Event(), threading.Event()

        def waiting(grad: torch.Tensor) -> None:
            inside.set()
            end.wait(10)

        def overlap() -> None:
            other = nn.Linear(4, 4)(torch.ones(2, 4))
            other.register_hook(waiting)
            other.sum().backward()

        thread = threading.Thread(target=overlap)

        def begin(grad: torch.Tensor) -> None:
            thread.start()
            inside.wait(10)

        handle = model.b.weight.register_hook(begin) if n >= LATER else None
        once(model, optimizer)
        found = float(sum(p.detach().sum() for p in model.parameters()))
        if handle is not None:
            handle.remove()
            end.set()
            thread.join()
        optimizer.step()
        return found

    assert ran(Large, body, **LENDING)[0] == ran(Large, body)[0]


def test_batches_may_be_slices_of_one_tensor() -> None:
    data = torch.randn(10, 96, 16)

    def body(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
        optimizer.zero_grad()
        loss = model(data[n]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    found, report = ran(layers, body, budget="70%", device="host")
    assert found == ran(layers, body)[0]
    assert report.unplanned == {"watching": 3} and report.swapped_out, report


@again
def test_close_inside_backward_leaves_no_hook() -> None:
    def body(n: int, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Any) -> float:
        def close(grad: torch.Tensor) -> None:
            fitted.close()

        handle = model[1].up.weight.register_hook(close) if n == LATER and fitted else None
        found = step(model, optimizer)
        if handle is not None:
            handle.remove()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        return found

    assert ran(layers, body, budget="70%", device="host")[0] == ran(layers, body)[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iteration_ns", "x"),
        ("iteration_ns", 10**4000),
        ("budget_bytes", -1),
        ("piece", "x"),
        ("peak_bytes", 1.5),
        ("early", "x"),
        ("soon", None),
        ("away", [1, 2]),
        ("turns", [[1]] * 4),
        ("lent", [[["weight", 10**30]]]),
        ("lent", [[["weight", -4]]]),
        ("trims", [["pack", 1_000_000, 5]]),
        ("trims", [["pack", 0, 5]] * 200_000),
        ("trims", [["nowhere", 0, 5]]),
        ("trims", [["begin", 0, -5]]),
        ("trims", [["unpack", 60, 5]]),
        ("actions", [["unpack", 1_000_000, [["in", 0]]]]),
        ("actions", [["pack", 0, [["dance", 0]]]]),
        ("actions", [["pack", 0, [["out", True]]]]),
    ],
)
def test_a_plan_with_a_damaged_number_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    torch.manual_seed(5)
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with neap.torch.fit(model, optimizer, "70%", "host", verbose=False) as fitted:
        while fitted.schedule is None:
            step(model, optimizer)
        fitted.schedule.save(path)
    form = json.loads(path.read_text())
    path.write_text(json.dumps({**form, name: value}))
    with pytest.raises(ValueError, match=r"plan\.json is damaged"):
        neap.torch.apply(model, optimizer, path)


@pytest.mark.parametrize("budget", [None, True, 0.5, 0, -1, "abc", ""])
def test_what_is_no_budget_is_refused(budget: Any) -> None:
    model = layers()
    with pytest.raises(ValueError, match="the budget is"):
        neap.torch.fit(model, torch.optim.SGD(model.parameters(), 0.1), budget)
