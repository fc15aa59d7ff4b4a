"""What is done when: a plan in the terms of PyTorch's hooks, and how it is made from a planner's
answer and kept in a file.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from neap.torch import _outside
from neap.torch._calls import View
from neap.torch._loans import ACTIONS, Parcel
from neap.torch._recipe import KINDS
from neap.torch._remake import Remake
from neap.torch._turns import ACTIONS as TURNS

FORMAT = "neap.torch.schedule"
VERSION = 1

Point = tuple[str, int]
Actions = list[tuple[str, int]]
Fits = tuple[int, int]
"""A saved tensor by its place in the iteration, and the most bytes that it has where that fits."""


class Needs(NamedTuple):
    """What an iteration without a plan needs besides the tensors that autograd saves, in bytes.

    Attributes:
        unseen: what it needs at most beyond what stood when autograd last saved a tensor that may
            leave, or asked for one.
        made: what it makes at most from one such moment to the next.
        beside: what stands all the time, optimizer states included.
    """

    unseen: int = 0
    made: int = 0
    beside: int = 0


UNKNOWN = Needs()
"""Where nothing was watched."""
PAGE = 20 << 20
"""The bytes by which PyTorch's allocator reserves more with expandable segments."""

_SLACK = 32
"""Beside a plan that does not meet its budget, this part of its peak may lie free, or a page."""

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading JSON raises whose values are not of the kind that is expected."""

MOST_ASKED = 16
"""Tensors that backward asks for more often stay from then on."""
_MOST_STEPS = 64
"""More steps are not taken for one iteration."""
_LARGEST = 1 << 50
"""More bytes are no iteration's."""

MOVES = ("out", "drop", "in")
"""The actions for an activation."""
TRIM = "trim"
"""The action at a point of :attr:`Schedule.trims`, with the bytes."""


@dataclass
class Again:
    """A call of a module that is run again in backward.

    Attributes:
        module: the module's path.
        number: which call of it in the iteration.
        first_pack, after_pack: its saved tensors, by place in the iteration.
        stays: those of them that parameters and buffers keep anyway.
        inputs: for each tensor among its arguments its view, and the number of the activation
            that it belongs to, if that is moved.
        nanoseconds: how long running it again takes, predicted.
        bytes: what it gives back meanwhile.
    """

    module: str
    number: int
    first_pack: int
    after_pack: int
    stays: list[int]
    inputs: list[tuple[View | None, int | None]]
    nanoseconds: int = 0
    bytes: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """The module's path and which call of it."""
        return self.module, self.number


@dataclass
class Schedule:
    """What is done when. Points are ``("pack", n)`` and ``("unpack", n)``: the n-th saved tensor.
    Where backward runs through the graph again, ``("unpack", n)`` counts on: of 10 tensors the one
    with number 3 is asked for at 3, and again at 13.

    Attributes:
        expected: for each saved tensor of an iteration its view and the function that made it.
        owner: the number of the activation that each saved tensor belongs to, if that is moved.
        sizes: bytes of each activation that is moved.
        actions: at each point what to do, in order: ``("out", a)`` copies an activation to the
            host, ``("drop", a)`` gives its bytes back, ``("in", a)`` brings it back.
        again: calls that are run again.
        remade: storages that operators make again from what they saved.
        away: names of the optimizer states that stay on the host between steps.
        ahead: whether their copies run beside the updates of other pieces.
        piece: the bytes of states that a piece of the step should have; nothing for the usual.
        early: whether updates run inside backward, each when its gradient is complete.
        soon: the parameters that are updated so.
        turns: for each parameter whose optimizer states are on the device around its early update
            only, the names of these states. Actions for them are those of
            :mod:`neap.torch._turns`.
        lent: the parcels of parameters that leave during backward. Actions for them are those of
            :mod:`neap.torch._loans`; ``("backward", 0)`` is a point for these too.
        borrowed: for saved tensors of such parameters the parcel, and which parameter of it.
        packed: how many tensors are saved before backward begins.
        workspace_bytes: what cuBLAS's workspaces take, as far as they were seen.
        trims: points at which the allocator gives memory back, each with the bytes that it may
            reserve until the next: only if it would then reserve more than :attr:`limit`. Besides
            the points above, ``("begin", 0)``, ``("backward", 0)`` and ``("step", 0)``, where
            these begin, ``("after", 0)``, where backward has ended, and ``("step", n)`` before the
            n-th piece of the step.
        moves: whether tensors of sparse pages are allocated anew there, which copies them twice.
        giving_back_ns: how long an iteration takes to give back memory and to reserve it again, as
            far as that was seen.
        excluded: why calls of modules can't be run again, with how many.
        varies: whether it serves iterations of the same kind on tensors of other sizes, as far as
            these have room in the pinned memory.
        fits: with ``varies``, a saved tensor by its place, and the most bytes that it has in an
            iteration that fits without the plan.
        shorter: whether it serves iterations that save the same and end earlier.
        steps: how many steps of the first optimizer make up an iteration.
        needs: what its like need that run without it.
        course: an iteration with the plan beside one without, as text for a page alone.
    """

    expected: list[tuple[View, str]]
    owner: list[int | None]
    sizes: list[int]
    actions: dict[Point, list[tuple[str, int]]]
    again: list[Again] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    ahead: bool = False
    piece: int | None = None
    early: bool = False
    peak_bytes: int = 0
    unplanned_peak_bytes: int = 0
    iteration_ns: int = 0
    unplanned_iteration_ns: int = 0
    budget_bytes: int = 0
    swap_bytes: int = 0
    met: bool = True
    excluded: dict[str, int] = field(default_factory=dict)
    trims: list[tuple[str, int, int]] = field(default_factory=list)
    moves: bool = False
    giving_back_ns: int = 0
    varies: bool = False
    fits: Fits | None = None
    shorter: bool = False
    steps: int = 1
    needs: Needs = UNKNOWN
    lent: list[Parcel] = field(default_factory=list)
    borrowed: dict[int, tuple[int, int]] = field(default_factory=dict)
    packed: int = 0
    workspace_bytes: int = 0
    remade: list[Remake] = field(default_factory=list)
    soon: list[str] = field(default_factory=list)
    turns: list[list[str]] = field(default_factory=list)
    course: str = ""

    @property
    def limit(self) -> int:
        """The bytes that the allocator is kept to: the budget, or a little more than a plan needs
        that does not meet it.
        """
        if self.peak_bytes <= self.budget_bytes:
            return self.budget_bytes
        return self.peak_bytes + max(self.peak_bytes // _SLACK, PAGE)

    @property
    def time_ns(self) -> int:
        """The predicted time of an iteration, with that of giving back free memory."""
        return self.iteration_ns + self.giving_back_ns

    def is_better_than(self, other: Schedule) -> bool:
        """Whether this plan is worth keeping though ``other`` leaves the allocator more: that takes
        more than a twentieth longer, or does not fit.
        """
        longest = self.time_ns + self.time_ns // 20
        return self.met and (not other.met or other.time_ns > longest)

    def does_as(self, other: Schedule) -> bool:
        """Whether both do the same, whatever time they were predicted to take."""
        return self._without_times() == other._without_times()

    def _without_times(self) -> Schedule:
        return replace(
            self,
            iteration_ns=0,
            giving_back_ns=0,
            unplanned_iteration_ns=0,
            workspace_bytes=0,
            again=[replace(one, nanoseconds=0) for one in self.again],
            remade=[replace(one, nanoseconds=0) for one in self.remade],
            course="",
        )

    def at(self, kind: str) -> list[Actions | None]:
        """For each saved tensor what to do at its point of this kind; the last entry, number -1,
        is for tensors without a number.
        """
        found: list[Actions | None] = [None] * (len(self.expected) + 1)
        for (of, number), actions in self.actions.items():
            if of == kind and number < len(self.expected):
                found[number] = actions
        for of, number, more in self.trims:
            if of == kind:
                found[number] = [(TRIM, more), *(found[number] or [])]
        return found

    def save(self, path: str | os.PathLike[str], key: str = "") -> None:
        """Writes it as JSON; the file appears whole or not at all. ``key`` says what it is for."""
        form = asdict(self)
        form["expected"] = [[_written(view), node] for view, node in self.expected]
        form["actions"] = [[*point, things] for point, things in self.actions.items()]
        for one in form["again"]:
            one["inputs"] = [[_written(view), owner] for view, owner in one["inputs"]]
        form["away"] = sorted(self.away)
        whole = {"format": FORMAT, "version": VERSION, "key": key, **form}
        _outside.write(path, json.dumps(whole).encode())

    @staticmethod
    def load(path: str | os.PathLike[str], own: bool = False) -> Schedule:
        """Reads what :meth:`save` wrote.

        Args:
            own: whether a file is refused that another user may write to.

        Raises:
            ValueError: if the file is none, with what to do.
        """
        name = os.fspath(path)
        try:
            content = _outside.read(path, own)
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        try:
            form = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not JSON: {error}") from None
        if not isinstance(form, dict) or form.get("format") != FORMAT:
            raise ValueError(f"{name} is no {FORMAT}; `neap torch --save-plan FILE` writes one")
        if form.get("version") != VERSION:
            raise ValueError(
                f"{name} has version {form.get('version')} of {FORMAT}, this neap reads {VERSION}"
            )
        try:
            return _read(form)
        except MALFORMED as error:
            raise ValueError(
                f"{name} is damaged ({type(error).__name__}: {error}); plan again"
            ) from None


def _read(form: dict[str, Any]) -> Schedule:
    known = {k: v for k, v in form.items() if k not in ("format", "version", "key")}
    known["expected"] = [(_view(view), node) for view, node in form["expected"]]
    known["actions"] = {
        (kind, number): [(what, one) for what, one in things]
        for kind, number, things in form["actions"]
    }
    known["again"] = [
        Again(**{**one, "inputs": [(None if v is None else _view(v), o) for v, o in one["inputs"]]})
        for one in form["again"]
    ]
    known["remade"] = [Remake(**one) for one in form.get("remade", [])]
    known["away"] = set(form["away"])
    place, most = form.get("fits") or (0, 0)
    known["fits"] = (int(place), int(most)) if form.get("fits") else None
    known["needs"] = Needs(*form.get("needs", ()))
    known["trims"] = [(str(kind), int(n), int(more)) for kind, n, more in form.get("trims", [])]
    known["lent"] = [[(str(name), int(size)) for name, size in p] for p in form.get("lent", [])]
    known["borrowed"] = {
        int(n): (int(parcel), int(member))
        for n, (parcel, member) in form.get("borrowed", {}).items()
    }
    schedule = Schedule(**known)
    for one in fields(Schedule):
        value = getattr(schedule, one.name)
        wrong = type(one.default) is bool and type(value) is not bool
        wrong |= type(one.default) is int and not _count(value)
        if wrong or (one.name == "piece" and not (value is None or (_count(value) and value))):
            raise ValueError(f"{one.name} is {str(value)[:40]}")
    if not 1 <= schedule.steps <= _MOST_STEPS:
        raise ValueError(f"an iteration has {schedule.steps} steps")
    if schedule.fits is not None:
        place, most = schedule.fits
        if not (schedule.varies and 0 <= place < len(schedule.expected) and _count(most)):
            raise ValueError("no saved tensor shows that an iteration fits")
    names = [*schedule.away, *schedule.soon, *(name for turn in schedule.turns for name in turn)]
    names += [*schedule.excluded, *(one.module for one in schedule.again)]
    names += [one.module for one in schedule.remade]
    names += [name for parcel in schedule.lent for name, _ in parcel]
    names.append(schedule.course)
    if not all(type(name) is str for name in names):
        raise ValueError("a name is no text")
    counts = [n for one in schedule.again for n in (one.number, one.first_pack, one.after_pack)]
    counts += [*schedule.excluded.values(), *(size for p in schedule.lent for _, size in p)]
    counts += [*schedule.needs, *(one.nanoseconds for one in schedule.again)]
    counts += [one.nanoseconds for one in schedule.remade]
    if not all(map(_count, counts)):
        raise ValueError("a number is no count")
    _points(schedule)
    if not all(type(size) is int and size > 0 for size in schedule.sizes):
        raise ValueError("a size is no number of bytes")
    if not all(size <= schedule.unplanned_peak_bytes for size in schedule.sizes):
        raise ValueError("an activation is larger than all that the iteration takes")
    activations, saved = len(schedule.sizes), len(schedule.expected)
    things = [thing for actions in schedule.actions.values() for thing in actions]
    numbers = [o for o in schedule.owner if o is not None]
    numbers += [o for one in schedule.again for _, o in one.inputs if o is not None]
    numbers += [one for what, one in things if what not in (*ACTIONS, *TURNS)]
    lent = [(one, 0) for what, one in things if what in ACTIONS]
    known_actions = {*MOVES, *ACTIONS, *TURNS}
    if not all(what in known_actions and _count(one) for what, one in things):
        raise ValueError("there is no such action")
    outside = any(not 0 <= n < activations for n in numbers)
    turns = len(schedule.turns)
    outside |= any(not 0 <= one < turns for what, one in things if what in TURNS)
    outside |= not all(names for names in schedule.turns)
    outside |= any(
        not (0 <= parcel < len(schedule.lent) and 0 <= member < len(schedule.lent[parcel]))
        for parcel, member in [*schedule.borrowed.values(), *lent]
    )
    outside |= any(
        one.node not in KINDS or not all(0 <= place < saved for place in one.packs)
        for one in schedule.remade
    )
    if len(schedule.owner) != saved or outside:
        raise ValueError("a number is out of range")
    for (view, _), owner in zip(schedule.expected, schedule.owner):
        if owner is not None and _reach(view) > schedule.sizes[owner]:
            raise ValueError(f"activation {owner} is smaller than a tensor that lies in it")
    return schedule


def _reach(view: View) -> int:
    """The bytes of its storage up to the end of its last element."""
    dtype, shape, stride, offset = view
    if len(shape) != len(stride) or min([offset, *shape, *stride]) < 0:
        raise ValueError("a tensor has no such shape")
    if 0 in shape:
        return 0
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride))
    return (last + 1) * dtype.itemsize


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _points(schedule: Schedule) -> None:
    """Checks that points are those of an iteration, and each is there once."""
    saved = len(schedule.expected)
    most = {"begin": 1, "backward": 1, "after": 1, "pack": saved, "unpack": MOST_ASKED * saved}
    trims = [(kind, number) for kind, number, _ in schedule.trims]
    if len(set(trims)) < len(trims):
        raise ValueError("a point is there twice")
    for kind, number in schedule.actions:
        _point(kind, number, most)
    most["unpack"] = saved
    for kind, number in trims:
        _point(kind, number, most)
    if not all(_count(more) for *_, more in schedule.trims):
        raise ValueError("a trim is no number of bytes")


def _point(kind: str, number: Any, most: dict[str, int]) -> None:
    # How many pieces a step has is not known here.
    if not (_count(number) and number < (_LARGEST if kind == "step" else most[kind])):
        raise ValueError(f"there is no point {str(kind)[:20]} {str(number)[:40]}")


def _written(view: View | None) -> Any:
    if view is None:
        return None
    dtype, shape, stride, offset = view
    return [str(dtype).removeprefix("torch."), list(shape), list(stride), offset]


def _view(form: Any) -> View:
    dtype = getattr(torch, form[0])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{form[0]} is no type of elements")
    return dtype, tuple(form[1]), tuple(form[2]), int(form[3])


def parameter_of(state: str) -> str:
    """The parameter whose optimizer state has this name."""
    return state.split(":", 1)[-1]
