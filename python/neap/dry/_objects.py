"""Ranks that exchange Python objects: PyTorch joins them and adds up their sizes on the device."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from neap.dry import _values

_FUNCTIONS = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
_OPERATORS = {"cat", "sum", "max"} | {
    f"{before}{name}{after}"
    for name in ("add", "radd", "iadd", "gt", "lt")
    for before, after in (("", ""), ("__", "__"))
}


class _Real(TorchFunctionMode):
    """These operators on integers of the device get their real results.

    PyTorch sizes its buffers by them. The device runs the operator too, so that the allocations
    stay PyTorch's own.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _OPERATORS and _counts(result):
            operands = [_on_the_host(argument) for argument in args]
            result.copy_(func(*operands, **(kwargs or {})))
        return result


def _on_the_host(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.cpu()
    if isinstance(argument, (list, tuple)):
        return [_on_the_host(part) for part in argument]
    return argument


def _counts(result: Any) -> bool:
    if not isinstance(result, torch.Tensor) or not result.is_cuda:
        return False
    return result.dtype in (torch.int64, torch.uint8, torch.bool)


def exchange(module: ModuleType) -> None:
    """Has ``torch.distributed`` exchange the objects of its ranks with their real bytes."""
    import torch.distributed as distributed

    for name in _FUNCTIONS:
        original = getattr(module, name, None)
        if original is None:
            continue
        for place in (module, distributed):
            setattr(place, name, _with_real(original))


def _with_real(original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        _values.exchanging.depth += 1
        try:
            with _Real():
                return original(*args, **kwargs)
        finally:
            _values.exchanging.depth -= 1

    return call
