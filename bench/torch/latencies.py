"""How well neap predicts an iteration's time once it has measured operators in the script.

    python bench/torch/latencies.py [--only lstm] [--iterations 60] [--threads 1]

Trains ResNet-18, a small GPT-2 and an LSTM on the CPU by plans whose first times are those of the
host's roofline. Copies are measured from then on too, and each plan that is made anew goes by what
was measured. The error compares the time that is predicted after two new plans (or after as many
as there were) with the median time of the iterations from then on. Needs torchvision and
transformers. Exits 1 if the median error of the jobs is above 10 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NEAP_TORCH_CACHE", "0")

import neap.torch
import torch
from table import Table
from torch import nn
from torch.nn import functional

MOST = 0.1
"""The largest median error that is good."""
COLUMNS = (
    "job",
    "new plans",
    "first prediction, ms",
    "prediction, ms",
    "measured, ms",
    "error, %",
    "operators measured",
)

Job = tuple[nn.Module, Callable[[], torch.Tensor]]


def resnet18() -> Job:
    """Classifies 16 images of 96 x 96."""
    import torchvision

    model = torchvision.models.resnet18(num_classes=10)
    images, labels = torch.randn(16, 3, 96, 96), torch.arange(16) % 10
    return model, lambda: functional.cross_entropy(model(images), labels)


def gpt2() -> Job:
    """Predicts 4 x 128 tokens by 4 layers of width 128."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_head=4, n_embd=128, vocab_size=2000, n_positions=128)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 2000, (4, 128))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


class Tagger(nn.Module):
    """Layers of an LSTM, one module each."""

    def __init__(self) -> None:
        """Makes three layers."""
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(128, 128, batch_first=True) for _ in range(3))
        self.head = nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The head's output for each place of a sequence."""
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


def lstm() -> Job:
    """Tags 32 sequences of 64."""
    model, given = Tagger(), torch.randn(32, 64, 128)
    return model, lambda: model(given).square().mean()


JOBS = {"resnet18": resnet18, "gpt2": gpt2, "lstm": lstm}


def measured(make: Callable[[], Job], iterations: int) -> tuple[float, tuple[Any, ...]]:
    """The error, as a part of the measured time, and the row of the table after the name."""
    torch.manual_seed(5)
    model, loss_of = make()
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = neap.torch.fit(model, optimizer, "70%", "host", verbose=False)
    times: list[float] = []
    first = predicted = plans = since = 0
    for _ in range(iterations):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
        report = fitted.report()
        first = first or report.predicted_iteration_ns
        if not predicted or (plans < 2 and len(report.replans) > plans):
            plans, since = len(report.replans), len(times)
            predicted = report.predicted_iteration_ns
    report = fitted.close()
    took = statistics.median(times[since + 3 :]) * 1e9
    error = abs(predicted / took - 1)
    figures = (f"{ns / 1e6:,.1f}" for ns in (first, predicted, took))
    counts = report.times_from
    known = f"{counts.get('measured', 0)} of {sum(counts.values())}"
    return error, (plans, *figures, f"{error * 100:.1f}", known)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(JOBS), help="jobs, with commas between")
    parser.add_argument("--iterations", type=int, default=60, help="how long each job trains")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch's")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    table, errors = Table(COLUMNS, ("job",)), []
    for name in asked.only.split(","):
        error, row = measured(JOBS[name], asked.iterations)
        errors.append(error)
        table.row(name, *row)
    median = statistics.median(errors)
    print(f"\nmedian error {median * 100:.1f} %")
    sys.exit(median > MOST)


if __name__ == "__main__":
    main()
