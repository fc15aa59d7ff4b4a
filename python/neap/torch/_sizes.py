"""What iterations without a plan need: which of them fit, and how much comes and goes unseen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from neap.torch._graph import Iteration, alike_with, made
from neap.torch._recorder import Recorder
from neap.torch._schedule import Fits
from neap.torch._spill import SMALLEST
from neap.torch._storage import blocks
from neap.torch._wanted import bytes_of


def fits(recorder: Recorder, found: Iteration, limit: int) -> Fits | None:
    """By which saved tensor an iteration shows that it needs no more than ``limit`` bytes; nothing
    if none of those that were watched did.

    Args:
        recorder: a finished recording.
        found: one of its iterations; those of its kind are compared.
        limit: the bytes.
    """
    # What is measured of the first one may be of those before.
    numbers = [number for number in alike_with(recorder, found.which) if number > 0]
    views = {n: _bytes(recorder, n) for n in numbers}
    place = next((at for at, sizes in enumerate(zip(*views.values())) if len(set(sizes)) > 1), None)
    if place is None:
        return None
    seen = sorted((views[n][place], _peak(recorder, n, found)) for n in numbers)
    return _most(seen, place, limit)


def _most(seen: Sequence[tuple[int, int]], place: int, limit: int) -> Fits | None:
    """Between the largest that fits with all that are smaller, and the next, peaks are taken to lie
    on a line: they grow at least as fast as the size, so that the line is above them.
    """
    fitting = 0
    while fitting < len(seen) and seen[fitting][1] <= limit:
        fitting += 1
    if fitting == 0:
        return None
    most, peak = seen[fitting - 1]
    if fitting < len(seen):
        next_most, next_peak = seen[fitting]
        most += (limit - peak) * (next_most - most) // (next_peak - peak)
    return place, most


def _bytes(recorder: Recorder, which: int) -> list[int]:
    """The bytes of each tensor that autograd saved in an iteration."""
    return [bytes_of(one.view) for one in recorder.packs if one.iteration == which]


def _peak(recorder: Recorder, number: int, found: Iteration) -> int:
    """What the iteration of this number needed, as measured; on the CPU, where nothing is, by what
    it made.
    """
    if recorder.peaks:
        return recorder.peaks[number]
    return found.peak * made(recorder, number) // made(recorder, found.which)


def unseen(recorder: Recorder, found: Iteration, seldom: int) -> tuple[int, int]:
    """The bytes that an iteration needs beyond what stood at the last look, and those that it makes
    from one look to the next.

    Args:
        recorder: a finished recording.
        found: one of its iterations.
        seldom: autograd looks when it saves a tensor that may leave, or asks for one, if so many
            bytes were saved or asked for since the last look.
    """
    passes: Counter[int] = Counter()
    for one in recorder.packs:
        storage = one.storage
        lasts = storage is None or storage.persistent or storage.bytes < SMALLEST
        if one.iteration == found.which and storage is not None and not lasts:
            for at in (one.packed + 1, one.unpacked, one.last_unpacked):
                if at in found.place:
                    passes[found.place[at]] += storage.bytes
    needed = most_made = made = 0
    seen, since = None, seldom
    for place, (node, stands) in enumerate(zip(found.nodes, found.resident())):
        made += sum(blocks(storage.bytes) for storage in node.makes)
        if seen is not None:
            needed, most_made = max(needed, stands - seen), max(most_made, made)
        if place in passes:
            if since >= seldom:
                seen, since, made = stands, 0, 0
            since += passes[place]
    return needed, most_made


def saved(recorder: Recorder, found: Iteration) -> int:
    """The bytes of all that autograd saved and that does not last."""
    storages = {one.storage for one in recorder.packs if one.iteration == found.which}
    return sum(one.bytes for one in storages if one is not None and not one.persistent)
