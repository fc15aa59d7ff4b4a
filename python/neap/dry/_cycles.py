"""What reference cycles hold of the peak: memory that waits for Python's garbage collector.

When the collector runs depends on how many containers a script makes, so a peak with cycles in it
lies somewhere between two others: that of a script whose cycles go at once, and that of one whose
collector never runs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from neap.dry._lines import text
from neap.dry._places import Place
from neap.torch._quiet import quiet
from neap.torch._storage import blocks

if TYPE_CHECKING:
    from neap.dry._curve import Curve, Event
    from neap.dry._library import Library

HELD = 8
"""Containers of each kind, and elements of the longest tuple, that neap's calls hold at a time."""
LINES = 5
"""The lines that a report names."""


class Collections:
    """Tells the device library while the collector runs by itself; what a script asks of it with
    ``gc.collect`` happens when the script says, and counts as any other free.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._asked = 0
        self._collect = gc.collect

    def start(self) -> None:
        """From now on each collection is noted."""
        gc.callbacks.append(quiet(self._runs))
        self._collect = collect = gc.collect

        def asked(generation: int = 2) -> int:
            self._asked += 1
            try:
                found = collect(generation)
                if generation == 2:
                    _fill_stores()
                    collect(0)  # Counting begins here.
                return found
            finally:
                self._asked -= 1

        gc.collect = asked

    def _runs(self, phase: str, info: dict[str, int]) -> None:
        self._library.collecting(phase == "start" and not self._asked)

    def found(self, now: bool) -> set[int]:
        """Allocations that only the collector freed; with ``now`` those too that it frees now."""
        if now:
            self._collect()
        return set(self._library.collected_allocations())


@quiet
def _fill_stores() -> None:
    """Fills Python's stores of freed containers, which a full collection empties, with as many as
    neap's own calls hold at a time: else these are made anew, and count, in the next steps.
    """
    tuples = [(None,) * size for size in range(1, HELD) for _ in range(HELD)]
    dicts: list[dict[str, int]] = [{} for _ in range(HELD)]
    lists: list[list[int]] = [[] for _ in range(HELD)]
    del tuples, dicts, lists


def of_the_peak(
    curve: Curve,
    order: Iterable[Event],
    device: int,
    standing: dict[int, int],
    collected: set[int],
) -> dict[str, Any] | None:
    """What of ``standing``, the blocks at a device's peak, is in cycles, as the report has it;
    nothing where none is.
    """
    lines: dict[str, int] = {}
    for number, size in standing.items():
        if number in collected:
            where = _where(curve.place(number))
            lines[where] = lines.get(where, 0) + size
    if not lines:
        return None
    least, most = _between(curve, order, device, collected)
    rows = sorted(lines.items(), key=lambda item: (-item[1], item[0]))
    return {
        "bytes": sum(lines.values()),
        "lines": [{"line": line, "bytes": size} for line, size in rows[:LINES]],
        "peak_at_once_bytes": least,
        "peak_never_bytes": most,
    }


def _where(place: Place) -> str:
    _, phase, module, line = place
    return text(line) or (f"{phase} of {module}" if module else phase)


def _between(
    curve: Curve, order: Iterable[Event], device: int, collected: set[int]
) -> tuple[int, int]:
    """The peaks of two other runs. In one, what cycles hold goes when the optimizer step ends that
    it was made before, or at the next allocation where no step follows; in the other, never.
    """
    living: dict[int, tuple[int, int]] = {}
    due: dict[int, int] = {}
    """Of blocks in cycles that stand in the first run: bytes by number, in order."""
    steps = curve.memory.places.step_ends()
    step, least, most, now, never = 0, 0, 0, 0, 0
    for at, entry, number in order:
        if at != device:
            continue
        if entry["action"] == "alloc":
            while step < len(steps) and steps[step] <= number:
                step += 1
                now -= sum(due.values())
                due.clear()
            if step == len(steps):  # No step follows.
                now -= sum(due.values())
                due.clear()
            size = blocks(entry["size"])
            living[entry["addr"]] = number, size
            now, never = now + size, never + size
            if number in collected:
                due[number] = size
            least, most = max(least, now), max(most, never)
        elif entry["action"] == "free_completed" and entry["addr"] in living:
            number, size = living.pop(entry["addr"])
            if number in collected:
                now -= due.pop(number, 0)
            else:
                now, never = now - size, never - size
    return least, most
