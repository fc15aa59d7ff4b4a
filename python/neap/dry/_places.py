"""Where allocations come from, kept in numbers and text alone.

A list or tuple for each allocation or step would count as a container of the script's, and so
decide when Python's garbage collector runs.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator

from neap.dry._lines import Line

OTHER = "other"
Place = tuple[int, str, str, "Line | None"]
"""Optimizer steps before it, phase, module and line of an allocation."""
NO_PLACE: Place = (0, OTHER, "", None)


class Places:
    """Phases, modules and lines that allocate, each combination once, and where steps end."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = []
        self._phases: list[str] = []
        self._steps = array("Q")
        """Allocations before the end of each optimizer step."""

    def __len__(self) -> int:
        return len(self._texts)

    def number(self, phase: str, module: str, line: Line | None) -> int:
        """The number of a place; a new one if it is new."""
        text = (
            f"{phase}\n{module}\n" if line is None else f"{phase}\n{module}\n{line[1]}\n{line[0]}"
        )
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._texts)
            self._texts.append(text)
            self._phases.append(phase)
        return number

    def stepped(self, allocations: int) -> None:
        """An optimizer step ends after so many allocations."""
        self._steps.append(allocations)

    def step(self, allocation: int) -> int:
        """How many optimizer steps ended before an allocation."""
        return bisect.bisect_right(self._steps, allocation)

    def step_ends(self) -> list[int]:
        """For each optimizer step the allocations before its end."""
        return list(self._steps)

    def phase(self, number: int) -> str:
        """The phase of a place."""
        return self._phases[number] if 0 <= number < len(self._phases) else OTHER

    def place(self, number: int, allocation: int) -> Place:
        """The place of an allocation, by both numbers."""
        if not 0 <= number < len(self._texts):
            return NO_PLACE
        phase, module, rest = self._texts[number].split("\n", 2)
        line, _, file = rest.partition("\n")
        return self.step(allocation), phase, module, (file, int(line)) if line else None


class Marks:
    """Where phases begin: allocations before it, optimizer steps before it, and its name."""

    def __init__(self) -> None:
        self._allocations = array("Q")
        self._steps = array("Q")
        self._phases: list[str] = []

    def add(self, allocations: int, step: int, phase: str) -> None:
        """Here a phase begins."""
        self._allocations.append(allocations)
        self._steps.append(step)
        self._phases.append(phase)

    def __iter__(self) -> Iterator[tuple[int, int, str]]:
        return zip(self._allocations, self._steps, self._phases)


class Modules:
    """Which module's forward makes autograd's functions from a sequence number on."""

    def __init__(self) -> None:
        self._from = array("Q")
        self._paths: list[str] = []

    def add(self, sequence: int, path: str) -> None:
        """From this function on the module of this path runs."""
        self._from.append(sequence)
        self._paths.append(path)
        if len(self._from) > 100_000:
            del self._from[:50_000], self._paths[:50_000]

    def at(self, sequence: int) -> str:
        """The module whose forward made the function of this number, or an empty string."""
        place = bisect.bisect_right(self._from, sequence) - 1
        return self._paths[place] if place >= 0 else ""


class Names:
    """What allocations hold that have a name: category and name by their number."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def add(self, allocation: int, category: str, name: str) -> None:
        """An allocation holds this; one without a name keeps what it was called."""
        known = self._texts.get(allocation)
        if not name and known is not None:
            name = known.partition("\n")[2]
        self._texts[allocation] = f"{category}\n{name}"

    def get(self, allocation: int) -> tuple[str, str] | None:
        """Category and name."""
        known = self._texts.get(allocation)
        if known is None:
            return None
        category, _, name = known.partition("\n")
        return category, name

    def all(self) -> Iterator[tuple[int, str]]:
        """Each allocation's number and name, which may be empty."""
        for allocation, known in self._texts.items():
            yield allocation, known.partition("\n")[2]
