"""Answers without which a script ends at once, or never: is everything valid, is the text complete.

On the device every value is 0, so a check such as ``torch.isfinite(loss)`` would fail and a loop
that generates text would go on for ever.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import torch

_library: Any = None


def start() -> None:
    """On CUDA, ``all()`` of a whole tensor and ``isfinite`` of one number are true."""
    from neap.dry._data_dependent import implement

    global _library
    _library = torch.library.Library("aten", "IMPL")
    implement(_library, "all", _all)
    implement(_library, "isfinite", _isfinite)


def _true(answer: torch.Tensor) -> torch.Tensor:
    if answer.numel() == 1 and not torch.cuda.is_current_stream_capturing():
        answer.copy_(torch.ones((), dtype=answer.dtype))
    return answer


def _all(self: torch.Tensor) -> torch.Tensor:
    kind = torch.uint8 if self.dtype is torch.uint8 else torch.bool
    answer = torch.empty((), dtype=kind, device=self.device)
    return _true(torch.ops.aten.all.all_out(self, out=answer))


def _isfinite(self: torch.Tensor) -> torch.Tensor:
    return _true(torch.ops.aten.isfinite.default.decompose(self))


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
