"""What `neap dry` runs inside a script, as far as it can be tried without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neap.dry import _curve, _guard, _memory
from neap.torch._watch import Watch

SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    print("step", step)
    torch.save(model.state_dict(), "model.pt")
    torch.load("model.pt")
"""


def run(folder: Path, script: str, **environment: str) -> tuple[Any, dict[str, Any] | None]:
    """Runs a script as ``neap dry`` does, without a device; what it wrote, and its report."""
    site = folder / "site"
    scratch = folder / "scratch"
    for path in (site, scratch):
        path.mkdir()
    (site / "sitecustomize.py").write_text("import neap.dry\nneap.dry.install()\n")
    (folder / "train.py").write_text(script)
    package = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), package]),
            "NEAP_DRY_DIR": str(scratch),
            **environment,
        },
        capture_output=True,
        text=True,
    )
    reports = list(scratch.glob("report-*.json"))
    return done, json.loads(reports[0].read_text()) if reports else None


def test_a_script_ends_after_its_steps_and_leaves_one_iteration_as_a_graph(tmp_path: Path) -> None:
    graph = tmp_path / "job.graph.json"
    done, report = run(tmp_path, SCRIPT, NEAP_DRY_STEPS="2", NEAP_DRY_RECORD=str(graph))
    assert done.returncode == 0, done.stderr
    # Two more for the recording; the last ends within `optimizer.step()`.
    assert done.stdout.splitlines() == ["step 0", "step 1", "step 2"]
    assert report is not None
    assert (report["ended_by"], report["steps"], report["exception"]) == ("steps", 2, None)
    assert report["recorded"]["steady"]
    form = json.loads(graph.read_text())
    updates = [o for o in form["operators"] if o["phase"] == "optimize"]
    assert [o["kind"] for o in updates] == ["neap::adam"] * 4


def test_saved_files_go_to_scratch_and_load_from_there(tmp_path: Path) -> None:
    done, report = run(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "model.pt").exists()
    assert report is not None
    assert report["redirected_writes"] == ["model.pt"]
    assert len(list((tmp_path / "scratch" / "writes").rglob("model.pt"))) == 1


def test_writes_that_are_allowed_stay(tmp_path: Path) -> None:
    _, report = run(tmp_path, SCRIPT, NEAP_DRY_ALLOW_WRITES="1")
    assert (tmp_path / "model.pt").exists()
    assert report is not None
    assert report["redirected_writes"] == []


def test_an_error_is_the_scripts_own_and_is_reported_with_its_line(tmp_path: Path) -> None:
    done, report = run(tmp_path, SCRIPT + "\nraise ValueError('too bad')\n")
    assert done.returncode == 1
    assert "ValueError: too bad" in done.stderr
    assert report is not None
    assert report["ended_by"] == "exception"
    assert report["exception"]["type"] == "ValueError"
    assert report["exception"]["line"] == len(SCRIPT.splitlines()) + 2


def test_too_few_steps_for_a_recording_are_said(tmp_path: Path) -> None:
    graph = tmp_path / "job.graph.json"
    script = SCRIPT.replace("range(6)", "range(2)")
    _, report = run(tmp_path, script, NEAP_DRY_RECORD=str(graph))
    assert report is not None
    assert "needs 3" in report["recorded"]["error"]
    assert not graph.exists()


def test_a_process_without_pytorch_is_left_alone(tmp_path: Path) -> None:
    script = "import sys\nassert 'torch' not in sys.modules\nprint('fine')\n"
    done, report = run(tmp_path, script)
    assert (done.stdout, done.stderr, report) == ("fine\n", "", None)


def test_a_fake_group_has_as_many_ranks_as_asked(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
print(dist.get_rank(), dist.get_world_size())
"""
    done, _ = run(tmp_path, script, NEAP_DRY_RANKS="8")
    assert done.stdout == "0 8\n", done.stderr


def test_the_peak_and_what_stands_at_it() -> None:
    memory = _memory.Memory(Watch())
    places = [
        memory.places.number("other", "", ("train.py", 3)),
        memory.places.number("forward", "layer", ("train.py", 9)),
        memory.places.number("backward", "layer", None),
    ]
    assert places == [0, 1, 2]
    memory.places.stepped(1)
    memory.names.add(0, "parameter", "layer.weight")
    for mark in [(0, 0, "other"), (1, 0, "forward"), (3, 1, "backward")]:
        memory.marks.add(*mark)
    trace: list[dict[str, Any]] = [
        {"action": "segment_alloc", "addr": 0, "size": 2 << 20},
        {"action": "alloc", "addr": 0, "size": 1000, "stream": 0},
        {"action": "alloc", "addr": 4096, "size": 600, "stream": 0},
        {"action": "free_completed", "addr": 4096, "size": 600},
        {"action": "alloc", "addr": 4096, "size": 512, "stream": 0},
        {"action": "alloc", "addr": 8192, "size": 2000, "stream": 0},
    ]
    records = [(0, 0), (1, 0), (1, 0), (2, 0)]
    events = list(_curve.merged([trace], [0, 0, 0, 0]))
    curve = _curve.Curve(memory, records, {2})
    rows = [row for event in events if (row := curve.take(*event))]
    assert rows == [
        "a,0,1000,0,0\n",
        "a,1,600,0,0\n",
        "f,1,,,0\n",
        "a,2,512,0,0\n",
        "a,3,2000,0,0\n",
    ]
    form = curve.report(events)
    peak = form["peak"]
    assert peak["allocated_bytes"] == 1024 + 512 + 2048
    assert (peak["phase"], peak["step"], peak["module"]) == ("backward", 1, "layer")
    found = {name: size for name, size in peak["categories"].items() if size}
    assert found == {"parameter": 1024, "workspace": 512, "gradient": 2048}
    assert peak["blocks"][0]["line"] == "backward of layer"
    assert peak["blocks"][1]["name"] == "layer.weight"
    peaks = {phase["name"]: phase["peak_allocated_bytes"] for phase in form["phases"]}
    assert peaks == {"other": 1024, "forward": 2048, "backward": 3584}
    assert all(phase["peak_reserved_bytes"] == 2 << 20 for phase in form["phases"])


def test_events_of_several_devices_come_in_the_order_of_their_allocations() -> None:
    def event(action: str, address: int) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": 512}

    first = [event("alloc", 1), event("free_completed", 1), event("alloc", 2)]
    second = [event("alloc", 3)]
    order = list(_curve.merged([first, second], [0, 1, 0]))
    assert [(device, entry["addr"], number) for device, entry, number in order] == [
        (0, 1, 0),
        (1, 3, 1),
        (0, 1, -1),
        (0, 2, 2),
    ]
    # The first allocation came before the history.
    order = list(_curve.merged([first[2:], second], [0, 1, 0]))
    assert [(entry["addr"], number) for _, entry, number in order] == [(3, 1), (2, 2)]


def test_a_failure_of_neaps_own_is_noted_and_ends_nothing() -> None:
    def fails() -> int:
        raise ValueError("mine")

    assert _guard.guarded(fails, 7)() == 7
    assert _guard.problems.pop() == "fails: ValueError: mine"


def test_checkpoints_may_be_opened_renamed_and_removed(tmp_path: Path) -> None:
    script = """
import os, pathlib, torch
open("old.pt", "rb").read()
with open("new.pt", "wb") as file:
    torch.save({"x": torch.ones(2)}, file)
torch.save({"x": torch.ones(3)}, "last.tmp")
os.replace("last.tmp", "last.pt")
assert os.path.exists("last.pt") and not os.path.exists("last.tmp")
assert torch.load("last.pt")["x"].shape == (3,) and torch.load("new.pt")["x"].shape == (2,)
pathlib.Path("last.pt").unlink()
assert not os.path.exists("last.pt")
with open("log.txt", "w") as file:
    file.write("kept")
print("done")
raise ValueError("so that there is a report")
"""
    (tmp_path / "old.pt").write_bytes(b"the user's own")
    done, report = run(tmp_path, script)
    assert done.stdout == "done\n", done.stderr
    assert (tmp_path / "old.pt").read_bytes() == b"the user's own"
    assert (tmp_path / "log.txt").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {
        "log.txt",
        "old.pt",
        "scratch",
        "site",
        "train.py",
    }
    assert report is not None
    assert report["redirected_writes"] == ["new.pt", "last.tmp", "last.pt"]


def test_a_graph_that_cannot_be_written_is_reported_as_that(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone" / "job.graph.json")
    done, report = run(tmp_path, SCRIPT, NEAP_DRY_RECORD=gone)
    assert done.returncode == 0 and report is not None
    assert report["unwritten"] == [f"{gone}: cannot be written: No such file or directory"]
    assert not report["problems"]


def test_a_graph_is_written_to_a_pipe_that_stays_one(
    tmp_path: Path, pipe: tuple[Path, Callable[[], str]]
) -> None:
    path, content = pipe
    done, report = run(tmp_path, SCRIPT, NEAP_DRY_RECORD=str(path))
    assert done.returncode == 0 and path.is_fifo(), report
    assert json.loads(content())["format"] == "neap.graph"
