"""``torch.func`` refuses to run while hooks for saved tensors are installed. Ours are taken away
around it and put back after it: what it saves is neither moved nor made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from neap.torch._guard import Guard, entry

_C = torch._C._autograd


def is_on_top(owner: object) -> bool:
    """Whether the hooks that the next saved tensor goes to are methods of this object's; where
    PyTorch does not tell, as 2.6, they are taken to be.
    """
    tell = getattr(_C, "_top_saved_tensors_default_hooks", None)
    top = None if tell is None else tell(True)
    return tell is None or (top is not None and getattr(top[0], "__self__", None) is owner)


class Lift:
    """Takes hooks away around ``torch.func`` between :meth:`install` and :meth:`remove`.

    Args:
        owners: the objects whose methods are our hooks.
        lifted: called when hooks are taken away.
    """

    def __init__(
        self, owners: Callable[[], list[Any]], lifted: Callable[[], None], guard: Guard
    ) -> None:
        self.guard = guard
        self._owners = owners
        self._lifted = lifted
        self._plain: Any = None

    def install(self) -> None:
        """From now on ``torch.func`` finds no hook of ours."""
        self._plain = torch.autograd.graph.disable_saved_tensors_hooks
        torch.autograd.graph.disable_saved_tensors_hooks = self._without

    def remove(self) -> None:
        """Puts PyTorch's own back, unless another tool has replaced ours."""
        if torch.autograd.graph.disable_saved_tensors_hooks == self._without:
            torch.autograd.graph.disable_saved_tensors_hooks = self._plain

    @entry()
    def _notice(self) -> None:
        self._lifted()

    @contextmanager
    def _without(self, error_message: str) -> Iterator[None]:
        taken = []
        while hasattr(_C, "_top_saved_tensors_default_hooks") and (
            (top := _C._top_saved_tensors_default_hooks(True)) is not None
        ):
            if not any(getattr(top[0], "__self__", None) is owner for owner in self._owners()):
                break
            _C._pop_saved_tensors_default_hooks()
            taken.append(top)
        if taken:
            self._notice()
        try:
            with self._plain(error_message):
                yield
        finally:
            for pack, unpack in reversed(taken):
                _C._push_saved_tensors_default_hooks(pack, unpack)
