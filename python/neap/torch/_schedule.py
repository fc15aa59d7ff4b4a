"""What is done when: a plan in the terms of PyTorch's hooks, and how it is made from a planner's
answer and kept in a file.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from neap.torch._calls import View
from neap.torch._loans import ACTIONS, COPY, FETCH, HOME, LEND, Parcel
from neap.torch._recipe import KINDS
from neap.torch._remake import Remake
from neap.torch._storage import blocks
from neap.torch._world import Loan, World

FORMAT = "neap.torch.schedule"
VERSION = 1

Point = tuple[str, int]
Actions = list[tuple[str, int]]
TRIM = ("trim", 0)
"""The action at a point of :attr:`Schedule.trims`."""


class Due:
    """What is to be done at a point, by its kind.

    Attributes:
        away: copies of activations to the host and drops, in order.
        back: activations that come.
        lent: actions for parameters.
        trim: whether the allocator gives back what it keeps free.
    """

    __slots__ = ("away", "back", "lent", "trim")

    def __init__(self, actions: Actions) -> None:
        self.away = [action for action in actions if action[0] in ("out", "drop")]
        self.back = [one for what, one in actions if what == "in"]
        self.lent = [action for action in actions if action[0] in ACTIONS]
        self.trim = TRIM in actions


def due(points: Sequence[Actions | None]) -> list[Due | None]:
    """What is to be done at each of the points."""
    return [None if actions is None else Due(actions) for actions in points]


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
        early: whether updates run inside backward, each when its gradient is complete.
        lent: the parcels of parameters that leave during backward. Actions for them are those of
            :mod:`neap.torch._loans`; ``("backward", 0)`` is a point for these too.
        borrowed: for saved tensors of such parameters the parcel, and which parameter of it.
        packed: how many tensors are saved before backward begins.
        trims: points at which the allocator gives back what it keeps free; also ``("begin", 0)``,
            ``("backward", 0)`` and ``("step", 0)``, where these begin.
        excluded: why calls of modules can't be run again, with how many.
    """

    expected: list[tuple[View, str]]
    owner: list[int | None]
    sizes: list[int]
    actions: dict[Point, list[tuple[str, int]]]
    again: list[Again] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    ahead: bool = False
    early: bool = False
    peak_bytes: int = 0
    unplanned_peak_bytes: int = 0
    iteration_ns: int = 0
    unplanned_iteration_ns: int = 0
    budget_bytes: int = 0
    swap_bytes: int = 0
    met: bool = True
    excluded: dict[str, int] = field(default_factory=dict)
    trims: list[Point] = field(default_factory=list)
    lent: list[Parcel] = field(default_factory=list)
    borrowed: dict[int, tuple[int, int]] = field(default_factory=dict)
    packed: int = 0
    remade: list[Remake] = field(default_factory=list)

    def at(self, kind: str) -> list[Actions | None]:
        """For each saved tensor what to do at its point of this kind; the last entry, number -1,
        is for tensors without a number.
        """
        found: list[Actions | None] = [None] * (len(self.expected) + 1)
        for (of, number), actions in self.actions.items():
            if of == kind:
                found[number] = actions
        for of, number in self.trims:
            if of == kind:
                found[number] = [TRIM, *(found[number] or [])]
        return found

    def save(self, path: str | os.PathLike[str], key: str = "") -> None:
        """Writes it as JSON; the file appears whole or not at all. ``key`` says what it is for."""
        form = asdict(self)
        form["expected"] = [[_written(view), node] for view, node in self.expected]
        form["actions"] = [[*point, things] for point, things in self.actions.items()]
        for one in form["again"]:
            one["inputs"] = [[_written(view), owner] for view, owner in one["inputs"]]
        form["away"] = sorted(self.away)
        partial = f"{os.fspath(path)}.{os.getpid()}.tmp"
        Path(partial).write_text(
            json.dumps({"format": FORMAT, "version": VERSION, "key": key, **form}), "utf-8"
        )
        os.replace(partial, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Schedule:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: if the file is none, with what to do.
        """
        name = os.fspath(path)
        try:
            form = json.loads(Path(name).read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{name} is not JSON: {error}") from None
        if not isinstance(form, dict) or form.get("format") != FORMAT:
            raise ValueError(f"{name} is no {FORMAT}; `neap torch --save-plan FILE` writes one")
        if form.get("version") != VERSION:
            raise ValueError(
                f"{name} has version {form.get('version')} of {FORMAT}, this neap reads {VERSION}"
            )
        try:
            return _read(form)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
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
    known["trims"] = [(str(kind), int(number)) for kind, number in form.get("trims", [])]
    known["lent"] = [[(str(name), int(size)) for name, size in p] for p in form.get("lent", [])]
    known["borrowed"] = {
        int(n): (int(parcel), int(member))
        for n, (parcel, member) in form.get("borrowed", {}).items()
    }
    schedule = Schedule(**known)
    activations, saved = len(schedule.sizes), len(schedule.expected)
    things = [thing for actions in schedule.actions.values() for thing in actions]
    numbers = [o for o in schedule.owner if o is not None]
    numbers += [one for what, one in things if what not in ACTIONS]
    lent = [(one, 0) for what, one in things if what in ACTIONS]
    outside = any(not 0 <= n < activations for n in numbers)
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
    return schedule


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


# -- from a planner's answer


class Timeline:
    """What ``neap simulate`` says of a plan: when copies begin and end, in places of operators."""

    def __init__(self, path: Path, world: World) -> None:
        form = json.loads(path.read_text())
        events = form["traceEvents"] if isinstance(form, dict) else form
        lanes = {
            event["tid"]: event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        starts: dict[str, float] = {}
        self._copies: dict[tuple[str, str], tuple[float, float]] = {}
        for event in events:
            if event["ph"] != "X":
                continue
            lane, name = lanes.get(event["tid"], ""), event["name"]
            if lane == "compute":
                starts.setdefault(name, event["ts"])
            else:
                self._copies.setdefault((lane, name), (event["ts"], event["ts"] + event["dur"]))
        self._starts = [starts.get(step.name, 0.0) for step in world.steps]

    def left(self, name: str, otherwise: int) -> int:
        """The first operator that starts after the tensor's copy to the host has ended."""
        copy = self._copies.get(("d2h", name))
        return otherwise if copy is None else bisect.bisect_left(self._starts, copy[1] - 1e-3)

    def comes(self, name: str, otherwise: int) -> int:
        """The first operator that starts after the tensor's copy to the device has begun."""
        copy = self._copies.get(("h2d", name))
        return otherwise if copy is None else bisect.bisect_left(self._starts, copy[0] - 1e-3)


def points(world: World) -> list[tuple[int, Point]]:
    """Moments at which PyTorch calls us, in order: the place that follows, and the point."""
    last = world.found.end
    triggers: dict[int, int] = {}
    for one in world.ranges:
        order = triggers.get(one.again, one.trigger.order)
        triggers[one.again] = min(order, one.trigger.order)
    found: list[tuple[int, int, Point]] = []
    for saved in world.packs:
        found.append((world.new(saved.packed + 1), -1, ("pack", saved.place)))
        if saved.unpacked is None or saved.unpacked > last:
            continue
        trigger = triggers.get(world.found.place[saved.unpacked])
        ahead = trigger is not None and saved.order <= trigger
        place = world.new(saved.unpacked, before=ahead)
        found.append((place, saved.order, ("unpack", saved.place)))
    if world.loans:
        found.append((world.backward[0], -2, ("backward", 0)))
    found.sort(key=lambda point: point[:2])
    return [(place, point) for place, _, point in found]


def schedule(
    world: World, form: dict[str, Any], timeline: Timeline, peak: int, divisible: bool
) -> Schedule:
    """The actions that carry a plan of ``world.graph(…, divisible)`` with this peak out. The peak
    of these actions may be lower, as copies begin later than a plan may ask for them.
    """
    place = {step.name: number for number, step in enumerate(world.steps)}
    moments = points(world)
    on_host = {s.name for s in world.away}
    outs: dict[str, int] = {}
    ins: dict[str, int] = {}
    moved_states = set()
    lending = Lending(world, timeline, moments)
    for event in form["jobs"][0]["events"]:
        name = event.get("tensor")
        after = -1 if event["after"] is None else place[event["after"]]
        if name in on_host:
            moved_states.add(name)
        elif name in lending.by_name:
            lending.event(name, event["event"], after)
        elif event["event"] == "swap_out":
            outs[name] = after
        elif event["event"] == "swap_in":
            ins[name] = after
    moved = [a for a in world.movable if a.storage.name in outs and a.storage.name in ins]
    number = {a.storage.name: n for n, a in enumerate(moved)}
    moves: list[_Move] = []
    for activation in sorted(moved, key=lambda a: outs[a.storage.name]):
        name = activation.storage.name
        copied = max(timeline.left(name, outs[name] + 1), activation.leaves)
        # Pack and unpack come one after another; what is due between two waits for the later.
        out = _first(moments, max(outs[name] + 1, activation.leaves))
        drop = _first(moments, copied)
        comes = max(ins[name] + 1, timeline.comes(name, 0))
        back = _first(moments, comes, len(moments) - 1)
        home = _first(moments, activation.returns, len(moments) - 1)
        if out is None or drop is None or back is None or home is None or out >= home:
            continue
        drop, back = max(drop, out), min(back, home)
        if drop >= back:
            continue
        moves.append(_Move(number[name], blocks(activation.storage.bytes), copied, out, drop, back))
    # A parameter's states leave together.
    owners = {parameter_of(name) for name in moved_states}
    moved_states = {s.name for s in world.away if parameter_of(s.name) in owners}
    standing = _drop_in_time(
        world.standing(moved_states, divisible), moments, [*moves, *lending.moves()], peak
    )
    actions: dict[Point, list[tuple[str, int]]] = {}
    for move in moves:
        for what, moment in (("out", move.out), ("drop", move.drop), ("in", move.back)):
            actions.setdefault(moments[moment][1], []).append((what, move.one))
    acted = {one for things in actions.values() for _, one in things}
    lent = lending.into(actions)
    member: dict[Any, tuple[int, int]] = {
        storage: (parcel, place)
        for parcel, loan in enumerate(lent)
        for place, storage in enumerate(loan.members)
    }

    def owner(storage: Any) -> int | None:
        one = None if storage is None else number.get(storage.name)
        return one if one in acted else None

    within = {s for r in world.ranges for s in r.saved}
    return Schedule(
        expected=[(s.view, s.node) for s in world.packs],
        owner=[None if s in within else owner(s.storage) for s in world.packs],
        sizes=[a.storage.bytes for a in moved],
        actions=actions,
        again=[
            Again(
                module=r.call.path,
                number=r.call.number,
                first_pack=r.call.first_pack,
                after_pack=r.call.after_pack,
                stays=_stays(r.call.first_pack, r.call.after_pack, {s.place for s in r.saved}),
                inputs=list(zip(r.call.views, map(owner, r.call.storages))),
                nanoseconds=r.nanoseconds,
                bytes=r.bytes,
            )
            for r in world.ranges
            if r.call is not None
        ],
        remade=[
            Remake(
                node=r.node,
                module=r.saved[0].module,
                packs=[s.place for s in r.saved],
                size=r.brings[0].bytes,
                nanoseconds=r.nanoseconds,
            )
            for r in world.ranges
            if r.call is None
        ],
        away={world.whole.get(name, name) for name in moved_states},
        ahead=world.ahead,
        peak_bytes=max(standing),
        swap_bytes=sum(moved[one].storage.bytes for one in acted),
        lent=[[(s.name, s.bytes) for s in loan.members] for loan in lent],
        borrowed={s.place: member[s.storage] for s in world.packs if s.storage in member},
        packed=world.packed,
    )


class Lending:
    """The times at which a plan has parameters away, in moments.

    Within backward a parameter may be away several times. It is copied to the host once; the copy
    may begin in forward, and its bytes are freed in backward only.
    """

    def __init__(
        self, world: World, timeline: Timeline, moments: Sequence[tuple[int, Point]]
    ) -> None:
        self._world = world
        self._timeline = timeline
        self._moments = moments
        self.by_name = {loan.name: loan for loan in world.loans}
        self._outs: dict[str, list[int]] = {}
        self._ins: dict[str, list[int]] = {}
        self._moves: list[tuple[Loan, _Move, int]] | None = None

    def event(self, name: str, what: str, after: int) -> None:
        """An event of the plan: a copy to the host, a release, or a copy to the device."""
        times = self._ins if what == "swap_in" else self._outs
        times.setdefault(name, []).append(after)

    def moves(self) -> list[_Move]:
        """Each absence that the moments allow."""
        if self._moves is None:
            self._moves = []
            for name, outs in self._outs.items():
                for number, out in enumerate(outs):
                    ins = [place for place in self._ins.get(name, []) if place >= out]
                    move = self._move(self.by_name[name], number, out, min(ins, default=None))
                    if move is not None:
                        self._moves.append(move)
        return [move for _, move, _ in self._moves]

    def _move(
        self, loan: Loan, number: int, out: int, back: int | None
    ) -> tuple[Loan, _Move, int] | None:
        moments, (first, after) = self._moments, self._world.backward
        if back is None:
            return None
        uses = [place for place in loan.uses if place > back]
        before = [place for place in loan.uses if place <= back]
        needed = min(uses, default=after)
        leaves = max(before, default=first - 1) + 1
        name = loan.name
        copied = max(self._timeline.left(name, out + 1) if number == 0 else leaves, leaves)
        # Nothing changes the parameter from here on, so its copy may begin as early as this.
        ask = _first(moments, min(out + 1, first))
        drop = _first(moments, max(copied, first))
        # What reads the parameter without having saved it must find it there.
        home = bisect.bisect_right(moments, needed, key=lambda moment: moment[0]) - 1
        while home > 0 and moments[home - 1][0] == needed:
            home -= 1
        comes = max(back + 1, self._timeline.comes(name, 0) if number == 0 else 0)
        bring = _first(moments, comes, home)
        if ask is None or drop is None or bring is None:
            return None
        bring = min(bring, home)
        if moments[drop][0] < first or drop >= bring:
            return None
        size = blocks(loan.bytes)
        return loan, _Move(-1, size, max(copied, first), min(ask, drop), drop, bring), home

    def into(self, actions: dict[Point, list[tuple[str, int]]]) -> list[Loan]:
        """Adds the actions; what leaves, in the order of its numbers."""
        self.moves()
        numbers: dict[Loan, int] = {}
        for loan, move, home in self._moves or ():
            one = numbers.setdefault(loan, len(numbers))
            for what, moment in (
                (COPY, move.out),
                (LEND, move.drop),
                (FETCH, move.back),
                (HOME, home),
            ):
                actions.setdefault(self._moments[moment][1], []).append((what, one))
        return list(numbers)


@dataclass
class _Move:
    """One activation's way: its bytes, the operator before which its copy to the host has ended,
    and at which of the moments it goes, is dropped and comes back.
    """

    one: int
    size: int
    copied: int
    out: int
    drop: int
    back: int


def _drop_in_time(
    unmoved: Sequence[int],
    moments: Sequence[tuple[int, Point]],
    moves: Sequence[_Move],
    peak: int,
) -> list[int]:
    """The bytes that stand during each operator, given what stands when no activation moves.

    A copy may end between two moments. Where the peak allows, its bytes are dropped at the later;
    else at the earlier, where the GPU waits for the rest of the copy.
    """
    change = [0] * (len(unmoved) + 1)
    for move in moves:
        change[moments[move.drop][0]] -= move.size
        change[moments[move.back][0]] += move.size
    standing = [size + less for size, less in zip(unmoved, accumulate(change))]
    for move in moves:
        late = moments[move.drop][0]
        if max(standing[move.copied : late], default=0) <= peak:
            continue
        last = bisect.bisect_right(moments, move.copied, key=lambda moment: moment[0]) - 1
        move.drop = max(last, move.out)
        for place in range(moments[move.drop][0], late):
            standing[place] -= move.size
    return standing


def _stays(first: int, after: int, saved: set[int]) -> list[int]:
    return [n for n in range(first, after) if n not in saved]


def _first(
    moments: Sequence[tuple[int, Any]], place: int, otherwise: int | None = None
) -> int | None:
    """The first point at or after the operator at ``place``."""
    low, high = 0, len(moments)
    while low < high:
        middle = (low + high) // 2
        if moments[middle][0] < place:
            low = middle + 1
        else:
            high = middle
    return low if low < len(moments) else otherwise
