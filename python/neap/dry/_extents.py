"""How large the tensors are that the script calls its models with, by step."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch

MOST = 1 << 20
"""Extents that are kept; later ones are not looked at."""
_DEPTH = 2
"""How deep dictionaries and lists are looked into."""


class Extents:
    """Notes them as they come, in arrays: other containers would count as the script's.

    Args:
        step: how many optimizer steps have ended.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._names: dict[str, int] = {}
        self._rows = array("Q")
        """Step, name and extent, one after another."""

    def called(self, path: str, args: Any, kwargs: Any) -> None:
        """A model is called from outside any other."""
        if not torch.is_grad_enabled() or len(self._rows) >= 3 * MOST:
            return
        before = f"{path}: " if path else ""
        for place, value in enumerate(args):
            self._take(f"{before}args[{place}]", value, _DEPTH)
        for name, value in kwargs.items():
            self._take(f"{before}{name}", value, _DEPTH)

    def _take(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            for place, extent in enumerate(value.shape):
                known = self._names.setdefault(f"{name}.shape[{place}]", len(self._names))
                self._rows.extend((self._step(), known, int(extent)))
        elif depth and isinstance(value, dict):
            for key, inner in value.items():
                self._take(f"{name}[{key!r}]", inner, depth - 1)
        elif depth and isinstance(value, (list, tuple)):
            for inner in value:
                self._take(f"{name}[...]", inner, depth - 1)

    def report(self) -> dict[str, Any]:
        """The extents that vary, each once, and for each step the largest of each."""
        steps: dict[int, dict[int, int]] = {}
        rows = iter(self._rows)
        for step, number, extent in zip(rows, rows, rows):
            found = steps.setdefault(step, {})
            found[number] = max(extent, found.get(number, 0))
        whole = {step: found for step, found in steps.items() if len(found) == len(self._names)}
        series: dict[tuple[int, ...], str] = {}
        for name, number in self._names.items():
            column = tuple(found[number] for found in whole.values())
            if len(set(column)) > 1:
                series.setdefault(column, name)
        return {
            "names": list(series.values()),
            "steps": [[step, list(row)] for step, row in zip(whole, zip(*series))],
        }
