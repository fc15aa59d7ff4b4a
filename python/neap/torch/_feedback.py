"""Plans anew, beside the script, where its operators take other times than the plan was made by."""

from __future__ import annotations

import time
from collections.abc import Callable

from neap.torch._beside import Beside
from neap.torch._clock import Clock
from neap.torch._latencies import THRESHOLD, Latencies
from neap.torch._meter import EVERY
from neap.torch._planning import Asked, Planner
from neap.torch._report import Report
from neap.torch._runtime import Runtime
from neap.torch._schedule import Schedule
from neap.torch._watch import Watch

_PAUSE = 4
"""The iterations after a plan was made anew in which no other is. The number doubles each time."""


class Feedback:
    """Measures the iterations of one script by its plan: the first one, each eighth after it, and
    those after one that took much longer or shorter than the one before it.

    Args:
        runtime: carries the plan out, with a clock in iterations that are measured.
        watch: tells of modules and steps.
        report: where is noted where operators' times come from.
        say: prints a line.
    """

    def __init__(
        self, runtime: Runtime, watch: Watch, report: Report, say: Callable[[str], None]
    ) -> None:
        self.latencies: Latencies | None = None
        self.acts = False
        """Whether anything is measured: not on a device that computes nothing."""
        self._runtime, self._watch, self._report, self._say = runtime, watch, report, say
        self._clock: Clock | None = None
        """What has taken the times of an iteration that are not taken in yet."""
        self._wait = 0
        """The iterations until the next that is measured anyway."""
        self._last = 0
        """When the last iteration ended; 0 where something else ran since."""
        self._usual = 0
        """How long the last iteration took that was not measured, which takes longer."""
        self._far = 0
        """How many iterations in a row took other times than planned."""
        self._rest, self._pause = 0, _PAUSE
        self._beside: Beside | None = None

    def plans(self, planner: Planner) -> None:
        """Plans are made by this planner from now on."""
        self.stop()
        self._report.times_from = planner.sources()
        if self.latencies is None or self.latencies.planner.found is not planner.found:
            self.latencies = Latencies(planner)
            self._rest, self._pause = 0, _PAUSE

    def stop(self) -> None:
        """Another plan acts, or none: what goes on is for nothing."""
        self._stray()
        self._wait = self._far = self._usual = 0
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.give_up()

    def forget(self) -> None:
        """Holds nothing of the script any more."""
        self.stop()
        self.latencies = None

    @property
    def looks(self) -> bool:
        """Whether a plan is made by measured times, or may soon have to be."""
        return self._far > 0 or self._beside is not None

    def strayed(self) -> None:
        """An iteration was not as planned."""
        self._stray()

    def _stray(self) -> None:
        self._last = 0
        clock, self._clock, self._runtime.clock = self._clock, None, None
        if clock is not None:
            clock.stop()

    def ran(
        self, schedule: Schedule, ask: Callable[[], tuple[Asked, str | None]]
    ) -> tuple[Planner, Schedule] | None:
        """After an iteration by a plan that stays: the planner and the plan that act next, if there
        is another one.

        Args:
            schedule: the plan.
            ask: called where a plan is to be made; gives what it is asked for, and what else calls
                for it.
        """
        known = self.latencies
        if not self.acts or known is None or schedule.varies or schedule.early:
            return None
        now = time.perf_counter_ns()
        took = now - self._last if self._last else 0
        self._runtime.clock = None
        self._rest -= 1
        self._wait -= 1
        if self._clock is not None:
            self._take(known)
        elif took:
            if self._usual and abs(took - self._usual) > THRESHOLD * self._usual:
                self._far, self._wait = max(self._far, 1), 0
            self._usual = took
        found = None
        if self._beside is not None:
            found = self._taken_up()
        elif self._far > 1 and self._rest <= 0:
            self._plan_anew(known, *ask())
        if found is None and self._clock is None and self._beside is None and self._wait <= 0:
            self._wait = EVERY
            self._clock = self._runtime.clock = Clock(self._runtime.device, self._watch)
            if self._runtime.meter is not None:
                self._runtime.meter.start()
        self._last = time.perf_counter_ns()
        return found

    def _take(self, known: Latencies) -> None:
        """Takes in the times of the last measured iteration, if they are there."""
        clock = self._clock
        if clock is None or not clock.ended:
            return
        self._clock = None
        known.learn(clock.spans(known.points, known.count))
        self._far = self._far + 1 if known.drift() is not None else 0
        if self._far:
            self._wait = 0

    def _plan_anew(self, known: Latencies, asked: Asked, more: str | None) -> None:
        drift = known.drift()
        if drift is None:
            return
        why = drift if more is None else f"{drift}; {more}"
        times, measured = known.times(), known.measured()
        known.planned()
        self._far = 0
        self._rest, self._pause = self._pause, 2 * self._pause
        self._say(f"neap: planning anew, beside the script: {why}")

        def both() -> tuple[Planner, Schedule]:
            planner = known.planner.at(times, measured)
            return planner, planner.plan(asked)

        self._beside = Beside(why, both)

    def _taken_up(self) -> tuple[Planner, Schedule] | None:
        beside = self._beside
        assert beside is not None
        if beside.runs:
            return None
        self._beside = None
        beside.end()
        report = self._report
        if beside.made is None:
            report.notes.append(f"no plan by measured times: {beside.problem}")
            return None
        planner, other = beside.made
        report.replans.append(beside.why)
        report.times_from = planner.sources()
        return planner, other
