"""An iteration as it would be if some calls were run again in backward: the operators in that
order, the bytes that stand during each, and what can be moved to the host meanwhile.

The planner gets this as a graph in which only what PyTorch can carry out is a tensor: activations
that nothing but autograd holds between forward and backward, and optimizer states. All other bytes
are workspace of the operators during which they stand.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from neap.torch import _states
from neap.torch._graph import Iteration, Life, Node
from neap.torch._ranges import Range
from neap.torch._recorder import Recorder
from neap.torch._storage import Storage, blocks
from neap.torch._watch import BACKWARD, OPTIMIZE

SMALLEST = 64 << 10
"""Storages below this many bytes stay: each copy costs about ten microseconds of the host."""


LARGE = 32 << 20
"""A parameter of at least this many bytes leaves by itself."""


@dataclass(eq=False)
class Activation:
    """A storage that can leave between its last use in forward and its first in backward.

    ``leaves`` is the first place at whose start nothing but autograd holds it, ``returns`` the
    place before which backward asks for it, ``gone`` the place at which it is freed.
    """

    storage: Storage
    born: int
    leaves: int
    returns: int
    gone: int


@dataclass(eq=False)
class Loan:
    """Parameters that can leave together while backward uses none of them.

    Attributes:
        name: in the planner's graph.
        members: the parameters.
        uses: the places of backward that use any of them.
    """

    name: str
    members: list[Storage]
    uses: list[int]

    @property
    def bytes(self) -> int:
        """Their bytes in one storage."""
        sizes = [s.bytes for s in self.members]
        return sizes[0] if len(sizes) == 1 else sum(map(blocks, sizes))


@dataclass(eq=False)
class Step:
    """An operator of the planned iteration: one of the recorded, or one that runs again."""

    name: str
    phase: str
    node: Node
    origin: int
    """Its place among the recorded operators."""
    again: bool = False
    part: int = 0
    parts: int = 1
    """How many parts the update of a large parameter has; this one is number :attr:`part`."""

    @property
    def workspace(self) -> int:
        """Its scratch in bytes."""
        return blocks(-(-self.node.workspace // self.parts))


class Change:
    """Bytes that come and go between places."""

    def __init__(self, count: int) -> None:
        self._at = [0] * (count + 1)

    def stand(self, size: int, first: int, end: int) -> None:
        """``size`` bytes more from the first place to before the end."""
        if end > first:
            self._at[first] += size
            self._at[end] -= size

    def added_to(self, standing: Sequence[int]) -> list[int]:
        """What stands at each place, given what stands without this."""
        return [size + more for size, more in zip(standing, accumulate(self._at))]


class World:
    """One iteration with ``ranges`` run again.

    Attributes:
        steps: the operators in their new order.
        resident: bytes that stand during each, when nothing is moved.
        movable: activations that can leave, in order of birth.
        away: optimizer states that can stay on the host, with the places of their updates.
        at: from places of the recording to new places.
        before: the same, ahead of what runs again just before that place.
        ahead: whether copies of states run beside the updates of other pieces.
        piece: the bytes of states that a piece of the step should have.
        early: whether updates run inside backward; only states of these move then.
        backward: the first place of backward and the one after its last, where parameters may
            leave.
        loans: those that can.
    """

    def __init__(
        self,
        recorder: Recorder,
        found: Iteration,
        ranges: Sequence[Range] = (),
        move_states: bool = True,
        ahead: bool = False,
        lend: Collection[Storage] = (),
        early: bool = False,
        piece: int | None = None,
    ) -> None:
        self.recorder = recorder
        self.ahead = ahead
        self.piece = piece or _states.PIECE_BYTES
        self.early = early
        self.found = found
        self.ranges = list(ranges)
        self.packs = [s for s in recorder.packs if s.iteration == found.which]
        self._within = {s for r in self.ranges for s in r.saved}
        # Inside backward an update is not divided.
        self._owners = self._owners_of_states() if move_states and not early else {}
        self.whole: dict[str, str] = {}
        """For each part of an optimizer state the name of the state."""
        self._parts: dict[tuple[Storage, int], Storage] = {}
        self._lay_out()
        self._spans: dict[Storage, tuple[int, int]] = {}
        self._account()
        self.movable = self._movable()
        self.away = self._states() if move_states else {}
        self.backward, self.packed = (0, 0), 0
        self.loans = self._loans(lend) if lend else []
        self._updated: dict[Storage, Storage] = {}
        """For each parameter that can leave what stands for it in the planner's graph."""

    @property
    def peak(self) -> int:
        """The most bytes that stand when nothing is moved."""
        return max(self.resident)

    # -- order

    def _lay_out(self) -> None:
        waiting: dict[int, list[Range]] = {}
        for one in self.ranges:
            waiting.setdefault(one.again, []).append(one)
        self.steps: list[Step] = []
        self.at: list[int] = []
        self.before: list[int] = []
        self.rerun: dict[int, dict[int, int]] = {}
        """For each range, by number, the new place of each of its operators that run again."""
        number = {id(one): n for n, one in enumerate(self.ranges)}
        for place, node in enumerate(self.found.nodes):
            self.before.append(len(self.steps))
            for one in sorted(waiting.get(place, []), key=lambda r: r.trigger.order):
                places = self.rerun.setdefault(number[id(one)], {})
                for origin in range(one.first, one.cut):
                    places[origin] = len(self.steps)
                    again = self.found.nodes[origin]
                    name = f"again:{again.name}"
                    self.steps.append(Step(name, BACKWARD, again, origin, True))
            self.at.append(len(self.steps))
            parts = self._parts_of(node)
            for part in range(parts):
                name = f"{node.name}[{part}]" if parts > 1 else node.name
                self.steps.append(Step(name, node.phase, node, place, part=part, parts=parts))
        self.before.append(len(self.steps))
        self.at.append(len(self.steps))

    def _owners_of_states(self) -> dict[Storage, Node | None]:
        """For each large optimizer state the one operator that uses it, or nothing if several
        do.
        """
        owners: dict[Storage, Node | None] = {}
        for node in self.found.nodes:
            for storage in dict.fromkeys([*node.reads, *node.writes]):
                if storage.role == "optimizer_state" and storage.bytes >= SMALLEST:
                    owners[storage] = None if storage in owners else node
        return owners

    def _parts_of(self, node: Node) -> int:
        """In how many parts an update runs, as :mod:`neap.torch._states` divides a parameter."""
        parameters = [s for s in node.writes if s.role == "parameter"]
        states = [s for s in dict.fromkeys([*node.reads, *node.writes]) if s in self._owners]
        if node.op is not None or node.phase != OPTIMIZE or len(parameters) != 1 or not states:
            return 1
        size = parameters[0].bytes
        if any(self._owners[s] is not node or s.bytes != size for s in states):
            return 1
        return len(_states.bounds(size, len(states) * size, self.piece))

    def _states_of(self, step: Step, storages: Iterable[Storage]) -> list[Storage]:
        """The large optimizer states among ``storages``, or the parts of them that a step uses."""
        states = [
            s
            for s in dict.fromkeys(storages)
            if s.role == "optimizer_state" and s.bytes >= SMALLEST
        ]
        return [self._part(s, step, len(states)) for s in states] if step.parts > 1 else states

    def _part(self, state: Storage, step: Step, count: int) -> Storage:
        known = self._parts.get((state, step.part))
        if known is None:
            cuts = _states.bounds(state.bytes, count * state.bytes, self.piece)
            first, after = cuts[step.part]
            kind, _, parameter = state.name.partition(":")
            name = f"{kind}[{step.part}]:{parameter}"
            known = replace(state, name=name, bytes=after - first, shape=[after - first])
            self._parts[state, step.part] = known
            self.whole[name] = state.name
        return known

    def new(self, op: int, before: bool = False) -> int:
        """The new place of a recorded operator."""
        place = self.found.place.get(op, len(self.found.nodes))
        return self.before[place] if before else self.at[place]

    # -- bytes

    def _end(self, life: Life) -> int:
        return len(self.found.nodes) if life.until is not None else life.death

    def _let_go(self, life: Life) -> int:
        """The place at which nothing but autograd holds a storage."""
        known = life.storage.alone
        if known is not None and self.found.start < known <= self.found.end:
            return min(self.found.place[known], self._end(life))
        return self._end(life)

    def _account(self) -> None:
        found, count = self.found, len(self.steps)
        lives = Change(len(found.nodes))
        for life in found.lives.values():
            lives.stand(-blocks(life.storage.bytes), life.born or 0, self._end(life))
        fixed = lives.added_to(found.resident())
        resident = []
        for place, step in enumerate(self.steps):
            if step.again:  # What stands at the place where it runs, and its own scratch.
                follower = place
                while self.steps[follower].again:
                    follower += 1
                origin = self.steps[follower].origin
                scratch = blocks(step.node.workspace) - blocks(found.nodes[origin].workspace)
                resident.append(fixed[origin] + scratch)
            else:
                less = blocks(step.node.workspace) - step.workspace
                resident.append(fixed[step.origin] - less)
        change = Change(count)
        inputs: dict[Storage, int] = {}
        for one in self.ranges:
            for storage in one.inputs:
                inputs[storage] = max(inputs.get(storage, 0), one.over)
        freed = self._only_within()
        for life in found.lives.values():
            storage = life.storage
            end = self._let_go(life) if storage in freed else self._end(life)
            end = max(end, inputs.get(storage, 0))
            first = self.at[life.born or 0]
            # What is freed before an operator is freed before what runs again ahead of it.
            self._spans[storage] = (first, self.before[min(end, len(found.nodes))])
            change.stand(blocks(storage.bytes), *self._spans[storage])
        for number, one in enumerate(self.ranges):
            places = self.rerun[number]
            last = max(places.values()) + 1
            brings = set(one.brings)
            for origin in range(one.first, one.cut):
                for storage in found.nodes[origin].makes:
                    known = found.lives.get(storage)
                    if known is None:
                        continue
                    if storage in brings:
                        asked = known.death if storage in freed else self._asked(storage, one)
                        end = self.before[min(max(asked, one.again + 1), len(found.nodes))]
                    else:
                        end = min(places.get(self._let_go(known), last), last)
                    after = max(end, places[origin] + 1)
                    change.stand(blocks(storage.bytes), places[origin], after)
        self.resident = change.added_to(resident)

    def _asked(self, storage: Storage, one: Range) -> int:
        """The place after backward's last use of what a range saved of a storage."""
        last = max((s.last_unpacked or 0) for s in one.saved if s.storage is storage)
        return self.found.place.get(last, 0) + 1 if last else one.over

    def _only_within(self) -> set[Storage]:
        """Storages that only ranges that run again have saved."""
        within = {s.storage for s in self._within if s.storage is not None}
        outside = {s.storage for s in self.packs if s not in self._within}
        return {s for s in within if s not in outside}

    # -- what can move

    def _movable(self) -> list[Activation]:
        kept: dict[Storage, list[int]] = {}
        for saved in self.packs:
            if saved.storage is None or saved in self._within or saved.unpacked is None:
                continue
            if saved.unpacked <= self.found.end:
                kept.setdefault(saved.storage, []).append(self.new(saved.unpacked, before=True))
        for one in self.ranges:
            for storage in one.inputs:
                kept.setdefault(storage, []).append(self.before[one.again])
        movable = []
        for storage, asked in kept.items():
            life = self.found.lives.get(storage)
            if life is None or storage.bytes < SMALLEST:
                continue
            if life.born is None or life.until is not None:
                continue
            if storage.saved and storage.alone is None:
                continue
            first, gone = self._spans[storage]
            leaves, returns = self.at[self._let_go(life)], min(asked)
            # A swap needs an operator between that neither makes nor uses it.
            if first < leaves < returns < len(self.steps):
                movable.append(Activation(storage, first, leaves, returns, gone))
        movable.sort(key=lambda a: (a.born, a.storage.number))
        return movable

    def _states(self) -> dict[Storage, list[int]]:
        """Optimizer states that only updates of single parameters use."""
        uses: dict[Storage, list[int]] = {}
        for place, step in enumerate(self.steps):
            for storage in self._states_of(step, [*step.node.reads, *step.node.writes]):
                uses.setdefault(storage, []).append(place)

        def moves(places: Sequence[int]) -> bool:
            users = [self.steps[place] for place in places]
            early = len(users) == 1 and users[0].phase == BACKWARD
            return all(user.node.op is None for user in users) and (early or not self.early)

        return {storage: places for storage, places in uses.items() if moves(places)}

    def _loans(self, lend: Collection[Storage]) -> list[Loan]:
        """Parameters that can leave in backward, of an iteration that calls it once."""
        calls = [c[1:] for c in self.recorder.backwards if c[0] == self.found.which]
        if len(calls) != 1:
            return []
        self.packed, begin, end = calls[0]
        first, after = self.new(begin, before=True), self.new(end, before=True)
        self.backward = first, after
        uses: dict[Storage, set[int]] = {s: set() for s in lend if s.bytes >= SMALLEST}
        for place in range(first, after):
            node = self.steps[place].node
            for storage in [*node.reads, *node.writes]:
                if storage in uses:
                    uses[storage].add(place)
        for saved in self.packs:
            if saved.storage not in uses or saved.unpacked is None or saved.storage is None:
                continue
            last = max(saved.unpacked, saved.last_unpacked or 0)
            for asked in (saved.unpacked, last):
                if begin <= asked <= end:
                    uses[saved.storage].add(self.new(asked, before=True))
        asked_at = sorted(
            self.new(saved.unpacked, before=True)
            for saved in self.packs
            if saved.unpacked is not None and begin <= saved.unpacked <= end
        )

        def held(place: int) -> range:
            """A function of autograd's holds what it needs until the next one asks for its own."""
            following = bisect.bisect_right(asked_at, place)
            until = asked_at[following] if following < len(asked_at) else after
            return range(place, max(until, place + 1))

        held_at = {
            s: {p for use in places for p in held(use) if first <= p < after}
            for s, places in sorted(uses.items(), key=lambda pair: pair[0].number)
        }
        # The small ones that are not used by then leave at the peak of what stays, those of a type
        # together.
        rest = [self.resident[place] for place in range(first, after)]
        for activation in self.movable:
            for place in range(max(activation.born, first), min(activation.gone, after)):
                rest[place - first] -= blocks(activation.storage.bytes)
        peak = first + max(range(len(rest)), key=lambda n: (rest[n], -n), default=0)
        large = [s for s in held_at if s.bytes >= LARGE]
        small = [s for s in held_at if s.bytes < LARGE and min(held_at[s], default=after) > peak]
        loans = [Loan(s.name, [s], sorted(held_at[s])) for s in large]
        # PyTorch saves no two tensors of different types that share memory.
        for dtype in sorted({s.dtype for s in small}):
            alike = [s for s in small if s.dtype == dtype]
            union = sorted(set().union(*(held_at[s] for s in alike)))
            loans.append(Loan(f"parameters in {dtype}", alike, union))
        return loans

    def pieces(self, divisible: bool) -> list[list[int]]:
        """Which updates run in one call, by place: as :mod:`neap.torch._states` divides a step, or
        all of them.
        """
        groups: list[list[int]] = []
        size = 0
        for place, step in enumerate(self.steps):
            if step.node.op is not None or step.node.phase != OPTIMIZE or step.again:
                continue
            more = sum(s.bytes for s in self._states_of(step, step.node.writes))
            full = bool(groups) and _states.full(len(groups[-1]), size, more, self.piece)
            after = bool(groups) and groups[-1][-1] != place - 1
            if not groups or (divisible and full) or after:
                groups.append([])
                size = 0
            groups[-1].append(place)
            size += more
        return groups

    def _standing(self, groups: Sequence[list[int]]) -> dict[int, list[int]]:
        """For each update the places while which its states are on the device."""
        reach = 1 if self.ahead else 0
        found = {}
        for number, group in enumerate(groups):
            near = groups[max(number - reach, 0) : number + reach + 1]
            places = [place for one in near for place in one]
            found.update(dict.fromkeys(group, places))
        return found

    def step_peak(self) -> int:
        """The least bytes that stand during the optimizer's step when all states are away that can
        be: with those of one piece, or where copies run ahead, of three.
        """
        groups = self.pieces(True)
        standing = self._standing(groups)
        away = sum(blocks(storage.bytes) for storage in self.away)
        here = dict.fromkeys(standing, 0)
        for storage, places in self.away.items():
            for place in {p for at in places for p in standing.get(at, [at])}:
                here[place] = here.get(place, 0) + blocks(storage.bytes)
        return max((self.resident[p] - away + size for p, size in here.items()), default=0)

    def _scratch(self, groups: Sequence[list[int]]) -> Iterable[tuple[int, int]]:
        """For each update the bytes beyond its own workspace: a multi-tensor call holds the
        temporaries of all its parameters at once.
        """
        for group in groups if self._together() else ():
            scratch = sum(self.steps[place].workspace for place in group)
            for place in group:
                yield place, scratch - self.steps[place].workspace

    def standing(self, moved: Collection[str], divisible: bool) -> list[int]:
        """The bytes that stand during each operator when no activation is moved, and the states of
        these names are on the device for their updates only.
        """
        groups = self.pieces(divisible)
        together = self._standing(groups)
        found = list(self.resident)
        for place, more in self._scratch(groups):
            found[place] += more
        for storage, places in self.away.items():
            if storage.name in moved:
                here = {p for at in places for p in together.get(at, [at])}
                for place in range(len(found)):
                    if place not in here:
                        found[place] -= blocks(storage.bytes)
        return found

    # -- the planner's graph

    def graph(self, durations: Mapping[str, int], divisible: bool) -> dict[str, Any]:
        """The ``neap.graph`` that is planned: every byte that can't move is workspace."""
        count, change = len(self.steps), Change(len(self.steps))
        touches: list[list[Storage]] = [[] for _ in range(count)]
        for activation in self.movable:
            size = blocks(activation.storage.bytes)
            change.stand(-size, activation.born, activation.gone)
            for place in range(activation.born + 1, activation.leaves):
                touches[place].append(activation.storage)
            for place in range(activation.returns, activation.gone):
                touches[place].append(activation.storage)
        lent = {o.name: replace(o.members[0], name=o.name, bytes=o.bytes) for o in self.loans}
        self._updated = {s: lent[o.name] for o in self.loans for s in o.members}
        for loan in self.loans:
            within = set(loan.uses)
            change.stand(-blocks(loan.bytes), 0, count)
            for place in range(count):
                if place in within or not self.backward[0] <= place < self.backward[1]:
                    touches[place].append(lent[loan.name])
        groups = self.pieces(divisible)
        together = self._standing(groups)
        for storage, places in self.away.items():
            change.stand(-blocks(storage.bytes), 0, count)
            for place in sorted({p for at in places for p in together.get(at, [at])}):
                touches[place].append(storage)
        rest = change.added_to(self.resident)
        for place, more in self._scratch(groups):
            rest[place] += more
        constant = max(min(rest) // 512 * 512, 0)
        tensors = [_tensor(s.name, "optimizer_state", s.bytes) for s in self.away]
        tensors.append(_tensor("held", "buffer", constant))
        tensors += [_tensor(o.name, "parameter", o.bytes) for o in self.loans]
        tensors += [_tensor(a.storage.name, "activation", a.storage.bytes) for a in self.movable]
        return {
            "format": "neap.graph",
            "version": 1,
            "name": self.found.name,
            "tensors": tensors,
            "operators": list(self._operators(touches, rest, constant, durations)),
        }

    def _together(self) -> bool:
        """Whether optimizer steps update many parameters by one operator."""
        steps = (self.recorder.ops[first:after] for first, after, _ in self.recorder.steps)
        return any("_foreach" in op.kind for ops in steps for op in ops)

    def _operators(
        self,
        touches: Sequence[Sequence[Storage]],
        rest: Sequence[int],
        constant: int,
        durations: Mapping[str, int],
    ) -> Iterable[dict[str, Any]]:
        made: dict[int, list[Storage]] = {}
        for activation in self.movable:
            made.setdefault(activation.born, []).append(activation.storage)
        version: dict[Storage, int] = {}
        for place, step in enumerate(self.steps):
            reads: list[dict[str, Any]] = [{"tensor": "held", "shape": [0]}]
            writes = []
            written = {*step.node.writes, *self._states_of(step, step.node.writes)}
            written |= {self._updated[s] for s in step.node.writes if s in self._updated}
            for storage in touches[place]:
                seen = version.get(storage, 0)
                reads.append({"tensor": storage.name, "shape": [0], **_version(seen)})
                if storage in written and not step.again:
                    version[storage] = seen + 1
                    writes.append({"tensor": storage.name, "shape": [0], **_version(seen + 1)})
            yield {
                "name": step.name,
                "kind": "custom",
                "phase": step.phase,
                "args": reads,
                "outputs": [{"tensor": s.name} for s in made.get(place, [])],
                **({"hidden": writes} if writes else {}),
                "workspace_bytes": max(0, rest[place] - constant),
                "replay": "never",
                "duration_ns": durations.get(step.node.name, 1000) // step.parts,
            }


def _tensor(name: str, role: str, size: int) -> dict[str, Any]:
    return {"name": name, "role": role, "dtype": "u8", "shape": [size]}


def _version(number: int) -> dict[str, int]:
    return {"version": number} if number else {}
