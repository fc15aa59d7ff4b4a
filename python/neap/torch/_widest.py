"""An iteration as large as any of its kind that was watched: each tensor has the most bytes that
it had in one of them. A plan for it serves them all, and every iteration between them.
"""

from __future__ import annotations

from collections.abc import Iterable

from neap.torch._calls import View
from neap.torch._graph import (
    Iteration,
    alike_with,
    iteration,
    kinds,
    largest,
    made,
    matched,
    operators,
)
from neap.torch._grown import TOO_LARGE, as_large
from neap.torch._recorder import Recorder
from neap.torch._storage import Storage
from neap.torch._wanted import bytes_of

Former = tuple[Recorder, Iteration]


def widest(recorder: Recorder, name: str, former: Former | None = None) -> Iteration:
    """The iterations of the main kind as one; the largest alone, where its tensors vary apart from
    each other, so that all of them at their largest would be none that comes.

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
    others = [(recorder, number) for number in alike]
    if former is not None and kinds(former[0])[former[1].which] == kinds(recorder)[which]:
        others.append((former[0], former[1].which))
    wider: dict[Storage, Storage] = {}
    for other, number in others:
        _look(recorder, which, other, number, wider)
    real = max(made(recorder, which), *(made(*other) for other in others), 1)
    more = sum(like.bytes - one.bytes for one, like in wider.items() if one.born is not None)
    if made(recorder, which) + more > real + real // TOO_LARGE:
        return found
    for one, like in wider.items():
        one.bytes, one.shape = like.bytes, like.shape
    for other, number in others:
        _widen(recorder, which, other, number)
    return as_large(recorder, found)


def _look(
    recorder: Recorder, which: int, other: Recorder, number: int, wider: dict[Storage, Storage]
) -> None:
    """Finds storages that are larger in the other iteration than in any before."""
    for op, twin in matched(operators(recorder, which), operators(other, number)):
        for storage, like in [*zip(op.makes, twin.makes), *zip(op.reads, twin.reads)]:
            if not storage.persistent and like.bytes > wider.get(storage, storage).bytes:
                wider[storage] = like


def _widen(recorder: Recorder, which: int, other: Recorder, number: int) -> None:
    """Saved tensors and what calls were given become as large as in the other iteration."""
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


def _wider(view: View, other: View) -> View:
    return other if bytes_of(other) > bytes_of(view) else view
