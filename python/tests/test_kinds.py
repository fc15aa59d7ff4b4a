"""Which iterations are alike, take turns, vary in size, and fit without a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from neap.torch import _graph
from neap.torch._kinds import Kinds
from neap.torch._runtime import LARGER
from neap.torch._sizes import Seen, _most, fits


def recorded(names: str) -> Any:
    """A recording of one operator an iteration: its kind is the letter without case, its size the
    letter's case.
    """
    ops = [
        SimpleNamespace(
            kind=name.lower(),
            phase="forward",
            makes=[SimpleNamespace(bytes=2 if name.isupper() else 1)],
            reads=[],
        )
        for name in names
    ]
    packs = [
        SimpleNamespace(iteration=n, node=name.lower(), view=(torch.float32, (1,), (1,), 0))
        for n, name in enumerate(names)
    ]
    return SimpleNamespace(ops=ops, cuts=list(range(len(names))), packs=packs)


@pytest.mark.parametrize(
    ("names", "period"),
    [("a", 0), ("ab", 0), ("aa", 1), ("aA", 0), ("abab", 0), ("ababab", 2), ("cababab", 2)],
)
def test_rows_of_several_iterations_must_be_seen_three_times(names: str, period: int) -> None:
    assert _graph.period(recorded(names)) == period
    kinds = Kinds(12)
    kinds.seen_enough(recorded(names))
    assert kinds.turns == (period if period > 1 else 0)


def test_a_pair_that_is_alike_is_enough_unless_sizes_were_seen_to_vary() -> None:
    kinds = Kinds(12)
    assert kinds.seen_enough(recorded("Aaa")) and not kinds.varies
    plan: Any = SimpleNamespace(varies=False)
    for why in ("one", "another", "another", "another"):
        kinds.ran(why, 3)
    assert kinds.out_of_patience
    assert kinds.watch_anew(plan) == "4 iterations in a row differ"
    assert not kinds.seen_enough(recorded("Aaa"))
    assert kinds.seen_enough(recorded("aaaaaaa")) and not kinds.varies
    assert kinds.seen_enough(recorded("Aaaaaaa")) and kinds.varies


@pytest.mark.parametrize(("names", "enough"), [("bcbaaaa", True), ("bcdeaba", False)])
def test_a_pair_says_little_of_a_script_that_changes(names: str, enough: bool) -> None:
    kinds, plan = Kinds(12), SimpleNamespace(varies=False)
    for saved in (3, 4, 3, 5):  # For the same reason, but not by as many tensors.
        kinds.ran("it differs", saved)
    kinds.watch_anew(plan)  # type: ignore[arg-type]
    assert kinds.seen_enough(recorded(names)) is enough


def test_all_that_are_scouted_are_watched() -> None:
    kinds = Kinds(12, 20)
    assert not kinds.seen_enough(recorded("a" * 19))
    assert kinds.seen_enough(recorded("a" * 20)) and not kinds.varies
    assert kinds.seen_enough(recorded("A" + "a" * 19)) and kinds.varies
    kinds.no_more_come()
    assert kinds.seen_enough(recorded("Aaa")) and kinds.varies


def test_patience_ends_where_iterations_differ_in_a_row_or_often() -> None:
    kinds = Kinds(12)
    for why in (*[None] * 40, *["it differs"] * 3):
        kinds.ran(why, 3)
        assert not kinds.out_of_patience
    kinds.ran("it differs", 3)
    assert kinds.out_of_patience
    kinds = Kinds(12)
    for why in (*["it differs"] * 3, None):
        kinds.ran(why, 3, True)
        assert not kinds.out_of_patience
    kinds.ran("it differs", 3, True)
    assert kinds.out_of_patience


def test_larger_iterations_count_though_others_are_as_planned() -> None:
    kinds, plan = Kinds(12), SimpleNamespace(varies=True)
    for patience in (4, 8):
        for _ in range(patience):
            assert not kinds.out_of_patience
            kinds.ran(LARGER, 3)
            kinds.ran(None, 3)
        assert kinds.out_of_patience
        why = kinds.watch_anew(plan)  # type: ignore[arg-type]
        assert why == f"{patience} iterations were larger than the plan's"


def test_steps_in_turn_end_an_iteration_together() -> None:
    kinds = Kinds(12)
    kinds.begin(3)
    assert [kinds.stepped() for _ in range(7)] == [False, False, True] * 2 + [False]
    assert kinds.begun == 1


def test_a_plan_serves_iterations_that_end_earlier() -> None:
    rows = ["ab", "abcd", "abab", "ab", "abab", "x", "abab", "ab"]
    packs = [
        SimpleNamespace(iteration=n, node=name, view=(torch.float32, (1,), (1,), 0))
        for n, row in enumerate(rows)
        for name in row
    ]
    recording: Any = SimpleNamespace(cuts=list(range(len(rows))), packs=packs)
    which = _graph.main_kind(recording)
    assert which == 4  # What came after `x` did not come after one that its plan serves.
    assert _graph.served_by(recording, which) == [0, 2, 3, 4, 6]
    assert _graph.some_are_shorter(recording, which)
    assert not _graph.some_are_shorter(recording, 0)


@pytest.mark.parametrize(
    ("seen", "fits"),
    [
        ([(10, 100), (20, 200), (30, 300)], (4, 24)),  # On the line between two.
        ([(10, 100), (20, 200)], (4, 20)),  # All that were seen.
        ([(10, 300), (20, 400)], None),
        ([(10, 100), (10, 400)], None),  # One of this size does not.
        ([(10, 100), (20, 200), (20, 400)], (4, 14)),
        ([(10, 100), (20, 400), (30, 200)], (4, 14)),  # A larger one that fits shows nothing.
    ],
)
def test_what_is_no_larger_than_what_fitted_fits(
    seen: list[tuple[int, int]], fits: tuple[int, int] | None
) -> None:
    assert _most(seen, 4, 240) == fits


def test_the_saved_tensor_that_tells_most_iterations_apart_says_which_fit() -> None:
    rows = [(9, 1, 100), (2, 5, 300), (5, 2, 150), (7, 3, 200)]  # The second size decides.
    watched = [Seen((4, first, second), 1, peak) for first, second, peak in rows]
    assert fits(watched, 300, 210) == (2, 3 + (210 - 200) * 2 // 100)
    assert fits(watched, 300, 90) is None
    made = [Seen((size,), size, 0) for size in (10, 20, 40)]  # Nothing is measured on the CPU.
    assert fits(made, 400, 200) == (0, 20)


def test_turns_that_are_planned_for_one_of_them_are_watched_for_all() -> None:
    kinds, plan = Kinds(12), SimpleNamespace(varies=False)
    assert kinds.seen_enough(recorded("ccgcc")) and not kinds.turns
    for _ in range(4):
        for why in (None, None, None, None, "it differs"):
            assert not kinds.out_of_patience
            kinds.ran(why, 3, why is not None)
    assert kinds.out_of_patience
    said = kinds.watch_anew(plan)  # type: ignore[arg-type]
    assert said == "4 of 20 iterations differ and exceed the budget"
    row = "gccccc" * 3
    for count in range(2, 18):
        assert not kinds.seen_enough(recorded(row[:count])) and not kinds.turns
    kinds.seen_enough(recorded(row))
    assert kinds.turns == 6
    kinds.begin(6)
    assert kinds.seen_enough(recorded("tt")) and not kinds.turns


@pytest.mark.parametrize(("between", "over"), [(8, True), (2, False)])
def test_a_plan_stays_if_what_differs_is_rare_or_keeps_to_the_budget(
    between: int, over: bool
) -> None:
    kinds = Kinds(12)
    for _ in range(30):
        for why in (*[None] * between, "it is the last batch of the epoch"):
            kinds.ran(why, 3, over and why is not None)
            assert not kinds.out_of_patience


@pytest.mark.parametrize(
    ("before", "after", "alike"),
    [
        ("abcdef", "abcdef", "abcdef"),
        ("abcdef", "abxyzcdef", "abcdef"),
        ("abxyzcdef", "abcdef", "abcdef"),
        ("abcxefg", "abcyefg", "abcefg"),
        ("aaaa", "aa", "aa"),
    ],
)
def test_operators_are_matched_though_one_iteration_runs_more(
    before: str, after: str, alike: str
) -> None:
    found = _graph.matched(recorded(before).ops, recorded(after).ops)
    assert "".join(one.kind for one, _ in found) == alike
    assert all(one.kind == other.kind for one, other in found)
