"""What iterations without a plan need, and which of them fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from neap.torch._graph import Iteration, alike_with, made
from neap.torch._recorder import Recorder
from neap.torch._schedule import Fits, Needs
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
    peaks = [_peak(recorder, number, found) for number in numbers]
    best, most_fit = None, 0
    seen_before: set[tuple[int, ...]] = set()
    for place, sizes in enumerate(zip(*(_bytes(recorder, number) for number in numbers))):
        if len(set(sizes)) > 1 and sizes not in seen_before:
            seen_before.add(sizes)
            one = _most(sorted(zip(sizes, peaks)), place, limit)
            fit = 0 if one is None else sum(size <= one[1] for size in sizes)
            if fit > most_fit:  # Of several the first, which is saved earliest.
                best, most_fit = one, fit
    return best


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


def needs(recorder: Recorder, found: Iteration, seldom: int) -> Needs:
    """What an iteration needs without a plan.

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
        makes = sum(blocks(storage.bytes) for storage in node.makes)
        if place in passes:  # Before the operator runs.
            if since >= seldom:
                seen, since, made = stands - makes - blocks(node.workspace), 0, 0
            since += passes[place]
        made += makes
        if seen is not None:
            needed, most_made = max(needed, stands - seen), max(most_made, made)
    return Needs(needed, most_made, found.peak - _saved(recorder, found))


def _saved(recorder: Recorder, found: Iteration) -> int:
    """The bytes of all that autograd saved and that does not last."""
    storages = {one.storage for one in recorder.packs if one.iteration == found.which}
    return sum(one.bytes for one in storages if one is not None and not one.persistent)
