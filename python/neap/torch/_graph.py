"""One iteration of a recording as the operators of a ``neap.graph``: lives, versions, lowered
updates, and the allocator's own figures.

A graph of version 1 has no word for memory that is held without being used, so such bytes count as
workspace of the operators during which they are held: results that the script's variables keep, and
what the allocator gave out before recording began (workspaces of cuBLAS, for one). That makes peaks
those of the framework; no plan moves these bytes.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._lower import Update, lower, settings
from neap.torch._recorder import Recorder
from neap.torch._storage import Op, Operand, Storage, blocks
from neap.torch._tensors import plain_tensors
from neap.torch._watch import BACKWARD, OPTIMIZE, state_tensors, unused

_AHEAD = 256
"""The most operators that one iteration runs more than another of its kind at one place."""
_ROW = 3
"""The operators in a row that must be alike where two iterations are alike again."""


@dataclass(eq=False)
class Node:
    """An operator of the finished graph."""

    kind: str
    phase: str
    module: str
    reads: list[Storage]
    writes: list[Storage]
    makes: list[Storage]
    workspace: int
    op: Op | None = None
    """What it was recorded as, unless it was lowered or only stands for where batch data comes
    from.
    """
    random: bool = False
    name: str = ""
    held: int = 0
    """Bytes that are held while it runs though no operator uses them any more."""


@dataclass(eq=False)
class Life:
    """When a storage is there, by place among the graph's operators."""

    storage: Storage
    born: int | None
    last: int
    death: int
    """The first place at which it is gone; the number of operators if it outlives the iteration."""
    until: int | None = None
    """Its like from the iteration before is freed before this place."""


@dataclass(eq=False)
class Iteration:
    """One recorded iteration: operators in order, and how long each storage lives."""

    name: str
    nodes: list[Node]
    lives: dict[Storage, Life]
    always: list[Storage]
    base: int
    """Bytes that the allocator has given out beyond all storages that were seen."""
    peak: int
    """The framework's own peak, before lowering: measured where there is a device."""
    steady: bool
    """The iteration before it ran the same operators."""
    optimizer: dict[str, Any] | None
    loss: Storage | None
    notes: list[str] = field(default_factory=list)
    start: int = 0
    end: int = 0
    which: int = 0
    """Its number in the recording."""
    place: dict[int, int] = field(default_factory=dict)
    """From recorded operators to places among ``nodes``."""

    def resident(self) -> list[int]:
        """Bytes that stand during each operator, as the framework has them."""
        count = len(self.nodes)
        change = [0] * (count + 1)
        for life in self.lives.values():
            size = blocks(life.storage.bytes)
            change[life.born or 0] += size
            change[min(life.last + 1, count)] -= size
            if life.until is not None:
                change[min(life.last + 1, count)] += size
                change[count] -= size
                change[0] += size
                change[life.until] -= size
        standing = sum(blocks(s.bytes) for s in self.always)
        found = []
        for place, node in enumerate(self.nodes):
            standing += change[place]
            found.append(standing + blocks(node.workspace) + node.held + self.base)
        return found


def iteration(
    recorder: Recorder, name: str, which: int | None = None, varies: bool = False
) -> Iteration:
    """The last iteration of a recording, or another by number, as operators and lives.

    Args:
        recorder: the recording.
        name: the graph's name.
        which: the number of the iteration.
        varies: whether the iteration before it may have had tensors of other sizes.

    Raises:
        ValueError: if no iteration was recorded.
    """
    which = len(recorder.cuts) - 2 if which is None else which
    if which < 0 or recorder.cuts[which] == recorder.cuts[which + 1]:
        raise ValueError(
            "no operator was recorded between two optimizer steps; is the model on another device?"
        )
    start, end = recorder.cuts[which], recorder.cuts[which + 1]
    _accumulate_in_place(recorder)
    ops = recorder.ops[start:end]
    before = recorder.ops[recorder.cuts[which - 1] : start] if which else []
    steady = which > 0 and _is_alike(recorder, which, varies)
    notes = list(recorder.problems)
    nodes, place = _nodes(recorder, ops, start, end, notes)
    found = Iteration(
        name=name,
        nodes=nodes,
        lives={},
        always=[],
        base=0,
        peak=0,
        steady=steady,
        optimizer=_optimizer(recorder),
        loss=None,
        notes=notes,
        start=start,
        end=end,
        which=which,
        place=place,
    )
    if which and not steady:
        notes.append("the iteration before it ran other operators, so it may not be a steady one")
    twins = dict(_twins(before, ops)) if steady else {}
    _lives(recorder, found, twins, which)
    _names(found)
    _base(recorder, found, which)
    return found


def kinds(recorder: Recorder) -> list[Any]:
    """What tells the iterations' kinds apart: which functions' tensors autograd saved, of which
    types and ranks. That of the operators since the last cut is the last.
    """
    found: list[list[Any]] = [[] for _ in recorder.cuts]
    for one in recorder.packs:
        dtype, shape, _, _ = one.view
        found[one.iteration].append((one.node, dtype, len(shape)))
    return found


def serves(kind: list[Any], other: list[Any]) -> bool:
    """Whether a plan for iterations of one kind serves those of the other: these save the same, or
    the same fewer times, as where a script takes its step after fewer batches.
    """
    if not other or kind[: len(other)] != other:
        return False
    return len(other) == len(kind) or len(other) % _repeats_after(kind) == 0


def _repeats_after(kind: list[Any]) -> int:
    """The length of the shortest row that the kind consists of."""
    # How much of the beginning each part of it ends with (Knuth, Morris and Pratt).
    border = [0] * len(kind)
    for n in range(1, len(kind)):
        at = border[n - 1]
        while at and kind[n] != kind[at]:
            at = border[at - 1]
        border[n] = at + (kind[n] == kind[at])
    length = len(kind) - border[-1]
    return length if len(kind) % length == 0 else len(kind)


def main_kind(recorder: Recorder) -> int | None:
    """The last iteration of the kind whose plan serves most, of those kinds that came after one
    that their plan serves; nothing if there is none.
    """
    all_kinds = kinds(recorder)
    pairs = enumerate(zip(all_kinds, all_kinds[1:]), start=1)
    row = [n for n, (before, kind) in pairs if serves(kind, before)]

    def served(which: int) -> int:
        return sum(serves(all_kinds[which], kind) for kind in all_kinds)

    return max(row, key=lambda n: (served(n), n), default=None)


def period(recorder: Recorder, alternates: bool = False) -> int:
    """How many iterations in a row repeat, with the operators since the last cut as the last one:
    the least number of which the last rows are alike, two rows of one iteration or three of
    several, which may be alike by chance; 0 if there is none. Where a script ``alternates``, rows
    of several that are not all alike count before one.
    """
    spans = _spans(recorder)
    lengths = list(range(1, len(spans) // 2 + 1))
    for length in [*lengths[1:], *lengths[:1]] if alternates else lengths:
        rows = 2 if length == 1 else 3
        begin = len(spans) - rows * length
        if begin < 0 or not all(map(_alike, spans[begin:-length], spans[begin + length :])):
            continue
        if not alternates or length == 1 or not all(_alike(spans[-1], s) for s in spans[-length:]):
            return length
    return 0


def _spans(recorder: Recorder) -> list[list[Op]]:
    """The operators of each iteration, and those since the last cut."""
    cuts = recorder.cuts
    return [recorder.ops[first:after] for first, after in zip(cuts, [*cuts[1:], None])]


def mostly_alike(recorder: Recorder) -> bool:
    """Whether more than half of the iterations are like the operators since the last cut, and none
    ran these on tensors of other sizes.
    """
    *before, last = _spans(recorder)
    like = sum(_alike(ops, last) for ops in before)
    return 1 + like > len(before) // 2 and like == sum(_alike(ops, last, False) for ops in before)


def largest(recorder: Recorder) -> int:
    """The number of the iteration of a finished recording that made most bytes, of those of the
    main kind that come after one of it, or else after one that its plan serves.
    """
    main = main_kind(recorder)
    if main is None:
        return len(recorder.cuts) - 2
    alike, served = alike_with(recorder, main), served_by(recorder, main)
    after = [n for n in alike if n - 1 in alike] or [n for n in alike if n - 1 in served]
    return max(after, key=lambda n: (made(recorder, n), n))


def alike_with(recorder: Recorder, which: int) -> list[int]:
    """The numbers of the iterations of a finished recording that are of this one's kind, maybe on
    tensors of other sizes.
    """
    found = kinds(recorder)[:-1]
    return [n for n, kind in enumerate(found) if kind == found[which]]


def served_by(recorder: Recorder, which: int) -> list[int]:
    """The numbers of the iterations of a finished recording that this one's plan serves."""
    found = kinds(recorder)[:-1]
    return [n for n, kind in enumerate(found) if serves(found[which], kind)]


def some_are_shorter(recorder: Recorder, which: int) -> bool:
    """Whether some of these end earlier than it."""
    return served_by(recorder, which) != alike_with(recorder, which)


def made(recorder: Recorder, which: int) -> int:
    """The bytes of all that an iteration made."""
    return sum(storage.bytes for op in operators(recorder, which) for storage in op.makes)


def operators(recorder: Recorder, which: int) -> list[Op]:
    """Those of an iteration of a finished recording."""
    first, after = recorder.cuts[which : which + 2]
    return recorder.ops[first:after]


def _is_alike(recorder: Recorder, which: int, varies: bool) -> bool:
    """Whether the iteration before this one ran the same operators on tensors of the same sizes,
    or with ``varies`` is of a kind that its plan serves.
    """
    if varies:
        return which - 1 in served_by(recorder, which)
    return _alike(operators(recorder, which - 1), operators(recorder, which))


def _alike(before: list[Op], ops: list[Op], sizes: bool = True) -> bool:
    return [_signature(op, sizes) for op in before] == [_signature(op, sizes) for op in ops]


def _signature(op: Op, sizes: bool) -> tuple[Any, ...]:
    made: Any = tuple(s.bytes for s in op.makes) if sizes else len(op.makes)
    return op.kind, op.phase, made, len(op.reads)


def matched(before: list[Op], ops: list[Op]) -> list[tuple[Op, Op]]:
    """Each operator with the one that stands for it in another iteration of its kind, which may
    have run some more or less.
    """
    if _alike(before, ops, False):
        return [*zip(before, ops)]
    first, second = ([_signature(op, False) for op in one] for one in (before, ops))
    found = []
    a = b = 0
    while a < len(first) and b < len(second):
        if first[a] == second[b]:
            found.append((before[a], ops[b]))
            skipped = 1, 1
        else:
            skipped = _until_alike(first[a : a + _AHEAD + _ROW], second[b : b + _AHEAD + _ROW])
        a, b = a + skipped[0], b + skipped[1]
    return found


def _until_alike(first: list[Any], second: list[Any]) -> tuple[int, int]:
    """After how many of either list the next ones are alike; one of both where none are."""
    for more in range(1, min(_AHEAD, max(len(first), len(second)))):
        if first[more : more + _ROW] == second[:_ROW]:
            return more, 0
        if first[:_ROW] == second[more : more + _ROW]:
            return 0, more
    return 1, 1


def _twins(before: list[Op], ops: list[Op]) -> list[tuple[Storage, Storage]]:
    """Each storage that the iteration makes, with the one that stood for it an iteration before."""
    both = matched(before, ops)
    return [(new, old) for a, b in both for old, new in zip(a.makes, b.makes)]


def _accumulate_in_place(recorder: Recorder) -> None:
    """Undoes what recording changed: autograd adds gradients up in place unless a dispatch mode is
    on.
    """
    same: dict[Storage, Storage] = {}

    def now(storage: Storage) -> Storage:
        while storage in same:
            storage = same[storage]
        return storage

    for op in recorder.ops:
        op.reads = [now(s) for s in op.reads]
        op.writes = [now(s) for s in op.writes]
        op.lists = [[None if s is None else now(s) for s in values] for values in op.lists]
        for operand in _operands(op):
            operand.storage = now(operand.storage)
        if not _adds_gradients(op):
            continue
        into = next((s for s in op.reads if s.born is not None and s.died == op.index + 1), None)
        made = op.makes[0]
        if into is None or into.bytes != made.bytes:
            continue
        same[made] = into
        into.died, into.uses = made.died, [*into.uses, *made.uses]
        into.role, into.name = made.role, made.name or into.name
        into.saved += made.saved
        op.kind, op.makes, op.writes = "aten::add_", [], [into]
        op.outputs = [_replaced(o, into) for o in op.outputs]
    recorder.gradients = [
        {now(s): owners for s, owners in step.items()} for step in recorder.gradients
    ]


def _replaced(operand: Operand | None, storage: Storage) -> Operand | None:
    if operand is not None:
        operand.storage = storage
    return operand


def _adds_gradients(op: Op) -> bool:
    full = [a for a in op.args if isinstance(a, Operand)]
    return (
        op.kind == "aten::add"
        and op.node is not None
        and len(op.makes) == 1
        and len(full) == 2
        and full[0].shape == full[1].shape
        and full[0].dtype == full[1].dtype
    )


def _operands(op: Op) -> list[Operand]:
    flat: list[Operand] = [o for o in [*op.outputs, *op.hidden] if o is not None]
    for value in op.args:
        if isinstance(value, Operand):
            flat.append(value)
        elif isinstance(value, list):
            flat += [x for x in value if isinstance(x, Operand)]
    return flat


def _nodes(
    recorder: Recorder, ops: list[Op], start: int, end: int, notes: list[str]
) -> tuple[list[Node], dict[int, int]]:
    """The operators with optimizer steps lowered, and where each recorded operator went."""
    updates: dict[int, list[Update]] = {}
    skip: set[int] = set()
    for number, (first, after, optimizer) in enumerate(recorder.steps):
        if first < start or after > end:
            continue
        step = recorder.ops[first:after]
        if not step:
            continue
        owned = _owned(recorder, optimizer)
        alone = len(recorder.optimizers) == 1
        lowered, why = lower(step, optimizer, recorder.gradients[number], owned, alone)
        if why is not None:
            notes.append(f"the step of {type(optimizer).__name__} stays as it was recorded: {why}")
            continue
        updates[first] = lowered
        skip.update(range(first, after))
    nodes: list[Node] = []
    place: dict[int, int] = {}
    met: set[Storage] = set()
    made: set[Storage] = set()
    for op in ops:
        if op.index in updates:
            first_update = len(nodes)
            for update in updates[op.index]:
                nodes.append(
                    Node(
                        update.kind, OPTIMIZE, "", update.reads, update.writes, [], update.workspace
                    )
                )
        if op.index in skip:
            place[op.index] = first_update
            continue
        for storage in op.reads + op.writes:
            # What came from outside the dispatcher: batch data made by other libraries, tensors
            # that foreign kernels made.
            if (
                storage not in met
                and storage.born is None
                and not storage.persistent
                and storage.seen >= start > 0
            ):
                kind = "neap::input" if recorder.device == "cpu" else "neap::outside"
                storage.role = "input" if recorder.device == "cpu" else storage.role
                nodes.append(Node(kind, op.phase, op.module, [], [], [storage], 0))
            met.add(storage)
        # A second `set_` of a storage makes nothing new.
        again = [storage for storage in op.makes if storage in made]
        if again:
            op.makes = [storage for storage in op.makes if storage not in made]
            op.writes = [*op.writes, *again]
        made.update(op.makes)
        met.update(op.makes)
        place[op.index] = len(nodes)
        workspace = 0
        if op.allocated is not None:
            before, _, most = op.allocated
            workspace = max(0, most - before - sum(blocks(s.bytes) for s in op.makes))
        if op.makes and from_host(op):
            for storage in op.makes:
                storage.role = "input"
        nodes.append(
            Node(
                op.kind,
                op.phase,
                op.module,
                op.reads,
                op.writes,
                op.makes,
                workspace,
                op,
                op.random,
            )
        )
    place[end] = len(nodes)
    # What comes after backward and before the step (clipping, unscaling) is the optimizer's work.
    last = max((i for i, node in enumerate(nodes) if node.phase == BACKWARD), default=len(nodes))
    for node in nodes[last + 1 :]:
        node.phase = OPTIMIZE
    return nodes, place


def _owned(recorder: Recorder, optimizer: Optimizer) -> list[list[Storage]]:
    """For each parameter its storage and those of its states."""
    owned = []
    for parameter, states in optimizer.state.items():
        if isinstance(parameter, torch.Tensor):
            tensors = [parameter, *(state for _, state in state_tensors(states))]
            found = [recorder.storages.find(p) for t in tensors for p in plain_tensors(t)]
            owned.append([s for s in found if s is not None])
    return owned


def from_host(op: Op) -> bool:
    """Whether an operator brings batch data from the host."""
    return op.kind in ("aten::_to_copy", "aten::to") and any(
        isinstance(a, dict) and "host" in a and a["shape"] for a in op.args
    )


def _lives(recorder: Recorder, found: Iteration, twins: dict[Storage, Storage], which: int) -> None:
    """How long each storage lives, and bytes that are held without use."""
    nodes, count = found.nodes, len(found.nodes)
    born: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    for place, node in enumerate(nodes):
        for storage in node.makes:
            born[storage] = place
        for storage in [*node.reads, *node.writes, *node.makes]:
            last[storage] = place
    old_gradients = {
        s.name: s
        for s in recorder.storages.all
        if s.role == "gradient" and s not in last and s.seen <= found.start
    }
    for storage, end in last.items():
        if storage not in born:
            found.always.append(storage)
            if storage.role == "activation":
                storage.role = "buffer"
            continue
        first = born[storage]
        death = (
            count if storage.died is None or storage.died > found.end else found.place[storage.died]
        )
        life = Life(storage, first, end, max(death, end + 1))
        found.lives[storage] = life
        if (death >= count and storage.role != "input") or storage.died is None:
            twin = twins.get(storage) or old_gradients.get(storage.name)
            if twin is None:
                twin = next((t for t in _unseen_twins(recorder, storage, which)), None)
            if twin is not None and twin.died is not None and found.start < twin.died <= found.end:
                freed = found.place[twin.died]
                if freed <= first:
                    life.until = freed if freed else None
                else:
                    for node in nodes[:freed]:
                        node.held += blocks(storage.bytes)
        if life.until is None:
            for node in nodes[end + 1 : life.death]:
                node.held += blocks(storage.bytes)
    # What has a name lives whether it is used or not.
    for storage in recorder.storages.all:
        if storage.persistent and storage not in last and not storage.reference.expired():
            found.always.append(storage)
    found.always.sort(key=lambda s: s.number)


def _unseen_twins(recorder: Recorder, storage: Storage, which: int) -> list[Storage]:
    """For batch data that no operator made: the last one's of the same shape."""
    if storage.born is not None or not which:
        return []
    return [
        s
        for s in recorder.storages.all
        if s.born is None
        and not s.persistent
        and s.seen < recorder.cuts[which]
        and s.shape == storage.shape
    ]


def _names(found: Iteration) -> None:
    """Unique names for operators and tensors."""
    count: dict[str, int] = {}
    taken: set[str] = set()
    renamed: dict[Storage, str] = {}
    for storage in found.always:
        renamed[storage] = unused(storage.name or "tensor", taken)
        taken.add(renamed[storage])
    for node in found.nodes:
        short = node.kind.split("::")[-1].lower() if "::" in node.kind else node.kind
        number = count.get(short, 0)
        count[short] = number + 1
        node.name = f"{short}_{number}"
        for place, storage in enumerate(node.makes):
            plain = node.name if place == 0 else f"{node.name}.{place}"
            renamed[storage] = unused(storage.name or plain, taken)
            taken.add(renamed[storage])
    for storage, name in renamed.items():
        storage.name = name


def _base(recorder: Recorder, found: Iteration, which: int) -> None:
    """What the allocator has given out beyond what was seen, and the framework's own peak."""
    found.base = 0
    resident = found.resident()
    if which >= len(recorder.allocated):
        found.peak = _recorded_peak(recorder, found)
        return
    # By most operators: autograd's sums of gradients take more while anything records.
    beyond = [
        node.op.allocated[2] - there
        for node, there in zip(found.nodes, resident)
        if node.op is not None and node.op.allocated is not None
    ]
    found.base = max(0, int(statistics.median_low(beyond))) if beyond else 0
    found.peak = recorder.peaks[which] if which < len(recorder.peaks) else max(resident)


def _recorded_peak(recorder: Recorder, found: Iteration) -> int:
    """The peak of the recorded operators by the deaths that were seen, where no allocator has
    measured it.
    """
    standing = sum(blocks(s.bytes) for s in found.always)
    change: dict[int, int] = {}
    for storage in recorder.storages.all:
        if storage in found.always or storage.persistent:
            continue
        first = storage.born if storage.born is not None else storage.seen
        after = storage.died if storage.died is not None else found.end
        if first >= found.end or after <= found.start:
            continue
        change[max(first, found.start)] = change.get(max(first, found.start), 0) + blocks(
            storage.bytes
        )
        change[after] = change.get(after, 0) - blocks(storage.bytes)
    most = standing
    for index in range(found.start, found.end):
        standing += change.get(index, 0)
        most = max(most, standing)
    return most


def _optimizer(recorder: Recorder) -> dict[str, Any] | None:
    if len(recorder.optimizers) != 1:
        return None
    values = settings(recorder.optimizers[0])
    if values is None:
        return None
    return {
        "class": type(recorder.optimizers[0]).__name__,
        "values": {k: _real(v) for k, v in sorted(values.items())},
    }


def _real(value: float) -> Any:
    if value != value:
        return {"float": "nan"}
    if value in (float("inf"), float("-inf")):
        return {"float": "inf" if value > 0 else "-inf"}
    return value
