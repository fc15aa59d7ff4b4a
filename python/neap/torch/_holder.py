"""What autograd keeps in place of saved tensors whose bytes may leave the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from neap.torch._calls import View
from neap.torch._guard import meant
from neap.torch._storage import PLAIN
from neap.torch._versions import changed, witness

_expired = torch.UntypedStorage._expired
_forget = torch.UntypedStorage._free_weak_ref


class Holder:
    """A storage that autograd saved and that may leave. Autograd keeps it in place of the first
    tensor that it saved of this storage.

    Attributes:
        seen: that tensor without its history, until its bytes are dropped. It shares the version
            counter; when the bytes are dropped, nothing else is left that could change them.
        here: a tensor that has the bytes on the device, while they are there.
        base: the storage until it is dropped.
        view: how the first tensor sees the storage.
        host: the bytes in the pinned pool, from the copy on.
        left: whether its copy to the host was asked for on a stream of its own.
        coming: whether its copy back may not have ended yet.
        device: where the bytes were.
        key: the address of the storage's C++ object, while the bytes are on the device; no other
            has it then.
        number: the activation's, in the schedule.
        place: the saved tensor's, in the iteration.
        slot: the place in the pinned pool, as a tensor like the first one where that is all of the
            storage.
    """

    __slots__ = (
        "__weakref__",
        "base",
        "coming",
        "device",
        "here",
        "host",
        "key",
        "left",
        "number",
        "place",
        "seen",
        "slot",
        "version",
        "view",
    )

    def __init__(
        self,
        place: int,
        number: int,
        tensor: torch.Tensor,
        base: torch.UntypedStorage,
        slot: torch.Tensor | None,
    ) -> None:
        self.place = place
        self.number = number
        self.base: torch.UntypedStorage | None = base
        self.seen: torch.Tensor | None = tensor.detach()
        self.here: torch.Tensor | None = self.seen
        self.device = tensor.device
        self.version = tensor._version
        self.view: View | None = None if slot is not None else seen_as(tensor)
        self.key = base._cdata
        self.slot = slot
        self.host: torch.Tensor | None = None
        self.left = False
        self.coming = False

    def drop(self) -> bool:
        """The host alone has the bytes from now on; whether the storage is gone from the device."""
        assert self.base is not None and self.host is not None
        weak = self.base._weak_ref()
        self.here = self.base = self.seen = None
        gone = bool(_expired(weak))
        _forget(weak)
        return gone

    def renew(self) -> None:
        """What came back is held as if it had just been saved: a function of the user's may have
        changed it since.
        """
        assert self.here is not None
        self.seen, self.base, self.version = (
            self.here,
            self.here.untyped_storage(),
            self.here._version,
        )
        self.host, self.left, self.coming = None, False, False

    def fetch(self) -> None:
        """The bytes are on the device: copied at once, if they are on the host alone."""
        if self.coming:
            torch.cuda.synchronize(self.device)
            self.coming = False
        if self.here is None and self.host is not None:
            self.here = self.host.to(self.device, copy=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The saved tensor's shape."""
        if self.view is not None:
            return self.view[1]
        assert self.slot is not None
        return self.slot.shape


class Handle:
    """What autograd keeps in place of a further tensor of a storage that may leave."""

    __slots__ = ("holder", "place", "seen", "version", "view")

    def __init__(self, place: int, holder: Holder, tensor: torch.Tensor) -> None:
        self.place = place
        self.holder = holder
        self.view = seen_as(tensor)
        self.seen = witness(tensor)
        self.version = tensor._version

    def fetch(self) -> None:
        """The bytes are on the device."""
        self.holder.fetch()


Kept = tuple[torch.Tensor, int, int]
"""What autograd keeps in place of a saved tensor that stays: the tensor, its number in the
iteration or -1, and its version.
"""


def kept(tensor: torch.Tensor, number: int = -1) -> Kept:
    """What keeps a tensor itself. A tensor that keeps itself would never be freed."""
    return tensor.detach(), number, tensor._version


class Counts:
    """What happened since the start, for the report."""

    def __init__(self) -> None:
        self.swapped_out = 0
        self.swapped_in = 0
        self.bytes_out = 0
        self.bytes_in = 0
        self.late = 0
        """Swap-ins that nothing had asked for before the tensor was needed."""
        self.kept = 0
        """Swap-outs left out because something else held the storage."""
        self.trims = 0
        """How often the allocator gave memory back."""
        self.bytes_moved = 0
        """What was allocated anew for it."""
        self.deaths = 0
        """Storages that were seen to be gone from the device after a swap-out."""


def flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def seen_as(tensor: torch.Tensor) -> View:
    """How a tensor sees its storage."""
    return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())


def fills(tensor: torch.Tensor, slot: torch.Tensor) -> bool:
    """Whether a tensor has the slot's shape, strides and type, and is all of its storage."""
    return (
        type(tensor) in PLAIN
        and tensor.shape == slot.shape
        and tensor.stride() == slot.stride()
        and tensor.dtype is slot.dtype
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == slot.nbytes
    )


def dense(view: View, size: int) -> bool:
    """Whether a view is all of a storage of this size, each element once."""
    dtype, shape, stride, offset = view
    step = 1
    for extent, apart in sorted(zip(shape, stride), key=lambda pair: pair[1]):
        if extent != 1:
            if apart != step:
                return False
            step *= extent
    return offset == 0 and len(shape) == len(stride) and step * dtype.itemsize == size


def fault(saved: Any) -> RuntimeError:
    """What PyTorch says of a saved tensor that was changed in place."""
    shape = saved.shape if isinstance(saved, Holder) else saved.view[1]
    return meant(RuntimeError(changed(saved.seen, saved.version, list(shape))))


def moved(holders: Iterable[Holder], known: dict[int, weakref.ref[Holder]]) -> None:
    """Tensors may have got another storage: holders and what knows them by it follow."""
    for holder in holders:
        if holder.here is None:
            continue
        storage = holder.here.untyped_storage()
        if holder.base is not None:
            holder.base = storage
        if storage._cdata != holder.key:
            known.pop(holder.key, None)
            known[storage._cdata], holder.key = weakref.ref(holder), storage._cdata
