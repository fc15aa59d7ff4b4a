"""Operators whose result's size depends on values: on a device without values they give the most,
or nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch

from neap.dry import _known, _triton, _values
from neap.dry._followed import DEPENDENT
from neap.dry._known import UNKNOWN, plain
from neap.dry._library import NO_ANSWER
from neap.dry._lines import Line, user_line
from neap.dry._reads import made_up

_counts: dict[tuple[str, Line | None], int] = {}
_most = True


def override(treatment: str) -> None:
    """Has their kernels find the right count where values are known; elsewhere with ``max`` every
    element counts, with ``zero`` none does.

    With ``max`` a forecast is an upper bound; every such use is listed in the report.
    """
    global _most
    _most = treatment != "zero"
    if _known.start():
        _values.start()
        _triton.start()
        for name in DEPENDENT:
            call = getattr(torch.ops.aten, name).default
            _values.stand_before(name, partial(_sized, call, name))
    original = torch.ctc_loss
    # `torch.compile` asks functions of PyTorch's for their names.
    torch.ctc_loss = update_wrapper(partial(_ctc_loss, original), original)  # type: ignore[assignment]


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
    line = user_line(2)
    key = name, line
    _counts[key] = _counts.get(key, 0) + 1
    made_up(f"aten::{name}", line)
    return most if _most else 0


def _sized(call: Any, name: str, keys: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the real operator, which reads from the device how many elements there are."""
    if not plain(self):
        return _values.real(call, keys, self, *args, **kwargs)
    state = _values.known((self,))
    values: Any = None
    along = _along(call, args, kwargs)
    if state:
        try:
            values = _values.on_the_host(call, self, *args, **kwargs)
        except Exception:
            state = UNKNOWN  # The real operator says what is wrong.
    if state:
        rows = _first(values).shape[along or 0]
    else:
        rows = _count(name, self.numel() if along is None else self.shape[along])
    _known.answer_counts(rows)
    try:
        result = _values.real(call, keys, self, *args, **kwargs)
    finally:
        _known.answer_counts(NO_ANSWER)
    if _first(result).shape[along or 0] != rows:
        result = _made(call, self, rows, along, result)
    if state:
        _values.beside(_values.put, result, values, state)
    return result


def _first(result: Any) -> torch.Tensor:
    first: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return first


def _along(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The dimension along which ``unique`` looks; nothing where it takes all elements."""
    names = [argument.name for argument in call._schema.arguments[1:]]
    given = {**dict(zip(names, args, strict=False)), **kwargs}.get("dim")
    return given


def _made(call: Any, self: torch.Tensor, rows: int, along: int | None, result: Any) -> Any:
    """A result of so many rows where the real operator read none."""
    if not isinstance(result, tuple):
        # PyTorch's own result has this layout too.
        return result.new_zeros((self.dim(), rows)).t()
    shape = [rows]
    if along is not None:
        shape = list(self.shape)
        shape[along] = rows
    # Whether counts were asked for shows in what there is of them.
    counts = [p.new_zeros(rows) if p is not None and p.numel() else p for p in result[2:]]
    return self.new_zeros(shape), result[1], *counts


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
