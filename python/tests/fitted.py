"""What tests of `neap.torch.fit` compare."""

from __future__ import annotations

import random
from typing import Any

import neap.torch
import torch
from jobs import Job

ITERATIONS = 7


def everything(job: Job) -> list[torch.Tensor]:
    """Parameters, buffers, optimizer states and the state of random numbers."""
    optimizer = job.optimizer.state_dict()["state"]
    return [
        *(p.detach() for p in job.model.parameters()),
        *job.model.buffers(),
        *(v for s in optimizer.values() for v in s.values() if isinstance(v, torch.Tensor)),
        torch.get_rng_state(),
    ]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether all are equal, bit for bit but for the sign of zeros."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


def run(make: Any, device: str | None, budget: str = "70%", iterations: int = ITERATIONS) -> Any:
    """Losses and everything else after some iterations, fitted if a device is given; the report."""
    torch.manual_seed(5)
    random.seed(5)
    job = make()
    fitted = None
    if device is not None:
        fitted = neap.torch.fit(job.model, job.optimizer, budget, device=device, verbose=False)
    losses = [job.iteration().clone() for _ in range(iterations)]
    report = None if fitted is None else fitted.close()
    return losses + everything(job), report
