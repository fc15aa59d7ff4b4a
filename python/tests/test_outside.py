"""What planning uses outside of the script: nothing makes the script wait, and nothing stays."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from neap.torch import _outside, _planning
from neap.torch._connection import ShareError
from neap.torch._fit import Fit
from neap.torch._report import Report
from neap.torch._schedule import Schedule
from neap.torch._share import Offer

pytestmark = pytest.mark.usefixtures("small")

SCRIPT = """
import os, sys, torch
from torch import nn
import neap.torch
model = nn.Sequential(*[one for _ in range(4) for one in (nn.Linear(32, 32), nn.Tanh())])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
neap.torch.fit(model, optimizer, "80%", device="host")
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(256, 32)).square().mean().backward()
    optimizer.step()
print("done")
"""


def train(budget: str = "80%", **more: Any) -> tuple[Report, Schedule | None]:
    """The report of some iterations of a small job, and the plan that acted at their end."""
    torch.manual_seed(3)
    layers = [one for _ in range(4) for one in (torch.nn.Linear(32, 32), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted = Fit([model], [optimizer], budget, "host", lambda text: None, **more)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(256, 32)).square().mean().backward()
        optimizer.step()
    schedule = fitted.schedule
    return fitted.close(), schedule


def fake(folder: Path, text: str) -> str:
    """An executable that takes the planner's place."""
    path = folder / "planner"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def test_a_kept_plan_that_is_a_pipe_or_anothers_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEAP_CACHE", str(tmp_path / "within" / "cache"))
    old = os.umask(0)
    try:
        first, _ = train(cache=True)
    finally:
        os.umask(old)
    kept = list((tmp_path / "within" / "cache" / "torch").iterdir())
    assert kept and first.planned, first
    for folder in (kept[0].parent, kept[0].parents[1], kept[0].parents[2]):
        assert folder.stat().st_mode & 0o777 == 0o700, folder

    def replaced(put: Callable[[Path], Any]) -> None:
        for path in kept:
            path.unlink()
            put(path)
        report, _ = train(cache=True)
        assert report.planned == first.planned
        assert all(path.is_file() and json.loads(path.read_text())["version"] for path in kept)

    replaced(os.mkfifo)
    content = b'{"format": "neap.torch.schedule", "version": 1, "met": "' + b"x" * 100

    def put(path: Path) -> None:
        path.write_bytes(content)
        path.chmod(0o666)

    replaced(put)


def test_only_files_of_this_user_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"content")
    path.chmod(0o644)
    assert _outside.read(path, own=True) == b"content"
    path.chmod(0o664)
    assert _outside.read(path) == b"content"
    with pytest.raises(ValueError, match="another user may write"):
        _outside.read(path, own=True)
    os.mkfifo(tmp_path / "pipe")
    for one in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises((ValueError, IsADirectoryError)):
            _outside.read(one)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(_outside.LARGEST + 1)
    with pytest.raises(ValueError, match="larger than"):
        _outside.read(tmp_path / "large")


def test_a_planner_that_hangs_does_not_make_training_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neap: str
) -> None:
    pids = tmp_path / "pids"
    # It answers for the first call, and then no more; nor does what it has started.
    first = f'[ $(wc -l < {pids}) -le 1 ] && exec {neap} "$@"'
    hanging = f"echo $$ >> {pids}; {first}; sleep 600 & echo $! >> {pids}; wait"
    monkeypatch.setenv("NEAP", fake(tmp_path, hanging))
    monkeypatch.setattr(_planning, "_PATIENCE_S", 15)
    began = time.monotonic()
    report, schedule = train()
    assert time.monotonic() - began < 120
    assert schedule is None and any("it took longer" in one for one in report.notes)
    for pid in pids.read_text().split():
        with contextlib.suppress(FileNotFoundError):
            # What has ended may wait to be reaped by init.
            assert "State:\tZ" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize(
    "does, says",
    [
        ("echo hello", "it answered 'hello"),
        ("echo '[1]'", "it answered '[1]"),
        ("kill -9 $$", "exit code -9"),
        ("echo damaged >&2; exit 2", "failed: damaged"),
        ("echo '{}'", "no neap of this version"),
        ('echo \'{"early": false, "ranges": null}\'', "no neap of this version"),
    ],
)
def test_an_answer_that_is_none_leaves_the_script_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neap: str, does: str, says: str
) -> None:
    """The times are right, the plan is not."""
    asked = f'[ "$2" = plan ] || exec {neap} "$@"; cat > /dev/null; {does}'
    monkeypatch.setenv("NEAP", fake(tmp_path, asked))
    report, schedule = train()
    assert schedule is None and any(says in one for one in report.notes), report.notes


def test_times_that_are_none_leave_the_script_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neap: str
) -> None:
    asked = f"""[ "$2" = times ] || exec {neap} "$@"; echo '{{"an operator": "long"}}'"""
    monkeypatch.setenv("NEAP", fake(tmp_path, asked))
    report, schedule = train()
    assert schedule is None
    assert any("no neap of this version" in one for one in report.notes), report.notes


def test_a_plan_that_cannot_be_written_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes nothing from the script but the file."""

    def full(path: object, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_outside, "write", full)
    report, _ = train(save_plan="full.json")
    assert report.planned > 0
    assert "the plan can't be written to full.json: No space left on device" in report.notes


@pytest.fixture
def heeds_hangups() -> Iterator[None]:
    """Tests that were started with nohup ignore the signal, and so would what they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeds_hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("within", [False, True])
def test_a_signal_while_planning_leaves_nothing(
    tmp_path: Path, number: signal.Signals, within: bool
) -> None:
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    temporary.mkdir()
    hanging = fake(tmp_path, f"echo $$ >> {pids}; exec sleep 600")
    environment = {**os.environ, "NEAP": hanging, "TMPDIR": str(temporary)}
    environment["PYTHONPATH"] = str(Path(_outside.__file__).parents[2])
    environment.pop("NEAP_TORCH_DIR", None)
    if within:
        environment["NEAP_TORCH_DIR"] = str(temporary)
    script = subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment)
    until = time.monotonic() + 100
    while not pids.exists() or not pids.read_text().endswith("\n"):
        assert time.monotonic() < until and script.poll() is None
        time.sleep(0.02)
    # PyTorch may leave a folder of its own.
    assert any(temporary.glob("neap-*"))
    script.send_signal(number)
    assert script.wait(30) == -number
    assert list(temporary.glob("neap-*")) == []
    for pid in map(int, pids.read_text().split()):
        while time.monotonic() < until:
            try:
                state = Path(f"/proc/{pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                break
            # Until what adopted it has taken note.
            if "\nState:\tZ" in state:
                break
            time.sleep(0.02)
        else:
            raise AssertionError(f"process {pid} is left")


@pytest.mark.usefixtures("heeds_hangups")
def test_a_scripts_own_handlers_stay() -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    hup = signal.getsignal(signal.SIGHUP)
    try:
        with _outside.workplace() as folder:
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGHUP) is not hup
        assert seen == [signal.SIGTERM] and not folder.exists()
        assert signal.getsignal(signal.SIGHUP) is hup
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sizes_of_a_given_plan_are_those_of_what_is_expected(tmp_path: Path) -> None:
    _, schedule = train()
    assert schedule is not None and schedule.sizes
    path = tmp_path / "made.plan"
    schedule.save(path)
    assert Schedule.load(path) == schedule
    form = json.loads(path.read_text())
    sizes = form["sizes"]
    peak = form["unplanned_peak_bytes"]
    for changed, reason in [
        ({"sizes": [1 << 40, *sizes[1:]]}, "larger than all that the iteration takes"),
        ({"sizes": [peak + 1, *sizes[1:]]}, "larger than all that the iteration takes"),
        ({"sizes": [1 << 60] * len(sizes), "unplanned_peak_bytes": 1 << 60}, "bytes is 1152"),
        ({"sizes": [sizes[0] - 1, *sizes[1:]]}, "smaller than a tensor that lies in it"),
    ]:
        path.write_text(json.dumps({**form, **changed}))
        with pytest.raises(ValueError, match=reason):
            Schedule.load(path)


def test_damaged_plans_and_offers_are_read_or_refused(tmp_path: Path) -> None:
    """More of it: NEAP_FUZZ_SECONDS=60, and -s shows the seeds."""
    _, schedule = train()
    assert schedule is not None
    path = tmp_path / "made.plan"
    schedule.save(path)
    plan = path.read_bytes()
    offer = b'{"share_bytes": 1000, "scripts": 2, "link_per_mille": 500, "why": "x has come"}'
    seconds = int(os.environ.get("NEAP_FUZZ_SECONDS", "3"))
    first = time.time_ns() if "NEAP_FUZZ_SECONDS" in os.environ else 0
    ends, seed = time.monotonic() + seconds, first
    while time.monotonic() < ends:
        seed += 1
        chance = random.Random(seed)
        path.write_bytes(damaged(plan, chance))
        try:
            with contextlib.suppress(ValueError):
                read = Schedule.load(path)
                assert all(0 < size <= read.unplanned_peak_bytes for size in read.sizes)
            with contextlib.suppress(ValueError, ShareError):
                found = Offer.read(damaged(offer, chance))
                assert found.share_bytes > 0 and 0 < found.link_per_mille <= 1000
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    print(f"{seed - first} inputs, of seeds from {first + 1} on")


def damaged(text: bytes, chance: random.Random) -> bytes:
    """One to three bits flipped, pieces cut out or copied elsewhere, or values replaced."""
    values = [b"0", b"-1", b"1e400", b"NaN", b"null", b"true", b"[]", b"{}", b'"x"', b"1" * 5000]
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text))
        end = min(at + 1 + chance.randrange(40), len(text))
        to = chance.randrange(len(text))
        kind = chance.randrange(4)
        if kind == 0:
            text = text[:at] + bytes([text[at] ^ 1 << chance.randrange(8)]) + text[at + 1 :]
        elif kind == 1:
            text = text[:at] + text[end:] or b"{"
        elif kind == 2:
            text = text[:to] + text[at:end] + text[to:]
        else:
            numbers = list(re.finditer(rb"-?\d+|true|false|\"\w*\"|\[\]", text)) or [None]
            one = chance.choice(numbers)
            if one is not None:
                text = text[: one.start()] + chance.choice(values) + text[one.end() :]
    return text
