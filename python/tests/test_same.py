"""Training loops that change from step to step give the same, bit for bit, whatever the budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from fitted import same
from neap.torch import _spill
from neap.torch._fit import Fit
from neap.torch._report import Report
from torch import nn

pytestmark = pytest.mark.usefixtures("small")

Loop = tuple[list[nn.Module], list[torch.optim.Optimizer], Iterator[torch.Tensor]]


@pytest.fixture(autouse=True)
def all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors leave too."""
    monkeypatch.setattr(_spill, "SMALLEST", 1)


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for one in models for p in one.parameters()], 1e-3)


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def texts() -> Loop:
    """A language model on texts of any length."""
    embed, body, head = nn.Embedding(50, 32), encoder(), nn.Linear(32, 50)
    optimizer = adam(embed, body, head)

    def run() -> Iterator[torch.Tensor]:
        while True:
            words = torch.randint(0, 50, (4, random.randint(6, 40)))
            hidden = body(embed(words), mask=torch.full((words.shape[1],) * 2, -9.0).triu(1))
            yield update(F.cross_entropy(head(hidden).flatten(0, 1), words.flatten()), optimizer)

    return [embed, body, head], [optimizer], run()


def two_lengths() -> Loop:
    """Texts of one length, and their translations of another."""
    model = nn.Transformer(32, 2, 2, 2, 64, batch_first=True)
    optimizer = adam(model)

    def run() -> Iterator[torch.Tensor]:
        while True:
            source = torch.randn(4, random.randint(6, 40), 32)
            target = torch.randn(4, random.randint(4, 20), 32)
            yield update(model(source, target).square().mean(), optimizer)

    return [model], [optimizer], run()


def crops() -> Loop:
    """Images of any size."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def run() -> Iterator[torch.Tensor]:
        while True:
            size = [random.randrange(8, 40, 4) for _ in range(2)]
            yield update(model(torch.randn(2, 3, *size)).square().mean(), optimizer)

    return [model], [optimizer], run()


def graphs() -> Loop:
    """Graphs of any number of nodes."""
    layers = nn.ModuleList(nn.Linear(64, 32) for _ in range(4))
    optimizer = adam(layers)

    def run() -> Iterator[torch.Tensor]:
        while True:
            nodes = random.randint(20, 100)
            x, edges = torch.randn(nodes, 32), torch.randint(0, nodes, (2, 3 * nodes))
            for layer in layers:
                message = layer(torch.cat([x[edges[0]], x[edges[1]]], 1)).relu()
                x = x + torch.zeros_like(x).index_add(0, edges[1], message)
            yield update(x.square().mean(), optimizer)

    return [layers], [optimizer], run()


def experts() -> Loop:
    """Each row goes to one expert; some get none."""
    parts = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
    )
    gate = nn.Linear(32, 4)
    optimizer = adam(parts, gate)

    def run() -> Iterator[torch.Tensor]:
        while True:
            x = torch.randn(48, 32)
            weight, which = gate(x).softmax(1).max(1)
            which = torch.minimum(which, torch.tensor(random.randint(0, 3)))
            out = torch.zeros_like(x)
            for number, part in enumerate(parts):
                rows = (which == number).nonzero()[:, 0]
                if len(rows):
                    out = out.index_add(0, rows, weight[rows, None] * part(x[rows]))
            yield update(out.square().mean(), optimizer)

    return [parts, gate], [optimizer], run()


def accumulated() -> Loop:
    """One to four batches a step."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 32))
    optimizer = adam(model)

    def run() -> Iterator[torch.Tensor]:
        while True:
            optimizer.zero_grad()
            for _ in range(random.randint(1, 4)):
                loss = model(torch.randn(32, 32)).square().mean()
                loss.backward()
            optimizer.step()
            yield loss

    return [model], [optimizer], run()


def packed() -> Loop:
    """A recurrent network on packed sequences."""
    body, head = nn.LSTM(16, 32, 2, batch_first=True, dropout=0.1), nn.Linear(32, 8)
    optimizer = adam(body, head)

    def run() -> Iterator[torch.Tensor]:
        while True:
            lengths = sorted((random.randint(2, 12) for _ in range(6)), reverse=True)
            rows = nn.utils.rnn.pack_padded_sequence(
                torch.randn(6, lengths[0], 16), torch.tensor(lengths), batch_first=True
            )
            yield update(head(body(rows)[0].data).square().mean(), optimizer)

    return [body, head], [optimizer], run()


def policies() -> Loop:
    """Rollouts without gradients, then epochs over them."""
    more = [one for _ in range(4) for one in (nn.Linear(64, 64), nn.Tanh())]
    body, actor = nn.Sequential(nn.Linear(16, 64), *more), nn.Linear(64, 4)
    critic = nn.Linear(64, 1)
    optimizer = adam(body, actor, critic)

    def run() -> Iterator[torch.Tensor]:
        while True:
            with torch.no_grad():
                states = torch.randn(512, 16)
                before = actor(body(states)).log_softmax(1)[:, 0]
            for _ in range(3):
                for rows in torch.randperm(512).split(random.choice([128, 192, 256])):
                    hidden = body(states[rows])
                    ratio = (actor(hidden).log_softmax(1)[:, 0] - before[rows]).exp()
                    loss = ratio.clamp(0.8, 1.2).mean() + critic(hidden).square().mean()
                    yield update(loss, optimizer)

    return [body, actor, critic], [optimizer], run()


def evaluated() -> Loop:
    """An evaluation every five steps, and a smaller last batch."""
    more = [one for _ in range(4) for one in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU())]
    model = nn.Sequential(nn.Linear(32, 64), *more)
    optimizer = adam(model)

    def run() -> Iterator[torch.Tensor]:
        while True:
            for rows in (128, 128, 128, 128, 45):
                yield update(model(torch.randn(rows, 32)).square().mean(), optimizer)
            model.eval()
            with torch.no_grad():
                model(torch.randn(512, 32))
            model.train()

    return [model], [optimizer], run()


def doubled() -> Loop:
    """A batch twice as long as any before, in step 20."""
    body, head = encoder(), nn.Linear(32, 2)
    optimizer = adam(body, head)

    def run() -> Iterator[torch.Tensor]:
        for step in range(1 << 30):
            length = 80 if step == 20 else random.randint(10, 40)
            yield update(head(body(torch.randn(4, length, 32))[:, 0]).square().mean(), optimizer)

    return [body, head], [optimizer], run()


def unfrozen() -> Loop:
    """Half of the layers train from step 16 on."""
    model = nn.Sequential(*(one for _ in range(4) for one in (nn.Linear(32, 32), nn.GELU())))
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    optimizer = adam(model)

    def run() -> Iterator[torch.Tensor]:
        for step in range(1 << 30):
            if step == 16:
                model.requires_grad_(True)
            rows = random.randrange(16, 64, 8)
            yield update(model(torch.randn(rows, 32)).square().mean(), optimizer)

    return [model], [optimizer], run()


LOOPS = [
    texts,
    two_lengths,
    crops,
    graphs,
    experts,
    accumulated,
    packed,
    policies,
    evaluated,
    doubled,
    unfrozen,
]


def ran(make: Callable[[], Loop], budget: str | None) -> tuple[list[torch.Tensor], Report | None]:
    """Losses, parameters, buffers, states and random numbers after some steps, and the report."""
    torch.manual_seed(7)
    random.seed(7)
    models, optimizers, steps = make()
    said: list[str] = []
    fit = None if budget is None else Fit(models, optimizers, budget, "host", said.append)
    found = [next(steps).detach().clone() for _ in range(40)]
    report = None if fit is None else fit.close()
    for model in models:
        found += [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        states = optimizer.state_dict()["state"].values()
        found += [value for one in states for value in one.values() if torch.is_tensor(value)]
    return [*found, torch.get_rng_state()], report


@pytest.mark.parametrize("make", LOOPS, ids=lambda make: make.__name__)
def test_changing_loops_give_the_same(make: Callable[[], Loop]) -> None:
    right, _ = ran(make, None)
    for budget in ("70%", "50%"):
        found, report = ran(make, budget)
        assert same(right, found), budget
        assert report is not None and report.swapped_out + report.recomputed + report.remade, report
        assert report.planned + sum(report.unplanned.values()) == 40, report
        assert not any("failed" in note for note in report.notes), report
