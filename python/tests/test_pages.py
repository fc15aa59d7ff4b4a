"""Tensors that are allocated anew while an iteration runs: every number as without neap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import neap.torch
import pytest
import torch
from fitted import everything, same
from jobs import Job
from neap.torch import _pages
from neap.torch._holder import Counts, Holder
from neap.torch._pages import Pages
from neap.torch._runtime import Runtime
from neap.torch._schedule import PAGE, Schedule
from neap.torch._search import Search
from test_jobs import JOBS

ITERATIONS = 6
MIB = 1 << 20


def everywhere(schedule: Schedule) -> list[tuple[str, int, int]]:
    """All points of an iteration."""
    places = range(len(schedule.expected))
    once = [(kind, 0, 1) for kind in ("begin", "backward", "after", "step")]
    return [*once, *((kind, n, 1) for kind in ("pack", "unpack") for n in places)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("make", JOBS, ids=lambda make: make.__name__)
def test_numbers_are_those_without_neap_where_all_that_can_move_does(
    make: Callable[[], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every point, all that may be allocated anew is, on whatever page it lies."""
    planned = Search.plan

    def plan(self: Search, planner: Any) -> Schedule:
        schedule = planned(self, planner)
        return replace(schedule, trims=everywhere(schedule), moves=True)

    def run(budget: str | None) -> tuple[list[torch.Tensor], neap.torch.Report | None]:
        torch.manual_seed(5)
        made = make()
        fitted = None
        if budget is not None:
            fitted = neap.torch.fit(made.model, made.optimizer, budget, "host", verbose=False)
        losses = [made.iteration().clone() for _ in range(ITERATIONS)]
        report = None if fitted is None else fitted.close()
        return losses + everything(made), report

    expected, _ = run(None)
    monkeypatch.setattr(Search, "plan", plan)
    monkeypatch.setattr(_pages, "_SMALLEST", 0)
    monkeypatch.setattr(
        _pages, "_on_sparse_pages", lambda tensors, holders, most: _pages._movable(tensors, holders)
    )
    monkeypatch.setattr(_pages, "reserved_now", lambda: 1 << 60)
    found, report = run("50%")
    assert report is not None
    assert same(expected, found), report
    assert report.planned == ITERATIONS - 3, report
    assert report.gave_back > 0 and report.moved_bytes > 0, report
    assert report.swapped_in == report.freed >= report.swapped_out, report


@pytest.mark.parametrize("beside", [True, False])
def test_what_something_else_holds_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """A storage moves if all tensors that hold it are known."""
    monkeypatch.setattr(_pages, "_SMALLEST", 0)
    one, two = torch.zeros(8), torch.zeros(8)
    view = two[2:]
    assert [list(map(id, found)) for found in _pages._movable([one, two], [])] == [[id(one)]]
    together = _pages._movable([two, view, two], [])
    assert [list(map(id, found)) for found in together] == [[id(two), id(view)]]
    one.fill_(3)
    two.fill_(5)
    before = [tensor.data_ptr() for tensor in (one, two)]
    version = two._version
    kept = [tensor.untyped_storage() for tensor in (one, two)]  # Their addresses stay in use.
    _pages._move([[one], [two, view]], 64, beside)
    assert [tensor.data_ptr() for tensor in (one, two)] != before and len(kept) == 2
    assert view.data_ptr() == two.data_ptr() + 8 and two._version == version
    view.fill_(7)
    assert one.tolist() == [3.0] * 8 and two.tolist() == [5.0, 5.0] + [7.0] * 6


@pytest.mark.filterwarnings("ignore")
def test_what_is_more_than_a_view_of_its_storage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another storage would make it a plain tensor."""
    monkeypatch.setattr(_pages, "_SMALLEST", 0)
    numbers = torch.zeros(4, dtype=torch.complex64)
    others = [numbers.conj(), torch.eye(3).to_sparse(), torch._efficientzerotensor(3)]
    if hasattr(torch.Tensor, "has_names"):  # PyTorch 2.15 has no named tensors.
        others.append(torch.zeros(2, names=("n",)))
    others.append(torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8))
    assert _pages._movable([numbers, *others], []) == []


def test_a_copy_that_may_not_have_ended_keeps_its_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs on a stream of its own."""
    monkeypatch.setattr(_pages, "_SMALLEST", 0)
    tensor = torch.zeros(8)
    holder = Holder(0, 0, tensor, tensor.untyped_storage(), None)
    del tensor
    assert len(_pages._movable([], [holder])) == 1
    holder.host = torch.zeros(8)
    assert not _pages._movable([], [holder])
    holder.host, holder.coming = None, True
    assert not _pages._movable([], [holder])


def test_pages_that_are_at_most_half_full_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless something lies there that can't be moved. What reaches into such a page moves too."""
    tensors = [torch.zeros(n) for n in (1, 2, 3, 4, 5)]
    monkeypatch.setattr(_pages, "_SMALLEST", 0)
    sizes = [25, 5, 12, 6, 3]  # MiB; the pages hold 20, 10, 12, 9 of what is known.
    starts = [0, 25, 42, 60, 66]

    pages = {}
    for tensor, start, size in zip(tensors, starts, sizes):
        first, end = start * MIB, (start + size) * MIB
        pages[tensor.data_ptr()] = [
            ((0, n), min(end, (n + 1) * PAGE) - max(first, n * PAGE))
            for n in range(first // PAGE, (end - 1) // PAGE + 1)
        ]
    monkeypatch.setattr(_pages, "_blocks", lambda: iter(pages.items()))

    def chosen(known: list[torch.Tensor], most: int) -> list[int]:
        return [found[0].numel() for found in _pages._on_sparse_pages(known, [], most)]

    assert chosen(tensors, 1 << 40) == [1, 2, 4, 5]
    assert chosen(tensors[:4], 1 << 40) == [1, 2]  # The last one can't be moved.
    # No more than what is missing, with a page of room.
    assert chosen(tensors, -8 * MIB) == [1, 2]
    assert chosen(tensors, -PAGE) == []
    with monkeypatch.context() as larger:  # What takes a page elsewhere gives none back.
        larger.setattr(_pages, "PAGE", 12)
        assert 2 not in chosen(tensors, 1 << 40)


def test_blocks_are_counted_on_each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free blocks and the segments of small ones do not count."""
    blocks = [(25, "active_allocated"), (10, "inactive"), (5, "active_pending_free")]
    one = {
        "address": 3 * PAGE,
        "total_size": 2 * PAGE,
        "segment_type": "large",
        "is_expandable": True,
        "blocks": [{"size": size * MIB, "state": state} for size, state in blocks],
    }
    whole = {**one, "address": 9 * PAGE, "is_expandable": False}
    small = {**one, "segment_type": "small"}
    captured = {**one, "segment_pool_id": (0, 1)}
    monkeypatch.setattr(_pages, "segments", lambda: [one, whole, small, captured])
    first, second = (3 * PAGE, 0), (3 * PAGE, 1)
    assert list(_pages._blocks()) == [
        (3 * PAGE, [(first, 20 * MIB), (second, 5 * MIB)]),
        (3 * PAGE + 35 * MIB, [(second, 5 * MIB)]),
        (9 * PAGE, [((9 * PAGE, 0), 25 * MIB)]),
        (9 * PAGE + 35 * MIB, [((9 * PAGE, 0), 5 * MIB)]),
    ]


def test_memory_is_given_back_where_too_much_would_be_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not where what may come still fits."""
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(1))
    monkeypatch.setattr(_pages, "reserved_now", lambda: 900)
    monkeypatch.setattr(_pages, "segments", lambda: [])
    counts = Counts()
    pages = Pages(counts, dict)
    schedule = Schedule([], [], [], {}, trims=[("begin", 0, 100), ("step", 0, 101)])
    schedule.budget_bytes, schedule.moves = 1000, True
    pages.follow(schedule)
    assert not pages.at(("begin", 0), list) and not pages.at(("after", 0), list)
    assert pages.at(("step", 0), list)
    assert given == [1] and counts.trims == 1
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(800))
    left = [900]
    monkeypatch.setattr(_pages, "reserved_now", lambda: left[-1])
    monkeypatch.setattr(_pages, "segments", lambda: pytest.fail("not needed"))
    assert pages.at(("step", 0), list)
    pages.follow(None)
    assert not pages.acts and not pages.at(("step", 0), list)


def test_a_point_with_nothing_else_to_do_acts_too() -> None:
    """Where a tensor is saved, also once nothing looks at how much is reserved."""
    view = (torch.float32, (4,), (1,), 0)
    schedule = Schedule([(view, "")] * 3, [None] * 3, [], {}, trims=[("pack", 2, 5)])
    runtime = Runtime("cpu")
    runtime.follow(schedule)
    # The first one shows that an iteration has begun.
    assert [wanted[-1] for wanted in runtime._all] == [True, False, True]
