"""What the operators of a script take, measured where it runs."""

from __future__ import annotations

from collections.abc import Sequence

from neap.torch._clock import Point, Span
from neap.torch._graph import Iteration, Node
from neap.torch._meter import NEWEST
from neap.torch._planning import Planner
from neap.torch._recorder import Recorder
from neap.torch._watch import OPTIMIZE

THRESHOLD = 0.3
"""A plan is made anew when the operators together take longer or shorter by this part of what they
were planned with, as in TENSILE's published code.
"""
_MOST = 4
"""The most modules that a reason names."""
_PART = 0.1
"""A module that a reason names has changed by this part of all changes."""


def places(recorder: Recorder, found: Iteration) -> dict[Point, int]:
    """Before which operator of a recorded iteration each point lies."""
    place, count = found.place, len(found.nodes)
    known: dict[Point, int] = {}
    twice: set[Point] = set()

    def add(what: str, which: str | int, number: int, op: int) -> None:
        point = (what, which, number)
        if point in known:  # Modules that were made on the fly may share a path.
            twice.add(point)
        known[point] = place.get(op, count)

    for call in recorder.calls:
        if call.iteration == found.which:
            add("enter", call.path, call.number, call.first)
            add("leave", call.path, call.number, call.after)
    for saved in recorder.packs:
        if saved.iteration == found.which:
            add("pack", saved.place, 0, saved.packed + 1)
            if saved.asked and found.start <= saved.asked[0][0] <= found.end:
                add("unpack", saved.place, 0, saved.asked[0][0])
    backwards = (one for one in recorder.backwards if one[0] == found.which)
    for number, (_, _, first, after) in enumerate(backwards):
        add("backward", "", number, first)
        add("after", "", number, after)
    steps = (one for one in recorder.steps if found.start <= one[0] and one[1] <= found.end)
    for number, (first, after, _) in enumerate(steps):
        add("step", "", number, first)
        add("stepped", "", number, after)
    return {point: at for point, at in known.items() if point not in twice}


class Latencies:
    """Mean times of the operators that one planner plans for, the newest measurement with weight
    :data:`NEWEST`.

    Args:
        planner: knows the operators, and the times by which the first plan was made.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.points = places(planner.recorder, planner.found)
        self._nodes = planner.found.nodes
        self._given = [planner.times.get(node.name, 1000) for node in self._nodes]
        self._means: list[int | None] = [None] * len(self._nodes)
        self._first = 0
        """Operators before this one share their time with what the script does between
        iterations.
        """
        self._modules: dict[str, int] = {}
        """The same by module: the time of its forward without that of modules inside it, and of
        its backward.
        """
        self._then = self._by_module(range(len(self._nodes)), sum(self._given))
        """The times by module when the last plan was made."""

    @property
    def count(self) -> int:
        """How many operators there are."""
        return len(self._nodes)

    def learn(self, spans: Sequence[Span]) -> None:
        """Takes in what an iteration took."""
        modules: dict[str, int] = {}
        for span in spans:
            within = range(span.first, span.after)
            shares = _divided(span.ns, [self._given[place] for place in within])
            for place, ns in zip(within, shares):
                self._means[place] = _mean(self._means[place], ns)
            rest = max(span.ns - sum(span.inside.values()), 0)
            for known in (span.inside, self._by_module(within, rest)):
                for path, ns in known.items():
                    modules[path] = modules.get(path, 0) + ns
        self._first = spans[0].after if spans else 0
        for path in {*modules, *self._modules}:
            self._modules[path] = _mean(self._modules.get(path), modules.get(path, 0))

    def drift(self) -> str | None:
        """How far the operators' times are from those of the last plan, in words, if that is
        farther than :data:`THRESHOLD`.
        """
        now, then = sum(self._modules.values()), sum(self._then.values())
        if not self._modules or abs(now - then) <= THRESHOLD * max(then, 1):
            return None
        change = {path: ns - self._then.get(path, 0) for path, ns in self._modules.items()}
        large = _PART * sum(map(abs, change.values()))
        named = [path for path in change if abs(change[path]) >= large]
        named.sort(key=lambda path: (-abs(change[path]), path))
        parts = [
            f"{path} {_ms(self._modules[path])} instead of {_ms(self._then.get(path, 0))}"
            for path in named[:_MOST]
        ]
        whole = f"operators took {_ms(now)} an iteration instead of {_ms(then)}"
        return ": ".join([whole, *([", ".join(parts)] if parts else [])])

    def planned(self) -> None:
        """A plan is made by these times: later drift is relative to them."""
        self._then = dict(self._modules)

    def times(self) -> dict[str, int]:
        """The time of each operator by name. One that was not measured is as much slower or quicker
        than it was taken to be as all others together.
        """
        pairs = [pair for pair in zip(self._means, self._given) if pair[0] is not None]
        now, then = sum(mean or 0 for mean, _ in pairs), sum(given for _, given in pairs)
        return {
            node.name: max(given * now // max(then, 1) if mean is None else mean, 1)
            for node, mean, given in zip(self._nodes, self._means, self._given)
        }

    def measured(self) -> set[str]:
        """The names of the operators that were measured."""
        return {node.name for node, mean in zip(self._nodes, self._means) if mean is not None}

    def table(self) -> dict[str, int]:
        """The measured time of each operator by name that says something of the operator alone."""
        return {
            node.name: max(mean, 1)
            for place, (node, mean) in enumerate(zip(self._nodes, self._means))
            if mean is not None and place >= self._first and (node.op is not None or node.reads)
        }

    def _by_module(self, within: range, ns: int) -> dict[str, int]:
        """A time of these operators by their modules."""
        found: dict[str, int] = {}
        for place, one in zip(within, _divided(ns, [self._given[place] for place in within])):
            path = _module(self._nodes[place])
            found[path] = found.get(path, 0) + one
        return found


def _module(node: Node) -> str:
    if node.phase == OPTIMIZE:
        return "the optimizer's step"
    return node.module or "what is in no module"


def _divided(ns: int, weights: Sequence[int]) -> list[int]:
    """A time in parts, by these weights; the parts add up to it."""
    whole, found, done, given = sum(weights), [], 0, 0
    for weight in weights:
        done += weight
        upto = ns * done // whole if whole else 0
        found.append(upto - given)
        given = upto
    return found


def _mean(old: int | None, new: int) -> int:
    return new if old is None else int(NEWEST * new + (1 - NEWEST) * old)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.2f} ms"
