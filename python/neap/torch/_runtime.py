"""Carries a schedule out: saved activations leave after forward and come back before backward.

Only hooks run in the steady state. A saved tensor is packed into a handle; handles of one storage
share a holder, which has the bytes on the device, on the host, or both. All device memory is
allocated on the compute stream, so that the allocator may reuse it in program order; copies run on
streams of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from neap.torch._recompute import Recompute
from neap.torch._recorder import is_subclass, node_name
from neap.torch._schedule import Schedule
from neap.torch._storage import blocks
from neap.torch._timeline import Timeline
from neap.torch._versions import changed, witness


class Holder:
    """The bytes of one storage that autograd saved.

    Attributes:
        base: the storage on the device, while it is there.
        host: its bytes in the pinned pool, from the copy on.
        left, came: events after the copies to the host and back.
        number: the activation's, in the schedule.
    """

    __slots__ = ("__weakref__", "base", "came", "device", "host", "left", "nbytes", "number")

    def __init__(self, base: torch.UntypedStorage, device: torch.device, number: int) -> None:
        self.base: torch.UntypedStorage | None = base
        self.device = device
        self.nbytes = base.nbytes()
        self.number = number
        self.host: torch.Tensor | None = None
        self.left: Any = None
        self.came: Any = None


class Handle:
    """What autograd keeps in place of a saved tensor."""

    __slots__ = ("holder", "number", "tensor", "version", "view", "witness")

    def __init__(
        self,
        number: int,
        holder: Holder | None,
        tensor: torch.Tensor | None,
        view: Any,
        witness: torch.Tensor,
    ) -> None:
        self.number = number
        self.holder = holder
        self.tensor = tensor
        self.view = view
        self.witness = witness
        self.version = witness._version


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
        self.deaths = 0
        """Storages that were seen to be gone from the device after a swap-out."""


class Runtime:
    """Swaps saved activations by a schedule. One for each model and optimizer.

    Args:
        device: the type of the device that the model is on.
        find: the module of a path, for calls that run again.
    """

    def __init__(
        self,
        device: str,
        find: Callable[[str], torch.nn.Module | None] = lambda path: None,
    ) -> None:
        self.device = device
        self.counts = Counts()
        self.recompute = Recompute(self, find)
        self.timeline: Timeline | None = None
        self.schedule: Schedule | None = None
        self.diverged: str | None = None
        self.differs: Callable[[], None] = lambda: None
        """Called when an iteration turns out not to be as planned."""
        self.count = 0
        self._holders: list[Any] = []
        # Weak: a holder lives as long as autograd's handles, and its bytes no longer.
        self._by_storage: dict[int, tuple[StorageWeakRef, weakref.ref[Holder]]] = {}
        self._done: set[tuple[str, int]] = set()
        self._waiting: dict[int, list[str]] = {}
        self._slots: list[torch.Tensor] = []
        self._guests: list[Any] = []
        self._gone: list[StorageWeakRef] = []
        self._out: Any = None
        self._in: Any = None

    # -- iterations

    def follow(self, schedule: Schedule | None) -> None:
        """From the next iteration on does what ``schedule`` says; nothing if it is ``None``.

        Raises:
            RuntimeError: if there is not enough pinned memory.
        """
        self.schedule = schedule
        self._slots = []
        if self.device == "cuda" and self._out is None:
            self._out, self._in = torch.cuda.Stream(), torch.cuda.Stream()
        if schedule is not None and schedule.sizes:
            total = sum(blocks(size) for size in schedule.sizes)
            pool = torch.empty(total, dtype=torch.uint8, pin_memory=self.device == "cuda")
            start = 0
            for size in schedule.sizes:
                self._slots.append(pool[start : start + size])
                start += blocks(size)
        self._guests = [None] * len(self._slots)
        self.recompute.follow(schedule)
        self.begin()

    def begin(self) -> None:
        """An iteration begins."""
        self.count = 0
        self.diverged = None
        self.recompute.begin()
        self._done = set()
        self._waiting = {}
        self._by_storage = {}
        if self.schedule is not None:
            self._holders = [None] * len(self.schedule.sizes)
        self.counts.deaths += sum(reference.expired() for reference in self._gone)
        self._gone = []

    def end(self) -> str | None:
        """An iteration ends: nothing, or what made it differ from the one that was planned."""
        if self.schedule is not None and self.diverged is None:
            expected = len(self.schedule.expected)
            if self.count < expected:
                self.diverge(f"{self.count} saved tensors instead of {expected}")
        return self.diverged

    # -- hooks

    def counted(self, tensor: torch.Tensor) -> int:
        """The number of a saved tensor; notes the first that is not as planned."""
        number = self.count
        self.count += 1
        if self.schedule is not None and self.diverged is None:
            why = self._differs(self.schedule, number, tensor)
            if why is not None:
                self.diverge(why)
        return number

    def diverge(self, why: str) -> None:
        """The rest of the iteration runs with everything kept."""
        if self.diverged is None:
            self.diverged = why
            self.differs()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves."""
        entering = self.recompute.entering
        if entering is not None:
            owner = entering.owner()
            return plain(tensor) if owner is None else self._hold(-1, owner, tensor)
        number = self.counted(tensor)
        schedule = self.schedule
        if schedule is None or self.diverged is not None:
            return plain(tensor)
        owner = schedule.owner[number]
        packed = plain(tensor, number) if owner is None else self._hold(number, owner, tensor)
        self.act("pack", number)
        return packed

    def unpack(self, packed: Any) -> torch.Tensor:
        """Called by autograd when backward needs a saved tensor."""
        handle: Handle = packed
        if handle.witness._version != handle.version:
            shape = handle.tensor.shape if handle.tensor is not None else handle.view[1]
            raise RuntimeError(changed(handle.witness, handle.version, list(shape)))
        if handle.tensor is not None:
            if handle.number >= 0:
                self.act("unpack", handle.number)
            return handle.tensor
        holder = handle.holder
        assert holder is not None
        self.act("unpack", handle.number)
        base = self._resident(holder)
        dtype, shape, stride, offset = handle.view
        with torch.no_grad():
            found = torch.empty(0, dtype=dtype, device=holder.device)
            found.set_(base, offset, shape, stride)
        return found

    def _differs(self, schedule: Schedule, number: int, tensor: torch.Tensor) -> str | None:
        if number >= len(schedule.expected):
            return f"more than {len(schedule.expected)} saved tensors"
        if is_subclass(tensor) or tensor.layout != torch.strided:
            found: Any = None
        else:
            found = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        view, node = schedule.expected[number]
        if found is not None and found != view:
            return f"saved tensor {number} is {found[1]} instead of {view[1]}"
        name = node_name(tensor)
        if name != node:
            return f"saved tensor {number} is of {name or 'a leaf'} instead of {node or 'a leaf'}"
        return None

    def _hold(self, number: int, owner: int, tensor: torch.Tensor) -> Any:
        if tensor.is_conj() or tensor.is_neg() or tensor.device.type != self.device:
            return plain(tensor)
        base = tensor.untyped_storage()
        key = base._cdata
        known = self._by_storage.get(key)
        holder = known[1]() if known is not None and not known[0].expired() else None
        if holder is not None:
            if holder.base is None:  # It left, and something else kept it alive.
                holder.base = base
        else:
            holder = Holder(base, tensor.device, owner)
            self._by_storage[key] = (StorageWeakRef(base), weakref.ref(holder))
            self._holders[owner] = weakref.ref(holder)
        view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        return Handle(number, holder, None, view, witness(tensor))

    # -- actions

    def act(self, kind: str, number: int) -> None:
        """Does what is due at a point."""
        schedule = self.schedule
        if schedule is None or self.diverged is not None:
            return
        if self._waiting:
            self._try_again()
        point = (kind, number)
        actions = schedule.actions.get(point)
        if actions is None or point in self._done:
            return
        self._done.add(point)
        for what, one in actions:
            holder = self._holder(one)
            if what == "in":
                if self._waiting.pop(one, None) is not None:
                    self.counts.kept += 1
                if holder is not None:
                    self._swap_in(holder)
            elif holder is not None:
                self._waiting.setdefault(one, []).append(what)
        self._try_again()

    def _holder(self, one: int) -> Holder | None:
        reference = self._holders[one]
        found: Holder | None = None if reference is None else reference()
        return found

    def _try_again(self) -> None:
        """Copies and drops what is due, as soon as nothing else holds it any more."""
        for one, stages in list(self._waiting.items()):
            holder = self._holder(one)
            while holder is not None and stages:
                done = self._swap_out(one, holder) if stages[0] == "out" else self._drop(holder)
                if not done:
                    break
                stages.pop(0)
            if holder is None or not stages:
                del self._waiting[one]

    def _swap_out(self, one: int, holder: Holder) -> bool:
        base = holder.base
        if base is None or holder.host is not None:
            return True
        # One of the storage's owners is `base` itself.
        if torch._C._storage_Use_Count(base._cdata) > 1:
            return False
        guest = None if self._guests[one] is None else self._guests[one]()
        slot = self._slots[one]
        if slot.numel() != holder.nbytes:
            return True
        if guest is not None and guest is not holder and guest.base is None:
            return True  # An older graph is still alive and needs the slot.
        whole = flat(base, holder.device)
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._out):
                self._copy(slot, whole, "to host", one)
                holder.left = self._out.record_event()
        else:
            self._copy(slot, whole, "to host", one)
        self._guests[one] = weakref.ref(holder)
        holder.host = slot
        self.counts.swapped_out += 1
        self.counts.bytes_out += holder.nbytes
        return True

    def _drop(self, holder: Holder) -> bool:
        if holder.host is None or holder.base is None:
            return True
        if torch._C._storage_Use_Count(holder.base._cdata) > 1:
            return False
        if holder.left is not None:
            torch.cuda.current_stream().wait_event(holder.left)
        self._gone.append(StorageWeakRef(holder.base))
        holder.base = None
        return True

    def _swap_in(self, holder: Holder) -> None:
        if holder.base is not None or holder.host is None:
            return
        with torch.no_grad():
            # On the compute stream: a side stream would have memory of its own.
            whole = torch.empty(holder.nbytes, dtype=torch.uint8, device=holder.device)
            if self._in is not None:
                self._in.wait_stream(torch.cuda.current_stream())
                if holder.left is not None:
                    self._in.wait_event(holder.left)
                with torch.cuda.stream(self._in):
                    self._copy(whole, holder.host, "to device", holder.number)
                    holder.came = self._in.record_event()
            else:
                self._copy(whole, holder.host, "to device", holder.number)
        holder.base = whole.untyped_storage()
        self.counts.swapped_in += 1
        self.counts.bytes_in += holder.nbytes

    def _copy(self, to: torch.Tensor, source: torch.Tensor, lane: str, one: int) -> None:
        timeline = self.timeline
        if timeline is None or not timeline.on:
            to.copy_(source, non_blocking=True)
            return
        began = timeline.event()
        to.copy_(source, non_blocking=True)
        timeline.copied(lane, f"activation {one}", to.numel(), began, timeline.event())

    def _resident(self, holder: Holder) -> torch.UntypedStorage:
        if holder.base is None:
            self.counts.late += 1
            self._swap_in(holder)
        if holder.came is not None:
            torch.cuda.current_stream().wait_event(holder.came)
            holder.came = None
        assert holder.base is not None
        return holder.base


def flat(base: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """All bytes of a storage as a tensor."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=device).set_(base)


def plain(tensor: torch.Tensor, number: int = -1) -> Handle:
    """A handle that keeps the tensor. A tensor that keeps itself would never be freed."""
    kept = tensor.detach()
    return Handle(number, None, kept, None, kept)
