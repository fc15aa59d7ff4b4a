"""bench/gpu/check: what it takes up again, what fails a line, and that nothing is left running."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "bench" / "gpu" / "check"))

import context  # noqa: E402
import inside  # noqa: E402
import lines  # noqa: E402
import planned  # noqa: E402
import snapshots  # noqa: E402
from command import Done, Impossible, Process, together  # noqa: E402
from lines import FAIL, NOT, PASS, Line, Lines, Saw  # noqa: E402

MANIFEST: dict[str, Any] = {
    "device": "h100",
    "iterations": 3,
    "script_iterations": 5,
    "repaired_script": "other",
    "repeats": 2,
    "plans": {"job 50%": "plans/job.json"},
    "reserved": {},
    "kernels": 2,
}


def check_in(folder: Path, seconds: float = 60.0, quick: bool = False) -> context.Check:
    """A check of a pack that holds a manifest only."""
    (folder / "pack.json").write_text(json.dumps(MANIFEST))
    flags = argparse.Namespace(pack=str(folder), out=str(folder / "out"), seconds=seconds)
    flags.quick, flags.python, flags.cuda_libs, flags.device = quick, None, "libs", None
    flags.own_python = sys.executable
    check = context.Check(flags)
    check.facts["python"] = sys.executable
    return check


def line(name: str, problem: Exception | None = None) -> Line:
    """A line that passes, or that raises this."""

    def work(_: object) -> Saw:
        if problem:
            raise problem
        return Saw(True, "well")

    return Line(name, "claims", work, needs_s=0.0)


def test_lines_are_taken_up_again(tmp_path: Path) -> None:
    """What ended is not asked again, a record that was cut off is as if it had never been."""
    first = Lines(tmp_path, {"asked": 1})
    first.begin("a")
    first.end(line("a"), PASS, Saw(True, "well", {"base": 7}), 0.5)
    text = first.raw.read_text()
    for more in ("", '{"line": "b", "resu', "\x00", "[]\n", '{"line": "b", "result": "maybe"}\n'):
        first.raw.write_text(text + more)
        again = Lines(tmp_path, {"asked": 1})
        assert again.ended("a") and again.passed("a") and again.facts == {"base": 7}
        assert not again.ended("b")
    other = Lines(tmp_path, {"asked": 2})
    assert not other.ended("a") and not other.facts
    assert (tmp_path / "lines-before.jsonl").exists()


def test_a_line_that_takes_the_machine_with_it_twice_fails(tmp_path: Path) -> None:
    """It begins again once; a line that was cut by the call's end begins as often as it must."""
    check = check_in(tmp_path)
    for _ in range(3):
        check.lines.begin("cut")
        check.lines.leave("cut")
    for _ in range(lines.TRIES):
        check.lines.begin("lost")
    check = check_in(tmp_path)
    check.all([line("cut"), line("lost")])
    assert check.lines.passed("cut")
    assert check.lines.count(FAIL) == 1
    assert "| lost | claims | began twice" in check.lines.table.read_text()


def test_out_of_time_leaves_the_rest_to_the_next_call(tmp_path: Path) -> None:
    """The table names what was not reached."""
    check = check_in(tmp_path, seconds=0.0)
    with pytest.raises(context.OutOfTime):
        check.all([Line("a", "claims", lambda _: Saw(True, ""), needs_s=1.0)])
    check.lines.write()
    assert "| a | claims |  | not reached |  |" in check.lines.table.read_text()


def test_a_command_ends_in_time_with_all_that_it_started(tmp_path: Path) -> None:
    """A line longer than a minute fails; one that the call's end cuts is for the next call."""
    pid = tmp_path / "pid"
    work = ["sh", "-c", f"sleep 60 & echo $! >{pid}; wait"]
    for whole, ends in ((True, context.Failed), (False, context.OutOfTime)):
        check = check_in(tmp_path)
        here = check._of_thread
        here.name, here.whole, here.until = "line", whole, time.monotonic() + 0.5
        with pytest.raises(ends):
            check.command(work)
        began = time.monotonic()
        while alive(pid.read_text().strip()):
            assert time.monotonic() - began < 30
            time.sleep(0.01)


def test_one_of_two_that_fails_ends_the_other(tmp_path: Path) -> None:
    """Two scripts that share a GPU wait for each other."""
    both = [["sleep", "60"], ["sh", "-c", "exit 4"]]
    processes = [Process(c, tmp_path / str(n), {}) for n, c in enumerate(both)]
    began = time.monotonic()
    codes = together(processes, began + 30)
    assert codes[1] == 4 and codes[0] != 0
    assert time.monotonic() - began < 20


def alive(process: str) -> bool:
    """Whether a process runs; one that has ended is a zombie until its new parent looks."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_lacks_is_said_and_a_dead_gpu_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure the GPU is asked whether it answers; if not, nothing waits for it again."""
    check = check_in(tmp_path)
    check.facts["answers"] = True
    monkeypatch.setattr(context, "together", lambda *_: [1])
    check.all([line("lacks", Impossible("no PyTorch")), line("errs", context.Failed("error 719"))])
    check.all([line("later")])
    results = {name: record["result"] for name, record in check.lines._ended.items()}
    assert results == {"lacks": NOT, "errs": FAIL, "later": NOT}
    assert "does not answer since the line 'errs'" in check.lines.table.read_text()


REPORT = {
    "met": True,
    "budget_bytes": 100,
    "peak_reserved_bytes": 90,
    "planned": 2,
    "unplanned": {"watching": 1},
    "replans": [],
    "notes": [],
    "predicted_iteration_ns": 110,
    "unplanned_iteration_ns": 100,
    "pinned_bytes": 1 << 30,
}


def test_a_script_beyond_its_plan_fails_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits, budget and time; where PyTorch repeats no losses, bits say nothing."""
    check = check_in(tmp_path)
    plain = {"losses": [1.0, 2.0, 3.0], "repeats": True, "ms": 1e-4, "host_bytes": 0}
    check.facts["eager job"] = plain
    answer = {"losses": [1.0, 2.0, 3.0], "iterations_ns": [110, 110, 110], "host_bytes": 1 << 30}
    answer["starts_s"] = [4.0, 5.0, 6.5]
    commands = []

    def command(_: object, asked: list[str], **__: object) -> Done:
        commands.append(asked)
        Path(asked[-1]).write_text(json.dumps(answer))
        return Done(0, "script's own\n" + json.dumps([report]), "", 1 << 30, None)

    monkeypatch.setattr(context.Check, "command", command)
    report = dict(REPORT)
    good = inside.within("job", "50%", True, check)
    assert good.good, good.text
    assert "the plan acts 5.0 s after" in good.text
    assert "--plan" in commands[-1]
    check.facts.update(good.facts)
    assert inside.pinned("job", "50%", check).good
    assert inside.within("job", "60%", False, check).good
    assert "--budget" in commands[-1] and "--no-cache" in commands[-1]
    report["met"] = False
    assert not inside.within("job", "50%", True, check).good
    report = REPORT | {"predicted_iteration_ns": 99}
    assert not inside.within("job", "50%", True, check).good
    report, answer["losses"] = dict(REPORT), [1.0, 2.0, 3.5]
    assert "2 of 3 losses" in inside.within("job", "50%", True, check).text
    assert not inside.within("job", "50%", True, check).good
    plain["repeats"] = False
    assert inside.within("job", "50%", True, check).good


@pytest.mark.parametrize(
    ("reported", "seen", "host", "good"),
    [
        (1 << 30, 1 << 30, 0, True),
        (1 << 30, (1 << 30) - 4096, 0, False),
        (1 << 30, 3 << 29, 0, False),
        (1 << 30, 0, 1 << 30, True),
        (1 << 30, -1, 1 << 31, False),
    ],
)
def test_pinned_bytes(tmp_path: Path, reported: int, seen: int, host: int, good: bool) -> None:
    """By the kernel's count; where it counts none, by the growth of the process."""
    check = check_in(tmp_path)
    check.facts["pinned job 50%"] = {"reported": reported, "seen": seen, "host": host}
    assert inside.pinned("job", "50%", check).good == good


def test_kernels_that_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, with what the device says and what the dry device says."""
    check = check_in(tmp_path)
    dry = {"64": {"add": {"registers": 8}, "mul": {"registers": 12}}}

    def command(_: object, asked: list[str]) -> Done:
        there = {"64": {"add": {"registers": 8}, "mul": {"registers": 16}}}
        out = next(part for part in asked if part.endswith(".json"))
        Path(out).write_text(json.dumps(dry if "--like" in asked else there))
        return Done(0, "", "", -1, None)

    monkeypatch.setattr(context.Check, "command", command)
    saw = snapshots.kernels(check)
    assert not saw.good
    assert saw.text == "1 of 2 kernels alike; first: mul: registers 16, dry 12"
    dry["64"]["mul"]["registers"] = 16
    assert snapshots.kernels(check).good
    del dry["64"]["mul"]
    assert "dry unknown" in snapshots.kernels(check).text


def test_what_the_sanitizer_finds_fails_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one the line is not possible; errors fail it, and the first of them is named."""
    check = check_in(tmp_path)
    for kind in ("graph", "min.plan"):
        check.path(f"job.{kind}.json").touch()
    (tmp_path / "neap").symlink_to("/bin/true")
    here = check._of_thread
    here.name, here.whole, here.until = "line", True, time.monotonic() + 60
    with pytest.raises(Impossible, match="no compute-sanitizer"):
        planned.sanitized(Path("job.et.json.gz"), "memcheck", check)
    check.facts["sanitizer"] = str(REPOSITORY / "tests" / "cuda" / "compute-sanitizer")
    for tool in planned.TOOLS:
        assert planned.sanitized(Path("job.et.json.gz"), tool, check).good
    monkeypatch.setenv("FAKE_ERRORS", "2")
    for tool in planned.TOOLS:
        saw = planned.sanitized(Path("job.et.json.gz"), tool, check)
        assert not saw.good and "2 " in saw.text and "Invalid __global__ write" in saw.text


def test_a_run_beyond_its_plan_fails_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory, time, bits and fallbacks are compared with the plan and the unplanned run."""
    check = check_in(tmp_path)
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "job.graph.json").touch()
    check.path("job.latency.csv").touch()
    monkeypatch.setattr(planned, "overlap", lambda _: "")
    plain = {"losses": [1.0], "checksum": "a", "products": [], "fallbacks": 0, "notes": []}
    plain |= {"walls_ns": [100], "submits_ns": [50], "iterations_ns": [100], "pinning_ns": 0}
    plain |= {"scratch_bytes": 0, "arena_bytes": 1000, "peak_bytes": 900, "late_copies": 0}
    plain |= {"timed_iterations": 1}
    made = {"iteration_ns": 100, "arena_bytes": 1000, "budget_bytes": 1000}
    ran: dict[str, Any] = {}
    monkeypatch.setattr(
        context.Check, "neap", lambda _, what, *__, **___: made if what == "plan" else plain | ran
    )
    saw = planned.unplanned("job", check)
    assert saw.good
    check.facts.update(saw.facts)
    assert planned.planned("job", "50%", check).good
    for key, value in [
        ("peak_bytes", 1001),
        ("arena_bytes", 1001),
        ("iterations_ns", [112]),
        ("losses", [2.0]),
        ("checksum", "b"),
        ("products", [{"parts": 3}]),
        ("fallbacks", 1),
    ]:
        ran.clear()
        ran[key] = value
        assert not planned.planned("job", "50%", check).good, key
    ran["fallbacks"] = 1
    assert not planned.unplanned("job", check).good
