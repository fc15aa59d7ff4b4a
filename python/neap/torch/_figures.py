"""What PyTorch's allocator says of itself."""

from __future__ import annotations

from typing import Any

import torch

GIVEN_OUT = ("allocated_bytes.all.current", "allocated_bytes.all.peak")
"""Bytes that are given out, now and at most."""
STANDING = ("allocated_bytes.all.current", "reserved_bytes.all.current")
"""Bytes that are given out and reserved now."""
PEAKS = ("reserved_bytes.all.peak", "allocated_bytes.all.peak")
"""The most bytes that were reserved and given out."""


def statistics(*names: str, device: int | None = None) -> tuple[int, ...]:
    """Figures of the allocator's, such as ``"allocated_bytes.all.peak"``, on the current device or
    another; 0 where nothing was asked of it yet.
    """
    # The plain dictionary takes ten times as long to make.
    known: Any = torch.cuda.memory_stats_as_nested_dict(device)
    figures = []
    for name in names:
        found = known
        for part in name.split("."):
            found = found.get(part, {})
        figures.append(int(found or 0))
    return tuple(figures)


def statistic(name: str) -> int:
    """One of these figures."""
    return statistics(name)[0]
