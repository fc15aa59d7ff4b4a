"""Training jobs of many kinds at 70 % and 50 % of their peaks: every number as without neap."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import neap.torch
import numpy as np
import pytest
import torch
from fitted import everything, same
from jobs import Block, Job, LowRank, Transformer, classify, language, squared, trained
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("small")
ITERATIONS = 6
JOBS: list[Callable[[], Job]] = []


def job(make: Callable[[], Job]) -> Callable[[], Job]:
    JOBS.append(make)
    return make


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x
        return self.relu(y)


@job
def residual_cnn() -> Job:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *[Residual(8) for _ in range(4)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return classify(model, torch.optim.SGD(model.parameters(), 0.1, 0.9), size=24)


@job
def dense_cnn() -> Job:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [
                    nn.Sequential(
                        nn.BatchNorm2d(4 * (n + 1)), nn.ReLU(), nn.Conv2d(4 * (n + 1), 4, 3, 1, 1)
                    )
                    for n in range(5)
                ]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = [x]
            for layer in self.layers:
                features.append(layer(torch.cat(features, 1)))
            return torch.cat(features, 1)

    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), Dense(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(24, 4)
    )
    return classify(model, torch.optim.RMSprop(model.parameters()), size=16)


@job
def vision_transformer() -> Job:
    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 4, 4)
            self.token = nn.Parameter(torch.zeros(1, 1, 16))
            self.places = nn.Parameter(torch.randn(1, 17, 16) / 8)
            self.blocks = nn.Sequential(*[Block(16, dropout=0.1) for _ in range(4)])
            self.head = nn.Linear(16, 4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
            return self.head(self.blocks(x)[:, 0])

    model = Vit()
    return classify(model, torch.optim.AdamW(model.parameters()), size=16)


@job
def masked_encoder() -> Job:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(32, 16),
            "encoder": nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
            "head": nn.Linear(16, 32),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_of() -> torch.Tensor:
        tokens = torch.randint(0, 32, (4, 8))
        padding = torch.arange(8) >= torch.tensor([[8], [6], [5], [7]])
        x = model["encoder"](model["words"](tokens), src_key_padding_mask=padding)
        return functional.cross_entropy(model["head"](x)[~padding], tokens[~padding])

    return trained(model, optimizer, loss_of)


@job
def encoder_and_decoder() -> Job:
    class T5(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(32, 16)
            self.both = nn.Transformer(16, 2, 2, 2, 32, dropout=0.1, batch_first=True)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            later = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            y = self.both(self.words(source), self.words(target), tgt_mask=later)
            return y @ self.words.weight.T

    model = T5()

    def loss_of() -> torch.Tensor:
        source, target = torch.randint(0, 32, (4, 9)), torch.randint(0, 32, (4, 6))
        return functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten())

    return trained(model, torch.optim.Adam(model.parameters()), loss_of)


@job
def recurrent_two_layers() -> Job:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.2, bidirectional=True)
            self.gru = nn.GRU(32, 16)
            self.head = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.gru(self.lstm(x)[0])[0])

    model = Tagger()
    return squared(model, torch.optim.Adagrad(model.parameters()), 12, 4, 8)


@job
def u_net_with_transposed_convolutions() -> Job:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.SiLU())
            self.narrow = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(2, 16), nn.SiLU())
            self.inner = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.SiLU())
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.out = nn.Conv2d(16, 3, 1)

        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            a = self.down(x) + time[:, None, None, None]
            return self.out(torch.cat([a, self.up(self.inner(self.narrow(a)))], 1))

    model = Net()

    def loss_of() -> torch.Tensor:
        images, noise, time = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16), torch.rand(2)
        return functional.mse_loss(model(images + noise, time), noise)

    return trained(model, torch.optim.AdamW(model.parameters(), amsgrad=True), loss_of)


@job
def low_rank_adapters() -> Job:
    model = Transformer(depth=3, tied=False).requires_grad_(False)
    for block in model.blocks:
        block.mlp[0], block.mlp[2] = LowRank(block.mlp[0]), LowRank(block.mlp[2])
    parts = [p for p in model.parameters() if p.requires_grad]
    return language(model, torch.optim.AdamW(parts), batch=4)


@job
def moving_average() -> Job:
    inner = residual_cnn()
    average = copy.deepcopy(inner.model)

    def iteration() -> torch.Tensor:
        loss = inner.iteration()
        with torch.no_grad():
            for old, new in zip(average.state_dict().values(), inner.model.state_dict().values()):
                if old.is_floating_point():
                    old.lerp_(new, 0.1)
        return loss + average[7].weight.sum()

    return Job(inner.model, inner.optimizer, iteration)


@job
def accumulation_with_clipping() -> Job:
    model = Transformer(depth=3, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())

    def iteration() -> torch.Tensor:
        for _ in range(3):
            tokens = torch.randint(0, 32, (2, 8))
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / 3
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, iteration)


@job
def scaled_gradients() -> Job:
    model = Transformer(depth=3, tied=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def iteration() -> torch.Tensor:
        tokens = torch.randint(0, 32, (4, 8))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Job(model, optimizer, iteration)


@job
def parameter_groups_and_a_schedule() -> Job:
    model = Transformer(depth=3, tied=False)
    flat = [p for p in model.parameters() if p.dim() < 2]
    deep = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    inner = language(model, optimizer, batch=4)

    def iteration() -> torch.Tensor:
        loss = inner.iteration()
        schedule.step()
        return loss

    return Job(model, optimizer, iteration)


@job
def checkpointed_already() -> Job:
    model = Transformer(depth=4, again=True, dropout=0.1)
    return language(model, torch.optim.AdamW(model.parameters()), batch=4)


@job
def guarded_against_nan() -> Job:
    model = Transformer(depth=3)
    optimizer = torch.optim.Adam(model.parameters())

    def iteration() -> torch.Tensor:
        tokens = torch.randint(0, 32, (4, 8))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        norm = sum(p.grad.square().sum().item() for p in model.parameters())
        if math.isfinite(norm):
            optimizer.step()
        return loss.detach()

    return Job(model, optimizer, iteration)


@job
def scalar_that_changes() -> Job:
    class Warm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.share = Block(16), [0.0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.block(x) * self.share[0]

    model = nn.Sequential(*[Warm() for _ in range(4)])
    count = [0]

    def loss_of() -> torch.Tensor:
        count[0] += 1
        for warm in model:
            warm.share[0] = count[0] / 10
        return model(torch.randn(4, 8, 16)).square().mean()

    return trained(model, torch.optim.Adam(model.parameters()), loss_of)


@job
def kernel_outside_the_dispatcher() -> Job:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.from_numpy(np.power(x.detach().numpy(), 3))

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return torch.from_numpy(3 * x.numpy() ** 2) * gradient

    class Cubic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(Cube.apply(self.norm(self.linear(x)))) + x

    model = nn.Sequential(*[Cubic() for _ in range(4)])
    return squared(model, torch.optim.Adamax(model.parameters()), 32, 32)


@job
def waves_in_one_dimension() -> Job:
    layers = [
        nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=2**n, dilation=2**n)),
            nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
            nn.GELU(),
        )
        for n in range(4)
    ]
    model = nn.Sequential(nn.Conv1d(1, 8, 1), *layers, nn.Conv1d(8, 1, 1))
    return squared(model, torch.optim.Adadelta(model.parameters()), 4, 1, 64)


@job
def experts_with_all_tokens() -> Job:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.experts = nn.ModuleList(
                [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            share = self.gate(x).softmax(-1)
            return x + sum(share[..., n, None] * e(x) for n, e in enumerate(self.experts))

    model = nn.Sequential(*[Experts() for _ in range(3)])
    return squared(model, torch.optim.AdamW(model.parameters()), 16, 16)


@job
def optimizer_that_can_not_be_divided() -> Job:
    model = Transformer(depth=3)
    return language(model, torch.optim.NAdam(model.parameters()), batch=4)


@job
def frozen_half_and_cumulative_norms() -> Job:
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8, momentum=None), nn.Hardswish())
        for _ in range(5)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    model[1].requires_grad_(False)
    model[2].eval()
    parts = [p for p in model.parameters() if p.requires_grad]
    return classify(model, torch.optim.Adam(parts), size=16)


@pytest.fixture
def devices(slow: str) -> dict[str, str]:
    """For each budget a device: one by which running again is quick, one by which copies are."""
    return {"70%": slow, "50%": "host"}


@pytest.mark.parametrize("make", JOBS, ids=lambda make: make.__name__)
def test_numbers_are_those_without_neap(
    make: Callable[[], Job], devices: dict[str, str], record_property: Callable[..., None]
) -> None:
    def run(budget: str | None) -> tuple[list[torch.Tensor], neap.torch.Report | None]:
        torch.manual_seed(5)
        made = make()
        fitted = None
        if budget is not None:
            fitted = neap.torch.fit(
                made.model, made.optimizer, budget, device=devices[budget], verbose=False
            )
        losses = [made.iteration().clone() for _ in range(ITERATIONS)]
        report = None if fitted is None else fitted.close()
        if fitted is not None and fitted.schedule is not None:
            owner = fitted.schedule.owner
            for (kind, place), actions in fitted.schedule.actions.items():
                for what, one in actions:
                    if (kind, what) == ("pack", "out") and one in owner:
                        assert owner.index(one) <= place, actions
        return losses + everything(made), report

    expected, _ = run(None)
    for budget in ("70%", "50%"):
        found, report = run(budget)
        assert report is not None
        assert same(expected, found), report
        assert report.planned == ITERATIONS - 3, report
        assert report.unplanned == {"watching": 3}, report
        # Something left the device, counted by storages that were seen to be gone.
        gone = report.freed + report.recomputed_deaths + report.remade_deaths
        assert gone > 0 or report.state_bytes > 0, report
        # A parameter that is away twice is copied to the host once.
        assert report.swapped_in == report.freed >= report.swapped_out, report
        assert not any("did not come back" in note for note in report.notes), report
        moved = report.state_bytes >> 10
        again = report.recomputed + report.remade
        record_property(budget, (report.swapped_out, again, moved, report.met))
