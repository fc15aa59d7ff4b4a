"""From a recorded iteration to a schedule: asks the planner's process, and puts its answer into the
terms of PyTorch's hooks.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from neap.torch import _form, _outside, _states
from neap.torch._early import updated
from neap.torch._graph import Iteration
from neap.torch._problem import Problem
from neap.torch._ranges import Range, candidates, operators
from neap.torch._recorder import Recorder
from neap.torch._remake import Remake
from neap.torch._schedule import MALFORMED, MOVES, UNKNOWN, Again, Fits, Needs, Schedule
from neap.torch._storage import Storage

_RATES = ("h2d", "d2h", "h2d_contended", "d2h_contended")
"""A link's rates in bytes per second."""

_EFFORT: int | None = None
"""The planner's effort; nothing for the usual."""
_QUICK = 0
"""The effort for the first plan that keeps to the budget."""
_MANY = 256
"""With fewer operators a first plan is there hardly sooner than the best one."""

_PATIENCE_S = 60
"""Seconds after which a process of neap's that should have answered is ended, for the planner more
by one for each :data:`_OPERATORS_PER_S` operators. Then the script runs without a plan.
"""
_OPERATORS_PER_S = 5

_LONGEST_NS = 1 << 50
"""No operator takes longer."""

MEASURED = "measured"
"""Where a time comes from that was measured in the script itself."""
_SOURCES = {"measured": "table", "predicted": "predicted", "roofline": "roofline"}
"""Where the other times come from, as the planner's process calls it."""

Bans = Collection[tuple[str, int]]


class Learned(NamedTuple):
    """Files of operator times, for plans before there are measured ones.

    Attributes:
        table: one that ``neap torch --latencies-out`` or ``neap profile`` wrote.
        predictor: one from ``neap train``.
    """

    table: str | None = None
    predictor: str | None = None

    def flags(self) -> list[str]:
        """What says so to neap's commands."""
        given = ("--latencies", self.table), ("--predictor", self.predictor)
        return [word for flag, path in given if path is not None for word in (flag, path)]


NOTHING = Learned()
"""No files are given."""


class Asked(NamedTuple):
    """What a plan is asked for.

    Attributes:
        budget: the budget in bytes, given the unplanned peak in bytes.
        less: bytes of it that the allocator needs beyond what it gives out, with all updates in
            the step and with updates inside backward.
        banned: calls that must not be run again.
        unpredicted: such bytes beside these where what the allocator reserves is not predicted.
        expandable: whether the allocator's segments grow; then it is predicted.
    """

    budget: Callable[[int], int]
    less: tuple[int, int] = (0, 0)
    banned: Bans = ()
    unpredicted: int = 0
    expandable: bool = False


class PlanError(RuntimeError):
    """No plan could be made; says why."""


def _other(neap: str, why: str) -> PlanError:
    return PlanError(f"{neap} is no neap of this version: {why}")


def executable() -> str:
    """The ``neap`` executable: ``$NEAP``, the one whose dry run this is, beside this Python, or on
    the PATH.

    Raises:
        PlanError: if there is none.
    """
    beside = Path(sys.executable).with_name("neap")
    named = os.environ.get("NEAP"), os.environ.get("NEAP_DRY_EXE")
    for found in (*named, str(beside), shutil.which("neap")):
        if found and os.access(found, os.X_OK):
            return found
    raise PlanError("there is no neap executable; install neap, or set NEAP to where it is")


def _run(command: list[str], seconds: float = _PATIENCE_S, given: str = "") -> str:
    """What one of neap's commands prints, given this on its standard input."""
    named = " ".join(["neap", *command[1:3]])
    try:
        code, text, error = _outside.run(command, seconds, given)
    except TimeoutError as problem:
        raise PlanError(f"{named} was ended: {problem}") from None
    except OSError as problem:  # Such as an executable that was replaced in the meantime.
        raise PlanError(f"{command[0]} can't be run: {problem.strerror}") from None
    if code != 0:
        raise PlanError(f"{named} failed: {error.strip() or f'exit code {code}'}")
    return text


def _answered(command: list[str], seconds: float = _PATIENCE_S, given: str = "") -> dict[str, Any]:
    """The JSON object that one of neap's commands prints."""
    text = _run(command, seconds, given)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise _other(command[0], f"it answered {text[:80]!r}")
    return answer


def device_of_card(card: str) -> str | None:
    """The built-in device that a card is, by the driver's name for it.

    Raises:
        PlanError: if it can't be asked for.
    """
    found = _answered([executable(), "script", "card", card]).get("device")
    return found if isinstance(found, str) else None


def page(report: str) -> str:
    """The page of a report, given as JSON with its title.

    Raises:
        PlanError: if none can be made.
    """
    return _run([executable(), "script", "page"], given=report)


class Planner:
    """Plans one recording, as often as need be.

    Args:
        recorder: a recording with saved tensors and calls.
        found: its last iteration.
        device: the profile whose times and link count.
        move_states: whether optimizer states may stay on the host between steps.
        recompute: whether calls may be run again.
        cache: whether plans are kept between runs, and taken from there.
        soon: the iteration with updates inside backward, if that may be planned too.
        lend: parameters that may leave during backward, where the budget can't be met otherwise.
        varies: whether plans are for iterations on tensors of other sizes too.
        steps: how many steps of the first optimizer make up an iteration.
        needs: what iterations need without a plan.
        learned: files of operator times: a table, and a predictor for what that lacks.
    """

    def __init__(
        self,
        recorder: Recorder,
        found: Iteration,
        device: str,
        move_states: bool = True,
        recompute: bool = True,
        cache: bool = False,
        soon: Iteration | None = None,
        lend: Collection[Storage] = (),
        varies: bool = False,
        steps: int = 1,
        needs: Needs = UNKNOWN,
        learned: Learned = NOTHING,
    ) -> None:
        self.recorder = recorder
        self.found = found
        self.device = device
        self.varies = varies
        self._steps, self._needs = steps, needs
        self.fits: Fits | None = None
        """With ``varies``, which iterations fit without a plan."""
        self.shorter = False
        """Whether plans serve iterations that save the same and end earlier."""
        self.neap = executable()
        self._soon, self._lend, self._moves_states = soon, lend, move_states
        self._recompute = recompute
        self._cache = cache
        self._seconds = _PATIENCE_S + len(found.nodes) // _OPERATORS_PER_S
        self._profile: dict[str, Any] | None = None
        """The device with its link as measured, once it was."""
        self._link: dict[str, int] | None = None
        """Its link alone, once this script has only a part of it."""
        self.times: dict[str, int] = {}
        """The time of each operator by name, in nanoseconds."""
        self._from: dict[str, str] = {}
        """Where that comes from, as :attr:`Report.times_from` has it."""
        self._ask_for_times(learned)
        self._use_times()

    def _ask_for_times(self, learned: Learned) -> None:
        with _outside.workplace() as folder:
            full = str(folder / "full.graph.json")
            _form.write(_form.graph(self.found), full)
            asked = [self.neap, "script", "times", full, "--device", self.device]
            answer = _answered([*asked, *learned.flags()], self._seconds)
        try:
            for name, (ns, source) in answer.items():
                if type(ns) is not int or not 0 <= ns <= _LONGEST_NS:
                    raise ValueError(f"an operator takes {str(ns)[:40]} ns")
                self.times[name], self._from[name] = ns, _SOURCES[source]
        except MALFORMED:
            raise _other(self.neap, "it answered no times") from None

    def _use_times(self) -> None:
        """What is planned for, with these times."""
        found, soon = self.found, self._soon
        self.ranges: list[Range] = []
        self._soon_ranges: list[Range] = []
        self.excluded: dict[str, int] = {}
        if self._recompute:
            self.ranges, self.excluded = self._candidates(found, self.times)
            if soon is not None:
                self._soon_ranges, _ = self._candidates(soon, self.times)
        early = None if soon is None else (soon, self._soon_ranges)
        about = self.ranges, early, self._lend, self.times, self._moves_states
        self._problem = Problem(self.recorder, found, *about)
        self._written = json.dumps(self._problem.form, separators=(",", ":"))
        usual = self._problem.form["usual"]["operators"]
        self.unplanned = max(found.peak, *(operator["standing"] for operator in usual))
        self.unplanned_ns = sum(operator["ns"] for operator in usual)

    def at(self, times: dict[str, int], measured: Collection[str]) -> Planner:
        """A planner of the same with other times, some of which were measured in the script. It
        may be made on another thread.
        """
        other = copy.copy(self)
        other.times = times
        other._from = {**self._from, **dict.fromkeys(measured, MEASURED)}
        other._cache = False  # No other run has the same times.
        other._use_times()
        return other

    def sources(self) -> dict[str, int]:
        """How many operators' times come from where."""
        return dict(sorted(Counter(self._from.values()).items()))

    def write_table(self, times: dict[str, int], path: str, on: str) -> None:
        """Writes measured times of operators by name as a table.

        Args:
            on: the device that they were measured on.

        Raises:
            PlanError: if it can't be written.
        """
        with _outside.workplace() as folder:
            full = str(folder / "full.graph.json")
            _form.write(_form.graph(self.found), full)
            command = [self.neap, "script", "table", full, path, "--device", self.device]
            _run([*command, "--on", on], self._seconds, json.dumps(times))

    @property
    def profile(self) -> dict[str, Any]:
        """The device by which plans are made.

        Raises:
            PlanError: if it can't be read.
        """
        if self._profile is None:
            self._profile = _answered([self.neap, "device", "show", self.device, "--json"])
        return self._profile

    def keep_within(self, host: int) -> None:
        """Plans for at most this many bytes of pinned memory from now on.

        Raises:
            PlanError: if the profile can't be read.
        """
        self.profile["pinned_bytes"] = min(host, self.profile["pinned_bytes"])

    def use_part_of_link(self, per_mille: int) -> None:
        """Plans for this part of the link's rates from now on, in thousandths.

        Raises:
            PlanError: if the profile can't be read.
        """
        if self._link is None and per_mille == 1000:
            return
        link = self._link = self._link or dict(self.profile["link"])
        rates = {key: max(link[key] * per_mille // 1000, 1) for key in _RATES}
        self.profile["link"] = {**link, **rates}

    def write(self, path: str) -> None:
        """Writes what is watched as a graph, with nothing run again."""
        _run([self.neap, "script", "graph", path], self._seconds, self._question(None))

    def _candidates(
        self, found: Iteration, durations: dict[str, int]
    ) -> tuple[list[Range], dict[str, int]]:
        """What may run again, and why calls may not."""
        about = self.recorder, found, durations, _states.SMALLEST
        calls, reasons = candidates(*about)
        return [*calls, *operators(*about)], dict(reasons)

    def _question(self, ask: dict[str, Any] | None) -> str:
        return f'{{"problem":{self._written},"ask":{json.dumps(ask)}}}'

    def plan(self, asked: Asked) -> Schedule:
        """The schedule for a budget.

        Raises:
            PlanError: if the planner fails. A budget that can't be met is no failure: then the
                plan is the lowest that was found, and ``met`` is false.
        """
        question, bytes = self._asks(asked, _EFFORT)
        kept = self._kept(question)
        if kept is not None and kept.exists():
            with contextlib.suppress(ValueError):  # From another version: it is written anew.
                made = Schedule.load(kept, own=True)
                made.budget_bytes = bytes
                return made
        made = self._carried_out(self._answer(question), bytes)
        if kept is not None:
            with contextlib.suppress(OSError):
                _outside.make(kept.parent)
                if not kept.is_file():  # A pipe would wait for a reader.
                    kept.unlink(missing_ok=True)
                made.save(kept)
        return made

    def quick(self, asked: Asked) -> Schedule | None:
        """The first schedule that keeps to a budget, to act while a better one is looked for.
        Nothing where there is none, or the better one is there as soon.

        Raises:
            PlanError: if the planner fails.
        """
        if len(self.found.nodes) < _MANY:
            return None
        kept = self._kept(self._asks(asked, _EFFORT)[0])
        if kept is not None and kept.exists():
            return None
        question, bytes = self._asks(asked, _QUICK)
        answer = self._answer(question)
        made = self._carried_out(answer, bytes)
        return made if made.met and answer["reserved_bytes"] <= bytes else None

    def _asks(self, asked: Asked, effort: int | None) -> tuple[str, int]:
        """The planner's question, and the budget in bytes."""
        budget, bans = asked.budget(self.unplanned), set(asked.banned)

        def numbers(ranges: Sequence[Range]) -> list[int]:
            return [n for n, one in enumerate(ranges) if one.key in bans]

        ask = {
            "budget": budget,
            "less": asked.less,
            "unpredicted": asked.unpredicted,
            "expandable": asked.expandable,
            "banned": [numbers(self.ranges), numbers(self._soon_ranges)],
            "effort": effort,
        }
        return self._question(ask), budget

    def _answer(self, question: str) -> dict[str, Any]:
        with _outside.workplace() as folder:
            device = self.device
            if self._profile is not None:
                device = str(folder / "measured.device.json")
                Path(device).write_text(json.dumps(self._profile))
            command = [self.neap, "script", "plan", "--device", device]
            return _answered(command, self._seconds, question)

    def _carried_out(self, answer: dict[str, Any], budget: int) -> Schedule:
        try:
            made = self._schedule(answer)
        except MALFORMED as error:
            raise _other(self.neap, repr(error)) from None
        made.budget_bytes = budget
        return made

    def _kept(self, question: str) -> Path | None:
        """Where the plan for a question is kept between runs: its name says what it is for."""
        if not self._cache:
            return None
        key = hashlib.sha256(question.encode())
        about = Path(self.neap).stat()
        profile = Path(self.device)
        key.update(profile.read_bytes() if profile.is_file() else self.device.encode())
        rest = [
            torch.__version__,
            [(str(s.view), s.node) for s in self._problem.packs],
            [one.key for one in (*self.ranges, *self._soon_ranges)],
            self._profile,
            self.varies,
            self._steps,
            self._needs,
            self.fits,
            self.shorter,
        ]
        key.update(repr([*rest, about.st_size, about.st_mtime_ns]).encode())
        return _outside.cache() / "torch" / f"{key.hexdigest()[:32]}.json"

    def _schedule(self, answer: dict[str, Any]) -> Schedule:
        """The planner's answer in the terms of PyTorch's hooks."""
        storages, packs = self._problem.storages, self._problem.packs
        ranges = self._soon_ranges if answer["early"] else self.ranges
        ranges = [ranges[number] for number in answer["ranges"]]
        moved = [storages[number] for number in answer["moved"]]
        actions = {
            (kind, number): [(what, one) for what, one in things]
            for kind, number, things in answer["actions"]
        }
        acted = {one for things in actions.values() for what, one in things if what in MOVES}
        number = {storage: n for n, storage in enumerate(moved) if n in acted}
        within = {s for one in ranges for s in one.saved}
        lent = [[storages[n] for n in parcel] for parcel in answer["lent"]]
        member = {
            storage: (parcel, place)
            for parcel, members in enumerate(lent)
            for place, storage in enumerate(members)
        }

        def owner(storage: Storage | None) -> int | None:
            return None if storage is None else number.get(storage)

        return Schedule(
            expected=[(s.view, s.node) for s in packs],
            owner=[None if s in within else owner(s.storage) for s in packs],
            sizes=[storage.bytes for storage in moved],
            actions=actions,
            again=[_again(one, owner) for one in ranges if one.call is not None],
            remade=[_remake(one) for one in ranges if one.call is None],
            turns=[[storages[n].name for n in turn] for turn in answer["turns"]],
            away=set(answer["away"]),
            ahead=answer["ahead"],
            piece=answer["piece"],
            early=answer["early"],
            soon=updated(self._soon) if answer["early"] and self._soon is not None else [],
            met=answer["met"],
            peak_bytes=answer["peak_bytes"],
            unplanned_peak_bytes=self.unplanned,
            iteration_ns=answer["iteration_ns"],
            trims=[(kind, number, more) for kind, number, more in answer["trims"]],
            giving_back_ns=answer["giving_back_ns"],
            unplanned_iteration_ns=self.unplanned_ns,
            swap_bytes=sum(moved[one].bytes for one in acted),
            excluded=self.excluded,
            varies=self.varies,
            fits=self.fits,
            shorter=self.shorter,
            steps=self._steps,
            needs=self._needs,
            lent=[[(s.name, s.bytes) for s in members] for members in lent],
            borrowed={s.place: member[s.storage] for s in packs if s.storage in member},
            packed=self._problem.packed if lent else 0,
            course=_course(answer["course"]),
        )


def _course(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError("the course is no text")
    return text


def _again(one: Range, owner: Callable[[Storage | None], int | None]) -> Again:
    call = one.call
    assert call is not None
    made = {s.place for s in one.saved}
    return Again(
        module=call.path,
        number=call.number,
        first_pack=call.first_pack,
        after_pack=call.after_pack,
        stays=[n for n in range(call.first_pack, call.after_pack) if n not in made],
        inputs=list(zip(call.views, map(owner, call.storages))),
        nanoseconds=one.nanoseconds,
        bytes=one.bytes,
    )


def _remake(one: Range) -> Remake:
    return Remake(
        node=one.node,
        module=one.saved[0].module,
        packs=[s.place for s in one.saved],
        size=one.brings[0].bytes,
        nanoseconds=one.nanoseconds,
    )
