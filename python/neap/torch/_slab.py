"""States that come to the device and go back together: one storage on each side, so one copy."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._pinned import host_memory
from neap.torch._storage import blocks


class Slab:
    """Optimizer states of one type of elements. On the device the bytes come and go, and the
    tensors that see them stay.

    Args:
        optimizer: what keeps the states.
        members: parameter, name and present tensor of each state.

    Attributes:
        host: all bytes on the host.
        here: all bytes on the device, none while they are away.
        size: the bytes of the states in blocks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Sequence[tuple[torch.Tensor, str, torch.Tensor]],
    ) -> None:
        self.size = sum(blocks(tensor.nbytes) for _, _, tensor in members)
        device = members[0][0].device
        self.host = host_memory(self.size, device.type == "cuda")
        self.here = torch.empty(0, dtype=torch.uint8, device=device)
        self._optimizer = optimizer
        self._owners = [owner for owner, _, _ in members]
        self._names = [name for _, name, _ in members]
        self._hosts = within(self.host, [tensor for _, _, tensor in members])
        self._views: list[torch.Tensor] = []
        self._count = sum(len(optimizer.state[owner]) for owner in self._owners)

    def hosts(self) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Parameter, name and tensor on the host of each state."""
        return zip(self._owners, self._names, self._hosts)

    def come(self) -> bool:
        """Takes memory on the device and puts tensors in it into the optimizer's state; their
        values are yet to be copied. Does nothing where the script has put in others.
        """
        owners = self._owned(self._hosts)
        if owners is None:
            return False
        if self._views:
            self.here.untyped_storage().resize_(self.size)
        else:
            # On the compute stream: a side stream would have memory of its own.
            self.here = torch.empty(self.size, dtype=torch.uint8, device=self.here.device)
            self._views = within(self.here, self._hosts)
        for owner, name, view in zip(owners, self._names, self._views):
            owner[name] = view
        return True

    def go(self) -> bool:
        """Puts the host's tensors into the optimizer's state; their values are yet to be copied,
        and :meth:`free` to be called. Does nothing where others are there.
        """
        owners = self._owned(self._views)
        if owners is None:
            return False
        for owner, name, host in zip(owners, self._names, self._hosts):
            owner[name] = host
        return True

    def is_here(self) -> bool:
        """Whether the optimizer's state has the tensors on the device."""
        return self._owned(self._views) is not None

    def versions(self) -> list[int]:
        """How often each tensor on the device was written to."""
        return [view._version for view in self._views]

    def free(self) -> None:
        """Gives the device's memory back. No tensor in it is read again before it comes."""
        self.here.untyped_storage().resize_(0)

    def _owned(self, tensors: list[torch.Tensor]) -> list[dict[str, Any]] | None:
        """What the optimizer keeps for each state's parameter, if the states are these tensors
        and there are no others.
        """
        owners = list(map(self._optimizer.state.get, self._owners))
        known = [owner for owner in owners if owner is not None]
        if len(known) < len(owners) or sum(map(len, known)) != self._count:
            return None
        found = map(dict.get, known, self._names)
        return known if all(map(operator.is_, found, tensors)) else None


def within(pool: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like these, one after another in the pool's memory."""
    starts = accumulate((blocks(tensor.nbytes) for tensor in like), initial=0)
    storage = pool.untyped_storage()
    return [
        torch.empty(0, dtype=tensor.dtype, device=pool.device).set_(
            storage, start // tensor.itemsize, tensor.size(), tensor.stride()
        )
        for tensor, start in zip(like, starts)
    ]
