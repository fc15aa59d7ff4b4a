"""What iterations without a plan need, and which of them fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from neap.torch._graph import Iteration, alike_with, largest, made
from neap.torch._recorder import Recorder
from neap.torch._schedule import Fits, Needs
from neap.torch._spill import is_small
from neap.torch._storage import blocks
from neap.torch._wanted import bytes_of


@dataclass(frozen=True)
class Seen:
    """What was watched of one iteration.

    Attributes:
        sizes: the bytes of each tensor that autograd saved.
        made: the bytes of all that the iteration made.
        peak: what it needed, as measured; 0 where nothing is, on the CPU.
    """

    sizes: tuple[int, ...]
    made: int
    peak: int


def seen(recorder: Recorder) -> list[Seen]:
    """The iterations of a finished recording that are of the main kind."""
    # What is measured of the first one may be of those before.
    numbers = [n for n in alike_with(recorder, largest(recorder)) if n > 0]
    peaks = recorder.peaks
    return [
        Seen(
            tuple(bytes_of(one.view) for one in recorder.packs if one.iteration == n),
            made(recorder, n),
            peaks[n] if n < len(peaks) else 0,
        )
        for n in numbers
    ]


def fits(watched: Sequence[Seen], most: int, limit: int) -> Fits | None:
    """By which saved tensor an iteration shows that it needs no more than ``limit`` bytes; nothing
    if none of those that were watched did.

    Args:
        watched: iterations of one kind.
        most: what the largest of them needs.
        limit: the bytes.
    """
    most_made = max((one.made for one in watched), default=0)
    peaks = [one.peak or most * one.made // max(most_made, 1) for one in watched]
    best, most_fit = None, 0
    looked: set[tuple[int, ...]] = set()
    for place, sizes in enumerate(zip(*(one.sizes for one in watched))):
        if len(set(sizes)) > 1 and sizes not in looked:
            looked.add(sizes)
            one = _most(sorted(zip(sizes, peaks)), place, limit)
            fit = 0 if one is None else sum(size <= one[1] for size in sizes)
            if fit > most_fit:  # Of several the first, which is saved earliest.
                best, most_fit = one, fit
    return best


def _most(rows: Sequence[tuple[int, int]], place: int, limit: int) -> Fits | None:
    """Between the largest that fits with all that are smaller, and the next, peaks are taken to lie
    on a line: they grow at least as fast as the size, so that the line is above them.
    """
    fitting = 0
    while fitting < len(rows) and rows[fitting][1] <= limit:
        fitting += 1
    # What is no larger than one that does not fit shows nothing.
    while 0 < fitting < len(rows) and rows[fitting - 1][0] == rows[fitting][0]:
        fitting -= 1
    if fitting == 0:
        return None
    most, peak = rows[fitting - 1]
    if fitting < len(rows):
        next_most = rows[fitting][0]
        next_peak = max(peak for size, peak in rows if size == next_most)
        most += (limit - peak) * (next_most - most) // (next_peak - peak)
    return place, most


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
        lasts = storage is None or storage.persistent or is_small(storage.bytes)
        if one.iteration == found.which and storage is not None and not lasts:
            for at in {one.packed + 1, *(place for place, _ in one.asked)}:
                if at in found.place:
                    passes[found.place[at]] += storage.bytes
    needed = most_made = made = beside = 0
    stood, since = None, seldom
    saved = _saved(recorder, found)
    resident = found.resident()
    more = max(found.peak - max(resident, default=0), 0)
    for place, (node, stands) in enumerate(zip(found.nodes, resident)):
        makes = sum(blocks(storage.bytes) for storage in node.makes)
        if place in passes:  # Before the operator runs.
            if since >= seldom:
                stood, since, made = stands - makes - blocks(node.workspace), 0, 0
                beside = max(beside, stood - saved[place])
            since += passes[place]
        made += makes
        if stood is not None:
            needed, most_made = max(needed, stands - stood), max(most_made, made)
    return Needs(needed, most_made, beside + more)


def _saved(recorder: Recorder, found: Iteration) -> list[int]:
    """The bytes that stand during each operator of what autograd saved and may leave."""
    storages = {one.storage for one in recorder.packs if one.iteration == found.which}
    change = [0] * (len(found.nodes) + 1)
    for life in found.lives.values():
        if life.storage in storages and not is_small(life.storage.bytes):
            change[life.born or 0] += blocks(life.storage.bytes)
            change[min(life.death, len(found.nodes))] -= blocks(life.storage.bytes)
    return list(accumulate(change))
