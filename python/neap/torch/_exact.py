"""A recorded iteration computes what it would without a recorder, bit for bit.

A few functions of PyTorch ask whether a dispatch mode is on (``isTensorSubclassLike``), and then
take another way. A recorder is a dispatch mode.

- Some backward functions then take another formula, which rounds otherwise. What they compute is
  computed again without the recorder, and replaced.
- The CTC loss then saves other tensors for backward, by which later iterations would look
  different. It gets its lengths as numbers, as it makes them itself without a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from neap.torch._guard import Guard, entry
from neap.torch._watch import Watch

_OTHERWISE = frozenset(
    ("CumprodBackward0", "MaskedFillBackward1", "ProdBackward0", "ProdBackward1")
)
"""Of all operators with samples in PyTorch 2.11's own tests, those whose gradients differ."""


class Exact:
    """What a recorder needs for it, from ``start`` to ``stop``.

    Attributes:
        busy: whether a gradient is computed again just now; what autograd then saves and asks for
            is none of the iteration's.
    """

    def __init__(self, watch: Watch) -> None:
        self.busy = False
        self._watch = watch
        self._ctc_loss: Callable[..., torch.Tensor] | None = None

    @property
    def guard(self) -> Guard:
        """The watch's."""
        return self._watch.guard

    def start(self) -> None:
        """Looks at each call of backward and of the CTC loss from now on."""
        self._watch.around_backward = self._within
        plain = self._ctc_loss = torch.ctc_loss
        numbers = partial(self._with_numbers, plain)
        # `torch.compile` asks functions of PyTorch's for their names.
        torch.ctc_loss = update_wrapper(numbers, plain)  # type: ignore[assignment]

    def stop(self) -> None:
        """Ends."""
        self._watch.around_backward = None
        if self._ctc_loss is not None:
            torch.ctc_loss = self._ctc_loss
            self._ctc_loss = None

    @contextmanager
    def _within(self, roots: Sequence[Any]) -> Iterator[None]:
        """For a call of backward that begins at these tensors or ``GradientEdge`` objects."""
        handles = self._follow(roots)
        if handles is None:  # Then these functions must see no recorder at all.
            with _disable_current_modes():
                yield
            return
        try:
            yield
        finally:
            # The graph may be kept, and gone through again.
            for handle in handles:
                handle.remove()

    @entry()
    def _follow(self, roots: Sequence[Any]) -> list[Any] | None:
        return [node.register_hook(self._again(node)) for node in _affected(roots)]

    def _again(self, node: Any) -> Callable[..., Any]:
        def hook(found: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
            self.busy = True
            try:
                with _disable_current_modes():
                    right = node(*given)
            finally:
                self.busy = False
            # A function of one result returns it without a tuple.
            rights = right if isinstance(right, tuple) else (right,)
            with _disable_current_modes():
                return self._corrected(found, rights)

        return hook

    @entry(lambda self, found, rights: rights)
    def _corrected(self, found: tuple[Any, ...], rights: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(_replaced, found, rights))

    def _with_numbers(
        self,
        ctc_loss: Callable[..., torch.Tensor],
        logs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Any,
        target_lengths: Any,
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        """``torch.ctc_loss``, where PyTorch's own kernel computes it: cuDNN takes tensors."""
        lengths = input_lengths, target_lengths
        blank = rest[0] if rest else more.get("blank", 0)
        lengths = self._numbers(logs, targets, lengths, blank)
        return ctc_loss(logs, targets, *lengths, *rest, **more)

    @entry(lambda self, logs, targets, lengths, blank: lengths)
    def _numbers(
        self, logs: torch.Tensor, targets: torch.Tensor, lengths: tuple[Any, Any], blank: int
    ) -> tuple[Any, Any]:
        if all(isinstance(x, torch.Tensor) for x in lengths) and not (
            logs.is_cuda and torch._use_cudnn_ctc_loss(logs, targets, *lengths, blank)
        ):
            return lengths[0].tolist(), lengths[1].tolist()
        return lengths


def _affected(roots: Sequence[Any]) -> list[Any]:
    """The functions below these roots that compute otherwise."""
    ahead = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    seen: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead.extend(after for after, _ in node.next_functions)
    return [node for node in seen if node.name() in _OTHERWISE]


def _replaced(found: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """``right``, in the memory of ``found`` where that is possible: the recorder knows it."""
    if found is None or right is None or found.requires_grad:
        return right
    if found.shape != right.shape or found.stride() != right.stride():
        return right
    return found.copy_(right) if found.data_ptr() != right.data_ptr() else found
