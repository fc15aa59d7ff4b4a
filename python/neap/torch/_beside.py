"""A plan that is made beside the script."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from neap.torch import _outside
from neap.torch._planning import Planner
from neap.torch._schedule import Schedule

_PAUSE_S = 0.01
"""Seconds between two looks whether a thread that is given up has started another process."""


class Beside:
    """A plan that is made on a thread of its own.

    Args:
        why: what calls for it.
        make: makes it, and gives the planner too.
    """

    def __init__(self, why: str, make: Callable[[], tuple[Planner, Schedule]]) -> None:
        self.why = why
        self.made: tuple[Planner, Schedule] | None = None
        self.problem = ""
        self._make = make
        # A signal that ends the script ends what the thread has started, too.
        self._place: AbstractContextManager[Path] = _outside.workplace()
        self._place.__enter__()
        self._thread = threading.Thread(target=self._run, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # The interpreter ends, and starts no thread any more.
            self.problem = str(error)

    @property
    def runs(self) -> bool:
        """Whether it is not made yet."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Waits for it."""
        if self._thread.ident is not None:
            self._thread.join()
        self._place.__exit__(None, None, None)

    def give_up(self) -> None:
        """Ends it before it is made."""
        while self._thread.ident is not None and self._thread.is_alive():
            _outside.stop(self._thread.ident)
            self._thread.join(_PAUSE_S)
        self.end()

    def _run(self) -> None:
        try:
            self.made = self._make()
        except Exception as error:  # Such as a recording that changes meanwhile.
            self.problem = f"{type(error).__name__}: {error}"
