"""Operators of PyTorch's that look at what the device computed before they go on, and fail where
that is 0: their own kernels run, and find what a script in order would make them find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch

from neap.dry import _data_dependent
from neap.dry._library import Library

Answers = Callable[..., "AbstractContextManager[None] | None"]

FUSED = 2048
"""Elements up to which one kernel finds the mode, and the host reads nothing."""


def start(library: Library) -> None:
    """Stands in front of these operators."""

    def normal(mean: Any = 0.0, std: Any = 1.0, *args: Any, **more: Any) -> Any:
        """All deviations are at least 0."""
        return library.answers({1: 1}) if _on_device(std) else None

    def mode(input: Any, dim: int = -1, *args: Any, **more: Any) -> Any:
        """The mode is among the values; how many of these differ depends on them."""
        if not _on_device(input) or input.dim() == 0 or input.shape[dim] <= FUSED:
            return None
        differ = _data_dependent._count("mode", input.shape[dim])
        return library.answers({4: max(0, differ - 1), 8: 1, 16: 1})

    both: list[tuple[str, Answers]] = [("cov", _cov), ("corrcoef", _cov), ("mode", mode)]
    for name, answers in [("normal", normal), *both]:
        plain = getattr(torch, name)
        # `torch.compile` asks functions of PyTorch's for their names.
        setattr(torch, name, update_wrapper(partial(_call, plain, answers), plain))
    for name, answers in both:
        _replace_method(name, answers)


def _replace_method(name: str, answers: Answers) -> None:
    plain = getattr(torch.Tensor, name)

    def method(self: torch.Tensor, *args: Any, **more: Any) -> Any:
        return _call(plain, answers, self, *args, **more)

    setattr(torch.Tensor, name, update_wrapper(method, plain))


def _call(plain: Any, answers: Answers, *args: Any, **more: Any) -> Any:
    prepared = None if torch.compiler.is_compiling() else answers(*args, **more)
    if prepared is None:
        return plain(*args, **more)
    with prepared:
        return plain(*args, **more)


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _cov(
    input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> AbstractContextManager[None] | None:
    """No weight is below 0, and their sum is more than the degrees of freedom take off."""
    if not _on_device(input):
        return None
    weights = sum(weight is not None for weight in (fweights, aweights))
    observations = input.shape[1] if input.dim() > 1 else input.numel()
    none_left = weights == 0 and observations <= correction
    return _compared([True] * (weights + (weights > 0)) + [none_left])


@contextmanager
def _compared(answers: list[bool]) -> Iterator[None]:
    """Meanwhile, whether two tensors are equal is answered with these, in order."""
    library = torch.library.Library("aten", "IMPL")
    left = iter(answers)
    _data_dependent.implement(library, "equal", lambda self, other: next(left, True))
    try:
        yield
    finally:
        library._destroy()
