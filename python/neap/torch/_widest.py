"""An iteration as large as any of its kind that was watched: each tensor has the most bytes that
it had in one of them. A plan for it serves them all, and every iteration between them.
"""

from __future__ import annotations

from collections.abc import Iterable

from neap.torch._calls import View
from neap.torch._graph import Iteration, alike_with, iteration, kinds, largest, matched, operators
from neap.torch._recorder import Recorder
from neap.torch._storage import Storage
from neap.torch._wanted import bytes_of

Former = tuple[Recorder, Iteration]


def widest(recorder: Recorder, name: str, former: Former | None = None) -> Iteration:
    """The iterations of the main kind as one.

    Args:
        recorder: a finished recording.
        name: the graph's name.
        former: an earlier recording, and what this gave for it; it counts if its kind is the same.

    Raises:
        ValueError: if no iteration was recorded.
    """
    which = largest(recorder)
    alike = [n for n in alike_with(recorder, which) if n != which]
    found = iteration(recorder, name, which, True)
    if not found.steady:
        return found
    for number in alike:
        _widen(recorder, which, recorder, number)
    if former is not None:
        before, number = former[0], former[1].which
        if kinds(before)[number] == kinds(recorder)[which]:
            _widen(recorder, which, before, number)
    wide = iteration(recorder, name, which, True)
    for node, alone in zip(wide.nodes, found.nodes):
        node.workspace = alone.workspace
    wide.base = found.base
    wide.peak = max(found.peak, *wide.resident())
    return wide


def _widen(recorder: Recorder, which: int, other: Recorder, number: int) -> None:
    """Tensors of one iteration become as large as they are in the other, if they are smaller."""
    for op, twin in matched(operators(recorder, which), operators(other, number)):
        pairs = [*zip(op.makes, twin.makes), *zip(op.reads, twin.reads)]
        for storage, like in pairs:
            if not storage.persistent and like.bytes > storage.bytes:
                _become(storage, like)
    both = ((recorder, which), (other, number))
    for one, like_it in zip(*([s for s in r.packs if s.iteration == n] for r, n in both)):
        one.view = _wider(one.view, like_it.view)
    theirs = {(c.path, c.number): c for c in other.calls if c.iteration == number}
    for call in (c for c in recorder.calls if c.iteration == which):
        like_call = theirs.get((call.path, call.number))
        if like_call is None:
            continue
        views: Iterable[tuple[View | None, View | None]] = zip(call.views, like_call.views)
        call.views = [a if a is None or b is None else _wider(a, b) for a, b in views]


def _become(storage: Storage, like: Storage) -> None:
    storage.bytes, storage.shape = like.bytes, like.shape


def _wider(view: View, other: View) -> View:
    return other if bytes_of(other) > bytes_of(view) else view
