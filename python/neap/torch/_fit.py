"""Fits a training script into a memory budget: watches, plans, acts, and says what it did."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._compact import compact, make_workspaces
from neap.torch._connection import ShareError
from neap.torch._enforce import Enforcement
from neap.torch._feedback import Feedback
from neap.torch._first import First
from neap.torch._guard import Guard, each, entry
from neap.torch._joined import Joined
from neap.torch._kinds import Kinds
from neap.torch._leftovers import Leftovers, unmovable
from neap.torch._lift import Lift, is_on_top
from neap.torch._loans import leavable
from neap.torch._meter import Meter
from neap.torch._pinned import room, standing, usable
from neap.torch._planning import NOTHING, Learned, PlanError, Planner, device_of_card
from neap.torch._policy import LOOKS, SPARE
from neap.torch._recompute import possible
from neap.torch._record import device_of
from neap.torch._recorder import Recorder
from neap.torch._report import Report, acts, parse_budget, size
from neap.torch._runtime import FITS, LARGER, SERVED, SHORTER, Runtime
from neap.torch._schedule import Schedule
from neap.torch._search import Search
from neap.torch._share import Share
from neap.torch._sizes import fits, needs
from neap.torch._states import divisible
from neap.torch._storage import Storage
from neap.torch._tally import Tally
from neap.torch._timeline import Timeline
from neap.torch._unplanned import Unplanned
from neap.torch._updates import Updates
from neap.torch._versions import newer_than_known
from neap.torch._wanted import longer
from neap.torch._watch import Watch, named_tensors
from neap.torch._watching import Watched, Watching

_ATTEMPTS = 12
"""The most iterations that are watched for two in a row that are alike."""

_VARIES = "sizes vary: the plan is for the largest that were watched"

_REASONS = 32
"""Iterations that differ for more reasons are counted together."""

_UNKNOWN = "a6000"
"""The device whose times count where nothing says which."""

_UNLIKE = "no two iterations in a row were alike"

_ACTING: list[Fit] = []
"""The fit that acts: hooks are global, so there is one at a time."""


class Fit:
    """A script that is being fitted. Made by :func:`fit`; also a context manager that closes it."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Optimizer],
        budget: str | int,
        profile: str,
        say: Callable[[str], None],
        attempts: int = _ATTEMPTS,
        recompute: bool = True,
        strict: bool = False,
        schedule: Schedule | None = None,
        save_plan: str | os.PathLike[str] | None = None,
        timeline: str | os.PathLike[str] | None = None,
        cache: bool = False,
        early_updates: bool = False,
        share: Share | None = None,
        scout: int = 0,
        learned: Learned = NOTHING,
        latencies_out: str | os.PathLike[str] | None = None,
    ) -> None:
        raises = strict or os.environ.get("NEAP_TORCH_STRICT") == "1"
        self.guard = Guard(raises, self._break_off)
        self.watch = Watch(self.guard)
        self.schedule: Schedule | None = None
        self._profile = profile
        self._learned, self._latencies_out = learned, latencies_out
        self._say = say
        self._recompute = recompute and possible()
        self._models = models
        self._optimizers = list(optimizers)
        self._pending: Schedule | None = None
        """A plan that was given for a script whose device is not known yet."""
        self._unproved = schedule is not None
        """Whether a plan was given that no iteration has shown to be this script's."""
        # A share of the GPU was given for what the script did at first.
        stays = share is not None
        self._first = First(self._optimizers, self.watch, self._first_is_gone, stays)
        self._save_plan = save_plan
        self._cache = cache
        self._steps = 0
        self._report = Report()
        self._updates = Updates(self.watch, self._optimizers, self._not_early)
        self._times: list[float] = []
        self._began = 0.0
        self._closed = False
        self._by_hand = False
        self._off = os.environ.get("NEAP_OFF") == "1"
        self._planning_ended = False
        self._kinds = Kinds(attempts, scout)
        self._scouts = scout > 0
        self._said = ""
        """The line that said which plan acts."""
        self._tally = Tally()
        self._former: tuple[Schedule, Planner | None] | None = None
        """The plan that acted before the script was watched anew."""
        self.device = device_of(models) if models else "cpu"
        self.enforcement = Enforcement(self.device, strict or share is not None)
        self.runtime = Runtime(self.device, self.watch.module_of, self._parameters)
        self.runtime.guard = self.guard
        self.runtime.differs, self.runtime.saves = self.enforcement.lift, self._saves
        self._unplanned = Unplanned(
            self.runtime.policy, self.enforcement, self._updates, self._report, say
        )
        self._leftovers = Leftovers(self._report, say, self.enforcement.standing)
        not_early = self._not_early if early_updates else None
        self.watching = Watching(self.watch, self._kinds, self._leftovers, attempts, not_early)
        asked = parse_budget(budget)
        self.feedback = Feedback(self.runtime, self.watch, self._report, say)
        about = self.enforcement, self.runtime, self._report, say
        self.search = Search(*about, asked, self.feedback)
        self._joined = Joined(share, self.search, self.enforcement, self._report, say)
        self._thread = threading.get_ident()
        self._lift = Lift(lambda: [self.runtime, self.watching.recorder], self._lifted, self.guard)
        # Once, before anything of the script's own: a hook that is pushed inside another's block
        # would be popped with it.
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self.runtime.pack, self.runtime.unpack
        )
        self._hooked = False
        self._inside = False
        """Whether an optimizer steps inside backward: its states stay then, and parameters too."""
        self._ends_with_backward = False
        if not self._off:
            self._start(models, schedule, timeline)

    @entry()
    def _start(
        self,
        models: Sequence[torch.nn.Module],
        schedule: Schedule | None,
        timeline: str | os.PathLike[str] | None,
    ) -> None:
        if _ACTING:
            self._say("neap: an earlier fit was still acting; this one takes its place")
            _ACTING[0].close()
        _ACTING.append(self)
        newer = newer_than_known()
        if newer is not None:
            self._report.notes.append(newer)
        for place, model in enumerate(models):
            self.watch.name_root(model, "" if place == 0 else type(model).__name__)
        if timeline is not None:
            self.runtime.timeline = Timeline(timeline)
            self.runtime.timeline.follow(self.watch)
        self.watch.named += [self._named, self.runtime.recompute.resolve]
        self.watch.install()
        self.watch.before_step.append(self._before_step)
        self.watch.before_piece.append(lambda number: self.runtime.reached("step", number))
        self.watch.after_step.append(self._stepped)
        self.watch.before_backward.append(lambda: self.runtime.reached("backward"))
        self.watch.after_backward.append(lambda: self.runtime.reached("after"))
        self.watch.after_backward.append(self.runtime.give_parameters_back)
        self.watch.backward_over.append(self._backward_over)
        self._hooks.__enter__()
        self._hooked = True
        self._lift.install()
        if schedule is not None:
            self._planning_ended = True
            self._joined.join_with(schedule)
            if models:
                self._act(schedule)
            else:
                self._pending = schedule

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """One iteration, for loops whose optimizer is not PyTorch's: its end is the iteration's."""
        self._by_hand = True
        try:
            yield
        finally:
            if not self._off and not self._closed:
                self._one_has_ended()

    @entry()
    def _one_has_ended(self) -> None:
        if self._kinds.stepped():
            self._ended()

    @entry(lambda self, *bring_back, **named: self._report, ends=True)
    def close(self, bring_back: bool = True) -> Report:
        """Takes everything away again. The report stays.

        Args:
            bring_back: whether optimizer states come back to the device, for steps without neap.
        """
        if not self._closed and not self._off and self.watch.backward_depth:
            # Hooks that are taken away inside backward are there again when it has ended.
            self.watch.after_backward.append(lambda: self._close_later(bring_back))
        elif not self._closed and not self._off:
            self._plan_with_what_came()
            if self._kinds.begun:
                self._count("the script ended within an iteration", self._kinds.begun)
                self._kinds.begin(1)
            self.report()
            self._write_latencies()
            self._closed = True
            _ACTING.remove(self)
            self.watching.stop()
            self.search.give_up()
            self.feedback.forget()
            self.runtime.stop()
            self._unhook()
            self._lift.remove()
            self.watch.remove()
            self.enforcement.close()
            self._joined.close()
            self._updates.stop(bring_back)
            # What is held no more can be freed though the fit lives on.
            self.runtime.follow(None)
            self._updates.forget()
            self._models, self._former, self.search.planner = [], None, None
            self.watching.forget()
            self._optimizers.clear()
        return self._report

    def _plan_with_what_came(self) -> None:
        """A script that runs for its plan alone has ended before as many iterations as were to be
        watched.
        """
        if self._scouts and self.watching.no_more_come():
            self._watch()

    def _close_later(self, bring_back: bool) -> None:
        self.close(bring_back)

    def _unhook(self) -> None:
        if self._hooked:
            self._hooked = False
            self._hooks.__exit__(None, None, None)

    # -- after a failure

    def _break_off(self, line: str) -> None:
        """neap itself has failed: everything comes back, and nothing acts any more."""
        self._say(line)
        on_device = self.device == "cuda" and torch.cuda.is_initialized()
        again: list[str] = []
        again += each([torch.cuda.synchronize] if on_device else [])
        again += each([self._measure, self.enforcement.close, self.search.give_up])
        again += [*self.runtime.give_up(), *self._updates.give_up()]
        again += each([self._joined.close])
        self._report.met = False
        self._report.notes.append(line)
        if again:
            self._report.notes.append(f"and then: {'; '.join(again)}")
        self.guard.end = self._take_away
        self._planning_ended = self._closed = True
        if self in _ACTING:
            _ACTING.remove(self)

    def _take_away(self) -> None:
        """Takes the hooks away, where none of them runs and none of the script's own is above."""
        if (
            threading.get_ident() != self._thread
            or self.watch.backward_depth
            or self.watch.within_step
            or self.watch.depth
        ):
            return
        recorder, self.watching.recorder = self.watching.recorder, None
        if recorder is not None and not (recorder.is_on_top() and is_on_top(recorder)):
            self.watching.recorder = recorder
            return
        each([recorder.give_up] if recorder is not None else [])
        if self._hooked and not is_on_top(self.runtime):
            return
        self.guard.end = None
        each([self._unhook, self._lift.remove, self.watch.remove, self._updates.stop])

    @entry(lambda self: self._report)
    def report(self) -> Report:
        """What happened so far."""
        if self._off or self._closed:
            return self._report
        return self._measure()

    def _measure(self) -> Report:
        counts, report, recompute = self.runtime.counts, self._report, self.runtime.recompute
        report.swapped_out, report.swapped_in = counts.swapped_out, counts.swapped_in
        report.swapped_bytes = counts.bytes_out
        report.freed, report.kept, report.late = counts.deaths, counts.kept, counts.late
        report.gave_back, report.moved_bytes = counts.trims, counts.bytes_moved
        report.state_bytes = self._updates.state_bytes
        report.recomputed, report.recomputed_deaths = recompute.ran, recompute.deaths
        remakes = self.runtime.remakes
        report.remade, report.remade_deaths = remakes.ran, remakes.deaths
        report.compared = recompute.compared + remakes.compared
        report.early_updates = self._updates.early
        timed = self._times and self.enforcement.computes()
        report.iteration_s = statistics.median(self._times) if timed else 0.0
        if self.schedule is not None:
            self.search.report(self.schedule)
        elif self._former is not None:
            self.search.report_dropped()
        else:
            self._unplanned.report()
        report.kinds = self._tally.all()
        report.allocator_retries = self.enforcement.retries()
        report.pinned_bytes = max(report.pinned_bytes, standing())
        return report

    def latencies(self, path: str | os.PathLike[str]) -> int:
        """Writes the operator times that were measured in the script as a table, which
        ``neap plan --latencies`` and :func:`fit` read; before :meth:`close`.

        Returns:
            How many operators were measured.

        Raises:
            ValueError: if none was, or the table can't be written.
        """
        known = self.feedback.latencies
        times = {} if known is None else known.table()
        if known is None or not times:
            raise ValueError("no operator was measured: no iteration by a plan was long enough")
        on = "host"
        if self.device == "cuda":
            on = self._profile or torch.cuda.get_device_name()
        try:
            known.planner.write_table(times, os.path.abspath(path), on)
        except PlanError as error:
            raise ValueError(str(error)) from None
        return len(times)

    def _write_latencies(self) -> None:
        """Writes the table that was asked for."""
        path = self._latencies_out
        if path is None:
            return
        try:
            count = self.latencies(path)
        except ValueError as error:
            self._report.notes.append(f"{os.fspath(path)} is not written: {error}")
        else:
            self._say(f"neap: {os.fspath(path)} has the times of {count:,} operators")

    @property
    def settled(self) -> bool:
        """Whether the plan is the final one, or there will be none."""
        return self.search.settled or (self.schedule is None and self._planning_ended)

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan, though it may not act yet."""
        return self.schedule is not None or self._pending is not None

    # -- iterations

    def _named(self) -> None:
        """Modules have got paths: a root is called for the first time."""
        if self._pending is None or self.watch.backward_depth:
            return
        roots = (reference() for reference in self.watch.roots.values())
        tensors = (next(root.parameters(), None) for root in roots if root is not None)
        first = next((one for one in tensors if one is not None), None)
        if first is not None:
            self._runs_on(first.device.type)

    def _runs_on(self, device: str) -> None:
        """The device is known, and a plan that was given acts from now on."""
        known, self.device = self.device, device
        self.runtime.device = self.runtime.policy.device = self.enforcement.device = device
        pending, self._pending = self._pending, None
        if pending is None and known != device:
            pending = self.schedule
        if pending is not None:
            self._act(pending)

    def _before_step(self, optimizer: Optimizer) -> None:
        self.runtime.reached("step")
        if any(known is optimizer for known in self._optimizers):
            return
        self._first.comes()
        self._optimizers.append(optimizer)
        if len(self._optimizers) == 1:
            # A script that was not changed shows its optimizer, and so its device, here. Its
            # modules were ignored if another one was the first before.
            self.watch.notice_modules()
            groups = (group["params"] for group in optimizer.param_groups)
            first = next((parameter for group in groups for parameter in group), None)
            self._runs_on(self.device if first is None else first.device.type)
        if self.schedule is not None:
            self._updates.join(optimizer, self.schedule)
            self.runtime.turns = self._updates.turns

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._by_hand or not self._first.stepped(optimizer):
            return
        if self.watch.backward_depth:
            self._inside = self._ends_with_backward = True
        elif self._kinds.stepped():
            self._ended()

    def _backward_over(self) -> None:
        """An iteration ends, if its optimizer stepped inside backward."""
        self._first.backward_over()
        if self._ends_with_backward:
            self._ends_with_backward = False
            if self._kinds.stepped():
                self._ended()

    def _first_is_gone(self, why: str, others: int) -> None:
        """Forgets the optimizers; the next one that steps ends iterations, which are watched."""
        if others:
            self._count("only another optimizer steps", others)
        if self.schedule is not None and self.search.planner is None:
            self._say(f"neap: {why}; the plan, which was given, stays")
            self._updates.follow(None)
        else:
            self._say(f"neap: {why}; watching the script anew")
            self.watching.stop()
            self._former = None
            self._drop_plan()
            self._planning_ended = False
        self._optimizers.clear()
        self.search.planner = None
        self.feedback.forget()
        self.watching.forget()
        gc.collect()  # What was recorded refers to the optimizers, in cycles.

    def _saves(self) -> None:
        """The first tensor of an iteration by the plan is saved."""
        self._first.saves()
        if self.schedule is not None:
            self.search.begins(self.schedule)

    def _ended(self) -> None:
        self._steps += 1
        if self.schedule is not None:
            why = self.runtime.end()
            self._leftovers.ended()
            by_plan = why is None or why in SERVED
            over = self._tell(by_plan, self.schedule.budget_bytes)
            more = self.runtime.policy.left > 0
            if why == LARGER and not self.runtime.saves_more:
                why = None  # Other tensors are smaller in return.
                self._unplanned.ended(self.schedule.limit, self._kinds.period)
            goes_on = why == longer(len(self.schedule.expected))
            self._kinds.ran(why, self.runtime.count, over, more, goes_on)
            self._report.planned += self._kinds.period * by_plan
            if why is None or why == SHORTER:
                self._proved()
                self._times.append(time.perf_counter() - self._began)
                if why == SHORTER:
                    self.feedback.strayed()
                other = self.search.ran(self.schedule)
                if other is not None:
                    self._act(other)
            else:
                if not by_plan:
                    self._count(why)
                self._unplanned.ended(self.schedule.limit, self._kinds.period)
                self.search.strayed(self.schedule)
                if by_plan or why == FITS:  # Its kind is the plan's.
                    self._proved()
                elif self._replaces_given(self.schedule, why):
                    return
            if self.schedule.varies:
                self.runtime.policy.give_back_free()
            self._on_timeline(why is None)
            if self._watch_anew(self.schedule):
                return
            self.runtime.begin()
            if self.search.settled and self.runtime.recompute.resolved:
                self.watch.ignore_modules()
            self.enforcement.apply()
            self._joined.ask(self.schedule, self._act)
            self._began = time.perf_counter()
            return
        if self._planning_ended:
            self._count("there is no plan")
            self._tell(False, self.runtime.policy.limit or 0)
            self.runtime.begin()
            self._unplanned.ended_without_plan(self.watch, self._optimizers)
            return
        self._count("watching")
        if self.watch.backward_depth:
            self._give_up("its iterations end inside backward")
            return
        if threading.get_ident() != self._thread:
            self._give_up("its iterations run in another thread than the one that neap began in")
            return
        self._watch()

    def _tell(self, by_plan: bool, limit: int) -> bool:
        """Counts an iteration that was not watched; whether it reserved more than ``limit`` bytes,
        if there is a limit.
        """
        runtime = self.runtime
        way = "by_plan" if by_plan else "on_demand" if runtime.policy.left else ""
        over = limit > 0 and self.enforcement.is_over(limit)
        self._tally.ended(runtime.count, runtime.saved_bytes, way, over, self._kinds.period)
        return over

    def _proved(self) -> None:
        """The plan is this script's, and there are states now."""
        given, self._unproved = self._unproved, False
        if given and self.schedule is not None:
            self.runtime.policy.begin(self.schedule.limit)
            self._together(self.schedule)

    def _replaces_given(self, schedule: Schedule, why: str) -> bool:
        """Watches a script whose first iteration is not that of the plan that was given, with what
        backward needs on the host; whether it does.
        """
        if not self._unproved or self._joined or self.watch.backward_depth:
            return False
        self._unproved = False
        self._say(
            f"neap: the plan that was given is not this script's ({why}); watching the script, "
            "with what backward needs on the host"
        )
        self._former, self.watching.spills, self._planning_ended = (schedule, None), True, False
        self._drop_plan()
        self.watch.notice_modules()
        self._watch()
        return True

    def _on_timeline(self, as_planned: bool) -> None:
        """Draws the fourth iteration that runs by the plan, when the allocator has settled."""
        timeline = self.runtime.timeline
        if timeline is None or timeline.done:
            return
        if timeline.on and as_planned:
            timeline.stop()
        elif self._report.planned >= 3:
            timeline.start(self.device)

    def _lifted(self) -> None:
        if self.watching.recorder is not None:
            self.watching.recorder.forbid("it uses torch.func, which allows no hooks")

    def _count(self, why: str, times: int | None = None) -> None:
        steps = self._kinds.period if times is None else times
        known = self._report.unplanned
        if why not in known and len(known) >= _REASONS:
            why = "of other differences"
        known[why] = known.get(why, 0) + steps

    def _give_up(self, why: str) -> None:
        self.watching.stop()
        if self._former is not None:
            (former, self.search.planner), self._former = self._former, None
            self.watching.spills = False
            self._say(f"neap: the plan stays: {why}")
            self._act(former)
            return
        self._planning_ended = True
        self._report.notes.append(why)
        self._say(f"neap: the script runs without a plan: {why}")

    def _give_up_plan(self, why: str, peak: int) -> None:
        """There is no plan for iterations of this many bytes: saved tensors leave on demand."""
        self._give_up(why)
        if self.schedule is None and not self._joined:
            self.runtime.begin()
            budget = self.search.budget(peak)
            self._unplanned.begin(budget, peak, self.watch, self._optimizers)

    # -- planning

    def _watch_anew(self, schedule: Schedule) -> bool:
        """Plans for larger iterations, or watches again a script that has changed for good, such as
        one that trains more of its layers from some step on; whether it is time. A plan from a file
        stays, and so does a share of the GPU that was given for what the script did at first.
        """
        kinds, planner = self._kinds, self.search.planner
        if (
            not kinds.out_of_patience
            or planner is None
            or self._joined
            or self.watch.backward_depth
            or threading.get_ident() != self._thread
        ):
            return False
        watched = self.watching.grown(self.runtime.larger) if kinds.grows else None
        if watched is None and kinds.may_wait and self._needs_states_away(schedule):
            return False
        why = kinds.watch_anew(schedule)
        self._former = schedule, planner
        if watched is not None:
            self._say(f"neap: {why}")
            self._drop_plan()
            self._plan(watched)
            return True
        self._say(f"neap: {why}; watching the script anew")
        self.watching.spills = True
        self._drop_plan()
        self.watch.notice_modules()
        self._watch()
        return True

    def _needs_states_away(self, schedule: Schedule) -> bool:
        """Whether states that the plan keeps on the host have no room on the device, where they are
        while the script is watched.
        """
        found = named_tensors(self.watch, self._optimizers) if schedule.away else []
        away = sum(tensor.nbytes for _, name, tensor in found if name in schedule.away)
        return away > schedule.limit // SPARE

    def _drop_plan(self) -> None:
        """Nothing acts until there is another plan."""
        if self._kinds.begun:
            self._count("the script changed within an iteration", self._kinds.begun)
        self._kinds.begin(1)
        self.schedule = None
        self.search.settled = self._report.met = False
        self.runtime.growth = None
        self.runtime.policy.begin(None)
        self.runtime.follow(None)
        self._updates.follow(None)
        self.runtime.turns = None
        self.search.give_up()
        self.search.dropped()
        self.enforcement.restart()

    def _watch(self) -> None:
        """Watches the script for another iteration.

        The first step makes the states; the next iterations are recorded until two are alike.
        """
        if self.watching.recorder is None:
            self.watching.begin(self.device, self._optimizers)
        elif self.watching.ended():
            name = type(self._models[0]).__name__ if self._models else "job"
            try:
                found = self.watching.found(name, self._optimizers)
            except ValueError as error:
                self._give_up(str(error))
            else:
                self._plan(found)
        elif self._kinds.turns:
            self._take_turns(self._kinds.turns)

    def _plan(self, watched: Watched) -> None:
        """A plan for what was watched acts from now on, if there is one."""
        recorder, found = watched.recorder, watched.iteration
        needed = needs(recorder, found, self.search.budget(found.peak) // LOOKS)
        self.runtime.policy.knows(needed)
        if not found.steady:
            self._give_up_plan(_UNLIKE, watched.peak)
            return
        self._say("neap: planning")
        self.search.start(found.peak, self._kinds.varies)
        try:
            planner = Planner(
                recorder,
                found,
                self._times_of(),
                not self._inside and all(map(divisible, self._optimizers)),
                self._recompute,
                cache=self._cache,
                soon=watched.soon,
                lend=[] if self._inside else self._lendable(recorder),
                varies=self._kinds.varies,
                steps=self._kinds.period,
                needs=needed,
                learned=self._learned,
            )
            self._keep_within_host(planner)
            notes = [_VARIES if self._kinds.varies else None, unmovable(recorder, found)]
            new = (note for note in notes if note is not None and note not in self._report.notes)
            self._report.notes += new
            planner.shorter = watched.shorter
            offer = self._joined.join(planner)
            if self._kinds.varies:
                limit = self.search.budget(planner.unplanned) - self.search.margin
                planner.fits = fits(watched.sizes, found.peak, limit)
            schedule = self._first_plan(planner)
        except PlanError as error:
            self._give_up_plan(str(error), watched.peak)
            return
        except ShareError as error:
            self._give_up(str(error))
            return
        self._former, self.watching.spills = None, False
        self._proved()
        self._act(schedule)
        self._joined.took(offer)

    def _first_plan(self, planner: Planner) -> Schedule:
        """A plan to begin with: the final one where the script runs for its plan alone, or shares
        a GPU by it.
        """
        whole = self._scouts or self._joined
        return self.search.plan(planner) if whole else self.search.first(planner)

    def _times_of(self) -> str:
        """The profile by whose times plans are made: the one that was asked for, or the card's."""
        if not self._profile and self.device == "cuda":
            card = torch.cuda.get_device_name()
            self._profile = device_of_card(card) or ""
            if not self._profile:
                note = f"there are no times of {card}: the plan goes by those of the {_UNKNOWN}"
                self._report.notes.append(f"{note}; --device names another")
        return self._profile or _UNKNOWN

    def _take_turns(self, turns: int) -> None:
        """Several iterations in a row are one from now on, and are watched anew."""
        self._say(f"neap: {turns} steps in turn make up an iteration")
        self.watching.stop()
        self._kinds.begin(turns)
        self._watch()

    def _keep_within_host(self, planner: Planner) -> None:
        """What leaves the device is pinned on the host, which may have less memory than that."""
        free = room() if self.device == "cuda" else None
        if free is None or usable(free) >= planner.unplanned:
            return
        planner.keep_within(usable(free))
        note = f"the host has {size(free)} left: the plan pins no more than 7/8 of it"
        self._report.notes.append(note)
        self._say(f"neap: {note}")

    def _parameters(self) -> dict[str, torch.Tensor]:
        found = named_tensors(self.watch, self._optimizers)
        return {name: tensor for role, name, tensor in found if role == "parameter"}

    def _lendable(self, recorder: Recorder) -> list[Storage]:
        """The parameters that may leave during backward: not those that the script gives another
        storage between backward and the step.
        """
        found = map(recorder.storages.find, leavable(self._parameters(), self._optimizers))
        within = recorder.parameters
        return [storage for storage in found if storage is not None and storage in within]

    def _not_early(self, why: str) -> None:
        text = f"updates stay in the optimizer's step: {why}"
        self._report.notes.append(text)
        self._say(f"neap: {text}")

    def _together(self, schedule: Schedule) -> None:
        """What stays on the device lies together when the plan begins. Before the first iteration
        that is cuBLAS's workspaces alone, since there are no states.
        """
        parameter = next(iter(self._parameters().values()), None)
        if not self._unproved:
            sizes = compact(self.watch, self._optimizers)
            schedule.workspace_bytes = max(schedule.workspace_bytes, sum(sizes.values()))
        elif parameter is not None and parameter.is_cuda:
            make_workspaces({parameter.device: schedule.workspace_bytes})

    def _save(self, schedule: Schedule, path: str) -> None:
        try:
            schedule.save(path)
        except OSError as problem:  # Such as a full disk.
            text = f"the plan can't be written to {path}: {problem.strerror}"
            if text not in self._report.notes:
                self._report.notes.append(text)
                self._say(f"neap: {text}")

    def _act(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._kinds.begin(schedule.steps)
        report = self._report
        report.budget_bytes = schedule.budget_bytes
        report.predicted_peak_bytes = schedule.peak_bytes
        report.unplanned_peak_bytes = schedule.unplanned_peak_bytes
        report.predicted_iteration_ns = schedule.time_ns
        report.unplanned_iteration_ns = schedule.unplanned_iteration_ns
        report.trims = len(schedule.trims)
        report.excluded = schedule.excluded
        report.course = schedule.course
        report.say_whether_met(
            schedule, schedule.met and schedule.peak_bytes <= schedule.budget_bytes
        )
        computes = self.enforcement.computes()
        self.runtime.recompute.compare = self.runtime.remakes.compare = computes
        if computes and self.runtime.meter is None:
            self.runtime.meter = Meter(self.device)
        self.feedback.acts = computes
        self.enforcement.lift()
        self.runtime.follow(None)
        self._updates.follow(schedule)
        self.runtime.turns = self._updates.turns
        self._together(schedule)
        self._leftovers.acts()
        self.search.begin(schedule)
        if self.search.planner is None:
            self.runtime.policy.knows(schedule.needs)
        self.runtime.policy.begin(0 if self._unproved else schedule.limit)
        self.runtime.follow(schedule)
        self._times = []
        self._began = time.perf_counter()
        if self._save_plan is not None:
            self._save(schedule, os.fspath(self._save_plan))
        line = acts(schedule)
        if line.partition("; free memory")[0] != self._said.partition("; free memory")[0]:
            self._said = line  # Points at which memory is given back come one after another.
            self._say(line)
