"""tools/gpu-check: what it takes up again, and that it leaves nothing running."""

import argparse
import json
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "gpu-check"


def load() -> ModuleType:
    """The script as a module."""
    spec = spec_from_loader("gpu_check", SourceFileLoader("gpu_check", str(SCRIPT)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flags(out: Path, minutes: float) -> argparse.Namespace:
    """Flags with which nothing is asked for."""
    return argparse.Namespace(
        out=str(out),
        neap="/bin/true",
        on="host",
        quick=True,
        device=None,
        iterations=1,
        minutes=minutes,
    )


def test_a_damaged_report_is_begun_anew(tmp_path: Path) -> None:
    """Whatever the file holds, the check begins without lines, or with whole ones."""
    module = load()
    check = module.Check(flags(tmp_path, 9))
    good = {"check": "a", "result": "pass", "figures": "b"}
    for lines in ([{}], [1], None, "lines", [{"check": "a", "result": "maybe", "figures": "b"}]):
        record = {"asked": check.asked, "lines": lines, "facts": {}}
        for text in (json.dumps(record), json.dumps(record)[:-5], "[]", "{}", "\x00"):
            (tmp_path / "gpu-check.json").write_text(text)
            assert module.Check(flags(tmp_path, 9)).lines == []
    record = {"asked": check.asked, "lines": [good], "facts": {}}
    (tmp_path / "gpu-check.json").write_text(json.dumps(record))
    again = module.Check(flags(tmp_path, 9))
    assert again.lines == [good]
    assert again.line("a", lambda: ("fail", "not asked again"))


def test_out_of_time_ends_what_a_command_started(tmp_path: Path) -> None:
    """A process that a command started goes with it."""
    module = load()
    check = module.Check(flags(tmp_path, 0.02))
    file = tmp_path / "pid"
    work = ["sh", "-c", f"sleep 60 & echo $! >{file}; wait"]
    began = time.monotonic()
    with pytest.raises(module.Failed, match=r"longer than 0\.02 minutes"):
        check.line_of.began = 0
        check.command(work)
    assert time.monotonic() - began < 30
    process = file.read_text().strip()
    # It ends soon after it was killed.
    while alive(process):
        assert time.monotonic() - began < 30
        time.sleep(0.01)


def alive(process: str) -> bool:
    """Whether a process runs; one that has ended is a zombie until its new parent looks."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_the_sanitizer_finds_fails_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one the line was not checked; errors fail it, and the first of them is named."""
    module = load()
    asked = flags(tmp_path, 9)
    asked.on, asked.cuda_libs = "cuda", None
    check = module.Check(asked)
    check.line_of.began = 0.0
    (tmp_path / "work" / "job.graph.json").touch()
    (tmp_path / "work" / "job.min.plan.json").touch()
    monkeypatch.setattr(module.shutil, "which", lambda *_, **__: None)
    missing = check.sanitized("job.et.json.gz", "memcheck")
    assert missing == ("not checked", "compute-sanitizer is not installed")
    stand_in = SCRIPT.parents[1] / "tests" / "cuda" / "compute-sanitizer"
    monkeypatch.setattr(module.shutil, "which", lambda *_, **__: str(stand_in))
    for tool in module.TOOLS:
        assert check.sanitized("job.et.json.gz", tool)[0] == "pass"
    monkeypatch.setenv("FAKE_ERRORS", "2")
    for tool in module.TOOLS:
        result, figures = check.sanitized("job.et.json.gz", tool)
        assert result == "fail" and "2 " in figures and "Invalid __global__ write" in figures


def asked(out: Path, **more: object) -> argparse.Namespace:
    """Flags of a check on a GPU."""
    on = flags(out, 9)
    on.on, on.quick, on.device, on.cuda_libs = "cuda", False, "h100", "libs"
    for key, value in more.items():
        setattr(on, key, value)
    return on


def test_what_is_measured_is_the_gpu_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device and libraries are passed on, and all that follows is for what was measured."""
    module = load()
    rates = {f"{key}_bytes_per_s": 5e10 for key in ("h2d", "d2h", "h2d_both", "d2h_both")}
    answer = {
        "link": [{"beside": "nothing", "bytes": 1 << 20, **rates}],
        "products": [{"flops_per_s": 1e12}],
    }
    commands = []

    def neap(_: object, *arguments: str) -> dict:
        commands.append(" ".join(arguments))
        return answer | {"kinds": []}

    monkeypatch.setattr(module.Check, "neap", neap)
    check = module.Check(asked(tmp_path))
    assert check.measure()[0] == "pass"
    assert check.profiled("job.graph.json", "job.csv")[0] == "pass"
    measured = str(tmp_path / "measured.device.json")
    for command in commands:
        assert "--on cuda --cuda-libs libs" in command, command
    assert "--name measured --device h100" in commands[0]
    assert commands[0].endswith(measured) and f"--device {measured}" in commands[1]
    # A profile that was measured in an earlier call is taken again.
    check.write()
    assert module.Check(asked(tmp_path)).device == measured


def test_a_run_beyond_its_plan_fails_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory, time, bits and fallbacks are compared with the plan and the unplanned run."""
    module = load()
    monkeypatch.setattr(module, "overlap", lambda _: "")
    check = module.Check(asked(tmp_path))
    plain = {"losses": [1.0], "checksum": "a", "products": [], "fallbacks": 0, "notes": []}
    plain |= {
        "walls_ns": [100],
        "submits_ns": [50],
        "iterations_ns": [100],
        "pinning_ns": 0,
        "scratch_bytes": 0,
    }
    plain |= {"arena_bytes": 1000, "peak_bytes": 900, "late_copies": 0, "timed_iterations": 1}
    made = {"iteration_ns": 100, "arena_bytes": 1000, "budget_bytes": 1000}
    ran: dict = {}
    monkeypatch.setattr(
        module.Check, "neap", lambda _, command, *__: made if command == "plan" else plain | ran
    )
    unplanned, planned = ("job", "job.graph.json", "job.csv"), ("job.graph.json", "job.csv", "50%")
    assert check.unplanned(*unplanned)[0] == "pass"
    assert check.planned("job", *planned)[0] == "pass"
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
        assert check.planned("job", *planned)[0] == "fail", key
    ran["fallbacks"] = 1
    assert check.unplanned(*unplanned)[0] == "fail"
    assert "llama_1b-1x512" in module.MODELS and "resnet50-64" in module.MODELS
