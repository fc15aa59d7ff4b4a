"""Markdown tables that appear line by line, as the measurements of bench/torch print them."""

from __future__ import annotations

from collections.abc import Sequence


class Table:
    """Prints its head at once.

    Args:
        columns: their names; those in ``words`` hold words, the others numbers.
    """

    def __init__(self, columns: Sequence[str], words: Sequence[str]) -> None:
        """Prints the head."""
        self.columns = list(columns)
        print(f"| {' | '.join(columns)} |")
        rules = ("---" if name in words else "---:" for name in columns)
        print(f"| {' | '.join(rules)} |", flush=True)

    def row(self, *cells: object) -> None:
        """Prints a line; fewer cells than columns say why the others are missing."""
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def mib(size: int) -> str:
    """Bytes in whole MiB."""
    return f"{size / 2**20:,.0f}"


def yes(good: bool) -> str:
    """Yes or no."""
    return "yes" if good else "no"
