"""Takes the times of one planned iteration, at points that its recording knows too.

Between two points the script runs operators. What neap does itself at a point or between two of
them (copies, waits for them, calls and operators that run again) is put aside and does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from neap.torch._watch import Watch

Point = tuple[str, str | int, int]
"""What happens, to which module or saved tensor, and how often that has happened before."""

_RUNS: list[Clock] = []
"""The clock that takes times just now, if one does."""
_NOTHING = nullcontext()


def aside() -> AbstractContextManager[None]:
    """Around what neap does itself."""
    return _RUNS[-1].aside() if _RUNS else _NOTHING


@dataclass
class Span:
    """Operators in a row and the time that they took together.

    Attributes:
        first, after: the operators by place in the graph, the first and the one after the last.
        ns: their time.
        inside: the parts of it that passed inside modules' forwards, by path. The rest is that of
            backward and steps.
    """

    first: int
    after: int
    ns: int
    inside: dict[str, int] = field(default_factory=dict)


class Clock:
    """Takes times from :meth:`start` to :meth:`stop`; on a GPU by its own events.

    Args:
        device: the type of the device.
        watch: tells of modules and steps.
    """

    def __init__(self, device: str, watch: Watch) -> None:
        self._cuda = device == "cuda"
        self._watch = watch
        self._marks: list[tuple[Point | None, Any, Any]] = []
        """At each point, and around what is put aside: when the script came there, and when it
        went on.
        """
        self._came: tuple[Point | None, Any] = (None, None)
        self._depth = 0
        self._counts: dict[tuple[str, str | int], int] = {}
        self._open: list[int] = []
        self._thread = 0
        self._runs = False

    def start(self) -> None:
        """An iteration begins."""
        self._marks, self._counts, self._open, self._depth = [], {}, [], 0
        self._thread = threading.get_ident()
        self._runs = True
        _RUNS.append(self)
        watch = self._watch
        watch.enter_module.append(self._enter)
        watch.leave_module.append(self._leave)
        watch.after_step.insert(0, self._stepped)
        watch.notice_modules()
        self.passes("begin")

    def stop(self) -> None:
        """It ends, or is not what was planned."""
        if not self._runs:
            return
        self.passes("end")
        self._runs = False
        _RUNS.remove(self)
        watch = self._watch
        watch.enter_module.remove(self._enter)
        watch.leave_module.remove(self._leave)
        watch.after_step.remove(self._stepped)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # -- points

    def comes(self, what: str = "", which: str | int = "") -> None:
        """The script has come to a point, or to what is put aside, until :meth:`goes_on`."""
        if self._depth == 0 and self._runs:
            self._came = self._point(what, which), self._now()
        self._depth += 1

    def goes_on(self) -> None:
        """Operators of the script's run again."""
        self._depth -= 1
        if self._depth == 0 and self._runs:
            self._marks.append((*self._came, self._now()))

    def passes(self, what: str, which: str | int = "", number: int | None = None) -> None:
        """The script passes a point at which nothing is done."""
        if self._depth == 0 and self._runs:
            point = self._point(what, which) if number is None else (what, which, number)
            now = self._now()
            self._marks.append((point, now, now))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around what neap does itself."""
        self.comes()
        try:
            yield
        finally:
            self.goes_on()

    def _point(self, what: str, which: str | int) -> Point | None:
        if not what:
            return None
        number = self._counts.get((what, which), 0)
        self._counts[what, which] = number + 1
        return what, which, number

    def _enter(self, module: torch.nn.Module, path: str) -> None:
        # As the recording does: in backward a module runs only because something recomputes.
        counts = (
            threading.get_ident() == self._thread
            and torch.is_grad_enabled()
            and torch._C._current_autograd_node() is None
        )
        name = self._watch.name_of(module)
        self._open.append(self._counts.get(("enter", name), 0) if counts else -1)
        if counts:
            self.passes("enter", name)

    def _leave(self, module: torch.nn.Module, path: str) -> None:
        number = self._open.pop() if self._open else -1
        if number >= 0:
            self.passes("leave", self._watch.name_of(module), number)

    def _stepped(self, optimizer: object) -> None:
        self.passes("stepped")

    # -- what was taken

    @property
    def ended(self) -> bool:
        """Whether all times are known. A GPU may not have come to the last point yet; the host
        does not wait for it.
        """
        return not self._runs and (not self._cuda or bool(self._marks[-1][1].query()))

    def _between(self, began: Any, ended: Any) -> int:
        return int(began.elapsed_time(ended) * 1e6) if self._cuda else int(ended - began)

    def spans(self, known: dict[Point, int], count: int) -> list[Span]:
        """The times of a graph's operators, given its points and how many operators there are."""
        found: list[Span] = []
        span = Span(0, 0, 0)
        stack: list[str] = []
        for (_, _, went), (point, came, _) in zip(self._marks, self._marks[1:]):
            ns = self._between(went, came)
            span.ns += ns
            if stack:
                span.inside[stack[-1]] = span.inside.get(stack[-1], 0) + ns
            place = -1 if point is None else known.get(point, -1)
            if point == ("end", "", 0):
                place = count
            if place > span.first:
                span.after = place
                found.append(span)
                span = Span(place, place, 0)
            elif found and place == span.first:  # No operator ran; hooks of a module may have.
                _add(found[-1], span)
                span = Span(span.first, span.first, 0)
            if point is not None and point[0] == "enter":
                stack.append(str(point[1]))
            elif point is not None and point[0] == "leave" and point[1] in stack:
                del stack[len(stack) - 1 - stack[::-1].index(str(point[1])) :]
        if found:
            _add(found[-1], span)
        return found


def _add(span: Span, more: Span) -> None:
    span.ns += more.ns
    for path, ns in more.inside.items():
        span.inside[path] = span.inside.get(path, 0) + ns
