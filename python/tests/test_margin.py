"""How a plan is fitted into what the allocator reserves: margins, and free memory given back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import neap.torch
import pytest
import torch
from jobs import Job, Transformer, language
from neap.torch import _enforce, _search
from neap.torch._enforce import Enforcement, Growth, Margin
from neap.torch._pages import Pages
from neap.torch._schedule import TRIM, Point, Schedule
from neap.torch._search import Search

MIB = 1 << 20


def made(peak: int, budget: int = 1000 * MIB) -> Schedule:
    """A schedule of two saved tensors that swaps one."""
    view = (torch.float32, (4,), (1,), 0)
    actions = {("pack", 1): [("out", 0), ("drop", 0)], ("unpack", 1): [("in", 0)]}
    schedule = Schedule([(view, ""), (view, "")], [0, None], [16], actions)
    schedule.peak_bytes, schedule.budget_bytes = peak, budget
    schedule.unplanned_peak_bytes = 2 * peak
    return schedule


def test_a_margin_that_does_not_help_grows_faster() -> None:
    """The second step is twice the first where the allocator reserves as much as before."""
    margin = Margin()
    first = margin.judge(made(900 * MIB), 6 * MIB)
    assert first == 8 * MIB
    assert margin.judge(made(890 * MIB), 6 * MIB) == first + 2 * 8 * MIB
    # It helped: from here on by what is missing.
    assert margin.judge(made(870 * MIB), 3 * MIB) == 24 * MIB + 5 * MIB


def test_a_plan_that_takes_more_when_it_is_looked_at_again_is_the_best_no_more() -> None:
    """The margin grows from there, and the plan does not come back."""
    margin = Margin()
    assert margin.judge(made(900 * MIB), 6 * MIB) == 8 * MIB
    fitted = made(850 * MIB)
    assert margin.judge(fitted, -10 * MIB) is None  # It is the best.
    assert margin.judge(fitted, 4 * MIB) == (8 + 6) * MIB
    lower = made(840 * MIB)
    lower.iteration_ns = fitted.iteration_ns + 1
    assert margin.judge(lower, -10 * MIB) is None


def test_a_plan_that_comes_back_and_fits_again_stays() -> None:
    """Margins that were tried already are not tried again."""
    margin = Margin()
    assert margin.judge(made(990 * MIB), 200 * MIB) == 202 * MIB
    fitted = made(800 * MIB)
    assert margin.judge(fitted, -80 * MIB) == 101 * MIB
    assert margin.judge(made(895 * MIB), 3 * MIB) == 151 * MIB + MIB // 2
    slower = made(847 * MIB)
    slower.iteration_ns = 1
    assert margin.judge(slower, -8 * MIB) is fitted
    assert margin.judge(fitted, -80 * MIB) is None


def test_what_a_plan_could_save_must_be_worth_another_plan() -> None:
    """The plan that did not fit was quicker by less than a fiftieth, or by more."""
    for quicker, found in ((990, None), (970, 11 * MIB)):
        margin = Margin()
        missed, fitted = made(990 * MIB), made(756 * MIB)
        missed.iteration_ns, fitted.iteration_ns = quicker, 1000
        assert margin.judge(missed, 20 * MIB) == 22 * MIB
        assert margin.judge(fitted, -80 * MIB) == found


def looked(growth: Growth, reserved: list[int], points: list[tuple[str, int, int]]) -> None:
    """Comes to these points with these MiB reserved."""
    for kind, number, size in points:
        reserved[0] = size * MIB
        growth.look(kind, number)


def test_memory_is_given_back_at_the_points_after_which_more_is_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each point with how much more; what is known already is not found again."""
    reserved = [0]
    monkeypatch.setattr(_enforce, "reserved_now", lambda: reserved[0])
    schedule = made(900 * MIB)
    begin = ("begin", 0, schedule.budget_bytes)
    growth = Growth(schedule.budget_bytes)
    looked(growth, reserved, [("begin", 0, 700), ("pack", 0, 700), ("pack", 1, 990)])
    assert growth.trimmed(schedule) is None
    looked(growth, reserved, [("unpack", 1, 1010), ("unpack", 0, 900), ("step", 0, 905)])
    trimmed = growth.trimmed(schedule)
    assert trimmed is not None and schedule.trims == []
    grew = [("pack", 0, 290 * MIB), ("pack", 1, 20 * MIB), ("unpack", 0, 5 * MIB)]
    assert trimmed.trims == [begin, *grew]
    assert trimmed.at("pack")[1] == [(TRIM, 20 * MIB), ("out", 0), ("drop", 0)]
    assert growth.trimmed(trimmed) is None

    growth = Growth(schedule.budget_bytes)
    looked(growth, reserved, [("end", 0, 990), ("begin", 0, 1010)])
    trimmed = growth.trimmed(schedule)
    assert trimmed is not None and trimmed.trims == [begin]
    assert growth.trimmed(trimmed) is None  # Once, though the end was the last point before.


def test_trims_are_kept_in_a_file(tmp_path: Path) -> None:
    """A plan that is saved gives back free memory where it did before."""
    schedule = made(900 * MIB)
    schedule.trims = [("begin", 0, 5), ("unpack", 1, 7)]
    schedule.save(tmp_path / "plan.json")
    assert Schedule.load(tmp_path / "plan.json") == schedule


@pytest.mark.usefixtures("small")
def test_growth_is_looked_for_once_the_plan_before_has_given_its_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("restart", "growth"):
        whole = getattr(Enforcement, name)

        def noted(self: Any, *args: Any, name: str = name, whole: Any = whole) -> Any:
            calls.append(name)
            return whole(self, *args)

        monkeypatch.setattr(Enforcement, name, noted)
    model = Transformer()
    job = language(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=4)
    with neap.torch.fit(model, job.optimizer, "60%", "host", verbose=False) as fitted:
        for _ in range(5):
            job.iteration()
        assert fitted.schedule is not None
    assert calls[:2] == ["restart", "growth"]


@pytest.mark.usefixtures("small")
def test_a_plan_is_looked_at_until_memory_lies_as_it_did_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third iteration of the first plan takes more than the budget, and so another is made."""
    reserved: list[int] = []

    def peak(self: Enforcement) -> int:
        return 0 if not reserved else reserved[0] if len(reserved) == 1 else reserved.pop(0)

    monkeypatch.setattr(Enforcement, "peak_reserved", peak)
    monkeypatch.setattr(Enforcement, "repeats", lambda self: len(reserved) == 1)
    model = Transformer()
    job = language(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=4)
    with neap.torch.fit(model, job.optimizer, "80%", "host", verbose=False) as fitted:
        while fitted.schedule is None:
            job.iteration()
        budget = fitted.schedule.budget_bytes
        reserved += [budget - 3, budget - 2, budget + 8, budget]
        for _ in range(8):
            assert not fitted.settled or fitted.report().replans
            job.iteration()
        report = fitted.report()
    assert report.replans == ["the allocator reserved 8 B more than the budget"], report


class Found(Growth):
    """Finds a point each time that it is asked, as long as there are points."""

    points: list[Point]

    def look(self, kind: str, number: int) -> None:
        pass

    def trimmed(self, schedule: Schedule) -> Schedule | None:
        if not self.points:
            return None
        return replace(schedule, trims=[*schedule.trims, (*self.points.pop(0), MIB)])


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the allocator is said to have reserved, with growth at two points."""
    Found.points = [("unpack", 1), ("unpack", 2)]
    found = [0]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(Enforcement, "peak_reserved", lambda self: found[0])
    monkeypatch.setattr(Enforcement, "growth", lambda self, budget: Found(budget))
    return found


def words() -> Job:
    """A small transformer."""
    model = Transformer()
    return language(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=4)


def fit(job: Job) -> neap.torch.Fit:
    """Acts by a plan of this job from now on."""
    fitted = neap.torch.fit(job.model, job.optimizer, "80%", "host", verbose=False)
    while fitted.schedule is None:
        job.iteration()
    return fitted


@pytest.mark.usefixtures("small")
def test_a_plan_with_trims_gets_more_when_a_later_iteration_shows_that_it_needs_them(
    monkeypatch: pytest.MonkeyPatch, reserved: list[int]
) -> None:
    """Free memory lies elsewhere in each iteration. Such a plan is never enforced."""
    monkeypatch.setattr(_search, "_REPLANS", 0)
    monkeypatch.setattr(Enforcement, "begin", lambda self, budget: pytest.fail("enforced"))
    job = words()
    with fit(job) as fitted:
        assert fitted.schedule is not None
        budget = fitted.schedule.budget_bytes
        # All free memory at the beginning, and not where later points are enough.
        for trims in (
            [("begin", 0, budget)],
            [("unpack", 1, MIB)],
            [("unpack", 1, MIB), ("unpack", 2, MIB)],
        ):
            reserved[0] = budget + 5
            before = fitted.schedule.trims
            while fitted.schedule.trims == before:
                job.iteration()
            assert not fitted.settled
            reserved[0] = budget - 5
            while not fitted.settled:
                job.iteration()
            assert fitted.report().met and fitted.report().trims == len(trims)
            assert fitted.schedule.trims == trims


def until_trims(job: Job, fitted: neap.torch.Fit, reserved: list[int]) -> int:
    """Comes to the first plan with trims: the next one fits, but is much slower. The budget."""
    assert fitted.schedule is not None
    budget = fitted.schedule.budget_bytes
    reserved[0] = budget + 5
    job.iteration()
    reserved[0] = budget - budget // 50
    while not fitted.schedule.trims:
        job.iteration()
    return budget


def slower(monkeypatch: pytest.MonkeyPatch, longer: float) -> list[Schedule]:
    """The plans that will be made: all meet their budget, and all but the first take longer."""
    planned = Search.plan
    made: list[Schedule] = []

    def plan(self: Search, planner: Any) -> Schedule:
        one = planned(self, planner)
        one.met, one.iteration_ns = True, int(1_000_000_000 * (longer if made else 1))
        made.append(one)
        return one

    monkeypatch.setattr(Search, "plan", plan)
    return made


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("helps", [True, False])
@pytest.mark.parametrize("longer", [1.04, 1.06])
def test_a_quicker_plan_is_kept_by_trims_where_they_help(
    monkeypatch: pytest.MonkeyPatch, reserved: list[int], longer: float, helps: bool
) -> None:
    """They are tried where a wider margin makes the plan more than a twentieth slower."""
    made = slower(monkeypatch, longer)
    job = words()
    with fit(job) as fitted:
        assert fitted.schedule is not None
        budget = fitted.schedule.budget_bytes
        reserved[0] = budget + 5
        job.iteration()
        assert fitted.schedule is made[1]
        assert fitted.report().margin_bytes == (2 << 20) + 5
        reserved[0] = budget - budget // 50
        while fitted.schedule is made[1] and not fitted.settled:
            job.iteration()
        begin = ("begin", 0, budget)
        assert fitted.settled == (longer == 1.04)
        if longer == 1.06:
            assert fitted.schedule.trims == [begin] and fitted.report().margin_bytes == 0
            reserved[0] = budget + 5
            job.iteration()
            assert fitted.schedule.trims == [begin, ("unpack", 1, MIB)]
            if not helps:
                Found.points = []
                job.iteration()
                assert fitted.schedule.moves
                job.iteration()
                assert fitted.schedule is made[1] and not fitted.schedule.trims
                assert fitted.report().margin_bytes == (2 << 20) + 5
        reserved[0] = budget - budget // 50
        while not fitted.settled:
            job.iteration()
        trims = longer == 1.06 and helps
        kept = made[0] if trims else made[1]
        assert fitted.schedule.iteration_ns == kept.iteration_ns and fitted.report().met
        assert fitted.schedule.trims == ([("unpack", 1, MIB)] if trims else [])


@pytest.mark.usefixtures("small")
def test_a_margin_and_trims_together_keep_to_the_budget(
    monkeypatch: pytest.MonkeyPatch, reserved: list[int]
) -> None:
    """Where trims are not enough, a wider margin is tried with them before one without."""
    times = iter((1_000_000_000, 2_000_000_000, 1_100_000_000))
    planned = Search.plan
    made: list[Schedule] = []

    def plan(self: Search, planner: Any) -> Schedule:
        one = planned(self, planner)
        one.met, one.iteration_ns = True, next(times)
        made.append(one)
        return one

    monkeypatch.setattr(Search, "plan", plan)
    job = words()
    with fit(job) as fitted:
        budget = until_trims(job, fitted, reserved)
        assert fitted.schedule is not None
        reserved[0] = budget + 5
        Found.points = []
        job.iteration()
        assert fitted.schedule.moves
        job.iteration()
        assert fitted.schedule.iteration_ns == 1_100_000_000 and fitted.schedule.trims
        reserved[0] = budget - budget // 50
        while not fitted.settled:
            job.iteration()
        assert fitted.schedule.iteration_ns == 1_100_000_000 and fitted.report().met
        assert fitted.report().margin_bytes == (2 << 20) + 5


@pytest.mark.usefixtures("small")
def test_a_plan_that_fits_comes_back_where_no_more_plans_may_be_made(
    monkeypatch: pytest.MonkeyPatch, reserved: list[int]
) -> None:
    """A smaller margin was tried last, and did not fit."""
    monkeypatch.setattr(_search, "_REPLANS", 2)
    made = slower(monkeypatch, 1.03)
    job = words()
    with fit(job) as fitted:
        assert fitted.schedule is not None
        budget = fitted.schedule.budget_bytes
        reserved[0] = budget + 5
        job.iteration()
        reserved[0] = budget // 2
        while len(made) < 3:
            job.iteration()
        reserved[0] = budget + 5
        job.iteration()
        assert fitted.schedule is made[1]
        reserved[0] = budget // 2
        while not fitted.settled:
            job.iteration()
        assert fitted.schedule is made[1] and fitted.report().met


@pytest.mark.usefixtures("small")
def test_trims_stay_where_the_link_is_slower_than_planned(
    monkeypatch: pytest.MonkeyPatch, reserved: list[int]
) -> None:
    """The plan that is made anew has them too."""
    monkeypatch.setattr(_search, "_REPLANS", 0)
    job = words()
    with fit(job) as fitted:
        assert fitted.schedule is not None
        budget = fitted.schedule.budget_bytes
        reserved[0] = budget + 5
        while not fitted.schedule.trims:
            job.iteration()
        reserved[0] = budget - 5
        while not fitted.settled:
            job.iteration()
        before = fitted.schedule
        monkeypatch.setattr(_search, "_REPLANS", 1)
        monkeypatch.setattr(_search, "drifted", lambda rates, link: "copies are slower")
        monkeypatch.setattr(_search, "measured_link", lambda rates, link: link)
        monkeypatch.setattr(
            fitted.runtime, "meter", SimpleNamespace(rates={}, on=False, turn=lambda: True)
        )
        job.iteration()
        monkeypatch.setattr(fitted.runtime, "meter", None)
        assert fitted.schedule is not before and fitted.schedule.trims == before.trims
        assert not fitted.settled


@pytest.mark.usefixtures("small")
def test_the_time_of_giving_back_counts(
    monkeypatch: pytest.MonkeyPatch, reserved: list[int]
) -> None:
    """A plan with trims that takes as long as the one without is not kept."""
    made = slower(monkeypatch, 1.5)
    spent = property(lambda self: 490_000_000 * self.acts, lambda self, ns: None)
    monkeypatch.setattr(Pages, "spent_ns", spent, raising=False)
    job = words()
    with fit(job) as fitted:
        until_trims(job, fitted, reserved)
        while not fitted.settled:
            job.iteration()
        assert fitted.schedule is made[1]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("enough", [True, False])
def test_all_free_memory_is_given_back_only_where_later_points_are_not_enough(
    monkeypatch: pytest.MonkeyPatch, reserved: list[int], enough: bool
) -> None:
    """The plan gives it back at the beginning of each iteration until it was seen to fit."""
    monkeypatch.setattr(_search, "_REPLANS", 0)
    Found.points = [("unpack", 1)]
    job = words()
    with fit(job) as fitted:
        assert fitted.schedule is not None
        budget = fitted.schedule.budget_bytes
        reserved[0] = budget + 5
        while len(fitted.schedule.trims) < 2:
            job.iteration()
        reserved[0] = budget - 5
        while len(fitted.schedule.trims) == 2:
            job.iteration()
        assert fitted.schedule.trims == [("unpack", 1, MIB)]
        if not enough:
            reserved[0] = budget + 5
            job.iteration()
            reserved[0] = budget - 5
        while not fitted.settled:
            job.iteration()
        expected = [("unpack", 1, MIB)]
        if not enough:
            expected.insert(0, ("begin", 0, budget))
        assert fitted.schedule.trims == expected and fitted.report().met


@pytest.mark.usefixtures("small")
def test_a_plan_whose_allocator_had_to_try_again_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, reserved: list[int]
) -> None:
    retries, begun = [0], [0]
    monkeypatch.setattr(Enforcement, "retries", lambda self: retries[0])
    monkeypatch.setattr(Enforcement, "begin", lambda self, budget: begun.append(budget))
    job = words()
    with fit(job) as fitted:
        assert fitted.schedule is not None
        reserved[0] = fitted.schedule.budget_bytes - 5
        while not fitted.settled:
            job.iteration()
        job.iteration()
        assert fitted.settled and len(begun) == 2
        retries[0] = 1
        job.iteration()
        assert not fitted.settled
        retries[0] = 0
        while not fitted.settled:
            job.iteration()
        assert len(begun) == 3


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("longer", "fits", "kept"), [(1.04, True, 1), (1.04, False, 0), (1.06, True, 0)]
)
def test_a_page_of_the_budget_stays_free_where_memory_lies_otherwise_each_time(
    monkeypatch: pytest.MonkeyPatch, reserved: list[int], longer: float, fits: bool, kept: int
) -> None:
    """A plan that leaves one free takes the place of one that leaves 5 bytes, if it fits too."""
    made = slower(monkeypatch, longer)
    monkeypatch.setattr(Enforcement, "repeats", lambda self: False)
    job = words()
    with fit(job) as fitted:
        assert fitted.schedule is not None
        budget = fitted.schedule.budget_bytes
        reserved[0] = budget - 5
        while len(made) < 2:
            job.iteration()
        assert (fitted.schedule is made[1]) == (longer == 1.04)
        reserved[0] = budget - (20 << 20) if fits else budget + 5
        if longer == 1.04:
            job.iteration()
        reserved[0] = budget - 5
        while not fitted.settled:
            job.iteration()
        assert fitted.schedule is made[kept] and fitted.report().met and len(made) == 2
        margin = fitted.report().margin_bytes
        assert (margin >= (20 << 20) - 5) == (kept == 1)
