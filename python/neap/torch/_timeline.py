"""One planned iteration as a timeline in Chrome's trace format, which Perfetto opens.

Three lanes: what the script does on the host (modules, calls that run again, steps), copies to the
host and copies to the device. Copies of a GPU are timed by its own events.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch

from neap._files import whole
from neap.torch._watch import Watch

LANES = {"script": 0, "to host": 1, "to device": 2}


class Timeline:
    """Notes what happens between :meth:`start` and :meth:`stop`.

    Args:
        path: the file to write.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.on = False
        self.done = False
        self._events: list[dict[str, Any]] = []
        self._copies: list[tuple[str, str, int, Any, Any, int]] = []
        self._open: list[tuple[str, int]] = []
        self._zero = 0
        self._first: Any = None

    def follow(self, watch: Watch) -> None:
        """Shows modules, backward and steps."""
        watch.enter_module.append(lambda module, path: self.enter(path))
        watch.leave_module.append(lambda module, path: self.leave(path))
        watch.before_backward.append(lambda: self.enter("backward"))
        watch.after_backward.append(lambda: self.leave("backward"))
        watch.before_step.append(lambda optimizer: self.enter("optimizer step"))

    def start(self, device: str) -> None:
        """An iteration begins."""
        self.on = True
        self._events, self._copies, self._open = [], [], []
        self._first = None
        if device == "cuda":
            torch.cuda.synchronize()
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record()
        self._zero = time.perf_counter_ns()

    def enter(self, name: str) -> None:
        """A part of the iteration begins on the host."""
        if self.on:
            self._open.append((name, time.perf_counter_ns()))

    def leave(self, name: str) -> None:
        """It ends, and what began within it and did not end."""
        while self.on and self._open:
            found, began = self._open.pop()
            self._add("script", found, began - self._zero, time.perf_counter_ns() - began)
            if found == name:
                break

    def event(self) -> Any:
        """An event of the current stream, or the time on a device without streams."""
        if not self.on:
            return None
        if self._first is None:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def copied(self, lane: str, name: str, size: int, began: Any, ended: Any) -> None:
        """A copy of ``size`` bytes between two :meth:`event` calls."""
        if self.on and began is not None and ended is not None:
            self._copies.append((lane, name, size, began, ended, 0))

    def stop(self) -> None:
        """The iteration ends: writes the file."""
        if not self.on:
            return
        while self._open:
            self.leave(self._open[-1][0])
        self.on, self.done = False, True
        if self._first is not None:
            torch.cuda.synchronize()
        for lane, name, size, began, ended, _ in self._copies:
            if self._first is None:
                start, length = began - self._zero, ended - began
            else:
                start = int(self._first.elapsed_time(began) * 1e6)
                length = int(began.elapsed_time(ended) * 1e6)
            self._add(lane, name, start, length, {"bytes": size})
        names: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": lane}}
            for lane, tid in LANES.items()
        ]
        with whole(self.path) as partial, open(partial, "w", encoding="utf-8") as out:
            json.dump({"traceEvents": names + self._events, "displayTimeUnit": "ms"}, out)

    def _add(
        self, lane: str, name: str, start: int, length: int, about: dict[str, Any] | None = None
    ) -> None:
        event = {
            "ph": "X",
            "pid": 0,
            "tid": LANES[lane],
            "name": name,
            "ts": start / 1e3,
            "dur": length / 1e3,
        }
        self._events.append({**event, "args": about} if about else event)
