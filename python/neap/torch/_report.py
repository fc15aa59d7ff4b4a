"""Budgets as users write them, and what a fitted script reports at its end."""

from __future__ import annotations

import html
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from neap.torch._schedule import Schedule
from neap.torch._tally import Kind

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_budget(budget: str | int) -> Callable[[int], int]:
    """A budget as users write it: bytes (``12GiB``), or a share of the unplanned peak (``60%``).

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise ValueError(f"the budget is {budget!r}; give bytes, such as 12GiB, or a share, 60%")
    if isinstance(budget, int):
        size = budget
        if size <= 0:
            raise ValueError(f"the budget is {budget}; give bytes above 0, such as 12GiB, or 60%")
        return lambda peak: size
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[KMGT]?i?B?)\s*", budget)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"the budget is {budget!r}; give bytes, such as 12GiB, or a share, 60%")
    number, unit = float(found[1]), found[2]
    if unit == "%":
        return lambda peak: int(peak * number / 100)
    scale = _UNITS[unit.rstrip("B").rstrip("i")]
    if "i" not in unit and unit not in ("", "B"):
        scale = 1000 ** (["K", "M", "G", "T"].index(unit[0]) + 1)
    return lambda peak: int(number * scale)


_UNMET = "the budget can't be met; this is the lowest peak that was found"
_OVER = (
    "the plan's peak is within the budget, but the allocator reserves more: memory lies in pieces"
)
_UNSEEN = "no iteration ran by the last plan, so what the allocator reserves for it is not known"
_FORMER = "no iteration ran by the last plan: what was measured is of the one before it"
_LOOKING = "the plan was not yet final, so later iterations might have reserved more"
_TRIED = "plans that were tried before reserved more than the budget: up to "
_STRAYED = "what did not run by the plan reserved more than the budget: up to "

_RESERVED = "iterations by the plan reserved more than the budget: up to "


_LINES = 6
"""The most kinds of iterations that have a line of their own in a report."""


@dataclass
class Report:
    """What happened so far. Bytes and nanoseconds are whole numbers.

    Attributes:
        planned: iterations that ran by the plan from beginning to end.
        unplanned: iterations that ran without it, by reason.
        by_policy: iterations, by the plan or without it, in which what autograd saved left for the
            host as memory neared the budget.
        kinds: iterations by how many tensors autograd saved in them, since neap watched the script.
        met: whether nothing reserved more than the budget since the plan acts; false on a device
            before an iteration has run by the plan.
        margin_bytes: what the plan was to leave of the budget for what the allocator reserves
            beyond what it gives out.
        trims: points of an iteration at which the allocator may give back free memory.
        gave_back: how often it did, and ``moved_bytes`` what was copied and allocated anew for it.
        peak_allocated_bytes, peak_reserved_bytes: measured since the plan acts; 0 on the CPU.
        swapped_out, swapped_in: copies of activations; ``late`` of those back were waited for.
        freed: storages of swapped activations that were seen to be gone from the device.
        kept_bytes: what each watched iteration made and the script kept.
        kept: swap-outs left out because something else held the storage.
        pinned_bytes: memory of the host that is pinned for what leaves the device.
        recomputed: calls of modules that were run again; ``recomputed_deaths`` storages of what
            they had saved were gone in between; ``compared`` saved tensors were compared with
            what came back.
        remade: operators that made their output again from what they had saved;
            ``remade_deaths`` of these were gone in between.
        early_updates: updates of parameters that ran inside backward.
        iteration_s: measured seconds of a planned iteration, the median; 0 on the dry device, whose
            own time says nothing.
        link_bytes_per_s: measured rates of copies, by direction.
        times_from: how many operators' times come from where: ``measured`` in the script, a
            ``table`` or ``predicted`` (the files that were given), or the device's ``roofline``.
        beyond: how often what did not run by the plan reserved more than the budget.
        replans: how often the plan was made anew, and why.
        excluded: calls that can't be run again, by reason.
        course: an iteration with the plan beside one without, as text that :meth:`html` draws.
    """

    budget_bytes: int = 0
    predicted_peak_bytes: int = 0
    unplanned_peak_bytes: int = 0
    predicted_iteration_ns: int = 0
    unplanned_iteration_ns: int = 0
    margin_bytes: int = 0
    by_policy: int = 0
    kinds: list[Kind] = field(default_factory=list)
    met: bool = False
    planned: int = 0
    unplanned: dict[str, int] = field(default_factory=dict)
    trims: int = 0
    gave_back: int = 0
    moved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    allocator_retries: int = 0
    kept_bytes: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    swapped_bytes: int = 0
    freed: int = 0
    kept: int = 0
    late: int = 0
    state_bytes: int = 0
    pinned_bytes: int = 0
    recomputed: int = 0
    recomputed_deaths: int = 0
    remade: int = 0
    remade_deaths: int = 0
    compared: int = 0
    early_updates: int = 0
    iteration_s: float = 0.0
    link_bytes_per_s: dict[str, int] = field(default_factory=dict)
    times_from: dict[str, int] = field(default_factory=dict)
    beyond: int = 0
    replans: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    excluded: dict[str, int] = field(default_factory=dict)
    course: str = ""

    def say_whether_met(self, schedule: Schedule, met: bool) -> None:
        """Whether the plan keeps to the budget, and if not, why."""
        self.met = met
        self.notes = [note for note in self.notes if note not in (_UNMET, _OVER)]
        if not met:
            within = schedule.peak_bytes <= schedule.budget_bytes
            self.notes.append(_OVER if within else _UNMET)

    def say_what_is_known(
        self, tried: bool, looked: int, settled: bool, fits: bool, strayed: int, before: int
    ) -> None:
        """What the measured peaks say of the plan that acts on a device.

        Args:
            tried: whether iterations were measured that ran by it, or by the plan before it.
            looked: iterations that ran by it at all.
            settled: whether it stays.
            fits: whether these iterations kept to the budget.
            strayed: the most bytes reserved by what did not run by it.
            before: the most bytes reserved by plans before it.
        """
        known = (_UNSEEN, _FORMER, _LOOKING, _STRAYED, _TRIED, _RESERVED)
        self.notes = [note for note in self.notes if not note.startswith(known)]
        if not fits and self.met:
            self.met = False
            self.notes.append(_RESERVED + size(self.peak_reserved_bytes))
        if not settled:
            self.met = fits and tried
            self.notes.append(_LOOKING if looked else _FORMER if tried else _UNSEEN)
        if self.met:
            self.notes = [note for note in self.notes if note not in (_UNMET, _OVER)]
        if before > self.budget_bytes:
            self.notes.append(_TRIED + size(before))
        self._say_what_strayed(strayed)

    def say_what_is_known_without_plan(self, strayed: int) -> None:
        """What the measured peaks say where no plan acts and saved tensors leave on demand; given
        the most bytes that exceeded the budget.
        """
        self.notes = [note for note in self.notes if not note.startswith(_STRAYED)]
        self.met = 0 < self.peak_reserved_bytes <= self.budget_bytes
        self._say_what_strayed(strayed)

    def _say_what_strayed(self, strayed: int) -> None:
        if strayed > self.budget_bytes:
            self.met = False
            times = "once" if self.beyond == 1 else f"{self.beyond} times"
            self.notes.append(f"{_STRAYED}{size(strayed)}; {times}")

    @property
    def verdict(self) -> str:
        """The sentence that says that the budget is not met; nothing if it is, or there is none."""
        if self.met or not self.budget_bytes:
            return ""
        budget = f"neap: the budget of {size(self.budget_bytes)} is not met"
        if self.peak_reserved_bytes > self.budget_bytes:
            return f"{budget}: {size(self.peak_reserved_bytes)} were reserved"
        if self.predicted_peak_bytes > self.budget_bytes:
            return f"{budget}: the lowest plan needs {size(self.predicted_peak_bytes)}"
        why = (note for note in self.notes if note.startswith((_UNSEEN, _FORMER, _LOOKING, _TRIED)))
        return ": ".join([budget, *list(why)[:1]])

    def html(self) -> str:
        """The report as a page of HTML that needs no network.

        Raises:
            RuntimeError: if ``neap`` is not there, or can't make it.
        """
        from neap.torch import _planning

        form = {"title": "neap.torch: within a budget", "report": asdict(self)}
        return _planning.page(json.dumps(form))

    def _repr_html_(self) -> str:
        """What a notebook shows: the page, or the text where there is no ``neap``."""
        try:
            shown = self.html()
        except RuntimeError:
            return f"<pre>{html.escape(str(self))}</pre>"
        return (
            f'<iframe srcdoc="{html.escape(shown)}" sandbox="allow-scripts" '
            'style="width: 100%; height: 560px; border: 0"></iframe>'
        )

    def _kind_lines(self) -> list[str]:
        """A line for each kind of iterations, where they are not all alike."""
        kinds = self.kinds
        alike = len(kinds) == 1 and kinds[0].least_bytes == kinds[0].most_bytes
        if not kinds or alike:
            return []
        rest = len(kinds) - _LINES
        more = [f"  and {some(rest, 'more kind')} of iterations"] if rest > 0 else []
        return [*map(_kind_line, kinds[:_LINES]), *more]

    def __str__(self) -> str:
        if not self.planned and not self.unplanned:
            seen = "neap: no iteration was seen; one ends when an optimizer of PyTorch steps"
            return "\n".join([seen, *(f"  note: {note}" for note in self.notes)])
        lines = [
            *([self.verdict] if self.verdict else []),
            f"neap: {some(self.planned, 'iteration')} ran by the plan, "
            f"{sum(self.unplanned.values())} without it",
            *(f"  {count} because: {why}" for why, count in sorted(self.unplanned.items())),
        ]
        if self.by_policy:
            lines.append(f"  {some(self.by_policy, 'iteration')} sent saved tensors away on demand")
        lines += self._kind_lines()
        if self.predicted_peak_bytes:
            left = self.budget_bytes - self.predicted_peak_bytes
            lines.append(
                f"  peak predicted {size(self.predicted_peak_bytes)}, without the plan "
                f"{size(self.unplanned_peak_bytes)}, budget {size(self.budget_bytes)}"
                + (f", of which {size(left)} are left to the allocator" if left > 0 else "")
            )
        if self.peak_allocated_bytes:
            budget = "" if self.predicted_peak_bytes else f" of {size(self.budget_bytes)}"
            met = f"; the budget{budget} is {'met' if self.met else 'not met'}"
            lines.append(
                f"  peak measured: allocated {size(self.peak_allocated_bytes)}, reserved "
                f"{size(self.peak_reserved_bytes)}; {self.allocator_retries} allocator retries"
                + (met if self.budget_bytes else "")
            )
        if self.predicted_iteration_ns:
            measured = f"; measured {self.iteration_s * 1e3:,.1f} ms" if self.iteration_s else ""
            lines.append(
                f"  iteration predicted {self.predicted_iteration_ns / 1e6:,.1f} ms, without the "
                f"plan {self.unplanned_iteration_ns / 1e6:,.1f} ms{measured}"
            )
        if self.times_from:
            lines.append(f"  operator times: {_sources(self.times_from)}")
        lines.append(
            f"  {self.swapped_out} swap-outs ({size(self.swapped_bytes)}), {self.swapped_in} "
            f"swap-ins, {self.late} of them late; {self.kept} left out; optimizer states moved "
            f"{size(self.state_bytes)}"
            + (f"; {size(self.pinned_bytes)} pinned on the host" if self.pinned_bytes else "")
        )
        if self.recomputed or self.remade:
            lines.append(
                f"  {some(self.recomputed, 'call')} of modules and "
                f"{some(self.remade, 'operator')} ran again; "
                f"{self.compared} saved tensors were compared with what came back"
            )
        if self.early_updates:
            lines.append(f"  {self.early_updates} updates ran inside backward")
        if self.link_bytes_per_s:
            rates = sorted(self.link_bytes_per_s.items())
            measured = ", ".join(f"{rate / 1e9:,.2f} GB/s {lane}" for lane, rate in rates)
            lines.append(f"  copies measured at {measured}")
        if self.trims:
            lines.append(
                f"  the allocator gave back free memory {self.gave_back} times, and "
                f"{size(self.moved_bytes)} were allocated anew for it; its time in the prediction "
                "is an estimate"
            )
        lines += [f"  planned anew: {why}" for why in self.replans]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def report(path: str | os.PathLike[str], number: int = 0) -> Report:
    """The report in a file that ``neap torch --json`` wrote; a notebook shows it as a page.

    Args:
        path: the file.
        number: which of its reports; a script that trains in several processes has one for each.

    Raises:
        OSError: if the file can't be read.
        ValueError: if it holds no such report.
    """
    with open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: not the output of `neap torch --json`: {error}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{path}: not the output of `neap torch --json`: no list of reports")
    if not 0 <= number < len(found):
        raise ValueError(f"{path}: it holds {some(len(found), 'report')}, counted from 0")
    form = _known(Report, found[number])
    kinds = [Kind(**_known(Kind, kind)) for kind in form.pop("kinds", [])]
    return Report(**form, kinds=kinds)


def _known(kind: type[Report | Kind], form: dict[str, Any]) -> dict[str, Any]:
    """The part of an object that this version knows: a later one may have written it."""
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in form.items() if name in names}


def _kind_line(kind: Kind) -> str:
    saved = size(kind.most_bytes)
    if kind.least_bytes != kind.most_bytes:
        saved = f"{size(kind.least_bytes)} to {saved}, median {size(kind.median_bytes)}"
    all_kept = kind.iterations - kind.by_plan - kind.on_demand
    ways = (
        (kind.by_plan, "by the plan"),
        (kind.on_demand, "on demand"),
        (all_kept, "with all kept"),
    )
    how = ", ".join(f"{count} {way}" for count, way in ways if count)
    over = f"; {kind.over} reserved more than the budget" if kind.over else ""
    name = f"{kind.saved_tensors} saved tensors" if kind.saved_tensors >= 0 else "other kinds"
    return f"  {name}, {saved}: {some(kind.iterations, 'iteration')}, {how}{over}"


def acts(schedule: Schedule) -> str:
    """The line that says that a plan acts."""
    lent = sum(map(len, schedule.lent))
    leaving = f", {some(lent, 'parameter')} during backward" if lent else ""
    points = len(schedule.trims)
    gives = f"; free memory is given back at up to {some(points, 'point')}" if points else ""
    states = len(schedule.away) + sum(map(len, schedule.turns))
    return (
        f"neap: the plan acts: peak {size(schedule.peak_bytes)} of "
        f"{size(schedule.unplanned_peak_bytes)}, budget {size(schedule.budget_bytes)}; "
        f"{some(len(schedule.sizes), 'activation')} and {some(states, 'state')} leave{leaving}, "
        f"{some(len(schedule.again), 'call')} and {some(len(schedule.remade), 'operator')} again; "
        f"{schedule.time_ns / 1e6:.1f} ms an iteration, "
        f"{schedule.unplanned_iteration_ns / 1e6:.1f} without the plan{gives}"
    )


_FROM = {
    "measured": "measured in the script",
    "table": "from the table",
    "predicted": "predicted",
    "roofline": "by the device's roofline",
}


def _sources(counts: dict[str, int]) -> str:
    """Where operators' times come from, in words."""
    return ", ".join(f"{counts[one]:,} {words}" for one, words in _FROM.items() if counts.get(one))


def some(count: int, what: str) -> str:
    """A count of things, in words."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Bytes in MiB, in KiB below one MiB, in bytes below one KiB."""
    if 0 < abs(count) < 1 << 10:
        return f"{count} B"
    if 0 < abs(count) < 1 << 20:
        return f"{count / 1024:,.1f} KiB"
    return f"{count / (1 << 20):,.1f} MiB"


def say_on_stderr(verbose: bool) -> Callable[[str], None]:
    """What prints a line on stderr if ``verbose``, and nothing otherwise."""

    def say(text: str) -> None:
        if verbose:
            print(text, file=sys.stderr, flush=True)

    return say
