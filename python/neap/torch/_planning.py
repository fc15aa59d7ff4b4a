"""From a recorded iteration to a schedule: which calls are run again, and what the planner says of
the rest.

The planner decides what is swapped, for a given set of calls that run again; which set is searched
here: from none to all, in the order in which they help, keeping the quickest plan that fits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from neap.torch import _form, _outside, _states, _world
from neap.torch._answer import Timeline, schedule
from neap.torch._early import updated
from neap.torch._graph import Iteration
from neap.torch._ranges import Range, candidates, families, operators, unchained
from neap.torch._recorder import Recorder
from neap.torch._schedule import Schedule
from neap.torch._storage import Storage
from neap.torch._world import World

_FEW = 16
"""The most ranges that are ordered by how much each lowers the peak."""
_GOOD = 1.05
"""Where running operators again makes a plan that takes no longer than this, in parts of the time
without a plan, calls are not looked at.
"""
_HALVINGS = 2
"""How often a piece of the step is halved, in bytes of states, where the budget asks for it."""
_PRUNED = 2
"""How many of the last ranges are left out on trial."""
_AS_LISTED = ["--no-reorder", "--no-split", "--no-early"]
"""A script runs its operators in its own order, each of them as a whole, and may write to a tensor
up to its last use.
"""

_LARGER = ["--min-swap", "2MiB"]
"""Small tensors move only where nothing else helps."""

_RATES = ("h2d", "d2h", "h2d_contended", "d2h_contended")
"""A link's rates in bytes per second."""

_LEAST = 1024
"""Fewer bytes are no budget."""

_PATIENCE_S = 60
"""Seconds after which a process of neap's that should have answered is ended, for the planner more
by one for each :data:`_OPERATORS_PER_S` operators. Then the script runs without a plan.
"""
_OPERATORS_PER_S = 20

_USUAL, _LENDING, _EARLY = "usual", "lending", "early"
"""Ways to plan: with all updates in the step, with parameters that leave during backward besides,
and with updates inside backward.
"""

Bans = Collection[tuple[str, int]]


class PlanError(RuntimeError):
    """No plan could be made; says why."""


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


def _run(command: list[str], seconds: float = _PATIENCE_S) -> tuple[int, str, str]:
    try:
        return _outside.run(command, seconds)
    except TimeoutError as error:
        raise PlanError(f"{command[0]} {command[1]} was ended: {error}") from None
    except OSError as error:  # Such as an executable that was replaced in the meantime.
        raise PlanError(f"{command[0]} can't be run: {error.strerror}") from None


def _seconds(operators: int) -> int:
    """How long one answer of the planner for this number of operators is waited for."""
    return _PATIENCE_S + operators // _OPERATORS_PER_S


def durations(graph: Path, device: str, neap: str, seconds: int) -> dict[str, int]:
    """Each operator's time in nanoseconds by the device's roofline."""
    plan = graph.with_name("times.plan.json")
    peak = ["--budget", "100%", "--effort", "0", "--without", "portfolio", *_AS_LISTED]
    command = [neap, "plan", str(graph), "--device", device, *peak, "-o", str(plan)]
    code, _, error = _run(command, seconds)
    if code != 0:
        raise PlanError(f"neap plan failed: {error.strip()}")
    job = json.loads(plan.read_text())["jobs"][0]
    return {row["operator"]: row["ns"] for row in job["latencies"]}


class _Answer:
    """The planner's answer for one set of calls that run again."""

    def __init__(
        self, world: World, graph: Path, met: bool, figures: dict[str, Any], plan: Path
    ) -> None:
        self.world = world
        self.graph = graph
        self.met = met
        self.plan = plan
        self.peak: int = figures["peak_bytes"]
        self.ns: int = figures["iteration_ns"]

    @property
    def worth(self) -> tuple[bool, int, int]:
        """Smaller is better: first what fits, by time; else by peak."""
        return (False, self.ns, self.peak) if self.met else (True, self.peak, self.ns)


def _worth(answer: _Answer) -> tuple[bool, int, int]:
    return answer.worth


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
    ) -> None:
        self.recorder = recorder
        self.found = found
        self.device = device
        self.varies = varies
        self.move_states = move_states
        self.neap = executable()
        self._seconds = _seconds(len(found.nodes))
        with _outside.workplace() as folder:
            full = folder / "full.graph.json"
            _form.write(_form.graph(found), full)
            self._key = hashlib.sha256(full.read_bytes()) if cache else None
            self.durations = durations(full, device, self.neap, self._seconds)
        self.soon = soon
        self._lend = lend
        self._way = _USUAL
        """What the search is for."""
        self._below_floor = False
        """Whether the budget was below what any plan needs, by the planner's last answer."""
        self._soon_ranges: list[Range] = []
        self._orders: dict[tuple[str, tuple[tuple[str, int], ...]], list[Range]] = {}
        """What :meth:`_order` found; it is the same for every budget."""
        self.ranges: list[Range] = []
        self.excluded: dict[str, int] = {}
        if recompute:
            self.ranges, self.excluded = self._candidates(found)
            if soon is not None:
                self._soon_ranges, _ = self._candidates(soon)
        self.ahead = False
        self.piece: int | None = None
        self._profile: dict[str, Any] | None = None
        """The device with its link as measured, once it was."""
        self._link: dict[str, int] | None = None
        """Its link alone, once this script has only a part of it."""
        self._asked = device
        self.unplanned = max(found.peak, self._world(()).peak)
        self.unplanned_ns = sum(self.durations.get(n.name, 1000) for n in found.nodes)

    @property
    def profile(self) -> dict[str, Any]:
        """The device by which plans are made.

        Raises:
            PlanError: if it can't be read.
        """
        if self._profile is None:
            code, text, error = _run([self.neap, "device", "show", self.device, "--json"])
            if code != 0:
                raise PlanError(f"neap device failed: {error.strip()}")
            self._profile = json.loads(text)
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
        graph = self._world(()).graph(self.durations, self.move_states)
        _form.write(graph, Path(path))

    def _candidates(self, found: Iteration) -> tuple[list[Range], dict[str, int]]:
        """What may run again, and why calls may not."""
        about = self.recorder, found, self.durations, _world.SMALLEST
        calls, reasons = candidates(*about)
        return [*calls, *operators(*about)], dict(reasons)

    def _world(self, ranges: Sequence[Range]) -> World:
        if self._way == _EARLY and self.soon is not None:
            return World(self.recorder, self.soon, ranges, self.move_states, early=True)
        lend = self._lend if self._way == _LENDING else ()
        return self._usual(ranges, self.ahead, self.piece, lend)

    def _usual(
        self,
        ranges: Sequence[Range] = (),
        ahead: bool = False,
        piece: int | None = None,
        lend: Collection[Storage] = (),
    ) -> World:
        return World(self.recorder, self.found, ranges, self.move_states, ahead, lend, piece=piece)

    def plan(
        self, budget: Callable[[int], int], less: tuple[int, int] = (0, 0), banned: Bans = ()
    ) -> Schedule:
        """The schedule for a budget.

        Args:
            budget: the budget in bytes, given the unplanned peak in bytes.
            less: bytes of it that the allocator needs beyond what it gives out, with all updates in
                the step and with updates inside backward.
            banned: calls that must not be run again.

        Raises:
            PlanError: if the planner fails. A budget that can't be met is no failure: then the
                plan is the lowest that was found, and ``met`` is false.
        """
        asked = budget(self.unplanned)
        made = self._plan(asked, less, banned)
        over = made.peak_bytes - asked if made.met else 0
        for part in (1, 2, 4):
            if over <= 0:
                break
            # Bytes that the planner gives back at once stand until the next hook.
            more = -(-over // part)
            lower = self._plan(asked, (less[0] + more, less[1] + more), banned)
            if lower.met and lower.peak_bytes <= asked:
                return lower
        return made

    def _plan(self, asked: int, less: tuple[int, int], banned: Bans) -> Schedule:
        bound, bound_soon = (max(asked - size, _LEAST) for size in less)
        self.ahead = self._usual(ahead=True).step_peak() <= bound
        # Pieces are no smaller than the budget asks for, since each costs the host its time.
        sizes = [_states.PIECE_BYTES >> number for number in range(_HALVINGS + 1)]
        fitting = (size for size in sizes if self._usual(piece=size).step_peak() <= bound)
        self.piece = next(fitting, sizes[-1])
        usable = [r for r in self.ranges if r.key not in set(banned)]
        kept = self._kept((bound, bound_soon), usable)
        if kept is not None and kept.exists():
            with contextlib.suppress(ValueError):  # From another version: it is written anew.
                made = Schedule.load(kept, own=True)
                made.budget_bytes = asked
                return made
        with _outside.workplace() as folder:
            if self._profile is not None:
                path = folder / "measured.device.json"
                path.write_text(json.dumps(self._profile))
                self._asked = str(path)
            best = self._search(folder, bound, usable)
            if not best.met and self._lend:
                lending = self._search_by(_LENDING, folder, bound, usable)
                best = min(best, lending, key=_worth)
            if self.soon is not None:
                soon = [r for r in self._soon_ranges if r.key not in set(banned)]
                early = self._search_by(_EARLY, folder, bound_soon, soon)
                best = min(best, early, key=_worth)
            form = json.loads(best.plan.read_text())
            drawn = folder / "timeline.json"
            simulate = [self.neap, "simulate", str(best.plan), "--timeline", str(drawn)]
            code, _, error = _run(simulate, self._seconds)
            if code != 0:
                raise PlanError(f"neap simulate failed: {error.strip()}")
            divisible = self.move_states and not best.world.early
            made = schedule(best.world, form, Timeline(drawn, best.world), best.peak, divisible)
        made.early = best.world.early
        made.soon = updated(best.world.found) if made.early else []
        made.met = best.met
        made.budget_bytes = asked
        made.unplanned_peak_bytes = self.unplanned
        made.iteration_ns = best.ns
        made.unplanned_iteration_ns = self.unplanned_ns
        made.excluded, made.varies = self.excluded, self.varies
        if kept is not None:
            with contextlib.suppress(OSError):
                _outside.make(kept.parent)
                if not kept.is_file():  # A pipe would wait for a reader.
                    kept.unlink(missing_ok=True)
                made.save(kept)
        return made

    def _kept(self, bounds: tuple[int, int], usable: Sequence[Range]) -> Path | None:
        """Where the plan for these bytes is kept between runs: its name says what it is for."""
        if self._key is None:
            return None
        key = self._key.copy()
        about = Path(self.neap).stat()
        profile = Path(self.device)
        key.update(profile.read_bytes() if profile.is_file() else self.device.encode())
        saved = [(str(s.view), s.node) for s in self.recorder.packs]
        ranges = [(r.key, r.first, r.after, r.trigger.place) for r in usable]
        rest = [
            torch.__version__,
            bounds,
            self.move_states,
            _world.SMALLEST,
            ranges,
            saved,
            self._profile,
            self.soon is not None,
            self.varies,
            sorted(storage.name for storage in self._lend),
        ]
        key.update(repr([*rest, about.st_size, about.st_mtime_ns]).encode())
        return _outside.cache() / "torch" / f"{key.hexdigest()[:32]}.json"

    # -- which calls run again

    def _search_by(self, way: str, folder: Path, budget: int, usable: list[Range]) -> _Answer:
        """The same by another of the ways."""
        within = folder / way
        within.mkdir()
        self._way = way
        try:
            return self._search(within, budget, usable)
        finally:
            self._way = _USUAL

    def _search(self, folder: Path, budget: int, usable: list[Range]) -> _Answer:
        tried: dict[frozenset[int], _Answer] = {}

        def attempts(several: Iterable[Sequence[Range]]) -> list[_Answer]:
            keyed = [(frozenset(map(id, ranges)), ranges) for ranges in several]
            new = {key: ranges for key, ranges in keyed if key not in tried}
            names = [folder / f"job{len(tried) + n}.graph.json" for n in range(len(new))]
            worlds = map(self._world, new.values())
            tried.update(zip(new, self._ask_all(names, budget, list(worlds))))
            return [tried[key] for key, _ in keyed]

        def attempt(ranges: Sequence[Range]) -> _Answer:
            return attempts([ranges])[0]

        best = attempt(())
        if best.met and best.ns <= self.unplanned_ns * 1.005:
            return best
        # Operators give back most for their time, so these come first, and stay beside calls.
        cheap = unchained([r for r in usable if r.call is None])
        best = min(best, self._along(cheap, attempts), key=_worth)
        made = [r for r in best.world.ranges if r.call is None]
        if best.met and best.ns <= self.unplanned_ns * _GOOD:
            return best
        for family in families([r for r in usable if r.call is not None]):
            order = self._order(family)
            beside = self._along(
                order,
                lambda several: attempts(
                    [*calls, *(r for r in made if r.beside(calls))] for calls in several
                ),
            )
            best = min(best, beside, key=_worth)
        calls = [r for r in best.world.ranges if r.call is not None]
        if calls:
            left = [r for r in cheap if r.beside(calls)]
            more = self._along(
                left, lambda several: attempts([*calls, *ranges] for ranges in several)
            )
            best = min(best, more, key=_worth)
        # The last of the forward often gives nothing back: it is there again when memory is full.
        for one in sorted(best.world.ranges, key=lambda r: -r.first)[:_PRUNED]:
            without = [r for r in best.world.ranges if r is not one]
            best = min(best, attempt(without), key=_worth)
        if usable or not best.met:
            return best
        # Swaps alone are many. Often fewer are as quick, and each costs the host its time.
        larger = self._ask(best.graph, budget, best.world, _LARGER)
        return min(best, larger, key=_worth)

    @staticmethod
    def _along(
        order: list[Range], attempts: Callable[[Iterable[Sequence[Range]]], list[_Answer]]
    ) -> _Answer:
        """The best beginning of ``order``: a coarse look, then between the best's neighbours."""
        count = len(order)
        looked = sorted({round(count * part / 4) for part in range(5)})
        while True:
            answers = dict(zip(looked, attempts(order[:n] for n in looked)))
            best = min(looked, key=lambda n: answers[n].worth)
            place = looked.index(best)
            low = looked[place - 1] if place else best
            high = looked[place + 1] if place + 1 < len(looked) else best
            new = sorted({(low + best) // 2, (best + high) // 2} - set(looked))
            if not new:
                return answers[best]
            looked = sorted({*looked, *new})

    def _order(self, family: Sequence[Range]) -> list[Range]:
        """Ranges by how much they lower the peak for their time; among equals the later first,
        since what an earlier one keeps has longer to be away.
        """
        key = self._way, tuple(r.key for r in family)
        if key in self._orders:
            return self._orders[key]
        chosen: list[Range] = []
        left = sorted(family, key=lambda r: -r.first)
        while left:
            gains = [0.0]
            if len(family) <= _FEW:
                peak = self._world(chosen).peak
                lower = [peak - self._world([*chosen, r]).peak for r in left]
                gains = [less / (r.nanoseconds + 1) for less, r in zip(lower, left)]
            if max(gains) <= 0:
                # The peak may need several at once: by what they keep for their time.
                gains = [r.bytes / (r.nanoseconds + 1) for r in left]
            best = max(range(len(left)), key=lambda n: (gains[n], -n))
            chosen.append(left.pop(best))
        self._orders[key] = chosen
        return chosen

    def _ask_all(self, paths: list[Path], budget: int, worlds: list[World]) -> list[_Answer]:
        """An answer for each world. Several are looked for at once, as far as there are processors:
        the planner uses two for most of its time.
        """
        for path, world in zip(paths, worlds):
            divisible = self.move_states and self._way != _EARLY
            _form.write(world.graph(self.durations, divisible), path)
        many = max((os.cpu_count() or 2) // 2, 1)
        return _outside.on_threads(
            lambda one: self._ask(one[0], budget, one[1]), zip(paths, worlds), many
        )

    def _ask(self, path: Path, budget: int, world: World, more: Sequence[str] = ()) -> _Answer:
        """The planner's answer for a world that was written to ``path``."""
        within = path.with_suffix(".larger.plan" if more else ".plan")
        lowest = path.with_suffix(".lowest.plan")
        base = [self.neap, "plan", str(path), "--device", self._asked, "--no-recompute", "--json"]
        base += [*_AS_LISTED, *more]

        def asked(budget: str, output: Path) -> dict[str, Any]:
            command = [*base, "--budget", budget, "-o", str(output)]
            code, text, error = _run(command, self._seconds)
            if code > 1 or (code == 1 and budget == "min"):
                raise PlanError(f"neap plan failed: {error.strip()}")
            return dict(json.loads(text))

        # Where one set's floor is above the budget, others' mostly are, which this call shows.
        least = asked("min", lowest) if self._below_floor else None
        self._below_floor = least is not None and least["floor_bytes"] > budget
        if not self._below_floor:
            figures = asked(str(budget), within)
            if figures["fits"]:
                return _Answer(world, path, True, figures, within)
            self._below_floor = figures["floor_bytes"] > budget
        return _Answer(world, path, False, least or asked("min", lowest), lowest)
