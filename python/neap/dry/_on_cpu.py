"""A PyTorch that is built for the CPU only: the script runs on fake tensors, and the bytes of their
storages are counted.

Fake tensors have shapes and no values (``FakeTensorMode``), so that a large model takes neither
memory nor time. There is no allocator to ask: the answer is what is allocated, not what PyTorch
would reserve on a GPU.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import dataloader

BLOCK = 512
"""The allocator's unit on a GPU, in bytes."""


class Storages(TorchDispatchMode):
    """Counts the bytes of all live storages that operators made, in blocks of 512 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._modes = [self._fake, self]
        self._steps: dict[int, dict[str, int]] = {}
        """What each optimizer's last step left, by the optimizer's id."""

    def start(self) -> None:
        """From now on every tensor of this process is a fake one."""
        for mode in self._modes:
            mode.__enter__()
        # ``Module.to`` swaps a fake parameter's content, which PyTorch refuses while a weak
        # reference to it exists, and fake tensors have one of PyTorch's own.
        torch.utils.weakref = SimpleNamespace(  # type: ignore[assignment]
            getweakrefs=lambda _: []
        )
        FakeTensor.__reduce_ex__ = _saved  # type: ignore[assignment,method-assign]
        torch.serialization.add_safe_globals([_loaded])
        # Data loaders load real data, in this process or in workers.
        os.register_at_fork(after_in_child=self._leave)
        load = dataloader._BaseDataLoaderIter.__next__

        def loaded(loader: Any) -> Any:
            with _disable_current_modes():
                batch = load(loader)
            return tree_map(self._batch, batch)

        dataloader._BaseDataLoaderIter.__next__ = loaded  # type: ignore[assignment]

    def _leave(self) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)

    def _batch(self, value: Any) -> Any:
        """A fake tensor for one of a batch, counted as on a device."""
        if not isinstance(value, torch.Tensor):
            return value
        fake = self._fake.from_tensor(value)
        self._count(fake)
        return fake

    def stepped(self, optimizer: Optimizer) -> None:
        """Notes what an optimizer's parameters, gradients and states take after its step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [
            value
            for state in optimizer.state.values()
            for value in tree_leaves(state)
            if isinstance(value, torch.Tensor)
        ]
        self._steps[id(optimizer)] = {
            "parameter_bytes": sum(map(_bytes, parameters)),
            "gradient_bytes": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
            "state_bytes": sum(map(_bytes, states)),
        }

    def row(self) -> dict[str, int]:
        """The peak of all storages, and what parameters, gradients and states take, in bytes."""
        names = ("parameter_bytes", "gradient_bytes", "state_bytes")
        rows = self._steps.values()
        return {"peak_bytes": self.peak} | {name: sum(r[name] for r in rows) for name in names}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            # A value that nothing computed: 1, which is true, finite and no division by zero.
            return _one(args[0].dtype)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return  # A sparse tensor's parts are counted by themselves.
        key = id(storage)
        size = (storage.nbytes() + BLOCK - 1) // BLOCK * BLOCK
        known = self._watched.get(key)
        if known is None or known() is not storage:
            self._watched[key] = weakref.ref(storage, partial(self._freed, key))
            self._sizes.setdefault(key, 0)
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int, _: Any) -> None:
        self._watched.pop(key, None)
        self.live -= self._sizes.pop(key, 0)


def _saved(tensor: FakeTensor, _: int) -> tuple[Any, ...]:
    """What a checkpoint has of a fake tensor, in pickle's form: no values."""
    shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return _loaded, (shape, strides, tensor.dtype, tensor.requires_grad, is_parameter)


def _loaded(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    """A tensor of a checkpoint: fake again, in a process with fake tensors."""
    tensor = torch.empty_strided(shape, strides, dtype=dtype)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _bytes(tensor: torch.Tensor) -> int:
    return (tensor.numel() * tensor.element_size() + BLOCK - 1) // BLOCK * BLOCK


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
