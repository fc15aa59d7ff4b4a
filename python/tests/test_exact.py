"""Functions of PyTorch that take another way while a dispatch mode is on."""

from __future__ import annotations

from collections.abc import Callable

import neap.torch
import pytest
import torch
from fitted import everything, same
from jobs import Job, trained
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("small")

Layer = Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
MASK = torch.arange(16) % 3 == 0
LAYERS: dict[str, Layer] = {
    "product_of_rows": lambda x, _: x * (1.1 - x.tanh() / 3).prod(1, keepdim=True),
    "product_of_all": lambda x, _: x * (1 + x / 1000).prod(),
    "transmittance": lambda x, _: x * torch.cumprod(1 - x.sigmoid() / 9, 1),
    "filled": lambda x, fill: x.tanh().masked_fill(MASK, fill.sum()),
    "checkpointed": lambda x, _: checkpoint(
        lambda y: y * torch.cumprod(1 - y.sigmoid() / 9, 1), x, use_reentrant=True
    ),
}


def made(layer: Layer) -> Job:
    linear = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
    fills = nn.ParameterList([torch.randn(16) / 9 for _ in linear])
    model = nn.ModuleDict({"linear": linear, "fills": fills})

    def loss_of() -> torch.Tensor:
        x = torch.randn(32, 16)
        for one, fill in zip(linear, fills):
            x = layer(one(x), fill)
        return x.square().mean()

    return trained(model, torch.optim.Adam(model.parameters()), loss_of)


def run(
    make: Callable[[], Job], fitted: bool = False
) -> tuple[list[torch.Tensor], neap.torch.Report | None]:
    torch.manual_seed(3)
    job = make()
    fit = neap.torch.fit(job.model, job.optimizer, "60%", verbose=False) if fitted else None
    losses = [job.iteration().clone() for _ in range(5)]
    return losses + everything(job), None if fit is None else fit.close()


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_of_watched_iterations_are_those_without_neap(layer: str) -> None:
    found, report = run(lambda: made(LAYERS[layer]), fitted=True)
    assert report is not None and report.planned == 2, report
    assert same(run(lambda: made(LAYERS[layer]))[0], found)


def test_a_ctc_loss_is_planned() -> None:
    def make() -> Job:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        lengths = torch.tensor([6, 6]), torch.tensor([2, 3])

        def loss_of() -> torch.Tensor:
            logs = model(torch.randn(6, 2, 8)).log_softmax(2)
            return functional.ctc_loss(logs, torch.tensor([[1, 2, 0], [2, 3, 4]]), *lengths)

        return trained(model, torch.optim.Adam(model.parameters()), loss_of)

    found, report = run(make, fitted=True)
    assert report is not None and report.planned == 2, report
    assert same(run(make)[0], found)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_is_compiled_while_it_is_watched(backend: str) -> None:
    def make() -> Job:
        torch._dynamo.reset()
        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
        count = [0]

        def loss_of() -> torch.Tensor:
            count[0] += 1
            if count[0] == 2:  # The first that is recorded.
                model.compile(backend=backend)
            assert torch.ctc_loss.__name__ == "ctc_loss"
            return model(torch.randn(32, 16)).square().mean()

        return trained(model, torch.optim.Adam(model.parameters()), loss_of)

    found, report = run(make, fitted=True)
    assert report is not None and report.planned + sum(report.unplanned.values()) == 5, report
    assert same(run(make)[0], found)


def test_what_is_compiled_is_watched_as_it_runs_later() -> None:
    def make() -> Job:
        torch._dynamo.reset()
        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)])
        # Saves other tensors than the same model in eager mode.
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.Adam(model.parameters())
        return trained(model, optimizer, lambda: compiled(torch.randn(32, 16)).square().mean())

    found, report = run(make, fitted=True)
    assert report is not None and report.planned > 0 and set(report.unplanned) == {"watching"}
    assert same(run(make)[0], found)
