"""Answers without which a script ends at once, or never: is everything valid, is the text complete.

On the device every value is 0, so a check such as ``torch.isfinite(loss)`` would fail and a loop
that generates text would go on for ever.
"""

from __future__ import annotations

import threading
from functools import partial
from types import ModuleType
from typing import Any

import torch

from neap.dry import _values
from neap.dry._known import ASSUMED, KNOWN, content, plain

_library: Any = None


def start() -> None:
    """On CUDA, ``all()`` of a whole tensor and ``isfinite`` of one number are true where the values
    are not known.
    """
    from neap.dry._data_dependent import implement

    global _library
    _library = torch.library.Library("aten", "IMPL")
    _values.stand_before("all", partial(_all, torch.ops.aten.all.default))
    _values.stand_before("equal", partial(_equal, torch.ops.aten.equal.default))
    # It consists of other operators, which follow values by themselves.
    implement(_library, "isfinite", _isfinite)


def _all(call: Any, keys: Any, self: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _values.real(call, keys, self)
    if plain(self) and plain(result):
        _values.settle(call, "all", result, (self,), {})
        _assumed(result)
    return result


def _equal(call: Any, keys: Any, self: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal. The real operator asks ``all()`` of what no kernel wrote."""
    if plain(self) and plain(other) and _values.known((self, other)):
        _given.equal = _values.on_the_host(call, self, other)
    try:
        return bool(_values.real(call, keys, self, other))
    finally:
        _given.equal = None


class _Given(threading.local):
    """The answer to ``torch.equal`` that this thread works on, if it is known."""

    equal: bool | None = None


_given = _Given()


def _isfinite(self: torch.Tensor) -> torch.Tensor:
    return _assumed(torch.ops.aten.isfinite.default.decompose(self))


def _assumed(answer: torch.Tensor) -> torch.Tensor:
    """The answer, true where it is not known."""
    if plain(answer) and answer.numel() == 1 and not content(answer):
        value = torch.full((), _given.equal is not False, dtype=answer.dtype, device="cpu")
        _values.put(answer, value, ASSUMED if _given.equal is None else KNOWN)
    return answer


def generation(module: ModuleType) -> None:
    """Ends ``generate`` of transformers at its longest text, which takes the most memory."""
    criteria = module.StoppingCriteriaList
    model = module.GenerationMixin
    check, goes_on = criteria.__call__, getattr(model, "_has_unfinished_sequences", None)
    if goes_on is None:
        return
    reached = threading.local()

    def __call__(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        longest = self.max_length
        reached.end = longest is not None and input_ids.is_cuda and input_ids.shape[-1] >= longest
        return check(self, input_ids, *args, **kwargs)

    def _has_unfinished_sequences(self: Any, *args: Any, **kwargs: Any) -> bool:
        if getattr(reached, "end", False):
            reached.end = False
            return False
        return bool(goes_on(self, *args, **kwargs))

    criteria.__call__ = __call__
    model._has_unfinished_sequences = _has_unfinished_sequences
