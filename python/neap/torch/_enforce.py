"""The budget binds what PyTorch's allocator reserves: measured, learnt from, and enforced."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch

from neap._dry_library import dry_library
from neap.torch._figures import statistic
from neap.torch._schedule import Point, Schedule

_known = inspect.signature(torch.cuda.memory_snapshot).parameters
_WITHOUT_HISTORY = {"include_traces": False} if "include_traces" in _known else {}
"""Where the allocator's events are recorded, giving them too takes tens of milliseconds."""
_REFINEMENTS = 3
"""The most tries of a smaller margin once a plan fits that leaves memory unused."""

_STEPS = 16
"""A small step of a margin is this part of the budget."""


def reserved_now() -> int:
    """Bytes that the allocator has reserved on the current device."""
    return statistic("reserved_bytes.all.current")


def segments() -> list[dict[str, Any]]:
    """What lies where in the memory that the allocator has reserved."""
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot(**_WITHOUT_HISTORY)
    return found


class Margin:
    """Finds how many bytes of a budget the allocator needs beyond what it gives out.

    A plan for the budget less a margin is tried for an iteration or two. Where the allocator
    reserves too much, the margin grows by that; where that did not help, by twice the last step. A
    lower plan leaves smaller gaps, so that the first margin that fits may leave much unused: then
    margins between it and the last that did not fit are tried, where the plan for that was quicker
    by over a fiftieth. What updates inside backward reserve depends on which tensors move more than
    on their bytes, so their margin grows in small steps.
    """

    def __init__(self, size: int = 0) -> None:
        self.bytes = size
        self._failed: int | None = None
        self._fitted = 0
        self._quicker_ns = 0
        """The time of the plan that did not fit last."""
        self._best: Schedule | None = None
        self._refined = 0
        self._over = 1 << 62
        self._step = 0
        """By how many bytes the last plan missed, and how far the margin grew then."""

    def judge(
        self, schedule: Schedule, over: int, predicted: bool = False
    ) -> Schedule | int | None:
        """What to do after iterations of ``schedule`` that reserved ``over`` bytes more than the
        budget, or less: plan with another margin, act by an earlier schedule, or nothing.
        """
        if over > 0:
            self._failed, self._quicker_ns = self.bytes, schedule.time_ns
            self.missed(schedule)
            if self._best is None:
                if not schedule.met:
                    return None
                step = over + (2 << 20)
                if over >= self._over:  # The last step did not help.
                    step = max(step, 2 * self._step)
                if schedule.early:
                    step = min(step, schedule.budget_bytes // _STEPS)
                self._over, self._step = over, step
                self.bytes += step
                return self.bytes
        else:
            if self._best is schedule:  # It came back, and fits again.
                return None
            if self._best is None or schedule.time_ns < self._best.time_ns:
                self._best, self._fitted = schedule, self.bytes
            least = self._best.time_ns - self._best.time_ns // 50
            close = -over < schedule.budget_bytes // 40 or self._quicker_ns > least
            # A plan that was made for what is reserved leaves little by chance.
            if self._failed is None or close or predicted:
                return self._back(schedule)
        span = self._fitted - self._failed
        if self._refined >= _REFINEMENTS or span < schedule.budget_bytes // 50:
            return self._back(schedule)
        self._refined += 1
        self.bytes = self._failed + span // 2
        return self.bytes

    def missed(self, schedule: Schedule) -> None:
        """It reserved too much, though it may have fitted when it was looked at first."""
        if self._best is schedule:
            self._best = None

    def best_but(self, schedule: Schedule) -> Schedule | None:
        """The best plan that fits, if it is another one."""
        return None if self._best is None else self._back(schedule)

    def _back(self, schedule: Schedule) -> Schedule | None:
        self.bytes = self._fitted
        return None if self._best is schedule else self._best


class Growth:
    """Finds how much more the allocator reserves after each point of an iteration.

    Free memory lies in pieces, and what fits into none of them is reserved anew. Where no plan with
    any margin fits, or only a much slower one, each iteration begins with no free memory reserved,
    and more is given back before a point after which too much would be reserved
    (:mod:`neap.torch._pages`). This makes the host wait for the device.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._last: Point = ("begin", 0)
        self._after: dict[Point, int] = {}
        self._passed = False
        """Whether more than the budget was reserved."""
        self.reserved = 0
        """The bytes that were reserved at the last point."""

    def look(self, kind: str, number: int) -> None:
        """The iteration is at this point."""
        if number < 0:
            return
        reserved = reserved_now()
        if reserved > self.reserved:
            more = reserved - self.reserved
            self._after[self._last] = max(more, self._after.get(self._last, 0))
        self.reserved = reserved
        self._passed |= reserved > self._budget
        # Between iterations the next one's beginning is the only point.
        self._last = ("begin", 0) if kind == "end" else (kind, number)

    def trimmed(self, schedule: Schedule) -> Schedule | None:
        """The schedule with what was seen after its points, if that is new."""
        if not self._passed:
            return None
        known = {(kind, number): more for kind, number, more in schedule.trims}
        found = {point: max(more, known.get(point, 0)) for point, more in self._after.items()}
        trims = {**known, **found, ("begin", 0): self._budget}
        if trims == known:
            return None
        points = [(*point, more) for point, more in trims.items()]
        return replace(schedule, trims=points, giving_back_ns=0)


class Enforcement:
    """One device's allocator.

    Args:
        device: the type of the device; nothing happens on the CPU.
        strict: whether reserving more than the budget is refused while a plan acts. Without it,
            what a plan does not cover may go beyond the budget where the device has room.
    """

    def __init__(self, device: str, strict: bool) -> None:
        self.device = device
        self.strict = strict
        self.beyond = 0
        """How often, since a plan acts, more was reserved by what the plan does not cover."""
        self._layouts: set[int] = set()
        """Hashes of the memory's layouts that were seen."""
        self._budget: int | None = None
        self._capped = False
        self._retries = 0
        self._strayed = (0, 0)
        """The most bytes given out and reserved by what did not run by the plan."""
        self._mark = (0, 0)
        """The most bytes given out and reserved when the last iteration by the plan ended."""

    @property
    def _on(self) -> bool:
        return self.device == "cuda" and torch.cuda.is_available()

    def _statistic(self, name: str) -> int:
        return statistic(name) if self._on else 0

    def peaks(self) -> tuple[int, int]:
        """The most bytes given out and reserved since :meth:`restart`, in all iterations."""
        allocated, reserved = self._statistic("allocated_bytes.all.peak"), self.peak_reserved()
        return max(allocated, self._strayed[0]), max(reserved, self._strayed[1])

    def peak_reserved(self) -> int:
        """The most bytes reserved since :meth:`restart` by iterations that ran by the plan."""
        return self._statistic("reserved_bytes.all.peak")

    @property
    def strayed_reserved(self) -> int:
        """The most bytes reserved since :meth:`restart` by what did not run by the plan and
        reserved more than it may.
        """
        return self._strayed[1]

    def mark(self) -> None:
        """An iteration by the plan has ended."""
        self._mark = self._statistic("allocated_bytes.all.peak"), self.peak_reserved()

    def grew(self, known: int) -> bool:
        """Whether more was given out and reserved since :meth:`mark` than ever before it, and more
        given out than ``known`` bytes: those of a whole iteration, whose beginning gives out less.
        """
        allocated, reserved = self._mark
        given = self._statistic("allocated_bytes.all.peak")
        return self.peak_reserved() > reserved and given > max(allocated, known)

    def over(self, limit: int) -> int:
        """By how many bytes more than ``limit`` was reserved since :meth:`mark`, or less; what was
        reserved before it does not count.
        """
        reserved = self.peak_reserved()
        return min(reserved - limit, 0) if reserved <= self._mark[1] else reserved - limit

    def is_over(self, budget: int) -> bool:
        """Whether the last iteration reserved more than ``budget``, or more is reserved still."""
        if not self._on:
            return False
        return self.over(budget) > 0 or self._statistic("reserved_bytes.all.current") > budget

    def give_back(self, most: int) -> bool:
        """After what did not run by the plan: gives back what the allocator keeps, if it reserved
        more than ``most`` bytes, and measures anew; whether it did.
        """
        if not self._on or self.peak_reserved() <= most:
            return False
        self.beyond += 1
        self._strayed = self.peaks()
        self._empty()
        return True

    def standing(self) -> int:
        """Bytes that are given out now."""
        return self._statistic("allocated_bytes.all.current")

    def retries(self) -> int:
        """How often the allocator gave back all that it kept and tried again, since
        :meth:`restart`.
        """
        return max(0, self._statistic("num_alloc_retries") - self._retries)

    def repeats(self) -> bool:
        """Whether memory lies as it did when this was asked before, since :meth:`restart`. Then the
        iterations that follow reserve no more than those since, as long as they are alike.
        """
        if not self._on:
            return True
        layout = hash(
            tuple(
                (
                    segment["address"],
                    tuple((one["size"], one["state"]) for one in segment["blocks"]),
                )
                for segment in segments()
            )
        )
        before = layout in self._layouts
        self._layouts.add(layout)
        return before

    def learn(self, peak: int, least: int) -> int:
        """What the watched iterations reserved beyond ``peak`` bytes given out, or ``least`` bytes.
        The first ones keep what initialisation left, so no more than a twentieth counts.
        """
        if not self._on:
            return 0
        beyond = self._statistic("reserved_bytes.all.current") - peak
        return max(min(beyond, peak // 20), least)

    def is_expandable(self) -> bool:
        """Whether the allocator's segments for large blocks grow (``expandable_segments``)."""
        large = (one for one in segments() if one["segment_type"] == "large") if self._on else ()
        return any(one["is_expandable"] for one in large)

    def growth(self, budget: int) -> Growth | None:
        """What finds where the allocator reserves more than ``budget``, on a device."""
        return Growth(budget) if self._on else None

    def computes(self) -> bool:
        """Whether the device computes. ``neap dry``'s does not, though it knows some values: what
        runs again there may differ, and copies take no time.
        """
        return not self._on or dry_library() is None

    def restart(self) -> None:
        """Gives back what the allocator keeps, and measures anew: a plan acts from now on."""
        self.lift()
        self._budget, self._strayed = None, (0, 0)
        if self._on:
            self._empty()
            self._retries = self._statistic("num_alloc_retries")

    def _empty(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._layouts.clear()
        self._mark = (0, 0)

    def begin(self, budget: int) -> None:
        """From now on no more than ``budget`` bytes may be reserved."""
        self._budget = budget
        self.apply()

    def apply(self) -> None:
        """Enforces the budget, if one acts."""
        if self._capped or self._budget is None or not self.strict or not self._on:
            return
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if self._budget < total and self._statistic("reserved_bytes.all.current") <= self._budget:
            torch.cuda.set_per_process_memory_fraction((self._budget + 1) / total)
            self._capped = True

    def lift(self) -> None:
        """Enforces nothing until :meth:`apply`: an iteration that is not as planned needs more."""
        if self._capped:
            torch.cuda.set_per_process_memory_fraction(1.0)
            self._capped = False

    def close(self) -> None:
        """Ends for good."""
        self.lift()
        self._budget = None
