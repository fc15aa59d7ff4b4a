"""Which calls of modules and which operators can be run again in backward in place of keeping what
they gave to it.

A call is a candidate if its forward is a pure function of its tensor arguments, parameters and
buffers, by what Python shows (:mod:`neap.torch._calls`) and by what its operators read and write.
An operator is one if its output is saved, and all its inputs are (:mod:`neap.torch._recipe`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from neap.torch._calls import Call
from neap.torch._graph import Iteration
from neap.torch._recipe import KINDS
from neap.torch._recorder import Recorder
from neap.torch._storage import PLAIN, Saved, Storage, blocks
from neap.torch._watch import FORWARD

_ELSEWHERE = ("c10d", "_c10d", "neap::", "optimizer::", "triton", "rprim", "symm_mem", "fsdp")
"""Operators that other processes take part in, or that no dispatcher knows: not to be repeated."""
_NORM = "batch_norm"


@dataclass(eq=False)
class Range:
    """A call or an operator that can be run again.

    Attributes:
        call: the call; nothing for an operator.
        first, after: places of its operators.
        cut: the place at which running it again may stop: after what the last saved tensor needs.
        again: the place before which backward first asks for something that it saved.
        over: the place at which backward has asked for the last such thing.
        trigger: the saved tensor whose unpacking runs it again.
        brings: storages that only the call's own saved tensors keep after the forward.
        inputs: storages among its arguments that it needs to run again.
        saved: its saved tensors that are not parameters or buffers, by place in the iteration; of
            an operator those of its output.
        asked: the saved tensors that an operator is run again from.
        nanoseconds: how long running it again takes.
    """

    call: Call | None
    first: int
    after: int
    cut: int
    again: int
    over: int
    trigger: Saved
    brings: list[Storage]
    inputs: list[Storage]
    saved: list[Saved]
    nanoseconds: int = 0
    inside: list[Range] = field(default_factory=list)
    asked: list[Saved] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """The module's path and which call of it in the iteration; for an operator autograd's
        function and the first saved tensor.
        """
        if self.call is not None:
            return self.call.path, self.call.number
        return self.node, self.saved[0].place

    @property
    def node(self) -> str:
        """Autograd's function of an operator."""
        recipe = self.saved[0].recipe
        return "" if recipe is None else recipe[0]

    @property
    def bytes(self) -> int:
        """Bytes that it keeps from forward to backward, unless it is run again."""
        return sum(blocks(s.bytes) for s in self.brings)


def candidates(
    recorder: Recorder, found: Iteration, durations: Mapping[str, int], smallest: int
) -> tuple[list[Range], Counter[str]]:
    """All calls of the last iteration that can be run again and would give back memory, in order
    of their beginning, outer ones first; and why the others can't.
    """
    which = found.which
    packs = {s.place: s for s in recorder.packs if s.iteration == which}
    reasons: Counter[str] = Counter()
    ranges: list[Range] = []
    by_call: dict[Call, Range] = {}
    # Notes of calls come at their end, so inner ones first.
    for call in sorted((c for c in recorder.calls if c.iteration == which), key=_order):
        made = _judge(found, call, packs, smallest)
        if isinstance(made, str):
            reasons[made] += 1
            continue
        if made is None:
            continue
        made.nanoseconds = sum(
            durations.get(found.nodes[place].name, 1000) for place in range(made.first, made.cut)
        )
        outer = call.inside
        while outer is not None and outer not in by_call:
            outer = outer.inside
        if outer is not None:
            by_call[outer].inside.append(made)
        by_call[call] = made
        ranges.append(made)
    return ranges, reasons


def _order(call: Call) -> tuple[int, int, int]:
    depth, outer = 0, call.inside
    while outer is not None:
        depth, outer = depth + 1, outer.inside
    return call.first_pack, -call.after_pack, depth


def _judge(
    found: Iteration, call: Call, packs: Mapping[int, Saved], smallest: int
) -> Range | str | None:
    """The range of a call, why it is none, or nothing if it would not matter."""
    if call.first >= call.after or call.first_pack >= call.after_pack or call.after > found.end:
        return None
    first, after = found.place[call.first], found.place[call.after]
    saved = [packs[n] for n in range(call.first_pack, call.after_pack) if n in packs]
    saved = [s for s in saved if s.storage is None or not s.storage.persistent]
    if len(saved) == 0:
        return None
    nodes = found.nodes[first:after]
    born = {s for node in nodes for s in node.makes}
    brings = list(dict.fromkeys(s.storage for s in saved if s.storage is not None))
    brings = [s for s in brings if s in born]
    if sum(blocks(s.bytes) for s in brings) < smallest:
        return None
    where = f"{call.kind}: "
    if call.why_not is not None:
        return where + call.why_not
    asked = [s for s in saved if s.asked]
    if any(len(s.asked) > 1 for s in saved):
        return where + "backward asks twice for one of its saved tensors"
    if not asked or any(s.subclass for s in saved):
        return where + "it saves something other than plain tensors"
    trigger = min(asked, key=lambda s: s.first)
    last = max(s.last for s in asked)
    if last > found.end or trigger.first[0] < call.after:
        return where + "its backward is not in the same iteration, after it"
    again, over = found.place[trigger.first[0]], found.place[last] + 1
    if again >= len(found.nodes):
        return where + "backward asks for nothing of it"
    inputs = list(dict.fromkeys(s for s in call.storages if s is not None))
    norms = {s for s in call.norm_storages if s is not None}
    why = _impure(found, first, after, again, set(inputs), norms)
    if why is not None:
        return where + why
    cut = max(found.place.get(s.packed, -1) for s in saved) + 1
    return Range(
        call=call,
        first=first,
        after=after,
        cut=min(max(cut, first + 1), after),
        again=again,
        over=min(over, len(found.nodes)),
        trigger=trigger,
        brings=brings,
        inputs=[s for s in inputs if not s.persistent and s not in born],
        saved=saved,
    )


def _impure(
    found: Iteration, first: int, after: int, again: int, inputs: set[Storage], norms: set[Storage]
) -> str | None:
    """Why running the operators again would not give the same, or would change something."""
    born: set[Storage] = set()
    used: set[Storage] = set()
    for node in found.nodes[first:after]:
        if node.op is None or node.phase != FORWARD:
            return "it is not all forward operators that PyTorch dispatches"
        if node.kind.startswith(_ELSEWHERE):
            return "it talks to other processes, or runs kernels of its own"
        if node.op.generator:
            return "it draws random numbers from a generator of its own"
        born.update(node.makes)
        for storage in node.writes:
            if storage not in born and storage not in norms:
                return "it changes a tensor that was there before"
        for storage in node.reads:
            if storage in born or storage in norms:
                continue
            if not storage.persistent and storage not in inputs:
                return "it reads a tensor that is not among its arguments"
            used.add(storage)
    for node in found.nodes[after:again]:
        for storage in node.writes:
            if storage in used or storage in inputs:
                return "what it reads is changed before backward"
    for node in found.nodes[first:after]:
        if any(s in norms for s in node.writes) and not (
            _NORM in node.kind or node.kind.startswith("aten::add_")
        ):
            return "it changes running statistics by an operator of its own"
    return None


def operators(
    recorder: Recorder, found: Iteration, durations: Mapping[str, int], smallest: int
) -> list[Range]:
    """All operators of the last iteration that can be run again, those that give back most for
    their time first.
    """
    groups = (group for optimizer in recorder.optimizers for group in optimizer.param_groups)
    if any(type(parameter) not in PLAIN for group in groups for parameter in group["params"]):
        return []  # What a saved tensor of a sharded parameter sees is gone between its uses.
    which = found.which
    saved: dict[Storage, list[Saved]] = {}
    for one in recorder.packs:
        if one.iteration == which and one.storage is not None:
            saved.setdefault(one.storage, []).append(one)
    writes: dict[Storage, list[int]] = {}
    for place, node in enumerate(found.nodes):
        for storage in node.writes:
            writes.setdefault(storage, []).append(place)
    ranges = []
    for storage, packs in saved.items():
        if storage.bytes >= smallest and not storage.persistent:
            made = _operator(found, storage, packs, writes)
            if made is not None:
                name = found.nodes[made.first].name
                made.nanoseconds = durations.get(name, 1000)
                ranges.append(made)
    # Among equals the later first, since what an earlier one keeps has longer to be away.
    ranges.sort(key=lambda r: (-r.bytes / (r.nanoseconds + 1), -r.first))
    return ranges


def _operator(
    found: Iteration, storage: Storage, packs: list[Saved], writes: Mapping[Storage, list[int]]
) -> Range | None:
    """The range of the operator that makes a storage, given what autograd saved of it."""
    recipe, life = packs[0].recipe, found.lives.get(storage)
    if recipe is None or life is None or life.born is None or storage in writes:
        return None
    place = life.born
    node, (name, asked) = found.nodes[place], recipe
    if node.op is None or node.phase != FORWARD or node.random:
        return None
    if node.kind != KINDS[name].operator or node.makes[:1] != [storage]:
        return None
    if any(len(s.asked) != 1 or s.subclass for s in packs):
        return None
    trigger = min(packs, key=lambda s: s.first)
    last = max(s.last for s in packs)
    if last > found.end or trigger.first[0] <= node.op.index:
        return None
    again, over = found.place[trigger.first[0]], found.place[last] + 1
    if again >= len(found.nodes):
        return None
    inputs = list(dict.fromkeys(s.storage for s in asked if s.storage is not None))
    if any(s not in inputs and not s.persistent for s in node.reads):
        return None
    if any(place < at < again for s in node.reads for at in writes.get(s, ())):
        return None
    return Range(
        call=None,
        first=place,
        after=place + 1,
        cut=place + 1,
        again=again,
        over=min(over, len(found.nodes)),
        trigger=trigger,
        brings=[storage],
        inputs=[s for s in inputs if not s.persistent],
        saved=packs,
        asked=asked,
    )
