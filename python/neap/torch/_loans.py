"""Parameters that leave the device while backward does not use them.

From the moment at which the script calls backward until that call returns, no code of the script's
own runs but hooks. Within it a parameter may be away: its tensor then shows a single NaN instead of
its elements, and its bytes are in pinned host memory. It comes back before backward uses it, and
all are back when backward returns or raises. What else holds the same storage keeps it on the
device: then nothing is freed, and nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from neap.torch._calls import View
from neap.torch._holder import Counts, seen_as
from neap.torch._lane import Lane
from neap.torch._recorder import PLAIN
from neap.torch._storage import blocks
from neap.torch._versions import witness

COPY, LEND, FETCH, HOME = "copy", "lend", "fetch", "home"
ACTIONS = frozenset((COPY, LEND, FETCH, HOME))
"""What may be done with a parameter at a point: ask for its copy to the host, free its bytes, ask
for its copy to the device, and give the parameter its bytes back.
"""


def lendable(parameter: torch.Tensor) -> bool:
    """Whether a parameter may leave: it is all of its storage, in the order of its elements."""
    return (
        type(parameter) in PLAIN
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
        and parameter.storage_offset() == 0
        and parameter.untyped_storage().nbytes() == parameter.nbytes
    )


class Lent:
    """A parameter in one iteration.

    Attributes:
        base: its storage, while it is on the device.
        here: its bytes while they come back.
        away: whether the parameter shows its stand-in.
        copied: whether the copy to the host was asked for in this iteration.
    """

    __slots__ = ("away", "base", "copied", "here", "number", "parameter")

    def __init__(self, number: int, parameter: torch.Tensor) -> None:
        self.number = number
        self.parameter = parameter
        self.base: torch.UntypedStorage | None = parameter.untyped_storage()
        self.here: torch.Tensor | None = None
        self.away = False
        self.copied = False


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
        self._wanted: list[tuple[str, int]] = []
        self._slots: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor | None] | None = None
        self._lent: dict[int, Lent] = {}
        self._blank: dict[int, torch.Tensor] = {}
        """For each parameter what it shows while it is away."""
        self.due: list[int] = []
        """Parameters that must leave, but something held their storage."""
        self._within = False
        self._out: Lane | None = None
        self._in: Lane | None = None

    def follow(self, wanted: Sequence[tuple[str, int]]) -> None:
        """From the next iteration on these parameters, by name and bytes, may leave.

        Raises:
            RuntimeError: if there is not enough pinned memory.
        """
        self._wanted, self._parameters = list(wanted), None
        self._slots, self._blank = [], {}
        if not wanted:
            return
        on_device = self.device == "cuda"
        if on_device and self._out is None:
            self._out, self._in = Lane(), Lane()
        for lane in (self._out, self._in):
            if lane is not None:
                lane.ends = [torch.cuda.Event() for _ in wanted]
        total = sum(blocks(size) for _, size in wanted)
        pool = torch.empty(total, dtype=torch.uint8, pin_memory=on_device)
        start = 0
        for _, size in wanted:
            self._slots.append(pool[start : start + size])
            start += blocks(size)

    @property
    def active(self) -> bool:
        """Whether any parameter may leave."""
        return bool(self._wanted)

    def begin(self) -> None:
        """An iteration begins."""
        self._lent = {}

    def _parameter(self, number: int) -> torch.Tensor | None:
        if self._parameters is None:
            named = self._find()
            self._parameters = [
                p if p is not None and lendable(p) and p.nbytes == size else None
                for p, size in ((named.get(name), size) for name, size in self._wanted)
            ]
        return self._parameters[number]

    def _known(self, number: int) -> Lent | None:
        lent = self._lent.get(number)
        if lent is None:
            parameter = self._parameter(number)
            if parameter is not None:
                lent = self._lent[number] = Lent(number, parameter)
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

    def ensure(self, module: torch.nn.Module) -> None:
        """A module is about to run again: its parameters must be here."""
        if not self._within:
            return
        known = {id(lent.parameter): lent for lent in self._lent.values() if lent.away}
        for parameter in module.parameters() if known else ():
            lent = known.get(id(parameter))
            if lent is not None:
                self._home(lent)

    # -- one parameter

    def _copy_out(self, lent: Lent) -> None:
        if lent.copied or lent.base is None:
            return
        lent.copied = True
        source = _bytes_of(lent.base)
        slot, lane = self._slots[lent.number], self._out
        if lane is None:
            slot.copy_(source)
        else:
            with lane:
                slot.copy_(source, non_blocking=True)
                lane.ended(lent.number)
        self.counts.swapped_out += 1
        self.counts.bytes_out += slot.nbytes

    def _drop(self, lent: Lent) -> bool:
        """Whether the parameter has left; else something holds its storage."""
        parameter, base = lent.parameter, lent.base
        if base is None or not lent.copied:
            return True
        if parameter.untyped_storage()._cdata != base._cdata:
            return True  # The script has given the parameter another storage.
        # Its owners are the parameter and `base`.
        if torch._C._storage_Use_Count(base._cdata) > 2:
            return False
        if self._out is not None:
            self._out.wait(lent.number)
        weak = base._weak_ref()
        parameter.data = self._stand_in(lent)
        lent.away = True
        lent.base = base = None
        self.counts.deaths += bool(torch.UntypedStorage._expired(weak))
        torch.UntypedStorage._free_weak_ref(weak)
        return True

    def _stand_in(self, lent: Lent) -> torch.Tensor:
        parameter = lent.parameter
        blank = self._blank.get(lent.number)
        if blank is None:
            size = torch.full((1,), float("nan"), dtype=parameter.dtype, device=parameter.device)
            blank = self._blank[lent.number] = size.expand(parameter.shape)
        return blank

    def _fetch(self, lent: Lent) -> None:
        if lent.base is not None or lent.here is not None:
            return
        parameter = lent.parameter
        # On the compute stream: a side stream would have memory of its own.
        lent.here = torch.empty(
            parameter.shape, dtype=parameter.dtype, device=parameter.device, requires_grad=False
        )
        target = _bytes_of(lent.here.untyped_storage())
        slot, lane = self._slots[lent.number], self._in
        if lane is None:
            target.copy_(slot)
        else:
            with lane:
                target.copy_(slot, non_blocking=True)
                lane.ended(lent.number)
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
            lent.away = False
            blank = self._blank[lent.number]
            if lent.parameter.data_ptr() == blank.data_ptr():
                lent.parameter.data = here


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage)
