"""Looks for the plan that keeps to its budget, by what the allocator does in its first iterations.

A plan says what is given out. What the allocator reserves for that shows only while it acts, and so
does whether calls that ran again gave the same. Each plan is looked at until that has settled; then
it stays, or another takes its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from neap.torch._beside import Beside
from neap.torch._enforce import Enforcement, Margin
from neap.torch._feedback import Feedback
from neap.torch._meter import drifted, measured_link
from neap.torch._planning import Asked, PlanError, Planner
from neap.torch._policy import SPARE
from neap.torch._report import Report, size
from neap.torch._runtime import Runtime
from neap.torch._schedule import PAGE, Schedule

_REPLANS = 6
"""The most plans that are made anew because of what the first iterations showed, counted apart
without and with trims.
"""
_LONGEST = 8
"""How many iterations of a plan are looked at while memory lies otherwise after each."""
_AGAIN = 8
"""How often, at most, plans that kept to the budget are looked at again."""
_EXACT = 50
"""A plan gives out no more than this part beyond its predicted peak."""
_ROUNDS = 16
"""How often, at most, a plan gets more points at which the allocator gives memory back."""
_BETTER = "a quicker plan was found beside the script"
"""Why a plan takes the place of the first one."""


class Search:
    """The search of one fit.

    What returns a schedule or nothing: the plan that acts next, if it is another one.

    Args:
        enforcement: the allocator that is measured.
        runtime: what acts by the plan.
        report: where each new plan and what calls for it are noted.
        say: prints a line.
        budget: the budget in bytes, given the unplanned peak in bytes.
        feedback: measures operators while a plan acts that stays.
    """

    def __init__(
        self,
        enforcement: Enforcement,
        runtime: Runtime,
        report: Report,
        say: Callable[[str], None],
        budget: Callable[[int], int],
        feedback: Feedback,
    ) -> None:
        self.planner: Planner | None = None
        self.budget = budget
        self.feedback: Feedback = feedback
        self.settled = False
        """Whether the first iterations by the plan showed nothing that calls for another."""
        self._enforcement = enforcement
        self._runtime = runtime
        self._report = report
        self._say = say
        self._learned = 0
        """The margin that the watched iterations showed."""
        self._spare = 0
        """The part of it that is left free beside what the allocator is predicted to reserve."""
        self._margins = _margins(0)
        """Those of plans with updates inside backward, or not, and with trims, or not."""
        self._replans = 0
        """How often the plan was made anew for the present budget."""
        self._tried = 0
        """Iterations that ran by the present plan."""
        self._looked = 0
        """How many of these ran since it began, what did not run by it aside."""
        self._spent_ns = 0
        """How long these took to give back memory and to reserve it again."""
        self._before = 0
        """The most bytes that were reserved by plans before it."""
        self._former: tuple[int, int] | None = None
        """The most bytes given out and reserved by the last plan before it that ran."""
        self._strayed = 0
        """The most bytes that were reserved, before it acted, by what did not run by a plan."""
        self._rounds = 0
        """How often it got more points at which the allocator gives memory back."""
        self._nearest: tuple[int, Schedule] | None = None
        """What it was when it exceeded the budget least, after the bytes by which it did."""
        self._quickest: tuple[Schedule, int] | None = None
        """The first plan that did not fit, with its margin."""
        self._instead: tuple[Schedule, int] | None = None
        """The plan that fits without trims, with its margin, while quicker ones with trims are
        looked at.
        """
        self._trims = False
        """Whether plans with trims are looked at, or were."""
        self._tight: tuple[Schedule, int] | None = None
        """The plan that fits, with its margin, where one that leaves a page free is looked at."""
        self._loosened = False
        """Whether leaving a page free was tried."""
        self._eased = False
        """Whether giving back less was tried."""
        self._fitted = False
        """Whether the plan kept to the budget when it was looked at, and may be looked at again."""
        self._missed = False
        """Whether the plan that stays did not keep to the budget when it was looked at."""
        self._again = 0
        """How often plans that did were looked at again."""
        self._banned: set[tuple[str, int]] = set()
        self._better: Beside | None = None
        """The plan that is looked for while the first one acts."""

    @property
    def margin(self) -> int:
        """The bytes that the watched iterations reserved beyond what was given out."""
        return self._learned

    def start(self, peak: int, varies: bool) -> None:
        """The watched iterations gave out ``peak`` bytes at most, and reserved what they did. Where
        sizes vary, free memory lies in pieces of other sizes.
        """
        spare = self.budget(peak) // SPARE if varies else 0
        self._spare = spare
        self._learned = self._enforcement.learn(peak, spare)
        self._begin_anew()

    def plan(self, planner: Planner) -> Schedule:
        """A plan for the budget less the present margin.

        Raises:
            PlanError: if the planner fails.
        """
        self._plans_by(planner)
        return planner.plan(self._asked())

    def first(self, planner: Planner) -> Schedule:
        """A plan to begin with. Where looking for the best one takes long, that goes on beside the
        script, and this is the first one that keeps to the budget.

        Raises:
            PlanError: if the planner fails.
        """
        self._plans_by(planner)
        asked = self._asked()
        quick = planner.quick(asked)
        if quick is None:
            return self.plan(planner)
        self._better = Beside(_BETTER, lambda: (planner, planner.plan(asked)))
        return quick

    def _plans_by(self, planner: Planner) -> None:
        """Plans are made by this planner from now on."""
        if planner is not self.planner:
            self.planner = planner
            self.feedback.plans(planner)

    def _asked(self) -> Asked:
        """What a plan is asked for, by what is known now."""
        margins = self._margins[False, self._trims].bytes, self._margins[True, self._trims].bytes
        left, expandable = self._learned - self._spare, self._enforcement.is_expandable()
        return Asked(self.budget, margins, set(self._banned), left, expandable)

    def give_up(self) -> None:
        """Nothing is looked for any more."""
        self.feedback.stop()
        better, self._better = self._better, None
        if better is not None:
            better.give_up()

    def begin(self, schedule: Schedule) -> None:
        """The plan acts from now on."""
        if self._missed and self.settled:  # It missed the budget least of all.
            self._report.say_whether_met(schedule, False)
        self.feedback.stop()
        self._trims |= any(kind == "begin" for kind, *_ in schedule.trims)
        self._report.margin_bytes = self._margin(schedule).bytes
        self._measure(schedule)

    def needs(self, schedule: Schedule) -> int:
        """The bytes that the plan was seen to need, or is taken to."""
        return max(schedule.peak_bytes + self._learned, self._enforcement.peak_reserved())

    def ran(self, schedule: Schedule) -> Schedule | None:
        """After an iteration that ran by the plan."""
        self._tried += 1
        self._looked += 1
        self._enforcement.mark()
        if not self.settled:
            return self._look(schedule)
        if self._fitted and self._misses(schedule):
            # The next iterations show where free memory must be given back too.
            self._again += 1
            self.settled = False
            self._measure(schedule)
        elif schedule.trims and not self._fitted and not self._missed and self._over(schedule) > 0:
            # It was looked at as often as may be.
            self._missed = True
            self._report.say_whether_met(schedule, False)
        elif self._missed and self._tried >= _LONGEST and self._over(schedule) <= 0:
            # What it reserves is measured anew after an iteration without the plan.
            self._settle(schedule, True)
        elif self._runtime.meter is not None and self._runtime.meter.turn():
            other = self._feed_back(schedule)
            if other is not None:
                return other
        made = self.feedback.ran(schedule, self._asked_as_measured)
        return None if made is None else self._by_measured_times(schedule, *made)

    def strayed(self, schedule: Schedule) -> None:
        """After an iteration that did not run by the plan: what it reserved beyond the budget goes
        back, and is not taken for what the plan needs.
        """
        self.feedback.strayed()
        self._beyond(schedule)

    def begins(self, schedule: Schedule) -> None:
        """At the first saved tensor of an iteration: the same for what ran since the last one, such
        as an evaluation without gradients.
        """
        known = schedule.peak_bytes
        if self._enforcement.grew(known + known // _EXACT):
            self._beyond(schedule)

    def _beyond(self, schedule: Schedule) -> None:
        if not self._enforcement.give_back(schedule.limit):
            return
        self._tried = 0
        if self._enforcement.beyond == 1:
            reserved, budget = self._enforcement.strayed_reserved, schedule.budget_bytes
            self._say(
                f"neap: {size(reserved)} were reserved for what is no iteration by the plan, such "
                f"as an evaluation or another batch; the budget is {size(budget)}"
                + ("" if self._enforcement.strict else "; --strict refuses that")
            )

    def for_another_budget(self, why: str) -> Schedule | None:
        """A plan for the budget as it is now: the margin that was found belongs to the last one."""
        self._begin_anew()
        return self._plan_anew(why)

    def dropped(self) -> None:
        """The plan acts no more: another follows, or the script is watched anew. What it and others
        took is kept for the report.
        """
        self.feedback.stop()
        if self._tried:
            self._former = self._enforcement.peaks()
        self._strayed = max(self._strayed, self._enforcement.strayed_reserved)

    def report_dropped(self) -> None:
        """Puts into the report what is known where no plan has followed on the last one yet."""
        former, now = self._former or (0, 0), self._enforcement.peaks()
        self._report.peak_allocated_bytes = max(former[0], now[0])
        self._report.peak_reserved_bytes = max(former[1], now[1], self._strayed)
        self._report.say_what_is_known_without_plan(self._strayed)

    def report(self, schedule: Schedule) -> None:
        """Puts into the report what is known of the plan that acts."""
        self.begins(schedule)  # What ran since the last iteration counts too.
        peaks, fits, report = self._enforcement.peaks(), self._over(schedule) <= 0, self._report
        measured = peaks[1] > 0
        if not self._tried and not self.settled:
            # What lies on the device between iterations says nothing of the plan.
            peaks = self._former or (0, 0)
            fits = peaks[1] <= schedule.budget_bytes
        report.peak_allocated_bytes, report.peak_reserved_bytes = peaks
        report.predicted_iteration_ns = schedule.time_ns
        if measured:
            report.beyond = self._enforcement.beyond
            report.say_what_is_known(
                self._tried > 0 or self._former is not None,
                self._looked,
                self.settled,
                fits,
                max(self._strayed, self._enforcement.strayed_reserved),
                self._before,
            )
            report.peak_reserved_bytes = max(peaks[1], self._strayed)
        elif report.kept_bytes:  # Nothing was measured, and more stands with each iteration.
            report.met = False

    # -- the first iterations of a plan

    def _look(self, schedule: Schedule) -> Schedule | None:
        """What they showed."""
        changed = self._changed()
        over = self._over(schedule)
        repeats = self._enforcement.repeats()
        self._spent_ns += self._runtime.pages.spent_ns
        schedule.giving_back_ns = self._spent_ns // self._looked
        if self._better is not None and not changed:
            # It is waited for where this plan does not fit, and where nothing is computed.
            if self._better.runs and over <= 0 and self._enforcement.computes():
                return None
            better, self._better = self._better, None
            other = self._if_better(better, schedule, over)
            if other is not None:
                return other
        if changed:
            self._quickest = self._nearest = self._instead = None
            self._trims = False
            self._forget_plans()
            return self._plan_anew("calls that did not give the same again are kept")
        # Garbage that Python collects now and then may still make a later iteration differ.
        soon = repeats and not schedule.trims and not self._again
        if over <= 0 and self._looked < (2 if soon else _LONGEST):
            return self._giving_back_less(schedule) if self._looked == 2 else None
        if self._tight is not None:
            (tight, bytes_of_tight), self._tight = self._tight, None
            if over > 0:
                self._margin(schedule).bytes = bytes_of_tight
                return tight
            instead = self._better_without_trims(schedule, over)
            if instead is None:
                self._settle(schedule, True)
            return instead
        if self._trims and over > 0:
            trimmed = self._with_more_trims(schedule, over)
            if trimmed is not None:
                return trimmed
        found = self._for_another_margin(schedule, over)
        if found is None and not self._trims and not self.settled:
            found = self._with_trims(schedule, over)
        if found is not None or self.settled:
            return found
        instead = self._better_without_trims(schedule, over)
        if instead is not None:
            return instead
        drifts = over <= 0 and not repeats
        loose = self._with_a_page_free(schedule, over) if drifts else None
        if loose is None:
            self._settle(schedule, over <= 0)
        if over > 0 and self._nearest is not None and self._nearest[1] is not schedule:
            return self._nearest[1]
        return loose

    def _if_better(self, better: Beside, schedule: Schedule, over: int) -> Schedule | None:
        """The plan that was looked for meanwhile, if there is one and it is quicker, or this one
        does not fit.
        """
        better.end()
        if better.made is None:
            self._report.notes.append(f"no plan but the first one: {better.problem}")
            return None
        other = better.made[1]
        if over <= 0 and (not other.met or other.time_ns >= schedule.time_ns):
            return None
        self._report.replans.append(better.why)
        return other

    def _better_without_trims(self, schedule: Schedule, over: int) -> Schedule | None:
        """The plan that fits without trims, if the one with trims does not fit, or is not much
        quicker with the time that these take.
        """
        if self._instead is None:
            return None
        (instead, before), self._instead = self._instead, None
        if over <= 0 and schedule.is_better_than(instead):
            return None
        self._trims, self._quickest = False, None
        self._margin(instead).bytes = before
        return instead

    def _margin(self, schedule: Schedule) -> Margin:
        """The margin of plans like this one."""
        return self._margins[schedule.early, self._trims]

    def _for_another_margin(self, schedule: Schedule, over: int) -> Schedule | None:
        """A plan for another margin, or an earlier one."""
        if schedule.varies and over <= 0:  # Smaller iterations leave more unused.
            return None
        margin = self._margin(schedule)
        before = margin.bytes
        known = not schedule.early and not schedule.lent
        found = margin.judge(schedule, over, known and self._enforcement.is_expandable())
        if isinstance(found, Schedule):  # It fitted, and is looked at once more.
            self._say("neap: an earlier plan was better")
            return found
        if over > 0 and self._quickest is None:
            self._quickest = schedule, before
        if found is None:
            return None
        if self._replans >= _REPLANS or self.planner is None:
            margin.bytes = before
            return margin.best_but(schedule)
        unused = f"the allocator left {size(-over)} of the budget unused"
        more = f"the allocator reserved {size(over)} more than the budget"
        other = self._plan_anew(more if over > 0 else unused)
        if other is None or not self._trims:
            return other
        if self._instead is not None and not other.is_better_than(self._instead[0]):
            margin.bytes = before
            return None
        self._rounds = 0
        return _with_trims_of(schedule, other)

    def _with_trims(self, schedule: Schedule, over: int) -> Schedule | None:
        """The quickest plan that did not fit, with trims, where the one that does takes much
        longer, or none does.
        """
        if self._quickest is None:
            return None
        quickest, before = self._quickest
        if over <= 0:
            # With trims no budget binds.
            if self._enforcement.strict or not quickest.is_better_than(schedule):
                return None
            self._instead = schedule, self._margin(schedule).bytes
        self._trims, self._replans = True, 0
        self._margin(quickest).bytes = before
        begin = ("begin", 0, quickest.budget_bytes)
        return replace(quickest, trims=[*quickest.trims, begin], giving_back_ns=0)

    def _with_more_trims(self, schedule: Schedule, over: int) -> Schedule | None:
        """The plan with more points at which the allocator gives memory back, if that may help."""
        if self._nearest is None or over <= self._nearest[0]:
            self._nearest = over, schedule
        self._margin(schedule).missed(schedule)
        growth = self._runtime.growth
        if growth is None or self._enforcement.peak_reserved() <= schedule.limit:
            return None
        self._rounds += 1
        trimmed = growth.trimmed(schedule) if self._rounds <= _ROUNDS else None
        if trimmed is None and not schedule.moves:
            self._rounds = 0
            return replace(schedule, moves=True, giving_back_ns=0)
        return trimmed

    def _with_a_page_free(self, schedule: Schedule, over: int) -> Schedule | None:
        """A plan that leaves a page of the budget free, where it takes little longer. Memory lies
        otherwise after each iteration, so that a later one may need a page more.
        """
        missing = over + PAGE
        if self._loosened or schedule.trims or missing <= 0:
            return None
        self._loosened = True
        margin = self._margin(schedule)
        before, margin.bytes = margin.bytes, margin.bytes + missing
        other = self._plan_anew(f"the allocator left only {size(-over)} of the budget")
        if other is None or not other.met or schedule.is_better_than(other):
            margin.bytes = before
            return None
        self._tight = schedule, before
        return other

    def _giving_back_less(self, schedule: Schedule) -> Schedule | None:
        """The plan without what it gives back at the beginning of each iteration: all free memory,
        which is reserved anew one page after another. The later points alone may be enough.
        """
        trims = [point for point in schedule.trims if point[0] != "begin"]
        if self._eased or not trims or len(trims) == len(schedule.trims):
            return None
        self._eased = True
        self._tight = schedule, self._margin(schedule).bytes
        return replace(schedule, trims=trims, giving_back_ns=0)

    def _changed(self) -> bool:
        """Whether a call gave something else when it ran again. It is kept from now on."""
        differing, made = self._runtime.recompute.differing, self._runtime.remakes.differing
        for (node, number), why in made.items():
            self._banned.add((node, number))
            self._report.notes.append(f"{why}, so what {node} gives is kept")
        for (module, number), why in differing.items():
            self._banned.add((module, number))
            self._report.notes.append(
                f"{module} (call {number + 1}) did not come back as it was and is kept: {why}"
            )
        changed = bool(made or differing)
        made.clear()
        differing.clear()
        return changed

    def _over(self, schedule: Schedule) -> int:
        """By how many bytes the plan has made the allocator reserve more than the budget."""
        return self._enforcement.peak_reserved() - schedule.budget_bytes

    def _misses(self, schedule: Schedule) -> bool:
        """Whether a plan that fitted does so no more: free memory lies elsewhere each time, or the
        script keeps more than it did.
        """
        return self._over(schedule) > 0 or self._enforcement.retries() > 0

    def _measure(self, schedule: Schedule) -> None:
        """From now on is measured what the allocator reserves for this plan, and where it grows."""
        if self._tried:
            self._before = max(self._before, self._enforcement.peak_reserved())
        self.dropped()
        self._tried = self._looked = self._spent_ns = 0
        self._missed &= self.settled
        if not schedule.trims:
            self._rounds, self._nearest, self._eased = 0, None, False
        self._enforcement.restart()
        self._runtime.growth = None if self.settled else self._enforcement.growth(schedule.limit)

    def _settle(self, schedule: Schedule, fits: bool) -> None:
        """The plan stays; if it fits, a strict budget binds from now on."""
        self._end()
        # On a device it is met though its margin was not left free; a CPU measures nothing.
        if self._enforcement.peak_reserved():
            self._report.say_whether_met(schedule, fits)
        self._fitted, self._missed = fits and self._again < _AGAIN, not fits
        # A script must not fail because its plan needs more, now or in a later iteration.
        if fits and not schedule.trims:
            self._enforcement.begin(schedule.budget_bytes)

    # -- another plan

    def _feed_back(self, schedule: Schedule) -> Schedule | None:
        """Another plan where copies are quicker or slower than the plan takes them to be."""
        report, meter = self._report, self._runtime.meter
        if meter is None:
            return None
        report.link_bytes_per_s = {lane: int(rate) for lane, rate in meter.rates.items()}
        if self.planner is None or self.feedback.looks:  # One plan for both.
            return None
        try:
            why = drifted(meter.rates, self.planner.profile["link"])
        except PlanError as error:
            report.notes.append(str(error))
            self._runtime.meter = None
            return None
        if why is None:
            return None
        self._measure_link(self.planner, meter.rates)
        other = self._plan_anew(why)
        return None if other is None else self._looked_at_anew(schedule, other)

    @staticmethod
    def _measure_link(planner: Planner, rates: dict[str, float]) -> None:
        """Plans by the measured rates of copies from now on."""
        planner.profile["link"] = measured_link(rates, planner.profile["link"])

    def _asked_as_measured(self) -> tuple[Asked, str | None]:
        """The same as :meth:`_asked`, by the measured rates of copies; and how far these are from
        the assumed ones, if they are far.
        """
        why, meter, planner = None, self._runtime.meter, self.planner
        if meter is not None and planner is not None:
            with contextlib.suppress(PlanError):
                why = drifted(meter.rates, planner.profile["link"])
                self._measure_link(planner, meter.rates)
        return self._asked(), why

    def _by_measured_times(
        self, schedule: Schedule, planner: Planner, other: Schedule
    ) -> Schedule | None:
        """Another plan that was made by measured times. One that does the same stays, and takes the
        time that is predicted now.
        """
        self.planner = planner
        if not other.does_as(schedule):
            self._replans = 0
            return self._looked_at_anew(schedule, other)
        schedule.iteration_ns, schedule.course = other.iteration_ns, other.course
        schedule.unplanned_iteration_ns = other.unplanned_iteration_ns
        schedule.again, schedule.remade = other.again, other.remade
        self._report.unplanned_iteration_ns = other.unplanned_iteration_ns
        self._report.course = other.course
        return None

    def _looked_at_anew(self, schedule: Schedule, other: Schedule) -> Schedule:
        """A plan in place of one that stayed."""
        self.settled = self._loosened = False
        self._quickest = None
        self._forget_plans()
        return _with_trims_of(schedule, other) if self._trims else other

    def _forget_plans(self) -> None:
        """Margins stay, but not what plans showed before."""
        self._margins = {kind: Margin(one.bytes) for kind, one in self._margins.items()}

    def _plan_anew(self, why: str) -> Schedule | None:
        """Another plan; nothing where there is none. Then the search has ended, unless a plan that
        fits without trims is left.
        """
        report = self._report
        self._tight = None
        self.give_up()
        if self._replans >= _REPLANS or self.planner is None:
            self._end()
            return None
        self._replans += 1
        report.replans.append(why)
        self._say(f"neap: planning anew: {why}")
        try:
            return self.plan(self.planner)
        except PlanError as error:
            report.notes.append(str(error))
            if self._instead is None:
                self._end()
            return None

    def _end(self) -> None:
        self.settled = True
        self._runtime.growth = None

    def _begin_anew(self) -> None:
        """What is known of the allocator is what the watched iterations showed."""
        self.settled = self._loosened = self._trims = False
        self._replans = self._again = 0
        self._quickest = self._instead = self._tight = None
        self._margins = _margins(self._spare)


def _with_trims_of(schedule: Schedule, other: Schedule) -> Schedule:
    """The other plan with the trims of this one, if it has any."""
    if not schedule.trims:
        return other
    return replace(other, trims=schedule.trims, moves=schedule.moves)


def _margins(size: int) -> dict[tuple[bool, bool], Margin]:
    """Margins that begin at this many bytes."""
    either = (False, True)
    return {(early, trims): Margin(size) for early in either for trims in either}
