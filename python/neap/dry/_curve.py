"""The allocator's events played once more: peaks by phase, and what stood at each."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neap.dry._cycles import of_the_peak
from neap.dry._lines import text
from neap.dry._places import OTHER, Place
from neap.torch._storage import blocks
from neap.torch._watch import BACKWARD, OPTIMIZE

if TYPE_CHECKING:
    from neap.dry._memory import Memory

STEP = "step"
CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer_state",
    "buffer",
    "input",
    "activation",
    "workspace",
    "other",
)
LARGEST = 20
"""Blocks that a report lists."""
MARKS = 100_000
"""Beginnings of phases that a report lists."""

Event = tuple[int, dict[str, Any], int]
"""Device, the allocator's entry, and the allocation's number for entries that allocate."""


def merged(traces: list[list[dict[str, Any]]], devices: list[int]) -> Iterator[Event]:
    """The events of all devices in the order in which they happened.

    ``devices`` has the device of each allocation, in order. The first ones may have come before the
    allocator's history began.
    """
    before = [0] * len(traces)
    for device in devices:
        if device < len(traces):
            before[device] += 1
    for device, trace in enumerate(traces):
        before[device] -= sum(entry["action"] == "alloc" for entry in trace)
    rest = [iter(trace) for trace in traces]
    for number, device in enumerate(devices):
        if device >= len(traces):
            continue
        if before[device] > 0:
            before[device] -= 1
            continue
        for entry in rest[device]:
            if entry["action"] == "alloc":
                yield device, entry, number
                break
            yield device, entry, -1
    number = len(devices)
    for device, entries in enumerate(rest):
        for entry in entries:
            allocates = entry["action"] == "alloc"
            yield device, entry, number if allocates else -1
            number += allocates


class Curve:
    """Plays the events and remembers each phase's highest moment."""

    def __init__(
        self, memory: Memory, records: list[tuple[int, int]], workspaces: Collection[int]
    ) -> None:
        self.memory = memory
        self.records = records
        """Place and device of each allocation, in order."""
        self.workspaces = workspaces
        """The allocations in which cuBLAS works."""
        self.ids: dict[tuple[int, int], int] = {}
        self.sizes: dict[int, int] = {}
        self.standing: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.peaks: dict[str, tuple[int, int, int]] = {}
        """By phase: the most allocated, the device, and the allocation that reached it."""
        self.phase_reserved: dict[str, int] = {}
        self.step_peaks: dict[tuple[int, str], int] = {}
        """By step and phase: the most allocated."""
        self.marks: list[dict[str, Any]] = []
        self._all_marks = list(memory.marks)
        self._next_mark = 0
        self._event = 0
        self._numbers = 0
        self._emptying = False
        self._born: dict[int, int] = {}
        """Beginnings of phases before allocations of a backward pass that stand."""
        self._outlived: set[int] = set()
        """Allocations of a backward pass that were there after it."""

    def write_events(self, order: Iterable[Event], path: Path) -> None:
        """Plays the events and writes them as CSV, compressed."""
        partial = path.with_name(path.name + ".tmp")
        with gzip.open(partial, "wt", compresslevel=1, newline="") as out:
            out.write("op,id,bytes,stream,device\n")
            out.writelines(row for event in order if (row := self.take(*event)))
        os.replace(partial, path)

    def take(self, device: int, entry: dict[str, Any], number: int) -> str:
        """Plays one event; its row, or nothing for what is no request."""
        action = entry["action"]
        if action not in ("segment_free", "segment_unmap"):
            self._emptying = False
        if action in ("segment_alloc", "segment_map"):
            self.reserved[device] = self.reserved.get(device, 0) + entry["size"]
        elif action in ("segment_free", "segment_unmap"):
            self.reserved[device] = self.reserved.get(device, 0) - entry["size"]
            if self._numbers in self.memory.emptied and not self._emptying:
                self._emptying = True
                self._event += 1
                return f"e,,,,{device}\n"
            return ""
        elif action == "alloc":
            self._marks(number)
            self._numbers = number + 1
            self.ids[device, entry["addr"]] = number
            self.sizes[number] = blocks(entry["size"])
            self.standing[device] = self.standing.get(device, 0) + self.sizes[number]
            if self._phase(number) == BACKWARD:
                self._born[number] = self._next_mark
            self._peak(device, number)
            self._event += 1
            return f"a,{number},{entry['size']},{entry.get('stream', 0)},{device}\n"
        elif action == "free_completed" and (device, entry["addr"]) in self.ids:
            number = self.ids.pop((device, entry["addr"]))
            if self._born.pop(number, self._next_mark) != self._next_mark:
                self._outlived.add(number)
            self.standing[device] -= self.sizes.pop(number)
            self._event += 1
            return f"f,{number},,,{device}\n"
        return ""

    def _marks(self, number: int) -> None:
        marks = self._all_marks
        while self._next_mark < len(marks) and marks[self._next_mark][0] <= number:
            _, step, phase = marks[self._next_mark]
            self.marks.append({"event": self._event, "step": step, "phase": phase})
            self._next_mark += 1

    def _peak(self, device: int, number: int) -> None:
        phase = self._phase(number)
        reserved = self.reserved.get(device, 0)
        self.phase_reserved[phase] = max(self.phase_reserved.get(phase, 0), reserved)
        key = self.memory.places.step(number), phase
        self.step_peaks[key] = max(self.step_peaks.get(key, 0), self.standing[device])
        best = self.peaks.get(phase)
        if best is None or self.standing[device] > best[0]:
            # Copying what stands at every new peak would take quadratic time; it is found again
            # later.
            self.peaks[phase] = (self.standing[device], device, number)

    def _phase(self, number: int) -> str:
        place = self.records[number][0] if number < len(self.records) else -1
        return self.memory.places.phase(place)

    def place(self, number: int) -> Place:
        """Where an allocation comes from."""
        place = self.records[number][0] if number < len(self.records) else -1
        return self.memory.places.place(place, number)

    def report(self, order: Iterable[Event]) -> dict[str, Any]:
        """Phases, the peak, and what stood at it, as the report has them."""
        self._outlived.update(self._born)
        wanted = {(device, number): phase for phase, (_, device, number) in self.peaks.items()}
        found = _standing_at(order, set(wanted))
        by_phase = {wanted[key]: standing for key, standing in found.items()}
        phases = [
            {
                "name": STEP if phase == OPTIMIZE else phase,
                "peak_allocated_bytes": best[0],
                "peak_reserved_bytes": self.phase_reserved.get(phase, 0),
            }
            for phase, best in self.peaks.items()
        ]
        result: dict[str, Any] = {"phases": phases, "marks": self.marks[:MARKS]}
        result["step_peaks"] = [[*key, bytes] for key, bytes in self.step_peaks.items()]
        result["categories_at_phase"] = [
            {"phase": phase, "categories": self._categories(standing)}
            for phase, standing in by_phase.items()
        ]
        if self.peaks:
            phase = max(self.peaks, key=lambda p: self.peaks[p][0])
            allocated, device, number = self.peaks[phase]
            step, _, module, line = self.place(number)
            standing = by_phase.get(phase, {})
            result["peak"] = {
                "device": device,
                "allocated_bytes": allocated,
                "step": step,
                "phase": phase,
                "module": module,
                "line": text(line),
                "categories": self._categories(standing),
                "blocks": self._largest(standing),
                "cycles": of_the_peak(self, order, device, standing, self.memory.collected),
            }
        return result

    def write_allocations(self, path: Path) -> None:
        """Writes as JSON the category and place of each allocation, in order, and the names that
        some have.
        """
        digits = {category: str(place) for place, category in enumerate(CATEGORIES)}
        numbers = range(self._numbers)
        known: dict[tuple[int, int], int] = {}
        places: list[dict[str, Any]] = []
        place_of: list[int | None] = []
        for number, (at, _) in enumerate(self.records[: self._numbers]):
            if at >= len(self.memory.places):
                place_of.append(None)
                continue
            key = at, self.memory.places.step(number)
            if key not in known:
                step, phase, module, line = self.place(number)
                known[key] = len(places)
                places.append(
                    {"step": step, "phase": phase, "module": module or None, "line": text(line)}
                )
            place_of.append(known[key])
        form = {
            "categories": CATEGORIES,
            "category_of": "".join(digits[self.category(number)] for number in numbers),
            "places": places,
            "place_of": place_of,
            "names": {number: name for number, name in self.memory.names.all() if name},
        }
        path.write_text(json.dumps(form), encoding="utf-8")

    def category(self, number: int) -> str:
        """What an allocation is."""
        if number in self.workspaces:
            return "workspace"
        named = self.memory.names.get(number)
        if named is not None:
            return named[0]
        step, phase, _, _ = self.place(number)
        if phase == BACKWARD:
            return "gradient" if number in self._outlived else "activation"
        if phase == "forward":
            return "activation"
        # Between steps and outside any module scripts bring batch data.
        return "input" if step and phase == OTHER else "other"

    def _categories(self, standing: dict[int, int]) -> dict[str, int]:
        found = dict.fromkeys(CATEGORIES, 0)
        for number, size in standing.items():
            found[self.category(number)] += size
        return found

    def _largest(self, standing: dict[int, int]) -> list[dict[str, Any]]:
        rows = []
        largest = sorted(standing.items(), key=lambda item: (-item[1], item[0]))
        for number, size in largest[:LARGEST]:
            step, phase, module, line = self.place(number)
            named = self.memory.names.get(number)
            where = text(line)
            if where is None and phase == BACKWARD:
                where = f"backward of {module}" if module else "backward"
            rows.append(
                {
                    "bytes": size,
                    "category": self.category(number),
                    "name": (named[1] or None) if named else None,
                    "module": module or None,
                    "line": where,
                    "step": step,
                }
            )
        return rows


def _standing_at(
    order: Iterable[Event], wanted: set[tuple[int, int]]
) -> dict[tuple[int, int], dict[int, int]]:
    """What stood on a device right after certain allocations: bytes by number of allocation."""
    living: dict[int, dict[int, tuple[int, int]]] = {}
    found = {}
    for device, entry, number in order:
        here = living.setdefault(device, {})
        if entry["action"] == "alloc":
            here[entry["addr"]] = (number, blocks(entry["size"]))
            if (device, number) in wanted:
                found[device, number] = dict(here.values())
        elif entry["action"] == "free_completed":
            here.pop(entry["addr"], None)
    return found
