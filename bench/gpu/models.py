#!/usr/bin/env python3
"""The training jobs that a GPU is checked with, in plain PyTorch.

    python bench/gpu/models.py resnet50-16 [--iterations 10] [--way WAY] [--deterministic] [--twice]

The same script is recorded and timed. Needs PyTorch alone; inception_v3 needs torchvision. Prints
one JSON object: nanoseconds of each iteration by the host's clock, seconds from the process's start
to each one's, losses, peaks of PyTorch's allocator and of the process's own memory in bytes.
Weights and data come from a seed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jobs import (
    Lstm,
    Ranking,
    bert,
    gpt2,
    inception_v3,
    llama_1b,
    resnet50,
    small,
    small_gpt,
    vgg16,
    vit,
)
from torch import nn
from torch.nn import functional

WAYS = ("nothing", "checkpoint every block", "save_on_cpu", "compiled offload")
"""Those of bench/torch/ways.py."""


class Job(NamedTuple):
    """A training job.

    Attributes:
        make: makes the model.
        batch: images, sequences or rows.
        size: side of an image, length of a sequence, or candidates of a row.
        data: which of the functions below makes a batch.
        bf16: whether forward runs under autocast.
    """

    make: Callable[[], nn.Module]
    batch: int
    size: int
    data: str
    bf16: bool = False


JOBS = {
    "small-2": Job(small, 2, 16, "images"),
    "small_gpt-16x256": Job(small_gpt, 16, 256, "next"),
    "resnet50-16": Job(resnet50, 16, 224, "images"),
    "resnet50-64": Job(resnet50, 64, 224, "images"),
    "vgg16-16": Job(vgg16, 16, 224, "images"),
    "inception_v3-16": Job(inception_v3, 16, 299, "images"),
    "vit_bf16-32": Job(vit, 32, 224, "images", bf16=True),
    "gpt2-4x512": Job(gpt2, 4, 512, "next"),
    "llama_1b-1x512": Job(llama_1b, 1, 512, "next"),
    "bert_padded-16x128": Job(bert, 16, 128, "padded"),
    "bert_drawn-16x256": Job(bert, 16, 256, "drawn"),
    "lstm-32x128": Job(Lstm, 32, 128, "next"),
    "ranking-256x4096": Job(Ranking, 256, 4096, "rows"),
}

Batch = tuple[torch.Tensor, ...]


def batches(job: Job, device: str) -> Callable[[int], tuple[Batch, torch.Tensor]]:
    """What gives the inputs and targets of an iteration by number.

    Only ``drawn`` gives another batch each time: sequences that are padded to the longest of them,
    a multiple of 8 that is drawn anew from a quarter of the size on.
    """
    many, size = job.batch, job.size
    classes = (torch.arange(many) % 10).to(device)
    if job.data == "images":
        images = torch.randn(many, 3, size, size).to(device)
        return lambda _: ((images,), classes)
    if job.data == "rows":
        rows = torch.randn(many, 64).to(device)
        return lambda _: ((rows,), classes)
    tokens = (torch.arange(many * size).view(many, size) % 101).to(device)
    if job.data == "next":
        return lambda _: ((tokens,), tokens)

    def padded(lengths: torch.Tensor, width: int) -> tuple[Batch, torch.Tensor]:
        there = (torch.arange(width).expand(many, width) < lengths[:, None]).to(device)
        # Of what is padding there is nothing to predict.
        return (tokens[:, :width], there), tokens[:, :width].masked_fill(~there, -100)

    def drawn(number: int) -> tuple[Batch, torch.Tensor]:
        dice = torch.Generator().manual_seed(number)
        longest = 8 * int(torch.randint(size // 32, size // 8 + 1, (1,), generator=dice))
        return padded(torch.randint(1, longest + 1, (many,), generator=dice), longest)

    if job.data == "padded":
        fixed = padded(torch.randint(size // 4, size + 1, (many,)), size)
        return lambda _: fixed
    return drawn


def loss_of(job: Job, model: nn.Module, inputs: Batch, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy: of classes, of each token's next, or of each token that is no padding."""
    with torch.autocast("cuda", torch.bfloat16) if job.bf16 else nullcontext():
        scores = model(*inputs)
        if scores.dim() == 3 and job.data == "next":
            scores, targets = scores[:, :-1], targets[:, 1:]
        return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def since_start() -> float:
    """Seconds since this process began, imports included."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def settings_of(way: str) -> Any:
    """bench/torch/ways.py, where a way is asked for."""
    if way == WAYS[0]:
        return None
    sys.path.append(str(Path(__file__).resolve().parents[1] / "torch"))
    import ways

    return ways


def train(name: str, iterations: int, device: str, way: str) -> dict[str, Any]:
    """Trains from the seed on; gives times, losses and the allocator's peaks."""
    job, ways = JOBS[name], settings_of(way)
    torch.manual_seed(0)
    with torch.device(device):
        model = job.make().train()
    batch = batches(job, device)
    if way == "checkpoint every block":
        ways.checkpointed(ways.repeated(model))
    elif way == "compiled offload":
        ways.offloaded(model)
    kind = torch.optim.Adam if job.data == "images" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-4)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, starts, losses = [], [], []
    for number in range(iterations):
        inputs, targets = batch(number)
        wait()
        starts.append(since_start())
        began = time.perf_counter_ns()
        optimizer.zero_grad()
        with ways.saved(way) if ways else nullcontext():
            loss = loss_of(job, model, inputs, targets)
        loss.backward()
        optimizer.step()
        wait()
        times.append(time.perf_counter_ns() - began)
        losses.append(loss.detach())
        del loss
    found: dict[str, Any] = {"iterations_ns": times, "starts_s": starts}
    found["losses"] = [loss.item() for loss in losses]
    if device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def main() -> None:
    """Prints the answer."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--way", choices=WAYS, default=WAYS[0])
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="the same bits in each run, where PyTorch has kernels for that",
    )
    parser.add_argument(
        "--twice", action="store_true", help="train again, and say whether all losses are the same"
    )
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
    answer = train(flags.job, flags.iterations, flags.device, flags.way)
    if flags.snapshot:
        torch.cuda.memory._dump_snapshot(flags.snapshot)
    if flags.twice:
        gc.collect()
        again = train(flags.job, flags.iterations, flags.device, flags.way)
        answer["repeats"] = again["losses"] == answer["losses"]
    answer["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    answer["torch"] = torch.__version__
    with open(flags.out, "w", encoding="utf-8") if flags.out else nullcontext(sys.stdout) as out:
        print(json.dumps(answer), file=out)


if __name__ == "__main__":
    main()
