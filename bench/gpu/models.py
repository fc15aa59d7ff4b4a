#!/usr/bin/env python3
"""The training jobs that a GPU is checked with, in plain PyTorch: the same script is recorded and timed.

    python bench/gpu/models.py resnet50-16 [--iterations 10] [--device cuda] [--deterministic] [--snapshot FILE.pickle]

Needs PyTorch alone; inception_v3 needs torchvision. Prints one JSON object: the time of each iteration in nanoseconds by the
device's clock, losses, and the peak of PyTorch's allocator in bytes. Weights and data come from a seed.
"""

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: 1x1, 3x3 and 1x1 convolutions (He et al. 2016, figure 5)."""

    def __init__(self, inside, width, stride):
        super().__init__()

        def conv(a, b, kernel, step=1):
            return nn.Sequential(nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(b))

        self.a, self.b, self.c = conv(inside, width, 1), conv(width, width, 3, stride), conv(width, 4 * width, 1)
        self.short = conv(inside, 4 * width, 1, stride) if inside != 4 * width or stride != 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))) + self.short(x))


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for blocks, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inside, width, stride if block == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


def vgg16():
    layers, inside = [], 3
    for width, times in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(times):
            layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(inplace=True)]
            inside = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(4096, 10))


def inception_v3():
    import torchvision

    return torchvision.models.inception_v3(num_classes=10, aux_logits=False, init_weights=False)


class Attention(nn.Module):
    """Causal attention; with fewer heads of keys and values than of queries where `shared` says so."""

    def __init__(self, width, heads, shared, bias, rotary):
        super().__init__()
        self.heads, self.shared, self.size, self.rotary = heads, shared, width // heads, rotary
        self.queries = nn.Linear(width, width, bias=bias)
        self.keys = nn.Linear(width, shared * self.size, bias=bias)
        self.values = nn.Linear(width, shared * self.size, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x, turn):
        batch, length, width = x.shape
        q = self.queries(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.keys(x).view(batch, length, self.shared, self.size).transpose(1, 2)
        v = self.values(x).view(batch, length, self.shared, self.size).transpose(1, 2)
        if self.rotary:
            q, k = (y * turn[0] + torch.cat((-y[..., self.size // 2 :], y[..., : self.size // 2]), -1) * turn[1] for y in (q, k))
        if self.shared != self.heads:
            k, v = (y.repeat_interleave(self.heads // self.shared, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class RootMeanSquare(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019)."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Gated(nn.Module):
    """A feed-forward layer with a gate (Shazeer 2020)."""

    def __init__(self, width, inner):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((width, inner), (width, inner), (inner, width)))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Language(nn.Module):
    """A decoder with tied embeddings: GPT-2 small, or Llama 3.2 1B."""

    def __init__(self, words, width, layers, heads, shared, inner, positions):
        super().__init__()
        gpt = positions > 0
        norm = nn.LayerNorm if gpt else RootMeanSquare
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(positions, width) if gpt else None
        self.size = width // heads

        def forward():
            return nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width)) if gpt else Gated(width, inner)

        self.blocks = nn.ModuleList(
            nn.ModuleList([norm(width), Attention(width, heads, shared, gpt, not gpt), norm(width), forward()]) for _ in range(layers)
        )
        self.last = norm(width)

    def forward(self, tokens):
        x, length = self.words(tokens), tokens.shape[1]
        turn = None
        if self.places is not None:
            x = x + self.places(torch.arange(length, device=tokens.device))
        else:
            rates = 500000.0 ** (-torch.arange(0, self.size, 2, device=tokens.device) / self.size)
            angles = torch.outer(torch.arange(length, device=tokens.device), rates).repeat(1, 2)
            turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for first, attention, second, inner in self.blocks:
            x = x + attention(first(x), turn)
            x = x + inner(second(x))
        return F.linear(self.last(x), self.words.weight)


def gpt2():
    return Language(50257, 768, 12, 12, 12, 3072, 1024)


def llama_1b():
    return Language(128256, 2048, 16, 32, 8, 8192, 0)


def small():
    """For a try of the scripts: with a layer of each kind that images go through."""
    layers = [nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), Bottleneck(8, 4, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


# By name: the model, the batch, and the side of an image or the length of a sequence.
JOBS = {
    "small-2": (small, 2, 16),
    "resnet50-16": (resnet50, 16, 224),
    "resnet50-64": (resnet50, 64, 224),
    "vgg16-16": (vgg16, 16, 224),
    "inception_v3-16": (inception_v3, 16, 299),
    "gpt2-4x512": (gpt2, 4, 512),
    "llama_1b-1x512": (llama_1b, 1, 512),
}


def train(name, iterations, device):
    make, batch, size = JOBS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = make().train()
    optimizer = (torch.optim.AdamW if make in (gpt2, llama_1b) else torch.optim.Adam)(model.parameters(), lr=1e-4)
    tokens = (torch.arange(batch * size).view(batch, size) % 101).to(device) if make in (gpt2, llama_1b) else None
    images = torch.randn(batch, 3, size, size).to(device) if tokens is None else None
    classes = (torch.arange(batch) % 10).to(device)
    times, losses = [], []
    for _ in range(iterations):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter_ns()
        optimizer.zero_grad()
        if tokens is None:
            loss = F.cross_entropy(model(images), classes)
        else:
            scores = model(tokens)
            loss = F.cross_entropy(scores[:, :-1].reshape(-1, scores.shape[-1]), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - began)
        losses.append(loss.detach())
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {"iterations_ns": times, "losses": [loss.item() for loss in losses], "peak_bytes": peak, "torch": torch.__version__}


def main():
    parser = argparse.ArgumentParser(description="One of the training jobs that a GPU is checked with.")
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in each run, where PyTorch has kernels for that")
    parser.add_argument("--snapshot", help="write every request to PyTorch's allocator there")
    parser.add_argument("--out", help="print to this file")
    flags = parser.parse_args()
    # As neap's kernels: factors of f32 products are not rounded to TF32.
    torch.backends.cudnn.allow_tf32 = False
    if flags.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    if flags.snapshot:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    answer = train(flags.job, flags.iterations, flags.device)
    if flags.snapshot:
        torch.cuda.memory._dump_snapshot(flags.snapshot)
    with open(flags.out, "w", encoding="utf-8") if flags.out else nullcontext(sys.stdout) as out:
        print(json.dumps(answer), file=out)


if __name__ == "__main__":
    main()
