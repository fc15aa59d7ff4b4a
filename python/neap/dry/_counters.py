"""Counters that PyTorch keeps on the device and divides by: there each would stay 0."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim.optimizer import _get_value as real


def start(enter_module: list[Any]) -> None:
    """Lets optimizers and batch norm read at least 1."""

    def at_least_one(value: Any) -> Any:
        found = real(value)
        on_device = isinstance(value, torch.Tensor) and value.is_cuda
        return max(found, 1) if on_device and isinstance(found, (int, float)) else found

    # Each optimizer's module has the function under its own name.
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim") and getattr(module, "_get_value", None) is real:
            module._get_value = at_least_one  # type: ignore[attr-defined]
    enter_module.append(count_batches)


def count_batches(module: torch.nn.Module, path: str) -> None:
    """Batch norm without momentum divides by its number of batches."""
    if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.momentum is None:
        count = module.num_batches_tracked
        if module.training and count is not None and count.is_cuda:
            count.copy_(torch.ones((), dtype=count.dtype, device="cpu"))
