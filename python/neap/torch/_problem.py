"""A recording for the planner: operators, lives, saved tensors, and what can run again.

The planner's process reads this as JSON; storages, saved tensors and ranges are numbers there, by
their places in lists, and times are places among operators.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from neap.torch import _states
from neap.torch._graph import Iteration, Life
from neap.torch._ranges import Range
from neap.torch._recorder import Recorder
from neap.torch._schedule import MOST_ASKED
from neap.torch._storage import Saved, Storage

_ROLES = {"parameter": "parameter", "optimizer_state": "optimizer_state"}


class Problem:
    """One recording as the planner sees it.

    Args:
        recorder: a recording with saved tensors and calls.
        found: its iteration that is planned.
        ranges: what may run again in it.
        soon: the iteration with updates inside backward, with what may run again in that.
        lend: parameters that may leave during backward.
        durations: each operator's time in nanoseconds.
        move_states: whether optimizer states may stay on the host between steps.

    Attributes:
        packs: what autograd saved in the iteration, in order.
        packed: how many of these are saved before backward begins, where it runs once.
        storages: every storage, by its number in the problem.
        form: the problem as the planner's process reads it.
    """

    def __init__(
        self,
        recorder: Recorder,
        found: Iteration,
        ranges: Sequence[Range],
        soon: tuple[Iteration, Sequence[Range]] | None,
        lend: Collection[Storage],
        durations: dict[str, int],
        move_states: bool,
    ) -> None:
        self.packs: list[Saved] = [s for s in recorder.packs if s.iteration == found.which]
        calls = [c[1:] for c in recorder.backwards if c[0] == found.which]
        self.packed = calls[0][0] if len(calls) == 1 else 0
        self._durations = durations
        iterations = [(found, ranges), *([soon] if soon is not None else [])]
        known: set[Storage] = set(lend)
        for iteration, several in iterations:
            known.update(iteration.lives)
            for node in iteration.nodes:
                known.update(node.reads, node.writes, node.makes)
            for one in several:
                known.update(one.brings, one.inputs)
        known.update(s.storage for s in self.packs if s.storage is not None)
        self.storages = sorted(known, key=lambda s: s.number)
        self._number = {storage: n for n, storage in enumerate(self.storages)}
        forms = [self._iteration(iteration, several) for iteration, several in iterations]
        self.form: dict[str, Any] = {
            "name": found.name,
            "storages": [
                {
                    "name": s.name,
                    "bytes": s.bytes,
                    "role": _ROLES.get(s.role, "other"),
                    "dtype": s.dtype,
                }
                for s in self.storages
            ],
            "usual": forms[0],
            "soon": forms[1] if soon is not None else None,
            "lend": self._numbers(sorted(lend, key=lambda s: s.number)),
            "backward": _backward(found, *calls[0][1:]) if len(calls) == 1 else None,
            "multi_tensor": _multi_tensor(recorder),
            "move_states": move_states,
            "smallest": _states.SMALLEST,
            "piece": {"bytes": _states.PIECE_BYTES, "parameters": _states.PIECE},
        }

    def _numbers(self, storages: Collection[Storage]) -> list[int]:
        return [self._number[s] for s in storages]

    def _iteration(self, found: Iteration, ranges: Sequence[Range]) -> dict[str, Any]:
        number = {id(one): n for n, one in enumerate(ranges)}
        inside = {id(inner): number[id(one)] for one in ranges for inner in one.inside}
        return {
            "operators": [
                {
                    "name": node.name,
                    "ns": self._durations.get(node.name, 1000),
                    "phase": node.phase,
                    "update": node.op is None,
                    "workspace": node.workspace,
                    "standing": standing,
                    "reads": self._numbers(node.reads),
                    "writes": self._numbers(node.writes),
                    "makes": self._numbers(node.makes),
                }
                for node, standing in zip(found.nodes, found.resident())
            ],
            "lives": [self._life(found, life) for life in found.lives.values()],
            "packs": [self._pack(found, saved) for saved in self.packs],
            "ranges": [self._range(one, inside.get(id(one))) for one in ranges],
        }

    def _life(self, found: Iteration, life: Life) -> dict[str, Any]:
        storage, alone = life.storage, life.storage.alone
        end = len(found.nodes) if life.until is not None else life.death
        let_go, pack = end, 0
        if alone is not None and found.start < alone <= found.end:
            let_go, pack = min(found.place[alone], end), storage.alone_from
        return {
            "storage": self._number[storage],
            "born": life.born,
            "end": end,
            "let_go": let_go,
            "let_go_pack": pack,
            "until": life.until,
            "held": bool(storage.saved) and alone is None,
        }

    def _pack(self, found: Iteration, saved: Saved) -> dict[str, Any]:
        place, count = found.place, len(found.nodes)
        asked = [one for one in saved.asked[:MOST_ASKED] if one[0] <= found.end]
        return {
            "storage": None if saved.storage is None else self._number[saved.storage],
            "module": saved.module,
            "packed": place.get(saved.packed + 1, count),
            "order": saved.order,
            "asked": [{"place": place.get(at, count), "order": order} for at, order in asked],
        }

    def _range(self, one: Range, inside: int | None) -> dict[str, Any]:
        return {
            "name": one.saved[0].module if one.call is None else one.call.path,
            "call": None if one.call is None else [one.call.first_pack, one.call.after_pack],
            "inside": inside,
            "first": one.first,
            "cut": one.cut,
            "again": one.again,
            "over": one.over,
            "order": one.trigger.first[1],
            "brings": self._numbers(one.brings),
            "inputs": self._numbers(one.inputs),
            "saved": [s.place for s in one.saved],
            "asked": [s.place for s in one.asked],
        }


def _backward(found: Iteration, first: int, after: int) -> dict[str, int] | None:
    """Where backward runs, if that lies within the iteration."""
    if first < found.start:
        return None
    count = len(found.nodes)
    begin, end = found.place.get(first, count), found.place.get(after, count)
    return {"begin": begin, "end": end} if begin <= end else None


def _multi_tensor(recorder: Recorder) -> bool:
    """Whether optimizer steps update many parameters by one operator."""
    steps = (recorder.ops[first:after] for first, after, _ in recorder.steps)
    return any("_foreach" in op.kind for ops in steps for op in ops)
