"""Carries a schedule out: saved activations leave after forward and come back before backward.

Only hooks run in the steady state. A saved tensor is packed into a handle; handles of one storage
share a holder, which has the bytes on the device, on the host, or both. All device memory is
allocated on the compute stream, so that the allocator may reuse it in program order; copies run on
streams of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch

from neap.torch._calls import View
from neap.torch._clock import Clock, aside
from neap.torch._due import Due, asked, due
from neap.torch._enforce import Growth, reserved_now
from neap.torch._grown import Larger
from neap.torch._guard import ALONE, Guard, each, entry, meant
from neap.torch._holder import Counts, Handle, Holder, fault, fills, flat, kept, moved, seen_as
from neap.torch._lane import Lane
from neap.torch._loans import Borrowed, Loans
from neap.torch._meter import Meter, noted, noting
from neap.torch._pages import Pages
from neap.torch._pinned import HostPool, host_memory
from neap.torch._policy import Policy
from neap.torch._recompute import Recompute
from neap.torch._remake import Made, Remakes
from neap.torch._schedule import Schedule
from neap.torch._spill import is_small
from neap.torch._storage import PLAIN, blocks
from neap.torch._tensors import bytes_of_elements
from neap.torch._timeline import Timeline
from neap.torch._turns import Turns
from neap.torch._versions import changed
from neap.torch._wanted import Wanted, bytes_of, differs, longer, wants, whole

LARGER = "it is larger than the plan's"
"""What an iteration by the plan is that has a tensor which is larger than planned."""
SHORTER = "it ends before the plan's"
"""What an iteration by the plan is that saves the same, but fewer tensors."""
SERVED = (LARGER, SHORTER)
"""What iterations are that run by the plan though they are not as planned."""
FITS = "it fits without the plan"
"""Why a small iteration does not run by a plan for tensors of varying sizes."""

_STRIDED = torch.strided
_PLAIN = frozenset(PLAIN)
_owners = torch._C._storage_Use_Count


class Runtime:
    """Swaps saved activations by a schedule. One for each model and optimizer.

    Args:
        device: the type of the device that the model is on.
        find: the module of a path, for calls that run again.
        parameters: the parameters by name, for those that leave.
    """

    def __init__(
        self,
        device: str,
        find: Callable[[str], torch.nn.Module | None] = lambda path: None,
        parameters: Callable[[], dict[str, torch.Tensor]] = dict,
    ) -> None:
        self.device = device
        self.guard: Guard = ALONE
        self.counts = Counts()
        self.recompute = Recompute(self, find)
        self.loans = Loans(device, parameters, self.counts)
        self.pages = Pages(self.counts, parameters)
        self.remakes = Remakes(self.unpack, self.value, self.loans.ensure)
        self._backwards = 0
        self._at_backward: list[Due | None] = []
        """What is yet to be done in this iteration when backward begins."""
        self.turns: Turns | None = None
        """What moves states around updates inside backward."""
        self._varies = False
        """Whether the plan is for tensors of varying sizes."""
        self._fits = (-1, 0)
        """The place of the saved tensor that shows that an iteration fits without the plan, and the
        most bytes that it has then.
        """
        self.policy = Policy(device, self.counts)
        """What sends saved tensors to the host in an iteration that is not as planned."""
        self.timeline: Timeline | None = None
        self.meter: Meter | None = None
        self.clock: Clock | None = None
        """What takes the times of the next iteration, if anything does."""
        self.schedule: Schedule | None = None
        self.diverged: str | None = None
        self.grown = False
        """Whether a tensor of this iteration is larger than planned: then what the plan keeps may
        leave on demand.
        """
        self.differs: Callable[[], None] = lambda: None
        """Called when an iteration turns out not to be as planned."""
        self.saves = self.differs
        """Called after the first saved tensor of an iteration by a plan."""
        self.growth: Growth | None = None
        """What looks at each point how much the allocator reserves, while that matters."""
        self.count = 0
        self.saved_bytes = 0
        """The bytes of the tensors that autograd saved in this iteration."""
        self._before = [0]
        """The same before each tensor that the schedule expects, and after the last."""
        self._holders: list[weakref.ref[Holder] | None] = []
        # Weak: a holder lives as long as autograd's handles, and its bytes no longer.
        self._by_storage: dict[int, weakref.ref[Holder]] = {}
        self._all: list[Wanted] = []
        self._wanted: list[Wanted] = []
        """What the schedule expects; nothing in an iteration that is not as planned."""
        self._packs: list[Due | None] = [None]
        self._unpacks: list[Due | None] = [None]
        """What is yet to be done in this iteration when each tensor is saved, and when needed; the
        last entry, number -1, is for tensors without a number.
        """
        self._points: tuple[list[Due | None], list[Due | None]] = ([None], [None])
        """Both as they are when an iteration begins."""
        self._waiting: dict[int, list[str]] = {}
        self._slots: list[torch.Tensor] = []
        self._whole: list[torch.Tensor | None] = []
        """The same bytes as tensors like the first that is saved of each activation."""
        self._sizes: list[int] = []
        self._guests: list[weakref.ref[Holder] | None] = []
        self.larger = Larger()
        """The sizes of iterations that were larger since the plan acts."""
        self._views: dict[int, View] = {}
        """What this iteration saved since it was seen to be larger, by place."""
        self._more: HostPool | None = None
        """Memory of the host for what is larger than its slot."""
        self._out: Lane | None = None
        self._in: Lane | None = None

    # -- iterations

    def follow(self, schedule: Schedule | None) -> None:
        """From the next iteration on does what ``schedule`` says; nothing if it is ``None``.

        Raises:
            RuntimeError: if there is not enough pinned memory.
        """
        self.schedule = schedule
        self._varies = schedule is not None and schedule.varies
        self._fits = (-1, 0) if schedule is None or schedule.fits is None else schedule.fits
        self._slots, self._whole, self.larger = [], [], Larger()
        if self.device == "cuda" and self._out is None:
            self._out, self._in = Lane(), Lane()
        for lane in (self._out, self._in):
            if lane is not None and schedule is not None:
                lane.ends = [torch.cuda.Event() for _ in schedule.sizes]
        if schedule is not None and schedule.sizes:
            total = sum(blocks(size) for size in schedule.sizes)
            pool = host_memory(total, self.device == "cuda")
            start = 0
            for size in schedule.sizes:
                self._slots.append(pool[start : start + size])
                start += blocks(size)
            self._sizes = schedule.sizes
            self._whole = whole(schedule, self._slots)
        self._guests = [None] * len(self._slots)
        self._all = [] if schedule is None else self._wants(schedule)
        self._points = ([None], [None])
        self._before = [0]
        if schedule is not None:
            sizes = (bytes_of(view) for view, _ in schedule.expected)
            self._before = [0, *accumulate(sizes)]
            self._points = due(schedule.at("pack")), asked(schedule)
        self.pages.follow(schedule)
        self.loans.device = self.device
        self.loans.relieve = self.differs
        self.loans.follow([] if schedule is None else schedule.lent)
        self.recompute.follow(schedule)
        self.remakes.follow([] if schedule is None else schedule.remade)
        self.begin()

    def begin(self) -> None:
        """An iteration begins."""
        if self._in is not None:
            self._in.settle()
        self.count = self.saved_bytes = 0
        self.diverged, self.grown, self._views = None, False, {}
        self.policy.begin_iteration()
        self.recompute.begin()
        self._backwards = 0
        self.loans.begin()
        self.loans.resolve()
        self._waiting = {}
        self._by_storage = {}
        self.remakes.begin()
        self.pages.begin()
        if self.turns is not None:
            self.turns.acting = True
        schedule = self.schedule
        self._wanted = self._all
        if schedule is not None:
            self._holders = [None] * len(schedule.sizes)
            packs, unpacks = self._points
            self._packs, self._unpacks = packs.copy(), unpacks.copy()
            self._at_backward = due([schedule.actions.get(("backward", 0))])
            if self.growth is not None or self.clock is not None:  # All points are looked at.
                self._packs = [actions or Due([]) for actions in packs]
                self._unpacks = [actions or Due([]) for actions in unpacks]
                self._wanted = [(*one[:-1], True) for one in self._all]
            self._at("begin")
            if self.clock is not None:
                self.clock.start()

    def _wants(self, schedule: Schedule) -> list[Wanted]:
        keeps: dict[int, Any] = {}
        first: set[int] = set()
        for n, a in enumerate(schedule.owner):
            if a is not None:
                alike = a not in first and self._whole[a] is not None
                keeps[n] = (self._hold_all if alike else self._hold), a
                first.add(a)
        keeps.update((n, (self._lend, parcel)) for n, (parcel, _) in schedule.borrowed.items())
        for number, one in enumerate(schedule.remade):
            keeps.update(dict.fromkeys(one.packs, (self._remake, number)))
        return wants(schedule, keeps)

    def reached(self, kind: str, number: int = 0) -> None:
        """Backward, the optimizer's step, or a piece of that step begins."""
        clock, self.clock = self.clock, None
        if clock is None:
            self._reached(kind, number)
            return
        clock.comes("" if number else kind)
        try:
            self._reached(kind, number)
        finally:
            self.clock = clock
            clock.goes_on()

    def _reached(self, kind: str, number: int) -> None:
        self.policy.look()
        if self.diverged is not None:
            return
        if kind == "backward" and self.schedule is not None and self.schedule.lent:
            self._backwards += 1
            if self._backwards == 1 and self.count == self.schedule.packed:
                self.loans.enter()
                self.act(self._at_backward, 0)
        if self.pages.acts or self.growth is not None:
            self._at(kind, number)

    def give_parameters_back(self) -> None:
        """Backward has ended: no parameter is away any more."""
        with aside():
            self.loans.leave()

    def _at(self, kind: str, number: int = 0) -> None:
        if self.growth is not None:
            self.growth.look(kind, number)
        if self.pages.at((kind, number), self._present):
            self._gave_back()

    def _present(self) -> list[Holder]:
        """What is held now."""
        found = (None if reference is None else reference() for reference in self._holders)
        return [holder for holder in found if holder is not None]

    def _gave_back(self) -> None:
        """Memory was given back, and holders may have another storage."""
        moved(self._present(), self._by_storage)
        if self.growth is not None:
            self.growth.reserved = reserved_now()

    def end(self) -> str | None:
        """An iteration ends: nothing, or what made it differ from the one that was planned."""
        if self.clock is not None:
            self.clock.stop()
        if self.growth is not None:
            self.growth.look("end", 0)
        if self.grown and self.diverged is None:
            self.larger.ended(self._views, self.saved_bytes)
        if self.schedule is not None and self.diverged is None:
            expected = len(self.schedule.expected)
            if 0 < self.count < expected and self.schedule.shorter:
                self.saved_bytes = self.saved_bytes if self._varies else self._before[self.count]
                return LARGER if self.grown else SHORTER
            if self.count < expected:
                self.diverge(f"{self.count} saved tensors instead of {expected}")
            elif not self._varies:
                self.saved_bytes = self._before[-1]
        return self.diverged or (LARGER if self.grown else None)

    @property
    def saves_more(self) -> bool:
        """Whether autograd saved more in this iteration than in the planned one."""
        return self.saved_bytes > self._before[-1]

    # -- hooks

    def counted(self, tensor: torch.Tensor) -> int:
        """The number of a saved tensor; notes the first that is not as planned."""
        number = self.count
        self.count = number + 1
        schedule = self.schedule
        if schedule is not None and self.diverged is None:
            why = differs(schedule.expected, number, tensor, schedule.varies)
            if why is None and number == self._fits[0] and tensor.nbytes <= self._fits[1]:
                why = FITS
                self.policy.expects_nothing()
            if why is not None:
                self.diverge(why, number)
            elif schedule.varies:
                self._saves_more(number, tensor)
                if self.grown:
                    self._views[number] = seen_as(tensor)
        if self._varies or self.diverged is not None:
            self.saved_bytes += bytes_of_elements(tensor)
        return number

    def diverge(self, why: str, known: int | None = None) -> None:
        """The rest of the iteration runs with everything kept. The first ``known`` saved tensors
        were as expected, or all until now.
        """
        if self.diverged is None:
            self.diverged = why
            if not self._varies:
                known = self.count if known is None else known
                self.saved_bytes = self._before[min(known, len(self._before) - 1)]
            self._rest()
            self.differs()

    def stop(self) -> None:
        """Nothing more is moved."""
        self.schedule = self._more = None
        self.policy.stop()
        self._all = []
        self._rest()
        self.loans.stop()
        self.recompute.stop()

    def give_up(self) -> list[str]:
        """After a failure: nothing is moved any more, and parameters are back. What autograd holds
        comes when it is asked for. Gives what failed again.
        """
        self.schedule, self._all, self.growth = None, [], None
        self.policy.stop()
        return each([self._rest, self.recompute.stop, self.loans.give_up])

    def _rest(self) -> None:
        """Nothing is due any more in this iteration."""
        if self.turns is not None:
            self.turns.acting = False
        self._wanted, self._packs, self._unpacks, self._waiting = [], [None], [None], {}

    @entry(lambda self, tensor: kept(tensor))
    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves.

        The comparison of :func:`differs` is written out here: it runs hundreds of times an
        iteration.
        """
        if self.recompute.entering is not None:
            owner = self.recompute.entering.owner(tensor)
            return kept(tensor) if owner is None else self._hold(-1, owner, tensor)
        number = self.count
        self.count = number + 1
        wanted = self._wanted
        if number >= len(wanted):
            return self._unexpected(number, tensor)
        dtype, shape, stride, names, keep, one, acts = wanted[number]
        function = tensor.grad_fn
        if not (
            type(tensor) in _PLAIN
            and tensor.shape == shape
            and tensor.dtype is dtype
            and tensor.layout is _STRIDED
            and tensor.stride() == stride
            and ("" if function is None else function.name()) in names
        ):
            schedule = self.schedule
            assert schedule is not None
            why = differs(schedule.expected, number, tensor, schedule.varies)
            if why is not None:
                self.diverge(why, number)
                return self._spilled(tensor)
            self._saves_more(number, tensor)
            if keep == self._hold_all:
                keep = self._hold
        if number == self._fits[0] and tensor.nbytes <= self._fits[1]:
            self.diverge(FITS, number)
            self.policy.expects_nothing()
            return self._spilled(tensor)
        if keep is not None:
            packed: Any = keep(number, one, tensor)
        elif self.grown and (held := self.policy.pack(tensor, number)) is not None:
            packed = held
        elif function is None:  # No function of autograd's can be reached from it.
            packed = (tensor, number, tensor._version)
        else:
            # A tensor that keeps itself would never be freed.
            packed = (tensor.detach(), number, tensor._version)
        if self._varies and self.diverged is None:
            self.saved_bytes += bytes_of_elements(tensor)
            self.policy.passes(tensor)
            if self.grown:
                self._views[number] = seen_as(tensor)
        if self.pages.moves:
            self.pages.saved(tensor, packed)
        if acts or self._waiting:
            self.act(self._packs, number)
            if number == 0:
                self.saves()
        return packed

    def _unexpected(self, number: int, tensor: torch.Tensor) -> Any:
        """A tensor is saved in an iteration without a plan, or after all that were expected."""
        if self.schedule is not None and self.diverged is None:
            expected = len(self.schedule.expected)
            self.diverge(longer(expected), expected)
        return self._spilled(tensor)

    def _spilled(self, tensor: torch.Tensor) -> Any:
        """A tensor is kept, on the host where that is asked for."""
        self.saved_bytes += bytes_of_elements(tensor)
        packed = self.policy.pack(tensor)
        return kept(tensor) if packed is None else packed

    @entry(lambda self, packed: self.plainly(packed))
    def unpack(self, packed: Any) -> torch.Tensor:
        """Called by autograd when backward needs a saved tensor."""
        tensor = self._unpacked(packed)
        if self._varies and self.diverged is None:
            self.policy.passes(tensor)
        return tensor

    def _unpacked(self, packed: Any) -> torch.Tensor:
        if type(packed) is tuple:
            tensor: torch.Tensor = packed[0]
            if tensor._version != packed[2]:
                raise meant(RuntimeError(changed(tensor, packed[2], list(tensor.shape))))
            number = packed[1]
            unpacks = self._unpacks
            if (
                self._waiting
                or self.loans.due
                or (number < len(unpacks) and unpacks[number] is not None)
            ):
                self.act(unpacks, number)
            return tensor
        if type(packed) is Borrowed or type(packed) is Made:
            self.act(self._unpacks, packed.place)
            return self.value(packed)
        saved: Holder | Handle = packed
        seen = saved.seen
        if seen is not None and seen._version != saved.version:
            raise fault(saved)
        place, unpacks = saved.place, self._unpacks
        if self._waiting or self.loans.due or (place < len(unpacks) and unpacks[place] is not None):
            self.act(unpacks, place)
        return self._held(saved)

    def _held(self, saved: Holder | Handle) -> torch.Tensor:
        holder = saved if isinstance(saved, Holder) else saved.holder
        if holder.number < 0:
            self.policy.wanted(holder)
        here = holder.here
        if here is None:
            here = self._late(holder)
        if holder.coming and self._in is not None:
            with aside():
                self._in.arrived(holder.number)
            holder.coming = False
        view = saved.view
        if view is None:
            return here
        # Needs no gradient, so that autograd does not see it.
        dtype, shape, stride, offset = view
        bare = torch.empty(0, dtype=dtype, device=here.device)
        return bare.set_(here.untyped_storage(), offset, shape, stride)

    def value(self, packed: Any) -> torch.Tensor:
        """The tensor that :meth:`pack` gave this for; what is due when it is needed is not done.

        Raises:
            RuntimeError: if it was changed in place.
        """
        if type(packed) is tuple:
            tensor: torch.Tensor = packed[0]
            if tensor._version != packed[2]:
                raise meant(RuntimeError(changed(tensor, packed[2], list(tensor.shape))))
            return tensor
        saved: Holder | Handle | Borrowed | Made = packed
        if saved.seen is not None and saved.seen._version != saved.version:
            raise fault(saved)
        if isinstance(saved, Borrowed):
            with aside():
                return self.loans.unpack(saved)
        return self.remakes.unpack(saved) if isinstance(saved, Made) else self._held(saved)

    def plainly(self, packed: Any) -> torch.Tensor:
        """The same once nothing acts any more: each copy is waited for."""
        if isinstance(packed, (Holder, Handle)):
            packed.fetch()
        elif isinstance(packed, Borrowed):
            self.loans.restore(packed.lent)
        return self.value(packed)

    def _lend(self, place: int, parcel: int, tensor: torch.Tensor) -> Any:
        return self.loans.pack(place, parcel, tensor) or kept(tensor, place)

    def _remake(self, place: int, number: int, tensor: torch.Tensor) -> Any:
        made = self.remakes.pack(place, number, tensor, self._varies)
        if made is None:
            schedule = self.schedule
            assert schedule is not None
            one = schedule.remade[number]
            self.diverge(f"saved tensor {place} can't be made again by {one.node}", place)
            self.saved_bytes += bytes_of_elements(tensor)
            return kept(tensor, place)
        return made

    def _hold_all(self, place: int, number: int, tensor: torch.Tensor) -> Any:
        """Holds a tensor that is known to look like its place in the pinned pool."""
        base = tensor.untyped_storage()
        known = self._by_storage.get(base._cdata)
        if (
            base.nbytes() != self._sizes[number]
            or (known is not None and known() is not None)
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_cuda is not (self.device == "cuda")
        ):
            return self._hold(place, number, tensor)
        holder = Holder(place, number, tensor, base, self._whole[number])
        self._by_storage[holder.key] = self._holders[number] = weakref.ref(holder)
        return holder

    def _hold(self, place: int, number: int, tensor: torch.Tensor) -> Any:
        if tensor.is_conj() or tensor.is_neg() or tensor.is_cuda is not (self.device == "cuda"):
            return kept(tensor, place)
        base = tensor.untyped_storage()
        known = self._by_storage.get(base._cdata)
        holder = None if known is None else known()
        if holder is not None:
            return Handle(place, holder, tensor)
        if self._varies and base.nbytes() > self._sizes[number]:
            self._grows(base.nbytes(), self._sizes[number])
        slot = self._whole[number]
        if slot is not None and not fills(tensor, slot):
            slot = None
        holder = Holder(place, number, tensor, base, slot)
        self._by_storage[holder.key] = self._holders[number] = weakref.ref(holder)
        return holder

    def _saves_more(self, number: int, tensor: torch.Tensor) -> None:
        """Looks whether a saved tensor is larger than planned."""
        assert self.schedule is not None
        size, known = bytes_of_elements(tensor), bytes_of(self.schedule.expected[number][0])
        if size > known and not is_small(size):
            self._grows(size, known)

    def _grows(self, size: int, known: int) -> None:
        """Of ``size`` bytes is what had ``known`` in the iteration that was planned: from here on
        what the plan keeps may leave too.
        """
        if not self.grown:
            self.grown = True
            self.differs()
        before = self._before[min(self.count, len(self._before) - 1)]
        self.policy.expects_more(self.saved_bytes + size, max(before, known))

    def stays(self, number: int, tensor: torch.Tensor) -> Any:
        """What a call that runs again keeps of a parameter or buffer that it saved."""
        schedule = self.schedule
        one = None if schedule is None else schedule.borrowed.get(number)
        packed = None if one is None else self.loans.pack(number, one[0], tensor)
        return tensor.detach() if packed is None else packed

    @entry(lambda self, stays: self.plainly(stays) if type(stays) is Borrowed else stays)
    def unpack_of(self, stays: Any) -> torch.Tensor:
        """The tensor that :meth:`stays` kept."""
        return self.loans.unpack(stays) if type(stays) is Borrowed else stays

    # -- actions

    def packed(self, number: int) -> None:
        """A call that runs again has saved a tensor."""
        self.act(self._packs, number)
        if number == 0 and self.diverged is None:
            self.saves()

    def unpacked(self, number: int) -> None:
        """Backward needs a tensor that a call that runs again has saved."""
        self.act(self._unpacks, number)

    def act(self, points: list[Due | None], number: int) -> None:
        """Does what is due at a point."""
        clock, self.clock = self.clock, None
        if clock is None:
            self._act(points, number)
            return
        what = "pack" if points is self._packs else "unpack" if points is self._unpacks else ""
        clock.comes(what, number)
        try:
            self._act(points, number)
        finally:
            self.clock = clock
            clock.goes_on()

    def _act(self, points: list[Due | None], number: int) -> None:
        waiting = self._waiting
        todo = points[number] if number < len(points) else None
        if todo is None:
            if waiting:
                self._try_again()
            if self.loans.due:
                self.loans.give(())
            return
        points[number] = todo.then
        if self.growth is not None and points is not self._at_backward:
            self.growth.look("pack" if points is self._packs else "unpack", number)
        holders = self._holders
        coming: list[Holder] = []
        for one in todo.back:
            if waiting.pop(one, None) is not None:
                self.counts.kept += 1
            reference = holders[one]
            holder = None if reference is None else reference()
            if holder is not None and holder.here is None and holder.host is not None:
                coming.append(holder)
        for what, one in todo.away:
            if one in waiting:
                waiting[one].append(what)
            elif holders[one] is not None:
                waiting[one] = [what]
        # What goes makes room for what comes.
        if waiting:
            self._try_again()
        if todo.lent or self.loans.due:
            self.loans.give(todo.lent)
        if todo.turns and self.turns is not None:
            self.turns.act(todo.turns)
        if todo.trim and self.pages.keep(todo.trim, self._present):
            self._gave_back()
        if coming:
            self._bring(coming)
        if todo.lent:
            self.loans.take(todo.lent)

    def _try_again(self) -> None:
        """Copies and drops what is due, as soon as nothing else holds it any more."""
        over = []
        leaving = []
        waiting, holders = self._waiting, self._holders
        for one, stages in waiting.items():
            reference = holders[one]
            holder = None if reference is None else reference()
            if holder is None or (holder.base is None and not self._renewed(holder, stages[0])):
                over.append(one)
                continue
            # Two of its owners are `base` and `here`.
            if _owners(holder.key) > 2:
                continue
            if stages[0] == "out":
                if self._may_leave(one, holder):
                    leaving.append(holder)
            else:
                self._drop(holder)
            del stages[0]
            if not stages:
                over.append(one)
        for one in over:
            del waiting[one]
        if leaving:
            self._send(leaving)
            # What is to be dropped, too, was to be copied before.
            if any(holder.number in waiting for holder in leaving):
                self._try_again()

    def _renewed(self, holder: Holder, stage: str) -> bool:
        """Whether what came back for one run of backward may leave until the next."""
        if holder.here is None or stage != "out":
            return False
        if holder.coming and self._in is not None:
            self._in.arrived(holder.number)
        holder.renew()
        return True

    def _may_leave(self, one: int, holder: Holder) -> bool:
        if holder.host is not None or holder.base is None:
            return False
        other = holder.slot is None and holder.base.nbytes() != self._sizes[one]
        if other and not self._varies:
            return False
        reference = self._guests[one]
        guest = None if reference is None else reference()
        # An older graph may still be alive and need the slot.
        return guest is None or guest is holder or guest.here is not None

    def _send(self, leaving: list[Holder]) -> None:
        """Asks for copies to the host."""
        lane = self._out
        counts, guests, notes = self.counts, self._guests, noting(self.timeline, self.meter)
        with lane or nullcontext():
            for holder in leaving:
                one, host, seen = holder.number, holder.slot, holder.seen
                if host is None:
                    assert holder.base is not None
                    host, seen = self._host_for(holder, holder.base.nbytes()), flat(holder.base)
                if host is None:  # The host has no room.
                    continue
                assert seen is not None
                noted(notes, host, seen, ("to host", f"activation {one}"))
                holder.host = host
                if lane is not None:
                    lane.ended(one)
                    holder.left = True
                guests[one] = self._holders[one]
                counts.swapped_out += 1
                counts.bytes_out += host.nbytes

    def _host_for(self, holder: Holder, size: int) -> torch.Tensor | None:
        """The activation's slot, or memory of this size where that is too small."""
        slot = self._slots[holder.number]
        if size <= slot.nbytes:
            return slot[:size]
        if self._more is None:
            self._more = HostPool(self.device == "cuda")
        return self._more.lend(holder, size)

    def _drop(self, holder: Holder) -> None:
        base, seen = holder.base, holder.seen
        if holder.host is None or base is None or seen is None:
            return
        if seen._version != holder.version:
            return  # It has changed: an error says so when backward needs it.
        if holder.left and self._out is not None:
            self._out.wait(holder.number)
        # Nothing else holds it, so that its address may soon be another's.
        self._by_storage.pop(holder.key, None)
        del base, seen
        self.counts.deaths += holder.drop()

    def _bring(self, coming: list[Holder]) -> None:
        """Asks for copies of what is on the host to the device."""
        room: list[torch.Tensor] = []
        for holder in coming:
            host = holder.host
            assert host is not None
            # On the compute stream: a side stream would have memory of its own.
            room.append(torch.empty_like(host, device=holder.device))
        lane, counts, notes = self._in, self.counts, noting(self.timeline, self.meter)
        # The compute stream waited for the copy to the host before the bytes were dropped.
        with lane or nullcontext():
            for holder, here in zip(coming, room):
                one, host = holder.number, holder.host
                assert host is not None
                noted(notes, here, host, ("to device", f"activation {one}"))
                holder.here = here
                holder.key = here.untyped_storage()._cdata
                self._by_storage[holder.key] = weakref.ref(holder)
                if lane is not None:
                    holder.coming = True
                    lane.comes(one, here)
                counts.swapped_in += 1
                counts.bytes_in += host.nbytes

    def _late(self, holder: Holder) -> torch.Tensor:
        """Nothing has asked for the copy to the device yet."""
        self.counts.late += 1
        with aside():
            self._bring([holder])
        assert holder.here is not None
        return holder.here
