"""From a planner's answer to a schedule: which of the points at which PyTorch calls us each of its
copies begins and ends at.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from neap.torch._loans import COPY, FETCH, HOME, LEND
from neap.torch._remake import Remake
from neap.torch._schedule import Again, Point, Schedule, parameter_of
from neap.torch._storage import Saved, Storage, blocks
from neap.torch._turns import COME, GO
from neap.torch._world import Loan, World

AFTER: Point = ("after", 0)
"""The moment at which backward has ended."""


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
        found.append((world.backward[1], -2, AFTER))
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
        if name in on_host and not world.early:
            moved_states.add(name)
        elif name in lending.by_name:
            lending.event(name, event["event"], after)
        elif event["event"] == "swap_out":
            outs[name] = after
        elif event["event"] == "swap_in":
            ins[name] = after
    moved = [a for a in world.movable if a.storage.name in outs and a.storage.name in ins]
    number = {a.storage.name: n for n, a in enumerate(moved)}
    within = {s for r in world.ranges for s in r.saved}
    held = _held_from(moments, (s for s in world.packs if s not in within))
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
        if out is None or drop is None or back is None or home is None:
            continue
        out = max(out, held.get(activation.storage, 0))
        drop, back = max(drop, out), min(back, home)
        if out >= home or drop >= back:
            continue
        moves.append(_Move(number[name], blocks(activation.storage.bytes), copied, out, drop, back))
    # A parameter's states leave together.
    owners = {parameter_of(name) for name in moved_states}
    moved_states = {s.name for s in world.away if parameter_of(s.name) in owners}
    unmoved = world.standing(moved_states, divisible)
    turns = list(_turns(world, outs, ins, timeline, moments)) if world.early else []
    for turn in turns:
        for before in range(moments[turn.come][0]):
            unmoved[before] -= turn.move.size
    standing = _drop_in_time(
        unmoved,
        [*moments, (len(unmoved), ("end", 0))],
        [*moves, *lending.moves(), *(turn.move for turn in turns)],
        peak,
    )
    actions: dict[Point, list[tuple[str, int]]] = {}
    for move in moves:
        for what, moment in (("out", move.out), ("drop", move.drop), ("in", move.back)):
            actions.setdefault(moments[moment][1], []).append((what, move.one))
    acted = {one for things in actions.values() for _, one in things}
    lent = lending.into(actions)
    for one, turn in enumerate(turns):
        actions.setdefault(moments[turn.come][1], []).append((COME, one))
        if turn.move.drop < len(moments):
            actions.setdefault(moments[turn.move.drop][1], []).append((GO, one))
    member: dict[Any, tuple[int, int]] = {
        storage: (parcel, place)
        for parcel, loan in enumerate(lent)
        for place, storage in enumerate(loan.members)
    }

    def owner(storage: Any) -> int | None:
        one = None if storage is None else number.get(storage.name)
        return one if one in acted else None

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
        turns=[turn.states for turn in turns],
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
        piece=world.piece,
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
                if self._moments[moment][1] == AFTER:
                    continue  # Then all come back in any case.
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


@dataclass
class _Turn:
    """The way of a parameter's states around its early update: they come at one of the moments,
    and ``move`` says how they go until the iteration ends.
    """

    states: list[str]
    come: int
    move: _Move


def _turns(
    world: World,
    outs: dict[str, int],
    ins: dict[str, int],
    timeline: Timeline,
    moments: Sequence[tuple[int, Point]],
) -> Iterator[_Turn]:
    """For each parameter the states that the plan moves; its states come and go together."""
    moved: dict[tuple[str, int], list[Storage]] = {}
    for storage, (update, *_) in world.away.items():
        if storage.name in outs and storage.name in ins:
            moved.setdefault((parameter_of(storage.name), update), []).append(storage)
    for (_, update), states in moved.items():
        names = [state.name for state in states]
        comes = min(max(ins[name] + 1, timeline.comes(name, 0)) for name in names)
        copied = max(max(timeline.left(name, update + 1) for name in names), update + 1)
        home = bisect.bisect_right(moments, update, key=lambda moment: moment[0]) - 1
        come = min(_first(moments, comes, len(moments) - 1) or 0, home)
        if come < 0:
            continue
        end = len(moments)
        after, drop = (_first(moments, place, end) for place in (update + 1, copied))
        assert after is not None and drop is not None
        size = sum(blocks(state.bytes) for state in states)
        yield _Turn(names, come, _Move(-1, size, copied, after, drop, end))


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


def _held_from(moments: Iterable[tuple[int, Point]], packs: Iterable[Saved]) -> dict[Storage, int]:
    """For each storage the moment of its first pack: an operator may save several tensors, one
    after another, and what is not saved yet can't be copied.
    """
    number = {point: n for n, (_, point) in enumerate(moments)}
    found: dict[Storage, int] = {}
    for saved in packs:
        if saved.storage is not None:
            found.setdefault(saved.storage, number["pack", saved.place])
    return found


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
