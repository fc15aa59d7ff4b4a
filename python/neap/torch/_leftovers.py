"""Storages of an iteration that outlive it: in reference cycles, which only Python's garbage
collector frees, or kept by the script.

No plan knows how many of them stand at once. Where an iteration leaves cycles, they are collected
at the end of each iteration, so that the plan's peak holds; what the script keeps is named, and
then no budget is claimed that was not measured.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterable

from neap.torch._graph import Iteration
from neap.torch._recorder import Recorder
from neap.torch._report import Report, size
from neap.torch._storage import Storage, blocks
from neap.torch._watch import BACKWARD, FORWARD

SMALLEST = 256 << 10
"""Fewer bytes than this are a script's losses and counters."""
_ROUNDS = 256
"""The most collections at an iteration's end. In a chain of autograd's functions a cycle holds the
one before it, so that each collection frees only the last.
"""
_LISTED = 3
"""The makers that a note names."""


class Leftovers:
    """What outlives the iterations of one script.

    Args:
        report: where it is noted.
        say: prints a line.
        standing: the bytes that the device's allocator has given out now; 0 where there is none.
    """

    def __init__(
        self, report: Report, say: Callable[[str], None], standing: Callable[[], int]
    ) -> None:
        self.collects = False
        """Whether the ends of iterations collect."""
        self._report = report
        self._say = say
        self._standing = standing
        self._least = 0
        """The fewest bytes that stood at the end of an iteration by the present plan."""

    def watched(self, recorder: Recorder) -> bool:
        """After an iteration was recorded, before it is cut off: whether it shows less than it
        should, so that another must be recorded.
        """
        if len(recorder.cuts) < 2:
            return False
        if self.collects:
            self._collect()
            recorder.look()
        # A script may hold the last iteration's loss until the next is there.
        left = [*_left(recorder, 2), *_left(recorder, 3)]
        if _bytes(left) < SMALLEST:
            return False
        if not self.collects:
            kept = _uncollected(recorder, left)
            freed = [storage for storage in left if storage not in set(kept)]
            if _bytes(freed) >= SMALLEST:
                count = len({bisect.bisect(recorder.cuts, one.born or 0) for one in freed})
                each = _bytes(freed) // count
                self._begin(f"{size(each)} of an iteration", _makers(recorder, freed, count))
                return True
            left = kept
        if _bytes(left) < SMALLEST:
            return False
        if len(recorder.cuts) < 3:
            return True  # One iteration more shows whether more is kept with each.
        older = _left(recorder, 3)
        if _bytes(older) >= SMALLEST:
            self._keeps(_bytes(older), _makers(recorder, older, 1))
        return False

    def acts(self) -> None:
        """Another plan acts."""
        self._least = 0

    def ended(self) -> None:
        """After an iteration that a plan acts in."""
        if self.collects:
            self._collect()
        standing = self._standing()
        if not self._least or standing < self._least:
            self._least = standing
        if standing < self._least + max(SMALLEST, self._least // 50):
            return
        now = standing
        for _ in range(_ROUNDS):
            gc.collect()
            before, now = now, self._standing()
            if now == before:
                break
        if not self.collects and standing - now >= SMALLEST:
            self._begin(f"{size(standing - now)}", "")
        # What the script keeps is asked about once.
        self._least = max(self._least, now)

    def _collect(self) -> None:
        """Collects what the iteration before left; the last one's graph is still held by its
        loss.
        """
        for _ in range(_ROUNDS):
            if not gc.collect():
                break

    def _begin(self, what: str, makers: str) -> None:
        self.collects = True
        note = (
            f"{what} were in reference cycles{makers}: they are collected at the end of each "
            "iteration, which takes time"
        )
        self._report.notes.append(note)
        self._say(f"neap: {note}")

    def _keeps(self, count: int, makers: str) -> None:
        self._report.kept_bytes = count
        note = (
            f"the script keeps {size(count)} of each iteration{makers}: what stands grows beyond "
            "the predicted peak"
        )
        self._report.notes.append(note)
        self._say(f"neap: {note}")


def unmovable(recorder: Recorder, found: Iteration) -> str | None:
    """What stands from forward to backward although autograd saved none of it, in words: selective
    checkpointing keeps outputs by itself, and so does a script that puts them aside.
    """
    kept = [
        life.storage
        for life in found.lives.values()
        if life.born is not None
        and life.storage.born is not None
        and not life.storage.saved
        and life.storage.role == "activation"
        and found.nodes[life.born].phase == FORWARD
        and found.nodes[life.last].phase == BACKWARD
    ]
    if _bytes(kept) < SMALLEST:
        return None
    return (
        f"{size(_bytes(kept))} stay on the device from forward to backward and can't move, since "
        "something other than autograd holds them, such as selective checkpointing"
        + _makers(recorder, kept, 1)
    )


def _uncollected(recorder: Recorder, left: list[Storage]) -> list[Storage]:
    """Those of these storages that no number of collections frees."""
    for _ in range(_ROUNDS):
        gc.collect()
        recorder.look()
        rest = [storage for storage in left if not storage.reference.expired()]
        if len(rest) == len(left):
            break
        left = rest
    return left


def _left(recorder: Recorder, before: int) -> list[Storage]:
    """What the iteration this many cuts ago made and still stands."""
    if len(recorder.cuts) < before:
        return []
    first, after = recorder.cuts[-before], recorder.cuts[-before + 1]
    return [
        storage
        for storage in recorder.storages.all
        if storage.born is not None
        and first <= storage.born < after
        and storage.role in ("activation", "input")
        and not storage.persistent
        and not storage.reference.expired()
    ]


def _bytes(storages: Iterable[Storage]) -> int:
    return sum(blocks(storage.bytes) for storage in storages)


def _makers(recorder: Recorder, storages: Iterable[Storage], iterations: int) -> str:
    """The operators that made these in a number of iterations, those of most bytes first."""
    made: dict[str, int] = {}
    for storage in storages:
        op = recorder.ops[storage.born or 0]
        name = f"{op.kind} in {op.module}" if op.module else op.kind
        made[name] = made.get(name, 0) + blocks(storage.bytes)
    most = sorted(made.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name} ({size(count // iterations)})" for name, count in most[:_LISTED])
    return f", made by {named}" + (" and others" if len(most) > _LISTED else "")
