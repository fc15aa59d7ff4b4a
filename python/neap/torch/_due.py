"""What is to be done at the points of an iteration, sorted by kind before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from neap.torch._loans import ACTIONS
from neap.torch._schedule import TRIM, Actions, Schedule
from neap.torch._turns import ACTIONS as TURNS


class Due:
    """What is to be done at a point, by its kind.

    Attributes:
        away: copies of activations to the host and drops, in order.
        back: activations that come.
        lent: actions for parameters.
        turns: actions for optimizer states.
        trim: how much more the allocator may reserve until the next point; memory is given back
            if that is too much.
        then: what is to be done when backward asks for the same tensor again.
    """

    __slots__ = ("away", "back", "lent", "then", "trim", "turns")

    def __init__(self, actions: Actions, then: Due | None = None) -> None:
        self.away = [action for action in actions if action[0] in ("out", "drop")]
        self.back = [one for what, one in actions if what == "in"]
        self.lent = [action for action in actions if action[0] in ACTIONS]
        self.turns = [action for action in actions if action[0] in TURNS]
        self.trim = sum(more for what, more in actions if what == TRIM)
        self.then = then


def due(points: Sequence[Actions | None]) -> list[Due | None]:
    """What is to be done at each of the points."""
    return [None if actions is None else Due(actions) for actions in points]


def asked(schedule: Schedule) -> list[Due | None]:
    """What is to be done when backward asks for each saved tensor, and asks again; the last entry
    is for tensors without a number.
    """
    saved = len(schedule.expected)
    found = due(schedule.at("unpack"))
    again: dict[int, dict[int, Actions]] = {}
    for (kind, point), actions in schedule.actions.items():
        if kind == "unpack" and point >= saved:
            again.setdefault(point % saved, {})[point // saved] = actions
    for number, times in again.items():
        then = None
        for time in range(max(times), 0, -1):
            then = Due(times.get(time, []), then)
        first = found[number] or Due([])
        first.then, found[number] = then, first
    return found
