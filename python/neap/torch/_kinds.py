"""How a script's iterations change: which of them are alike, in sizes or in kind, or take turns."""

from __future__ import annotations

from neap.torch import _graph
from neap.torch._recorder import Recorder
from neap.torch._runtime import FITS, LARGER, SERVED
from neap.torch._schedule import Schedule

FEW = 7
"""The iterations that are watched where their sizes vary; the plan is for the largest of them."""

_OFTEN = 8
"""Where one iteration in this many differs from the plan and exceeds the budget, the script may do
things in turn.
"""
_ROWS = 18
"""The iterations that are watched for such turns."""

PATIENCE = 4
"""The iterations in a row that differ from the plan after which the script is watched anew. The
number doubles each time, since watching costs time too.
"""


class Kinds:
    """What is known of one script's iterations.

    Args:
        attempts: the most iterations that are watched for some that are alike.
        scout: at least so many are watched, where the script is run for its plan alone.

    Attributes:
        varies: whether those that are watched are of one kind, on tensors of varying sizes.
        turns: how many of those that are watched repeat in a row, where one alone does not; or 0.
        period: the steps of the first optimizer that make up an iteration: a script may do
            different things in turn.
    """

    def __init__(self, attempts: int, scout: int = 0) -> None:
        self.varies = False
        self.turns = 0
        self.period = 1
        self._attempts = max(attempts, scout)
        self._few = max(min(FEW, attempts), scout)
        self._steps = 0
        """Those since the period began."""
        self._different = 0
        """Iterations in a row that were not as planned."""
        self._others = self._since = 0
        """Iterations that were not as planned and exceeded the budget since the plan acts, in a
        row or not, of how many.
        """
        self._alternates = False
        """Whether such came between others, so that a pair that is alike says little."""
        self._reasons: set[tuple[str, int]] = set()
        """Why, and how many tensors they saved."""
        self._larger = 0
        """Iterations that were larger than the plan's and needed more, in a row or not."""
        self._longer = 0
        """Iterations that went on where the plan's ends, in a row or not."""
        self._patience = PATIENCE
        self._changes = scout > 0
        """Whether iterations that were not as planned were unlike each other, so that a pair that
        is alike says little.
        """

    def begin(self, period: int) -> None:
        """The next step begins an iteration of so many."""
        self.period, self._steps = period, 0

    def stepped(self) -> bool:
        """The first optimizer has stepped; whether an iteration ends."""
        self._steps += 1
        return self._steps % self.period == 0

    @property
    def begun(self) -> int:
        """The steps of an iteration that has not ended."""
        return self._steps % self.period

    # -- by a plan

    def ran(
        self,
        why: str | None,
        saved: int,
        over: bool = False,
        more: bool = True,
        longer: bool = False,
    ) -> None:
        """An iteration has ended that was as planned, or was not.

        Args:
            why: what made it differ.
            saved: how many tensors it saved.
            over: whether it reserved more than the budget.
            more: whether more left than by the plan.
            longer: whether it was as planned, and then went on.
        """
        self._since += 1
        if why in (None, *SERVED, FITS):
            self._different = 0
            self._reasons.clear()
            self._larger += why == LARGER and (over or more)
        else:
            self._different += 1
            self._others += over
            self._longer += longer
            if len(self._reasons) < self._patience:
                self._reasons.add((why, saved))

    @property
    def out_of_patience(self) -> bool:
        """Whether too many iterations were not as planned: they are to be watched."""
        often = self._others >= self._patience and self._others * _OFTEN >= self._since
        most = max(self._different, self._larger, self._longer)
        return most >= self._patience or (often and self.period == 1)

    @property
    def grows(self) -> bool:
        """Whether they were all of the plan's kind, and larger."""
        return self._larger >= self._patience > max(self._different, self._longer)

    @property
    def may_wait(self) -> bool:
        """Whether some iterations still run by the plan."""
        return self._different < self._patience

    def watch_anew(self, schedule: Schedule) -> str:
        """They are watched, as too many differ from this plan: how many did."""
        why = f"{self._different} iterations in a row differ"
        most = max(self._different, self._larger, self._longer)
        self._alternates = most < self._patience
        if self._alternates:
            why = f"{self._others} of {self._since} iterations differ and exceed the budget"
        if self._larger >= self._patience:
            why = f"{self._larger} iterations were larger than the plan's"
        goes_on = self._longer >= self._patience > self._different
        if goes_on:
            why = f"{self._longer} iterations went on where the plan's ends"
        self._different = self._larger = self._longer = self._others = self._since = 0
        self._changes = schedule.varies or goes_on or len(self._reasons) > 1
        self._patience *= 2
        self._reasons.clear()
        return why

    # -- while they are watched

    def no_more_come(self) -> None:
        """What was watched is enough, if it is two iterations."""
        self._few = self._attempts = 2

    def seen_enough(self, recorder: Recorder) -> bool:
        """Whether two iterations in a row were alike, or else some were of one kind, on tensors of
        varying sizes; or there will be no more.
        """
        # Once steps in turn are one iteration, two of these that are alike are enough.
        alternates = self._alternates and self.period == 1
        recorded, row = len(recorder.cuts), _graph.period(recorder, alternates)
        self.turns = row if self.period == 1 and row > 1 else 0
        if recorded < 2:
            return False
        alike = row == 1
        attempts = max(self._attempts, _ROWS) if alternates else self._attempts
        many = recorded >= (attempts if alternates else self._few)
        if alike and (self._changes or alternates):
            alike = many and _graph.mostly_alike(recorder)
        self.varies = not alike and many and _graph.main_kind(recorder) is not None
        return alike or self.varies or recorded >= attempts
