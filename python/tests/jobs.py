"""Small training jobs of many kinds, for tests on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Job:
    """A model, its optimizer and one iteration."""

    def __init__(self, model: nn.Module, optimizer: Any, iteration: Callable[[], torch.Tensor]):
        self.model = model
        self.optimizer = optimizer
        self.iteration = iteration


def cnn(**settings: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2, dropout: float = 0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(
        self,
        depth: int = 2,
        width: int = 16,
        dropout: float = 0.0,
        tied: bool = True,
        again: bool = False,
    ):
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.again = again

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two small matrices beside it (LoRA)."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(inner.in_features, 2) / 4)
        self.b = nn.Parameter(torch.zeros(2, inner.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.a @ self.b


def trained(
    model: nn.Module,
    optimizer: Any,
    loss_of: Callable[..., torch.Tensor],
    data: Callable[[], tuple[torch.Tensor, ...]] = tuple,
) -> Job:
    """A job whose iteration is the usual one; gradients stay until there is the next data."""

    def iteration() -> torch.Tensor:
        given = data()
        optimizer.zero_grad()
        loss = loss_of(*given)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(model, optimizer, iteration)


def squared(model: nn.Module, optimizer: Any, *shape: int) -> Job:
    """A job whose loss is the mean square of what the model makes of random numbers."""
    return trained(model, optimizer, lambda: model(torch.randn(shape)).square().mean())


def classify(model: nn.Module, optimizer: Any, size: int = 8, batch: int = 4) -> Job:
    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(images), labels)

    def data() -> tuple[torch.Tensor, ...]:
        return torch.randn(batch, 3, size, size), torch.arange(batch) % 4

    return trained(model, optimizer, loss_of, data)


def language(model: nn.Module, optimizer: Any, batch: int = 2, length: int = 8) -> Job:
    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return trained(model, optimizer, loss_of, lambda: (torch.randint(0, 32, (batch, length)),))
