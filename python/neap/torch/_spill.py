"""Little memory without a plan: what autograd saves goes to the host as soon as nothing else holds
it, and comes back when backward asks for it.

Each copy is in the compute stream's way, so this is for the iterations until there is a plan, where
the script does something else than the plan that it was given says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from neap.torch._holder import Handle, Holder, flat
from neap.torch._storage import PLAIN, Storage, Storages, blocks, storage_of

SMALLEST = 1 << 20
"""Smaller ones stay: a copy costs more than they take."""

_owners = torch._C._storage_Use_Count


def is_small(size: int) -> bool:
    """Whether a tensor of this many bytes stays."""
    return size < SMALLEST


class Spill:
    """Keeps saved tensors on the host.

    Args:
        device: the type of the device.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._known: dict[int, weakref.ref[Holder]] = {}
        self._waiting: list[weakref.ref[Holder]] = []

    def pack(self, tensor: torch.Tensor, place: int = -1) -> Holder | Handle | None:
        """What autograd keeps of a saved tensor; nothing for one that stays. ``place`` is that of
        the tensor in an iteration by a plan.
        """
        self.look()
        if (
            type(tensor) not in PLAIN
            or tensor.layout is not torch.strided
            or tensor.device.type != self.device
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        base = storage_of(tensor)
        if base is None or is_small(base.nbytes()):
            return None
        with _disable_current_modes():
            reference = self._known.get(base._cdata)
            known = None if reference is None else reference()
            if known is not None and known.base is not None:
                return Handle(place, known, tensor)
            holder = Holder(place, -1, tensor, base, None)
        self._known[holder.key] = weakref.ref(holder)
        self._waiting.append(self._known[holder.key])
        return holder

    def look(self) -> None:
        """What nothing else holds any more goes to the host."""
        waiting, self._waiting = self._waiting, []
        for reference in waiting:
            holder = reference()
            # Two of its owners are `base` and `here`.
            if holder is None or holder.base is None:
                continue
            if _owners(holder.key) > 2:
                self._waiting.append(reference)
            elif holder.seen is not None and holder.seen._version == holder.version:
                self._send(holder)

    def _send(self, holder: Holder) -> None:
        base = holder.base
        assert base is not None
        with _disable_current_modes():
            pinned = base.device.type == "cuda"
            host = torch.empty(base.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            # On the compute stream, which gives the memory to nothing else before the copy.
            host.copy_(flat(base), non_blocking=True)
        self._known.pop(holder.key, None)
        holder.host = host
        holder.here = holder.base = holder.seen = None


class Recorded(Spill):
    """The same while an iteration is recorded, as if all stayed: what leaves and comes back under
    another address is one storage.

    Args:
        storages: those of the recording.
        now: the number of operators so far.
    """

    def __init__(self, storages: Storages, now: Callable[[], int]) -> None:
        super().__init__(storages.device)
        self.away = 0
        """Bytes that are on the host for now."""
        self._storages = storages
        self._now = now
        self._gone: dict[int, tuple[Storage, weakref.ref[Holder]]] = {}

    def _send(self, holder: Holder) -> None:
        storage = None if holder.seen is None else self._storages.find(holder.seen)
        if storage is not None:
            if storage.alone is None:
                storage.alone = self._now()
            self._storages.leave(storage)
            self.away += blocks(storage.bytes)
            key = id(holder)
            self._gone[key] = storage, weakref.ref(holder, lambda gone: self._never_came(key))
        super()._send(holder)

    def _back(self, key: int) -> Storage | None:
        storage, _ = self._gone.pop(key, (None, None))
        if storage is not None:
            self.away -= blocks(storage.bytes)
        return storage

    def _never_came(self, key: int) -> None:
        storage = self._back(key)
        if storage is not None:
            storage.died = self._now()

    def value(self, packed: Holder | Handle) -> torch.Tensor:
        """The saved tensor that :meth:`pack` gave this for."""
        found = fetched(packed)
        holder = packed if isinstance(packed, Holder) else packed.holder
        storage = self._back(id(holder))
        if storage is not None and holder.here is not None:
            self._storages.come(storage, holder.here)
        return found


def fetched(packed: Holder | Handle) -> torch.Tensor:
    """The saved tensor that :meth:`Spill.pack` gave this for, without its history."""
    with _disable_current_modes():
        packed.fetch()
        holder = packed if isinstance(packed, Holder) else packed.holder
        assert holder.here is not None and packed.view is not None
        dtype, shape, stride, offset = packed.view
        bare = torch.empty(0, dtype=dtype, device=holder.device)
        return bare.set_(holder.here.untyped_storage(), offset, shape, stride)
