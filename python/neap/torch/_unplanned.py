"""What a script gets that no plan is made for."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim.optimizer import Optimizer

from neap.torch._enforce import Enforcement
from neap.torch._policy import Policy
from neap.torch._report import Report
from neap.torch._schedule import PAGE, Schedule
from neap.torch._states import SMALLEST, divisible
from neap.torch._updates import Updates
from neap.torch._watch import Watch, named_tensors

_STATES_STAY = 2
"""The iterations that must need more than the budget before optimizer states leave too."""

_HOLDS = "what autograd saves leaves for the host as memory nears the budget, and nothing else"
_STATES_LEAVE = "that is not enough: optimizer states stay on the host between steps, too"


class Unplanned:
    """Holds the iterations of one script to its budget that no plan covers.

    Args:
        policy: what sends saved tensors away.
        enforcement: the allocator that is measured.
        updates: what moves optimizer states.
        report: where it is noted.
        say: prints a line.
    """

    def __init__(
        self,
        policy: Policy,
        enforcement: Enforcement,
        updates: Updates,
        report: Report,
        say: Callable[[str], None],
    ) -> None:
        self._policy = policy
        self._enforcement = enforcement
        self._updates = updates
        self._report = report
        self._say = say
        policy.begins = self.begins
        self._missed = 0
        """Iterations that needed more than the budget though all saved tensors left that could."""

    def begin(self, budget: int, peak: int, watch: Watch, optimizers: list[Optimizer]) -> None:
        """No plan will come: what is saved leaves as memory nears the budget. ``peak`` is that of
        the iterations that were watched.
        """
        self._report.budget_bytes, self._report.unplanned_peak_bytes = budget, peak
        self._enforcement.restart()
        self._policy.begin(budget)
        self._enforcement.begin(budget)
        self._missed = 0
        self._note(_HOLDS)
        if self._policy.is_tight:
            self._send_states(watch, optimizers)

    def begins(self) -> None:
        """The first tensor of an iteration is saved next: what ran since the last one, such as an
        evaluation, may have reserved more than the budget.
        """
        limit = self._policy.limit
        if limit and self._enforcement.grew(0):
            self._enforcement.give_back(limit)

    def ended(self, limit: int, steps: int) -> bool:
        """An iteration of this many steps has ended in which a plan did not act, or not to its end;
        whether it exceeded the limit, or a page more would, although all left that could.
        """
        over = self._enforcement.over(limit)
        missed = over > -PAGE and self._policy.short
        self._report.by_policy += steps if self._policy.left else 0
        self._policy.ended(over)
        return missed

    def ended_without_plan(self, watch: Watch, optimizers: list[Optimizer]) -> None:
        """The same where there is no plan at all."""
        limit = self._policy.limit
        if not limit:
            return
        self._missed += self.ended(limit, 1)
        if not self._enforcement.give_back(limit):
            self._policy.give_back_free()
        self._enforcement.mark()
        self._enforcement.apply()
        if self._missed == _STATES_STAY:
            self._send_states(watch, optimizers)

    def report(self) -> None:
        """Puts into the report what is known where there is no plan."""
        report, enforcement = self._report, self._enforcement
        report.peak_allocated_bytes, report.peak_reserved_bytes = enforcement.peaks()
        if self._policy.limit:
            report.beyond = enforcement.beyond
            report.say_what_is_known_without_plan(enforcement.strayed_reserved)

    def _send_states(self, watch: Watch, optimizers: list[Optimizer]) -> None:
        self._missed = _STATES_STAY + 1
        if not all(map(divisible, optimizers)):
            return
        names = {
            name
            for role, name, tensor in named_tensors(watch, optimizers)
            if role == "optimizer_state" and tensor.nbytes >= SMALLEST
        }
        if names:
            self._updates.follow(Schedule([], [], [], {}, away=names))
            self._note(_STATES_LEAVE)

    def _note(self, text: str) -> None:
        self._say(f"neap: {text}")
        self._report.notes.append(text)
