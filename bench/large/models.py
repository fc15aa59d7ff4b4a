#!/usr/bin/env python3
"""Training jobs that are too large for most GPUs, in plain PyTorch: parameters and gradients in bf16, AdamW on f32 copies.

    neap dry --device h100 --device-bytes 1TiB --record llama_7b.graph.json -- python bench/large/models.py llama_7b-512

Needs PyTorch alone. The models are those of bench/gpu/models.py at other sizes, and a mixture of experts.
"""

import argparse
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
from models import Attention, Gated, Language, RootMeanSquare  # noqa: E402


class Experts(nn.Module):
    """A mixture of experts (Jiang et al. 2024) whose routing is given: token i goes to experts i and i + 1, modulo their number.

    Real routing depends on values; given, each expert gets the same number of tokens, as a balanced router would send it.
    """

    def __init__(self, width, inner, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Gated(width, inner) for _ in range(experts))

    def forward(self, x):
        count, width = len(self.experts), x.shape[-1]
        flat = x.reshape(-1, width)
        share = self.router(flat).softmax(-1)
        out = torch.zeros_like(flat)
        place = torch.arange(len(flat), device=x.device)
        for number, expert in enumerate(self.experts):
            rows = torch.cat([place[number::count], place[(number - 1) % count :: count]])
            found = expert(flat.index_select(0, rows)) * share[:, number].index_select(0, rows).unsqueeze(1)
            out = out.index_add(0, rows, found)
        return out.view_as(x)


class Mixture(Language):
    """A decoder whose feed-forward layers are mixtures of experts."""

    def __init__(self, words, width, layers, heads, shared, inner, experts):
        nn.Module.__init__(self)
        self.words, self.places, self.size = nn.Embedding(words, width), None, width // heads
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [RootMeanSquare(width), Attention(width, heads, shared, False, True), RootMeanSquare(width), Experts(width, inner, experts)]
            )
            for _ in range(layers)
        )
        self.last = RootMeanSquare(width)


class MasterAdamW(torch.optim.AdamW):
    """AdamW on f32 copies of the parameters (Micikevicius et al. 2018): each step casts gradients and copies the result back."""

    def __init__(self, parameters, **settings):
        self.models = list(parameters)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.models]
        super().__init__(self.masters, **settings)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, master in zip(self.models, self.masters):
            master.grad, parameter.grad = parameter.grad.float(), None
        super().step()
        for parameter, master in zip(self.models, self.masters):
            parameter.copy_(master)
            master.grad = None


MODELS = {
    # Words, width, layers, heads, heads of keys, inner width, and positions (0: rotary) or experts.
    "llama_7b": lambda: Language(32000, 4096, 32, 32, 32, 11008, 0),
    "llama_13b": lambda: Language(32000, 5120, 40, 40, 40, 13824, 0),
    "moe_8x1b": lambda: Mixture(32000, 2048, 24, 16, 8, 5632, 8),
    "gpt2_xl": lambda: Language(50257, 1600, 48, 25, 25, 6400, 2048),
}


def train(name, iterations, device):
    kind, _, length = name.rpartition("-")
    torch.manual_seed(0)
    with torch.device(device):
        model = MODELS[kind]().to(torch.bfloat16).train()
    optimizer = MasterAdamW(model.parameters(), lr=1e-4)
    tokens = (torch.arange(int(length)).view(1, -1) % 101).to(device)
    for _ in range(iterations):
        scores = model(tokens)
        loss = F.cross_entropy(scores[:, :-1].reshape(-1, scores.shape[-1]).float(), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
    return sum(p.numel() for p in optimizer.models)


def main():
    parser = argparse.ArgumentParser(description="One training job that is too large for most GPUs.")
    parser.add_argument("job", help=f"NAME-LENGTH, NAME one of {', '.join(MODELS)}; the batch is 1")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    flags = parser.parse_args()
    print(f"{train(flags.job, flags.iterations, flags.device) / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    main()
