"""Parameters that leave the device while backward does not use them.

From the moment at which the script calls backward until that call returns, no code of the script's
own runs but hooks. Within it a parameter may be away: its tensor then shows a single NaN instead of
its elements, and its bytes are in pinned host memory. It comes back before backward uses it, and
all are back when backward returns or raises. What else holds the same storage keeps it on the
device: then nothing is freed, and nothing is wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._calls import View
from neap.torch._holder import Counts, flat, seen_as
from neap.torch._lane import Lane, copy
from neap.torch._pinned import host_memory
from neap.torch._storage import PLAIN, blocks
from neap.torch._versions import witness

COPY, LEND, FETCH, HOME = "copy", "lend", "fetch", "home"
Parcel = list[tuple[str, int]]
"""Parameters that leave and come back together, by name and bytes. Several of a parcel lie in one
storage: if each came back by itself, they would end between activations, and the allocator's free
memory in pieces.
"""
ACTIONS = frozenset((COPY, LEND, FETCH, HOME))
"""What may be done with a parcel at a point: ask for its copy to the host, free its bytes, ask
for its copy to the device, and give the parameter its bytes back.
"""


def offsets(parcel: Parcel) -> list[int]:
    """Where each parameter of a parcel begins, in bytes."""
    return [0, *accumulate(blocks(size) for _, size in parcel)][:-1]


def size_of(parcel: Parcel) -> int:
    """The bytes of a parcel's storage: as they are for one parameter, in blocks for several."""
    return parcel[0][1] if len(parcel) == 1 else sum(blocks(size) for _, size in parcel)


def lendable(parameter: torch.Tensor) -> bool:
    """Whether a parameter may leave: it is all of its storage, in the order of its elements."""
    return (
        type(parameter) in PLAIN
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
        and parameter.storage_offset() == 0
        and parameter.untyped_storage().nbytes() == parameter.nbytes
    )


def leavable(
    parameters: dict[str, torch.Tensor], optimizers: Iterable[Optimizer]
) -> list[torch.Tensor]:
    """Those that may leave. With other processes, and in captured graphs, their addresses may be
    known elsewhere, so that none may.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if with_others() or any(group.get("capturable") for group in groups):
        return []
    return [parameter for parameter in parameters.values() if lendable(parameter)]


def with_others() -> bool:
    """Whether other processes train too: addresses may be known elsewhere."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class Lent:
    """The parameters of a parcel in one iteration.

    Attributes:
        base: their storage, while it is on the device.
        here: its bytes while they come back.
        away: whether the parameters show their stand-ins.
        copied: whether the copy to the host was asked for in this iteration.
        versions: those of the parameters when that was.
        host: where their bytes are on the host, once they have left.
    """

    __slots__ = ("away", "base", "copied", "here", "host", "number", "parameters", "versions")

    def __init__(self, number: int, parameters: list[torch.Tensor]) -> None:
        self.number = number
        self.parameters = parameters
        self.base: torch.UntypedStorage | None = parameters[0].untyped_storage()
        self.here: torch.Tensor | None = None
        self.away = False
        self.copied = False
        self.versions: list[int] = []
        self.host: torch.Tensor | None = None


class Borrowed:
    """What autograd keeps in place of a saved tensor of a parameter that may leave."""

    __slots__ = ("lent", "place", "seen", "version", "view")

    def __init__(self, place: int, lent: Lent, tensor: torch.Tensor) -> None:
        self.place = place
        self.lent = lent
        self.seen = witness(tensor)
        self.version = tensor._version
        self.view: View = seen_as(tensor)


class Loans:
    """Moves the parameters of a schedule.

    Args:
        device: the type of the device.
        find: the parameters of the script by name.
        counts: where copies are counted.
    """

    def __init__(
        self, device: str, find: Callable[[], dict[str, torch.Tensor]], counts: Counts
    ) -> None:
        self.device = device
        self.counts = counts
        self.relieve: Callable[[], None] = lambda: None
        """Called when a parameter finds no memory: the budget binds no more."""
        self._find = find
        self._parcels: list[Parcel] = []
        self._slots: list[torch.Tensor] = []
        self._parameters: list[list[torch.Tensor]] | None = None
        """The parameters of each parcel, none of one that stays, once their names are known."""
        self._lent: dict[int, Lent] = {}
        self._blank: dict[torch.Tensor, torch.Tensor] = {}
        """For each parameter what it shows while it is away."""
        self.due: list[int] = []
        """Parcels that must leave, but something held their storage."""
        self._within = False
        self._out: Lane | None = None
        self._in: Lane | None = None

    def follow(self, parcels: Sequence[Parcel]) -> None:
        """From the next iteration on these parameters may leave.

        Raises:
            RuntimeError: if there is not enough pinned memory.
        """
        self._unpack_parcels()
        self._parcels = list(parcels)
        self._slots, self._blank = [], {}
        if not parcels:
            return
        on_device = self.device == "cuda"
        if on_device and self._out is None:
            self._out, self._in = Lane(), Lane()
        for lane in (self._out, self._in):
            if lane is not None:
                lane.ends = [torch.cuda.Event() for _ in parcels]
        pool = host_memory(sum(map(size_of, parcels)), on_device)
        start = 0
        for parcel in parcels:
            self._slots.append(pool[start : start + size_of(parcel)])
            start += size_of(parcel)

    def resolve(self) -> None:
        """Finds the parameters by name, and puts those of a parcel next to each other in one
        storage.
        """
        if not self._parcels or self._parameters is not None:
            return
        named = self._find()
        if not any(name in named for parcel in self._parcels for name, _ in parcel):
            return  # The script has called no module yet.
        self._parameters = []
        for parcel in self._parcels:
            found = [named.get(name) for name, _ in parcel]
            usable = [
                p
                for p, (_, size) in zip(found, parcel)
                if p is not None and lendable(p) and p.nbytes == size
            ]
            whole = len(usable) == len(parcel) and len({p.device for p in usable}) == 1
            if len(usable) > 1:  # What the script holds of their memory would no longer be theirs.
                whole &= all(map(_alone, usable))
            self._parameters.append(usable if whole else [])
            if whole and len(usable) > 1:
                self._put_together(usable, parcel)

    def _put_together(self, parameters: list[torch.Tensor], parcel: Parcel) -> None:
        """Gives the parameters of a parcel one storage. They go by way of the host, so that no
        more memory is needed than they have.
        """
        device, hosts = parameters[0].device, []
        for parameter in parameters:
            hosts.append(parameter.detach().to("cpu", copy=True))
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=device)
        try:
            slab = torch.empty(size_of(parcel), dtype=torch.uint8, device=device).untyped_storage()
        except RuntimeError:  # Free memory lies in smaller pieces: they stay by themselves.
            slab = None
        for parameter, host, offset in zip(parameters, hosts, offsets(parcel)):
            if slab is None:
                parameter.data = host.to(device)
            else:
                parameter.data = _like(host, slab, offset)
                parameter.data.copy_(host)

    def _unpack_parcels(self) -> None:
        """Each parameter has a storage of its own again, unless the script holds its memory too."""
        self._lent = {}
        for parameters in self._parameters or []:
            if len({parameter.untyped_storage()._cdata for parameter in parameters}) != 1:
                continue
            base = parameters[0].untyped_storage()
            # Its owners are the parameters and `base`.
            if torch._C._storage_Use_Count(base._cdata) > len(parameters) + 1:
                continue
            for parameter in parameters if len(parameters) > 1 else ():
                parameter.data = parameter.data.clone()
        self._parameters = None

    def stop(self) -> None:
        """Nothing leaves any more."""
        self.leave()
        self.follow(())

    def begin(self) -> None:
        """An iteration begins."""
        self._lent = {}

    def _known(self, number: int) -> Lent | None:
        lent = self._lent.get(number)
        if lent is None and self._parameters is not None and self._parameters[number]:
            parameters = self._parameters[number]
            storages = {p.untyped_storage()._cdata for p in parameters}
            size = parameters[0].untyped_storage().nbytes()
            # Else the script has given one another storage.
            if len(storages) == 1 and size == self._slots[number].nbytes:
                lent = self._lent[number] = Lent(number, parameters)
        return lent

    # -- saved tensors

    def pack(self, place: int, number: int, tensor: torch.Tensor) -> Borrowed | None:
        """What autograd keeps of a saved tensor of this parameter; nothing if it is of another
        storage.
        """
        lent = self._known(number)
        base = None if lent is None else lent.base
        if lent is None or base is None or tensor.untyped_storage()._cdata != base._cdata:
            return None
        return None if tensor.is_conj() or tensor.is_neg() else Borrowed(place, lent, tensor)

    def unpack(self, saved: Borrowed) -> torch.Tensor:
        """The saved tensor, on the device."""
        lent = saved.lent
        if lent.base is None:
            if lent.here is None:
                self.counts.late += 1
            self._home(lent)
        dtype, shape, stride, offset = saved.view
        assert lent.base is not None
        return torch.empty(0, dtype=dtype, device=lent.base.device).set_(
            lent.base, offset, shape, stride
        )

    # -- a backward

    def enter(self) -> None:
        """Backward begins, in an iteration that is as planned."""
        self._within = True

    def leave(self) -> None:
        """Backward has ended, perhaps by an exception: all parameters are back from now on."""
        self._within = False
        self.due = []
        for lent in self._lent.values():
            try:
                self._fetch(lent)
            except RuntimeError:  # No memory: a parameter that is away is worse than no budget.
                self.relieve()
                if self.device == "cuda":
                    torch.cuda.empty_cache()
                self._fetch(lent)
        for lent in self._lent.values():
            self._home(lent)

    def give(self, actions: Iterable[tuple[str, int]]) -> None:
        """Those of the actions that make room."""
        for what, number in actions:
            lent = self._known(number) if what == COPY else self._lent.get(number)
            if lent is None:
                continue
            if what == COPY:
                self._copy_out(lent)
            elif what == LEND and self._within and lent.base is not None:
                self.due.append(number)
        if self.due:
            self.due = [n for n in self.due if not self._drop(self._lent[n])]

    def take(self, actions: Iterable[tuple[str, int]]) -> None:
        """Those of the actions that need room."""
        for what, number in actions:
            lent = self._lent.get(number)
            if lent is None or what not in (FETCH, HOME):
                continue
            if number in self.due:
                self.due.remove(number)
                self.counts.kept += 1
            self._fetch(lent)
            if what == HOME:
                self._home(lent)

    def ensure(self, parameters: Iterable[torch.Tensor]) -> None:
        """What reads these parameters is about to run again: they must be here."""
        if not self._within:
            return
        away = [lent for lent in self._lent.values() if lent.away]
        known = {id(p): lent for lent in away for p in lent.parameters}
        for parameter in parameters if known else ():
            lent = known.get(id(parameter))
            if lent is not None:
                self._home(lent)

    # -- one parcel

    def _copy_out(self, lent: Lent) -> None:
        if lent.copied or lent.base is None:
            return
        lent.copied = True
        lent.versions = [parameter._version for parameter in lent.parameters]
        slot = self._slots[lent.number]
        copy(self._out, [slot], [flat(lent.base)], lent.number)
        self.counts.swapped_out += 1
        self.counts.bytes_out += slot.nbytes

    def _drop(self, lent: Lent) -> bool:
        """Whether the parameters have left; else something holds their storage."""
        base = lent.base
        if base is None or not lent.copied:
            return True
        if any(p.untyped_storage()._cdata != base._cdata for p in lent.parameters):
            return True  # The script has given one another storage.
        if lent.versions != [parameter._version for parameter in lent.parameters]:
            return True  # A hook of the script's has written to one: the copy is stale.
        # Its owners are the parameters and `base`.
        if torch._C._storage_Use_Count(base._cdata) > len(lent.parameters) + 1:
            return False
        if self._out is not None:
            self._out.wait(lent.number)
        weak = base._weak_ref()
        lent.away, lent.host = True, self._slots[lent.number]
        for parameter in lent.parameters:
            parameter.data = self._stand_in(parameter)
        lent.base = base = None
        self.counts.deaths += bool(torch.UntypedStorage._expired(weak))
        torch.UntypedStorage._free_weak_ref(weak)
        return True

    def _stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        blank = self._blank.get(parameter)
        if blank is None:
            one = torch.full((1,), float("nan"), dtype=parameter.dtype, device=parameter.device)
            blank = self._blank[parameter] = one.expand(parameter.shape)
        return blank

    def _fetch(self, lent: Lent) -> None:
        if lent.base is not None or lent.here is not None:
            return
        slot = self._slots[lent.number]
        # On the compute stream: a side stream would have memory of its own.
        here = torch.empty(slot.nbytes, dtype=torch.uint8, device=lent.parameters[0].device)
        copy(self._in, [here], [slot], lent.number)
        lent.here = here
        self.counts.swapped_in += 1
        self.counts.bytes_in += slot.nbytes

    def _home(self, lent: Lent) -> None:
        self._fetch(lent)
        here, lent.here = lent.here, None
        if here is None:
            return
        if self._in is not None:
            self._in.wait(lent.number)
        lent.base = here.untyped_storage()
        if lent.away:
            self._put_back(lent, lent.base)

    def _put_back(self, lent: Lent, base: torch.UntypedStorage) -> None:
        """The parameters lie in this storage again, but for those that the script has moved."""
        for parameter, offset in zip(lent.parameters, offsets(self._parcels[lent.number])):
            blank = self._blank.get(parameter)
            if blank is not None and parameter.data_ptr() == blank.data_ptr():
                parameter.data = _like(parameter, base, offset)
        lent.away = False

    # -- after a failure

    def restore(self, lent: Lent) -> None:
        """A parcel that is away is back, by a copy that is waited for."""
        if lent.base is None and lent.host is not None:
            lent.base = lent.host.to(lent.parameters[0].device, copy=True).untyped_storage()
            lent.here = None
        if lent.away and lent.base is not None:
            self._put_back(lent, lent.base)

    def give_up(self) -> None:
        """All parameters are back, and none leaves any more."""
        self._within, self.due = False, []
        for lent in self._lent.values():
            self.restore(lent)
        self._parameters = None  # What lies in one storage may stay there.


def _alone(parameter: torch.Tensor) -> bool:
    """Whether nothing but the parameter holds its storage."""
    storage = parameter.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # The other one is `storage`.


def _strides(shape: Sequence[int]) -> list[int]:
    """Those of a contiguous tensor."""
    return [*accumulate(reversed(shape[1:]), operator.mul, initial=1)][::-1][: len(shape)]


def _like(parameter: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    """A contiguous tensor like `parameter` in another storage, `offset` bytes from its start."""
    bare = torch.empty(0, dtype=parameter.dtype, device=storage.device)
    return bare.set_(
        storage, offset // parameter.itemsize, parameter.shape, _strides(parameter.shape)
    )
