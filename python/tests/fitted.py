"""What tests of `neap.torch.fit` compare."""

from __future__ import annotations

import torch
from jobs import Job


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
