"""What is expected of the tensors that autograd saves in an iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from neap.torch._calls import View
from neap.torch._holder import dense
from neap.torch._schedule import Schedule
from neap.torch._tensors import VIEWS, is_subclass, node_name

Wanted = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[str, ...], Any, int, bool]
"""What is expected of a saved tensor: type, shape, strides, names that the function that
made it may have, what keeps it if its bytes may go, the number that it gets besides its place, and
whether anything is done at its point.
"""


def names_of(node: str) -> tuple[str, ...]:
    """The names that autograd may give a function to which :func:`node_name` gives this one."""
    return VIEWS if node == "view" else (node,)


def longer(expected: int) -> str:
    """How an iteration differs that saved what was expected, and then more."""
    return f"more than {expected} saved tensors"


def differs(
    expected: Sequence[tuple[View, str]], number: int, tensor: torch.Tensor, varies: bool = False
) -> str | None:
    """How a saved tensor differs from the one that was planned in its place. Where it begins in its
    storage makes no difference: a batch may be another slice of the same data each time. With
    ``varies`` its extents make none either.
    """
    if number >= len(expected):
        return longer(len(expected))
    view, node = expected[number]
    if not is_subclass(tensor) and tensor.layout is torch.strided:
        dtype, shape, stride, _ = view
        what = f"saved tensor {number}"
        if tensor.shape != shape and not (varies and tensor.dim() == len(shape)):
            return f"{what} is {tuple(tensor.shape)} instead of {shape}"
        if tensor.dtype is not dtype:
            return f"{what} is of {tensor.dtype} instead of {dtype}"
        if tensor.stride() != stride and not varies:
            return f"{what} has strides {tensor.stride()} instead of {stride}"
    name = node_name(tensor)
    if name != node:
        return f"saved tensor {number} is of {name or 'a leaf'} instead of {node or 'a leaf'}"
    return None


def serves(view: View, found: View | None, varies: bool) -> bool:
    """Whether a tensor is like the one that was planned. Where it begins in its storage makes no
    difference; with ``varies`` its extents make none either.
    """
    if found is None or not varies:
        return found is not None and found[:3] == view[:3]
    return found[0] is view[0] and len(found[1]) == len(view[1])


def bytes_of(view: View) -> int:
    """The bytes of a tensor's elements."""
    dtype, shape, _, _ = view
    return math.prod(shape) * dtype.itemsize


def whole(schedule: Schedule, slots: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Each slot as a tensor like the first that is saved of its activation, if that is all of it:
    then it comes back as it was saved.
    """
    found: list[torch.Tensor | None] = [None] * len(slots)
    seen = set()
    for (view, _), owner in zip(schedule.expected, schedule.owner):
        if owner is None or owner in seen:
            continue
        seen.add(owner)
        dtype, shape, stride, _ = view
        if dense(view, schedule.sizes[owner]):
            found[owner] = slots[owner].view(dtype).as_strided(shape, stride)
    return found


def wants(schedule: Schedule, keeps: dict[int, Any]) -> list[Wanted]:
    """What each saved tensor must be, ready for the comparison; ``keeps`` says what keeps it."""
    acting = {*schedule.actions, *((kind, n) for kind, n, _ in schedule.trims)}
    return [
        (*view[:3], names_of(node), *keeps.get(n, (None, 0)), ("pack", n) in acting or n == 0)
        for n, (view, node) in enumerate(schedule.expected)
    ]
