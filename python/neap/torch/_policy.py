"""A budget without a plan: what autograd saves leaves for the host as memory nears a limit.

This serves iterations that no plan covers: a script whose iterations are never alike, a batch that
is larger than any before. Backward asks first for what was saved last, so the tensor that is needed
last leaves first, which is Belady's rule. In backward tensors come back in the order in which they
will be asked for, as far as there is room.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

from neap.torch._figures import STANDING, statistics
from neap.torch._holder import Counts, Handle, Holder, flat
from neap.torch._lane import Lane
from neap.torch._pinned import HostPool
from neap.torch._schedule import PAGE, UNKNOWN, Needs
from neap.torch._spill import Spill
from neap.torch._tensors import bytes_of_elements

LOOKS = 128
"""What stands is measured anew when this part of the limit has been saved since."""
SPARE = 8
"""This part of the limit is left to the allocator at first, for free memory in pieces."""
_TRIMS = 64
"""The most times that free memory is given back in an iteration."""
_PIECES = 16
"""Less free memory than this part of the limit is not given back."""
_BUSY = 8
"""This many tensors in a row that something else holds end the search for what leaves early."""

_owners = torch._C._storage_Use_Count
_probe = torch.empty(1)
_ALONE = _owners(_probe.untyped_storage()._cdata)
"""The owners of a storage that one tensor alone sees."""
_raw = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


class Policy(Spill):
    """Holds one script to a limit.

    Args:
        device: the type of the device.
        counts: where copies are counted.

    Attributes:
        limit: the most bytes that the allocator may reserve; nothing leaves where there is none,
            and with 0 everything that may.
        margin: the bytes of it that iterations were seen to need beyond what stands whenever this
            looks.
        left: the bytes that have left in this iteration.
        short: whether more had to leave than could.
    """

    def __init__(self, device: str, counts: Counts) -> None:
        super().__init__(device)
        self.limit: int | None = None
        self.margin = 0
        self.left = 0
        self.short = False
        self._counts = counts
        self._needs = UNKNOWN
        """What was watched."""
        self._jump = 0
        """What is taken to come and go between two looks of this iteration."""
        self._usual = 0
        """The margin of iterations that are no larger than this one, if it is larger."""
        self._reserved = self._growth = self._trims = 0
        """What was reserved at the last look, the most by which it grew between two looks of an
        iteration, and how often memory was given back in it.
        """
        self._pieces = 0
        """The free bytes that were left when memory was last given back in this iteration: they
        lie beside others in pages.
        """
        self._expects = True
        """Whether this iteration is taken to need as much room as those before."""
        self._since = 0
        """Bytes that were saved since what stands was measured."""
        self._room = 0
        """Bytes that could still be given out then."""
        self._early = 0
        """Bytes whose copies are asked for before their memory is needed, since as many left in
        iterations before.
        """
        self._sent = 0
        """Bytes whose copies to the host were asked for in this iteration."""
        self._copies = 0
        self._away: list[weakref.ref[Holder]] = []
        """What is on the host alone; backward asks for the last one first."""
        self._came: list[weakref.ref[Holder]] = []
        """What came back, and may leave again without a copy."""
        self._home: tuple[int, int] | None = None
        """The device and stream on which the first tensor was saved."""
        self._begun = False
        """Whether a tensor was saved in this iteration."""
        self.begins: Callable[[], None] = lambda: None
        """Called before the first tensor of an iteration is saved."""
        self._pool: HostPool | None = None
        self._out: Lane | None = None
        self._in: Lane | None = None

    def begin(self, limit: int | None) -> None:
        """From now on this is the limit."""
        self.limit = limit
        if limit and self._needs.beside:
            at_first = self._needs.unseen + limit // SPARE
            self.margin = min(max(self.margin, at_first), limit // 2)
        self._room = self._since = 0

    @property
    def is_tight(self) -> bool:
        """Whether what is known to stand beside saved tensors leaves no room for what comes and
        goes.
        """
        return self.limit is not None and self._needs.beside + self.margin > self.limit

    def stop(self) -> None:
        """Nothing leaves any more; memory of the host goes with the last tensor that is there."""
        self.begin(None)
        self._pool = None

    def knows(self, needs: Needs) -> None:
        """What iterations of the script need besides saved tensors."""
        self._needs, self._jump = needs, needs.unseen
        self.margin = self._growth = 0

    @property
    def floor(self) -> int:
        """About what this iteration needs with all on the host that may leave, in bytes; 0 if that
        is not known.
        """
        return self._needs.beside + self._jump if self._needs.beside else 0

    def expects_nothing(self) -> None:
        """This iteration is taken to fit as it is."""
        self._expects = False

    def expects_more(self, size: int, known: int) -> None:
        """This iteration has saved ``size`` bytes where those before had up to ``known``: what
        comes and goes between two looks grows with it.
        """
        if self.limit and size > known and not self._usual:
            self._usual = self.margin
            self.margin = min(self.margin * size // max(known, 1), self.limit // 2)
            self._jump = min(self._jump * size // max(known, 1), self.limit // 2)

    def begin_iteration(self) -> None:
        """Nothing was looked at in this iteration yet."""
        self._counts.trims += self._trims
        self._room = self._since = self._reserved = self._pieces = self._trims = 0
        self._growth = self._growth * 7 // 8

    def ended(self, over: int) -> None:
        """An iteration by the policy has ended, in which the allocator reserved ``over`` bytes more
        than the limit, or less.
        """
        if over > 0 and self.limit:
            self.margin = min(self.margin + over + PAGE, self.limit // 2)
        elif self._usual:
            self.margin = self._usual
        self._usual, self._jump = 0, self._needs.unseen
        if self._in is not None:
            self._in.settle()
        self._forget_the_dead()
        self._early = max(self.left, self._early * 7 // 8)
        self.left = self._sent = 0
        self.short, self._expects, self._begun = False, True, False

    def _forget_the_dead(self) -> None:
        def lives(reference: weakref.ref[Holder]) -> bool:
            return reference() is not None

        self._waiting = [*filter(lives, self._waiting)]
        self._away = [*filter(lives, self._away)]
        self._came = [*filter(lives, self._came)]
        self._known = {key: one for key, one in self._known.items() if lives(one)}
        # Events of copies that are not over yet are not used again.
        if self._pool is None or not self._pool.is_lent:
            self._copies = 0

    def give_back_free(self) -> None:
        """Between iterations whose sizes vary: what the last one left free goes back to the device
        if the next one could not reserve much beside it.
        """
        self._pieces = 0
        if self.limit and self.device == "cuda":
            standing, reserved = statistics(*STANDING)
            self._give_back(standing, reserved, self.limit // SPARE)

    def _most(self) -> int:
        """The most bytes that may be reserved before the next look: that grows by pages."""
        assert self.limit is not None
        return self.limit - min(2 * PAGE, self.limit // 16)

    def _give_back(self, standing: int, reserved: int, more: int) -> int:
        """Free memory goes back if ``more`` bytes beside it would be too much. Gives the bytes that
        are reserved then.
        """
        assert self.limit is not None
        near = self._trims < _TRIMS and self.limit > 0 and reserved + more > self._most()
        if near and reserved - standing > max(self.limit // _PIECES, self._pieces + PAGE):
            if self._out is not None:  # A copy may still read what was freed.
                self._out.stream.synchronize()
            torch.cuda.empty_cache()
            self._trims += 1
            self._reserved = 0
            standing, reserved = statistics(*STANDING)
            self._pieces = reserved - standing
        return reserved

    # -- forward

    def pack(self, tensor: torch.Tensor, place: int = -1) -> Holder | Handle | None:
        """What autograd keeps of a saved tensor; nothing for one that stays anyway."""
        if self.limit is None or _lasts(tensor) or not self._knows_home(tensor.device):
            return None
        if not self._begun:
            self._begun = True
            self.begins()
        packed = super().pack(tensor, place)
        if isinstance(packed, Holder) and packed.base is not None:
            self._since += packed.base.nbytes()
        return packed

    def _knows_home(self, device: torch.device) -> bool:
        """Whether what is on this device may leave now. The first one shows where all must be."""
        if device.type != "cuda":
            return True
        if self._home is None:
            self._home = device.index, _raw(device.index)
        return device.index == self._home[0] and self._is_home()

    def _is_home(self) -> bool:
        """Whether copies are in order with what is asked of the device now: its stream is the one
        on which the first tensor was saved, and captures no graph.
        """
        if self._home is None:
            return self.device != "cuda" or not _capturing()
        index, stream = self._home
        return torch.cuda.current_device() == index and _raw(index) == stream and not _capturing()

    def look(self, but: Holder | None = None) -> None:
        """Something is saved next, or backward or the step begins. ``but`` stays."""
        if self.limit is None or not self._is_home() or not self._is_time():
            return
        room = self._measure()
        if room < 0:
            self._make_room(-room, but)
        elif self._expects and self._sent < self._early:
            self._send_early()

    def passes(self, tensor: torch.Tensor) -> None:
        """A plan saves this tensor or asks for it, in an iteration of other sizes than those before
        it: free memory may fit into none of its pieces, and what the plan keeps may leave.
        """
        self._since += bytes_of_elements(tensor)
        may_leave = self._waiting or self._came
        if (self.device == "cuda" or may_leave) and self._is_time() and self._is_home():
            room = self._measure()
            if room < 0 and may_leave:
                self._make_room(-room)

    def _is_time(self) -> bool:
        """Whether enough was saved or asked for since the last look."""
        return self.limit is not None and self._since >= max(self._room // 4, self.limit // LOOKS)

    def _measure(self) -> int:
        """Bytes that may still be given out. Free memory goes back to the device before what comes
        next would make the allocator reserve too much, as it may fit into none of its pieces.
        """
        assert self.limit is not None
        most, self._since = self.limit - self.margin, 0
        if self.device == "cuda":
            standing, reserved = statistics(*STANDING)
            if self._reserved:
                self._growth = max(self._growth, reserved - self._reserved)
            self._reserved = reserved
            jump = max(self._growth, self._jump)
            reserved = self._give_back(standing, reserved, max(jump, self._needs.made))
            if self._trims < _TRIMS:
                # What lies in pieces between others may not do for what comes next.
                standing = max(standing, reserved + jump - self._most() + most)
        else:
            standing = self._needs.beside + self._held()
        self._room = most - standing
        return self._room

    def _held(self) -> int:
        """The bytes of saved tensors that are here."""
        found = (reference() for reference in (*self._waiting, *self._came))
        here = (None if holder is None else holder.here for holder in found)
        return sum(tensor.untyped_storage().nbytes() for tensor in here if tensor is not None)

    def _make_room(self, need: int, but: Holder | None = None) -> None:
        """The oldest leave, except one that is wanted just now."""
        waiting, self._waiting = self._waiting, []
        going: list[Holder] = []
        at = 0
        while at < len(waiting) and need > 0:
            holder = waiting[at]()
            if holder is not None and holder.base is not None:
                if holder is not but and self._may_leave(holder):
                    going.append(holder)
                    need -= holder.base.nbytes()
                else:
                    self._waiting.append(waiting[at])
            at += 1
        self._waiting += waiting[at:]
        self._copy_out([holder for holder in going if holder.host is None])
        for holder in going:
            if holder.host is not None:
                self._drop(holder)
            else:  # The host has no room.
                self._waiting.append(weakref.ref(holder))
        if need > 0 and self._came:
            need -= self._send_back(need, but)
        self.short |= need > 0

    def _send_back(self, need: int, but: Holder | None) -> int:
        """What came back leaves again, that which was saved first ahead: backward over the same
        graph once more needs it last. Gives the bytes.
        """
        found = [holder for holder in (one() for one in self._came) if holder is not None]
        left, self._came = 0, []
        for holder in sorted(found, key=lambda holder: -holder.number):
            here, host = holder.here, holder.host
            assert host is not None
            if here is None:
                continue
            alone = _owners(here.untyped_storage()._cdata) <= _ALONE
            if left < need and holder is not but and not holder.coming and alone:
                holder.here = here = None
                left += host.nbytes
                self._away.insert(0, weakref.ref(holder))
            else:
                self._came.append(weakref.ref(holder))
        return left

    def _send_early(self) -> None:
        busy, going, size = 0, [], 0
        for reference in self._waiting:
            holder = reference()
            if holder is None or holder.base is None or holder.host is not None:
                continue
            if not self._may_leave(holder):
                busy += 1
                if busy == _BUSY:
                    break
                continue
            busy = 0
            going.append(holder)
            size += holder.base.nbytes()
            if self._sent + size >= self._early:
                break
        self._copy_out(going)

    def _may_leave(self, holder: Holder) -> bool:
        """Whether nothing else holds it. Two of its owners are ``base`` and ``here``."""
        unchanged = holder.seen is not None and holder.seen._version == holder.version
        return unchanged and _owners(holder.key) <= 2

    def _copy_out(self, going: Sequence[Holder]) -> None:
        """Asks for copies to the host, as far as that has room."""
        if not going:
            return
        if self._pool is None:
            self._begin_copies()
        assert self._pool is not None
        with _disable_current_modes(), self._out or nullcontext():
            for holder in going:
                base = holder.base
                assert base is not None
                host = self._pool.lend(holder, base.nbytes())
                if host is None:
                    break
                holder.host = host
                host.copy_(flat(base), non_blocking=True)
                self._number(holder)
                if self._out is not None:
                    self._out.ended(-1 - holder.number)
                self._sent += base.nbytes()
                self._counts.swapped_out += 1
                self._counts.bytes_out += base.nbytes()

    def _begin_copies(self) -> None:
        on_device = self.device == "cuda"
        self._pool = HostPool(on_device)
        if on_device:
            self._out, self._in = Lane(), Lane()

    def _number(self, holder: Holder) -> None:
        """Numbers of what the policy moves are below 0; each has an event on either lane."""
        self._copies += 1
        holder.number = -1 - self._copies
        for lane in (self._out, self._in):
            while lane is not None and len(lane.ends) <= self._copies:
                lane.ends.append(torch.cuda.Event())

    def _drop(self, holder: Holder) -> None:
        """Its memory is given back on the compute stream, which waits for the copy."""
        assert holder.base is not None
        if self._out is not None:
            self._out.wait(-1 - holder.number)
        self._known.pop(holder.key, None)
        self.left += holder.base.nbytes()
        self._counts.deaths += holder.drop()
        self._away.append(weakref.ref(holder))

    # -- backward

    def wanted(self, holder: Holder) -> None:
        """Backward asks for a storage: it is on the device, and those that are asked for next come
        as far as there is room.
        """
        if holder.here is None:
            self._counts.late += 1
            self._bring([holder])
        if holder.coming and self._in is not None:
            self._in.arrived(-1 - holder.number)
        holder.coming = False
        if self.limit is None or not self._is_home():
            return
        if not self._away:
            self._since += 0 if holder.here is None else holder.here.untyped_storage().nbytes()
            self.look(holder)
            return
        room = self._measure()
        if room < 0:
            self._make_room(-room, holder)
            return
        coming = []
        while self._away:
            found = self._away[-1]()
            if found is not None and found.here is None and found.host is not None:
                room -= found.host.nbytes
                if room < 0:
                    break
                coming.append(found)
            self._away.pop()
        self._bring(coming)

    def _bring(self, coming: Sequence[Holder]) -> None:
        if not coming:
            return
        lane = self._in
        with _disable_current_modes():
            hosts = [holder.host for holder in coming if holder.host is not None]
            # On the compute stream: a side stream would have memory of its own.
            room = [torch.empty_like(host, device=coming[0].device) for host in hosts]
            with lane or nullcontext():
                for holder, here, host in zip(coming, room, hosts):
                    here.copy_(host, non_blocking=True)
                    holder.here = here
                    self._came.append(weakref.ref(holder))
                    if lane is not None:
                        holder.coming = True
                        lane.comes(-1 - holder.number, here)
                    self._counts.swapped_in += 1
                    self._counts.bytes_in += host.nbytes


def _lasts(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)
