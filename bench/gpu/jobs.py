"""The models of bench/gpu/models.py, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: 1x1, 3x3 and 1x1 convolutions (He et al. 2016, figure 5)."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        """Channels in, channels of the middle, and the step of the middle."""
        super().__init__()

        def conv(a: int, b: int, kernel: int, step: int = 1) -> nn.Module:
            plain = nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False)
            return nn.Sequential(plain, nn.BatchNorm2d(b))

        self.a, self.b = conv(inside, width, 1), conv(width, width, 3, stride)
        self.c = conv(width, 4 * width, 1)
        same = inside == 4 * width and stride == 1
        self.short = nn.Identity() if same else conv(inside, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images x channels x height x width in and out."""
        y = functional.relu(self.b(functional.relu(self.a(x))))
        return functional.relu(self.c(y) + self.short(x))


def resnet50() -> nn.Module:
    """ResNet-50 with ten classes."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for blocks, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inside, width, stride if block == 0 else 1))
            inside = 4 * width
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))
    return nn.Sequential(*layers, *end)


def vgg16() -> nn.Module:
    """VGG-16 with ten classes."""
    layers: list[nn.Module] = []
    inside = 3
    for width, times in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(times):
            layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(inplace=True)]
            inside = width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for before in (512 * 49, 4096):
        layers += [nn.Linear(before, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, 10))


def inception_v3() -> nn.Module:
    """torchvision's, without the second classifier."""
    import torchvision

    model: nn.Module = torchvision.models.inception_v3(
        num_classes=10, aux_logits=False, init_weights=False
    )
    return model


class Attention(nn.Module):
    """Attention; with fewer heads of keys and values than of queries where ``shared`` says so."""

    def __init__(
        self, width: int, heads: int, shared: int, bias: bool = True, causal: bool = False
    ) -> None:
        """Width of the stream, heads of queries and of keys; whether the layers have a bias, and
        whether a position looks at those before it alone.
        """
        super().__init__()
        self.heads, self.shared, self.size, self.causal = heads, shared, width // heads, causal
        self.queries = nn.Linear(width, width, bias=bias)
        self.keys = nn.Linear(width, shared * self.size, bias=bias)
        self.values = nn.Linear(width, shared * self.size, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(
        self, x: torch.Tensor, turn: Any = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Batch x length x width; the rotation of positions; where a key may be looked at."""
        batch, length, width = x.shape
        q = self.queries(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.keys(x).view(batch, length, self.shared, self.size).transpose(1, 2)
        v = self.values(x).view(batch, length, self.shared, self.size).transpose(1, 2)
        if turn is not None:
            half = self.size // 2
            q, k = (
                y * turn[0] + torch.cat((-y[..., half:], y[..., :half]), -1) * turn[1]
                for y in (q, k)
            )
        if self.shared != self.heads:
            k, v = (y.repeat_interleave(self.heads // self.shared, 1) for y in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class RootMeanSquare(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        """Of this many features."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Gated(nn.Module):
    """A feed-forward layer with a gate (Shazeer 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        """Width of the stream and of the middle."""
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def forward_layer(width: int, inner: int, approximate: str) -> nn.Module:
    """Two linear layers with a GELU between them."""
    act = nn.GELU(approximate=approximate)
    return nn.Sequential(nn.Linear(width, inner), act, nn.Linear(inner, width))


class Language(nn.Module):
    """A decoder with tied embeddings: GPT-2 small, or Llama 3.2 1B."""

    def __init__(
        self,
        words: int,
        width: int,
        layers: int,
        heads: int,
        shared: int,
        inner: int,
        positions: int,
    ) -> None:
        """With learnt positions it is GPT's kind, with none Llama's."""
        super().__init__()
        gpt = positions > 0
        norm = nn.LayerNorm if gpt else RootMeanSquare
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(positions, width) if gpt else None
        self.size = width // heads

        def forward() -> nn.Module:
            return forward_layer(width, inner, "tanh") if gpt else Gated(width, inner)

        def block() -> nn.Module:
            attention = Attention(width, heads, shared, bias=gpt, causal=True)
            return nn.ModuleList([norm(width), attention, norm(width), forward()])

        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.last = norm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Batch x length of tokens in, logits out."""
        x, length = self.words(tokens), tokens.shape[1]
        turn = None
        if self.places is not None:
            x = x + self.places(torch.arange(length, device=tokens.device))
        else:
            steps = torch.arange(0, self.size, 2, device=tokens.device)
            rates = 500000.0 ** (-steps / self.size)
            places = torch.arange(length, device=tokens.device)
            angles = torch.outer(places, rates).repeat(1, 2)
            turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            first, attention, second, inner = block  # type: ignore[misc]
            x = x + attention(first(x), turn)
            x = x + inner(second(x))
        return functional.linear(self.last(x), self.words.weight)


def gpt2() -> nn.Module:
    """GPT-2 small."""
    return Language(50257, 768, 12, 12, 12, 3072, 1024)


def llama_1b() -> nn.Module:
    """Llama 3.2 1B."""
    return Language(128256, 2048, 16, 32, 8, 8192, 0)


def small_gpt() -> nn.Module:
    """For a try of the scripts: large enough for a plan."""
    return Language(1000, 128, 2, 4, 4, 512, 256)


class Block(nn.Module):
    """A block of an encoder, norms before its layers."""

    def __init__(self, width: int, heads: int) -> None:
        """Width of the stream, and heads of its attention."""
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, heads)
        self.inner = forward_layer(width, 4 * width, "none")

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Batch x length x width in and out; where a key may be looked at."""
        x = x + self.attention(self.first(x), None, mask)
        return x + self.inner(self.second(x))


class Encoder(nn.Module):
    """BERT: it predicts each token from those on both sides."""

    def __init__(self, words: int, width: int, layers: int, heads: int, positions: int) -> None:
        """As large as these say."""
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """Batch x length of tokens, and which are no padding, in; logits out."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        mask = there[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return functional.linear(self.last(x), self.words.weight)


def bert() -> nn.Module:
    """BERT base."""
    return Encoder(30522, 768, 12, 12, 512)


class Vision(nn.Module):
    """ViT-B/16 with ten classes (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        """As large as these say."""
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 14 * 14 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images of 224 x 224 in, scores of classes out."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places
        for block in self.blocks:
            x = block(x, None)
        return self.head(self.last(x[:, 0]))


def vit() -> nn.Module:
    """ViT-B/16."""
    return Vision()


class Lstm(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        """10,000 words, 1,024 wide."""
        super().__init__()
        self.words = nn.Embedding(10000, 1024)
        self.layers = nn.LSTM(1024, 1024, 2, batch_first=True)
        self.head = nn.Linear(1024, 10000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Batch x length of tokens in, logits out."""
        return self.head(self.layers(self.words(tokens))[0])


class Ranking(nn.Module):
    """Sorts: each row's best of 4,096 candidates by top-k, all of them by sort."""

    def __init__(self) -> None:
        """Rows have 64 features."""
        super().__init__()
        self.scores = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4096))
        self.head = nn.Linear(128 + 64, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows x 64 in, scores of classes out."""
        scores = self.scores(rows)
        best = scores.topk(128).values
        ordered = scores.sort(descending=True).values.cumsum(-1)[:, ::64]
        return self.head(torch.cat((best, ordered), -1))


def small() -> nn.Module:
    """For a try of the scripts: with a layer of each kind that images go through."""
    layers = [nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(*layers, Bottleneck(8, 4, 2), *end)
