"""How many iterations of which kinds a script had, and how they ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

_MOST = 64
"""The most kinds that are counted by themselves; all others count as one."""


@dataclass
class Kind:
    """Iterations in which autograd saved the same number of tensors.

    Attributes:
        saved_tensors: how many; -1 for all kinds beyond the first 64.
        iterations: how many there were since neap knows the script.
        by_plan: those that ran by the plan from beginning to end.
        on_demand: those in which what autograd saved left for the host as memory neared the budget.
        over: those in which the allocator reserved more than the budget.
        least_bytes, median_bytes, most_bytes: of what autograd saved in one.
    """

    saved_tensors: int
    iterations: int = 0
    by_plan: int = 0
    on_demand: int = 0
    over: int = 0
    least_bytes: int = 0
    median_bytes: int = 0
    most_bytes: int = 0


class Tally:
    """Counts iterations by kind."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Kind, Counter[int]]] = {}

    def ended(self, tensors: int, saved: int, way: str, over: bool, steps: int = 1) -> None:
        """An iteration has ended.

        Args:
            tensors: how many tensors autograd saved in it.
            saved: their bytes.
            way: the attribute of :class:`Kind` that counts how it ran, or nothing.
            over: whether it reserved more than the budget.
            steps: how many steps of the first optimizer it was.
        """
        if tensors not in self._found and len(self._found) >= _MOST:
            tensors = -1
        kind, sizes = self._found.setdefault(tensors, (Kind(tensors), Counter()))
        kind.least_bytes = min(saved, kind.least_bytes) if kind.iterations else saved
        kind.iterations += steps
        kind.over += steps * over
        if way:
            setattr(kind, way, getattr(kind, way) + steps)
        kind.most_bytes = max(saved, kind.most_bytes)
        sizes[saved >> 20] += 1

    def all(self) -> list[Kind]:
        """The kinds, that of most iterations first."""
        for kind, sizes in self._found.values():
            half, seen = sum(sizes.values()) // 2, 0
            for mib, count in sorted(sizes.items()):
                seen += count
                if seen > half:
                    within = max(mib << 20, kind.least_bytes)
                    kind.median_bytes = min(within, kind.most_bytes)
                    break
        found = [kind for kind, _ in self._found.values()]
        return sorted(found, key=lambda kind: (-kind.iterations, kind.saved_tensors))
