"""An iteration that is larger than those that were watched, predicted from what autograd saved in
iterations by the plan.

While a plan acts only saved tensors are seen. Of all else (gradients, what is freed at once) the
watched iterations say how it grows: its bytes follow from those of some saved tensor, exactly where
both are the same product of extents or one is a multiple of the other and a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from neap.torch._calls import View
from neap.torch._wanted import bytes_of

if TYPE_CHECKING:
    from neap.torch._graph import Iteration
    from neap.torch._recorder import Recorder
    from neap.torch._storage import Storage

Sizes = tuple[int, ...]
"""The bytes of one thing in each of the watched iterations."""
Views = dict[int, View]
"""Saved tensors by place in the iteration."""

TOO_LARGE = 5
"""An iteration that makes more than any real one by more than this part of it would have a plan
that moves too much.
"""


class Larger:
    """The sizes of iterations that were larger than the planned one.

    Attributes:
        most: the largest views that were seen.
        largest: those of the iteration that saved most bytes.
        saved: the bytes that it saved.
    """

    def __init__(self) -> None:
        self.most: Views = {}
        self.largest: Views = {}
        self.saved = 0

    def ended(self, views: Views, saved: int) -> None:
        """Such an iteration has ended."""
        for place, view in views.items():
            if place not in self.most or bytes_of(view) > bytes_of(self.most[place]):
                self.most[place] = view
        if saved > self.saved:
            self.saved, self.largest = saved, views


def grown(recorder: Recorder, known: Iteration, larger: Larger) -> Iteration | None:
    """The iteration that was planned for, but with saved tensors as large as they were seen; the
    largest that was seen, where all of them at their largest would be none that comes. Nothing if
    the watched iterations don't say how all else grows.

    Args:
        recorder: a finished recording of iterations whose sizes vary.
        known: what :func:`neap.torch._widest.widest` gave for it, or this function.
        larger: what was seen.
    """
    from neap.torch._graph import alike_with

    which = known.which
    packs = [one for one in recorder.packs if one.iteration == which]
    others = [n for n in alike_with(recorder, which) if n != which]
    columns = list(
        zip(*([bytes_of(one.view) for one in recorder.packs if one.iteration == n] for n in others))
    )
    if not any(len(set(column)) > 1 for column in columns):
        return None
    views = [one.view for one in packs]
    real = max(larger.saved, sum(map(bytes_of, views)))
    most = [max(view, larger.most.get(n, view), key=bytes_of) for n, view in enumerate(views)]
    comes = sum(map(bytes_of, most)) <= real + real // TOO_LARGE
    largest = [larger.largest.get(n, view) for n, view in enumerate(views)]
    views = most if comes else largest
    now: dict[Sizes, int] = {}
    for one, view, column in zip(packs, views, columns):
        one.view = view
        now[column] = max(bytes_of(view), now.get(column, 0))
    size: dict[Sizes, int] = {}
    for storage, column in _columns(recorder, which, others):
        if column not in size:
            size[column] = predicted(column, now)
        storage.bytes = max(storage.bytes, size[column]) if comes else size[column]
    return as_large(recorder, known)


def as_large(recorder: Recorder, known: Iteration) -> Iteration:
    """A known iteration again, after its tensors in the recording became larger. What else its
    operators need and what lies below it stay as they were.
    """
    from neap.torch._graph import iteration

    wide = iteration(recorder, known.name, known.which, True)
    for node, before in zip(wide.nodes, known.nodes):
        node.workspace = before.workspace
    wide.base = known.base
    wide.peak = max(known.peak, *wide.resident())
    return wide


def _columns(
    recorder: Recorder, which: int, others: Sequence[int]
) -> Iterable[tuple[Storage, Sizes]]:
    """Each storage of the iteration that has its like in all others, with the bytes there."""
    from neap.torch._graph import matched, operators

    found: dict[Storage, dict[int, int]] = {}
    for number in others:
        for op, twin in matched(operators(recorder, which), operators(recorder, number)):
            for storage, like in [*zip(op.makes, twin.makes), *zip(op.reads, twin.reads)]:
                if not storage.persistent:
                    found.setdefault(storage, {})[number] = like.bytes
    for storage, sizes in found.items():
        if len(sizes) == len(others):
            yield storage, tuple(sizes[number] for number in others)


def predicted(column: Sizes, now: Mapping[Sizes, int]) -> int:
    """The bytes of what had these in the watched iterations.

    Args:
        column: the bytes in each of them.
        now: what saved tensors have, by the bytes in each of them.
    """
    if len(set(column)) == 1:
        return column[0]
    if column in now:
        return now[column]
    for other, size in now.items():
        at = next((n for n, one in enumerate(other) if one != other[0]), 0)
        if not at:
            continue
        slope = Fraction(column[at] - column[0], other[at] - other[0])
        if slope >= 0 and all(
            one - column[0] == slope * (two - other[0]) for one, two in zip(column, other)
        ):
            return column[0] + int(slope * (size - other[0]))
    most = [Fraction(size, max(other)) for other, size in now.items() if max(other)]
    return int(max(column) * max([Fraction(1), *most]))
