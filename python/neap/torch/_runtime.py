"""Carries a schedule out: saved activations leave after forward and come back before backward.

Only hooks run in the steady state. A saved tensor is packed into a handle; handles of one storage
share a holder, which has the bytes on the device, on the host, or both. All device memory is
allocated on the compute stream, so that the allocator may reuse it in program order; copies run on
streams of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from neap.torch._calls import View
from neap.torch._lane import Lane
from neap.torch._meter import Meter
from neap.torch._recompute import Recompute
from neap.torch._recorder import is_subclass, node_name
from neap.torch._schedule import Actions, Schedule
from neap.torch._storage import blocks
from neap.torch._timeline import Timeline
from neap.torch._versions import changed, witness


class Holder:
    """The bytes of one storage that autograd saved.

    Attributes:
        base: the storage on the device, while it is there.
        host: its bytes in the pinned pool, from the copy on.
        left: whether its copy to the host was asked for on a stream of its own.
        coming: whether its copy back may not have ended yet.
        number: the activation's, in the schedule.
    """

    __slots__ = ("__weakref__", "base", "coming", "device", "host", "left", "nbytes", "number")

    def __init__(self, base: torch.UntypedStorage, device: torch.device, number: int) -> None:
        self.base: torch.UntypedStorage | None = base
        self.device = device
        self.nbytes = base.nbytes()
        self.number = number
        self.host: torch.Tensor | None = None
        self.left = False
        self.coming = False


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
        self.meter: Meter | None = None
        self.schedule: Schedule | None = None
        self.diverged: str | None = None
        self.differs: Callable[[], None] = lambda: None
        """Called when an iteration turns out not to be as planned."""
        self.count = 0
        self._holders: list[weakref.ref[Holder] | None] = []
        # Weak: a holder lives as long as autograd's handles, and its bytes no longer.
        self._by_storage: dict[int, tuple[StorageWeakRef, weakref.ref[Holder]]] = {}
        self._packs: list[Actions | None] = []
        self._unpacks: list[Actions | None] = []
        """What is yet to be done in this iteration when each tensor is saved, and when needed."""
        self._waiting: dict[int, list[str]] = {}
        self._slots: list[torch.Tensor] = []
        self._guests: list[weakref.ref[Holder] | None] = []
        self._gone: list[StorageWeakRef] = []
        self._out: Lane | None = None
        self._in: Lane | None = None

    # -- iterations

    def follow(self, schedule: Schedule | None) -> None:
        """From the next iteration on does what ``schedule`` says; nothing if it is ``None``.

        Raises:
            RuntimeError: if there is not enough pinned memory.
        """
        self.schedule = schedule
        self._slots = []
        if self.device == "cuda" and self._out is None:
            self._out, self._in = Lane(), Lane()
        for lane in (self._out, self._in):
            if lane is not None and schedule is not None:
                lane.ends = [torch.cuda.Event() for _ in schedule.sizes]
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
        self._waiting = {}
        self._by_storage = {}
        schedule = self.schedule
        if schedule is not None:
            self._holders = [None] * len(schedule.sizes)
            self._packs, self._unpacks = schedule.at("pack"), schedule.at("unpack")
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
        self.count = number + 1
        schedule = self.schedule
        if schedule is not None and self.diverged is None:
            why = differs(schedule.expected, number, tensor)
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
        number = self.count
        self.count = number + 1
        schedule = self.schedule
        if schedule is None or self.diverged is not None:
            return plain(tensor)
        why = differs(schedule.expected, number, tensor)
        if why is not None:
            self.diverge(why)
            return plain(tensor)
        owner = schedule.owner[number]
        packed = plain(tensor, number) if owner is None else self._hold(number, owner, tensor)
        self.act(self._packs, number)
        return packed

    def unpack(self, packed: Any) -> torch.Tensor:
        """Called by autograd when backward needs a saved tensor."""
        handle: Handle = packed
        seen = handle.witness
        if seen._version != handle.version:
            shape = handle.tensor.shape if handle.tensor is not None else handle.view[1]
            raise RuntimeError(changed(seen, handle.version, list(shape)))
        if handle.tensor is not None:
            self.act(self._unpacks, handle.number)
            return handle.tensor
        holder = handle.holder
        assert holder is not None
        self.act(self._unpacks, handle.number)
        base = self._resident(holder)
        dtype, shape, stride, offset = handle.view
        # Needs no gradient, so that autograd does not see it.
        return torch.empty(0, dtype=dtype, device=holder.device).set_(base, offset, shape, stride)

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
            mine = weakref.ref(holder)
            self._by_storage[key] = (StorageWeakRef(base), mine)
            self._holders[owner] = mine
        view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        return Handle(number, holder, None, view, witness(tensor))

    # -- actions

    def packed(self, number: int) -> None:
        """A call that runs again has saved a tensor."""
        self.act(self._packs, number)

    def unpacked(self, number: int) -> None:
        """Backward needs a tensor that a call that runs again has saved."""
        self.act(self._unpacks, number)

    def act(self, points: list[Actions | None], number: int) -> None:
        """Does what is due at a point; a tensor without a number, below 0, has none."""
        waiting = self._waiting
        due = 0 <= number < len(points) and points[number] is not None
        if not (due or waiting) or self.schedule is None or self.diverged is not None:
            return
        actions = points[number] if due else None
        if actions is None:
            self._try_again()
            return
        points[number] = None
        for what, one in actions:
            if what == "in":
                if waiting.pop(one, None) is not None:
                    self.counts.kept += 1
                holder = self._holder(one)
                if holder is not None:
                    self._swap_in(holder)
            elif one in waiting:
                waiting[one].append(what)
            elif self._holders[one] is not None:
                waiting[one] = [what]
        if waiting:
            self._try_again()

    def _holder(self, one: int) -> Holder | None:
        reference = self._holders[one]
        return None if reference is None else reference()

    def _try_again(self) -> None:
        """Copies and drops what is due, as soon as nothing else holds it any more."""
        over = []
        leaving = []
        for one, stages in self._waiting.items():
            holder = self._holder(one)
            if holder is None or holder.base is None:
                over.append(one)
                continue
            # One of the storage's owners is `base` itself.
            if torch._C._storage_Use_Count(holder.base._cdata) > 1:
                continue
            if stages[0] == "out":
                stages.pop(0)
                if self._may_leave(one, holder):
                    leaving.append((one, holder, holder.base))
                if stages:
                    continue  # It is dropped below, after its copy was asked for.
            else:
                self._drop(holder)
                stages.pop(0)
            if not stages:
                over.append(one)
        for one in over:
            del self._waiting[one]
        if leaving:
            self._send(leaving)
            self._try_again()

    def _may_leave(self, one: int, holder: Holder) -> bool:
        if holder.host is not None or self._slots[one].numel() != holder.nbytes:
            return False
        reference = self._guests[one]
        guest = None if reference is None else reference()
        # An older graph may still be alive and need the slot.
        return guest is None or guest is holder or guest.base is not None

    def _send(self, leaving: list[tuple[int, Holder, torch.UntypedStorage]]) -> None:
        """Asks for copies to the host."""
        copies = [(one, self._slots[one], flat(base, h.device)) for one, h, base in leaving]
        if self._out is None:
            for one, slot, whole in copies:
                self._copy(slot, whole, "to host", one)
        else:
            with self._out:
                for one, slot, whole in copies:
                    self._copy(slot, whole, "to host", one)
                    self._out.ended(one)
        for one, holder, _ in leaving:
            holder.left = self._out is not None
            holder.host = self._slots[one]
            self._guests[one] = weakref.ref(holder)
            self.counts.swapped_out += 1
            self.counts.bytes_out += holder.nbytes

    def _drop(self, holder: Holder) -> None:
        if holder.host is None or holder.base is None:
            return
        if holder.left and self._out is not None:
            self._out.wait(holder.number)
        self._gone.append(StorageWeakRef(holder.base))
        holder.base = None

    def _swap_in(self, holder: Holder) -> None:
        if holder.base is not None or holder.host is None:
            return
        # On the compute stream: a side stream would have memory of its own.
        whole = torch.empty(holder.nbytes, dtype=torch.uint8, device=holder.device)
        if self._in is None:
            self._copy(whole, holder.host, "to device", holder.number)
        else:
            # The compute stream waited for the copy to the host before the bytes were dropped.
            with self._in:
                self._copy(whole, holder.host, "to device", holder.number)
                self._in.ended(holder.number)
            holder.coming = True
        holder.base = whole.untyped_storage()
        self.counts.swapped_in += 1
        self.counts.bytes_in += holder.nbytes

    def _copy(self, to: torch.Tensor, source: torch.Tensor, lane: str, one: int) -> None:
        for noting in (self.timeline, self.meter):
            if noting is not None and noting.on:
                began = noting.event()
                to.copy_(source, non_blocking=True)
                noting.copied(lane, f"activation {one}", to.numel(), began, noting.event())
                return
        to.copy_(source, non_blocking=True)

    def _resident(self, holder: Holder) -> torch.UntypedStorage:
        if holder.base is None:
            self.counts.late += 1
            self._swap_in(holder)
        if holder.coming and self._in is not None:
            self._in.wait(holder.number)
            holder.coming = False
        assert holder.base is not None
        return holder.base


def differs(expected: Sequence[tuple[View, str]], number: int, tensor: torch.Tensor) -> str | None:
    """How a saved tensor differs from the one that was planned in its place."""
    if number >= len(expected):
        return f"more than {len(expected)} saved tensors"
    view, node = expected[number]
    if not is_subclass(tensor) and tensor.layout is torch.strided:
        dtype, shape, stride, offset = view
        if (
            tensor.shape != shape
            or tensor.dtype is not dtype
            or tensor.stride() != stride
            or tensor.storage_offset() != offset
        ):
            return f"saved tensor {number} is {tuple(tensor.shape)} instead of {shape}"
    name = node_name(tensor)
    if name != node:
        return f"saved tensor {number} is of {name or 'a leaf'} instead of {node or 'a leaf'}"
    return None


def flat(base: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """All bytes of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(base)


def plain(tensor: torch.Tensor, number: int = -1) -> Handle:
    """A handle that keeps the tensor. A tensor that keeps itself would never be freed."""
    kept = tensor.detach()
    return Handle(number, None, kept, None, kept)
