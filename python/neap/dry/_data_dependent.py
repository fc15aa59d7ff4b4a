"""Operators whose result's size depends on values: on a device without values they give the most,
or nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch

from neap.dry._lines import Line, user_line

_counts: dict[tuple[str, Line | None], int] = {}
_library: Any = None
_most = True


def override(treatment: str) -> None:
    """Overrides them on CUDA: with ``max`` every element counts, with ``zero`` none does.

    With ``max`` a forecast is an upper bound; every use is listed in the report.
    """
    global _library, _most
    _most = treatment != "zero"
    _library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "nonzero": _nonzero,
        "masked_select": _masked_select,
        "_unique": _unique1,
        "_unique2": _unique2,
        "unique_dim": _unique_dim,
        "unique_consecutive": _unique_consecutive,
        "unique_dim_consecutive": _unique_dim_consecutive,
        "repeat_interleave.Tensor": _repeat_interleave,
    }.items():
        implement(_library, name, function)
    plain = torch.ctc_loss
    # `torch.compile` asks functions of PyTorch's for their names.
    torch.ctc_loss = update_wrapper(partial(_ctc_loss, plain), plain)  # type: ignore[assignment]


def implement(library: Any, name: str, function: Any) -> None:
    """Puts ``function`` in the place of an operator's CUDA kernel, silently."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            library.impl(name, function, "CUDA", allow_override=True)
        except TypeError:  # Before PyTorch 2.9.
            library.impl(name, function, "CUDA")


def rows() -> list[dict[str, Any]]:
    """As the report has them."""
    return [
        {
            "op": f"aten::{name}",
            "file": line[0] if line else None,
            "line": line[1] if line else None,
            "count": count,
            "treatment": "max" if _most else "zero",
        }
        for (name, line), count in sorted(
            _counts.items(), key=lambda item: (item[0][0], item[0][1] or ("", 0))
        )
    ]


def _count(name: str, most: int) -> int:
    key = name, user_line(3)
    _counts[key] = _counts.get(key, 0) + 1
    return most if _most else 0


def _indices(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=like.device)


def _nonzero(self: torch.Tensor) -> torch.Tensor:
    rows = _count("nonzero", self.numel())
    # PyTorch's own result has this layout too.
    return _indices(self, self.dim(), rows).t()


def _masked_select(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    count = 1
    for extent in shape:
        count *= extent
    return self.new_zeros(_count("masked_select", count))


def _unique(
    name: str, self: torch.Tensor, inverse: bool, counts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    most = _count(name, self.numel())
    return (
        self.new_zeros(most),
        _indices(self, *self.shape) if inverse else _indices(self, 0),
        _indices(self, most) if counts else _indices(self, 0),
    )


def _unique1(
    self: torch.Tensor, sorted: bool = True, return_inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return _unique("_unique", self, return_inverse, False)[:2]


def _unique2(
    self: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _unique("_unique2", self, return_inverse or return_counts, return_counts)


def _unique_consecutive(
    self: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if dim is not None:
        return _along("unique_consecutive", self, dim, return_inverse, return_counts)
    return _unique("unique_consecutive", self, return_inverse, return_counts)


def _along(
    name: str, self: torch.Tensor, dim: int, inverse: bool, counts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    most = _count(name, self.shape[dim])
    shape = list(self.shape)
    shape[dim] = most
    return (
        self.new_zeros(shape),
        _indices(self, self.shape[dim]) if inverse else _indices(self, 0),
        _indices(self, most) if counts else _indices(self, 0),
    )


def _unique_dim(
    self: torch.Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _along("unique_dim", self, dim, return_inverse, return_counts)


def _unique_dim_consecutive(
    self: torch.Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _along("unique_dim_consecutive", self, dim, return_inverse, return_counts)


def _repeat_interleave(repeats: torch.Tensor, output_size: int | None = None) -> torch.Tensor:
    # What the script copied to the device can be read back; what was computed there is 0.
    if repeats.numel() == 0:
        return torch.empty_like(repeats)
    sums = repeats.contiguous().cumsum(0)
    if output_size is None:
        (repeats >= 0).all()
        output_size = int(repeats.cpu().sum())
    result = repeats.new_empty(output_size)
    del sums
    return result


def _ctc_loss(
    original: Callable[..., torch.Tensor],
    logs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *rest: Any,
    **more: Any,
) -> torch.Tensor:
    # Lengths that were computed on the device are 0: then each is taken as long as it can be.
    lengths = input_lengths, target_lengths
    if targets.numel() and all(isinstance(x, torch.Tensor) and x.is_cuda for x in lengths):
        read = inputs, parts = [x.flatten().tolist() for x in lengths]
        together = targets.dim() == 1
        if not any(parts) or (together and sum(parts) != targets.numel()):
            each, longer = divmod(targets.numel(), len(parts))
            even = [each + (n < longer) for n in range(len(parts))]
            parts = even if together else [targets.shape[-1]] * len(parts)
        inputs = inputs if any(inputs) else [logs.shape[0]] * len(inputs)
        lengths = inputs, parts
        if [inputs, parts] != read:
            _count("ctc_loss", 0)
    return original(logs, targets, *lengths, *rest, **more)
