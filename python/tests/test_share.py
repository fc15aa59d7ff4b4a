"""Scripts that share a GPU: `neap torch --serve` and `--join`, as far as the CPU shows them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neap.torch._connection import ShareError
from neap.torch._share import Offer, Share
from waits import until

SCRIPT = """
import os, sys, torch
from torch import nn

seed, steps = map(int, sys.argv[1:3])
torch.manual_seed(seed)
torch.set_num_threads(1)
layers = [module for _ in range(6) for module in (nn.Linear(256, 256), nn.Tanh())]
model = nn.Sequential(nn.Linear(64, 256), *layers, nn.Linear(256, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
step = 0
while step < steps:
    optimizer.zero_grad()
    loss = model(torch.randn(1024, 64)).square().mean()
    loss.backward()
    optimizer.step()
    step += 1
    if step == 5:
        open(f"planned-{seed}", "w").close()
    # Until some steps after a file has appeared, if one is named.
    if sys.argv[3:] and not os.path.exists(sys.argv[3]):
        steps = step + 5
print(step, loss.item(), sum(p.double().sum().item() for p in model.parameters()))
"""
BUDGET = 26 << 20
"""Enough for one script as it is, and not for two."""


class Site:
    """A folder with the script, and a server on a socket."""

    def __init__(self, neap: str, folder: Path) -> None:
        self.neap, self.folder = neap, folder
        self.socket = str(folder / "gpu")
        (folder / "train.py").write_text(SCRIPT)
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "NEAP": neap}
        command = [neap, "torch", "--serve", self.socket, "--budget", str(BUDGET)]
        with open(folder / "serve.log", "w") as log:
            self.server = subprocess.Popen(command, stderr=log, env=self.environment)
        until(lambda: os.path.exists(self.socket))

    def said(self) -> str:
        """What the server has said."""
        return (self.folder / "serve.log").read_text()

    def start(self, *arguments: str, join: bool = True) -> subprocess.Popen[str]:
        """Starts the script."""
        command = [sys.executable, str(self.folder / "train.py"), *arguments]
        if join:
            command = [self.neap, "torch", "--join", self.socket, "--json", "--", *command]
        # Its own group, so that all of it can be ended.
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment,
            start_new_session=True,
        )

    def planned(self, seed: int) -> bool:
        """Whether the script with this seed is past its watched iterations."""
        return (self.folder / f"planned-{seed}").exists()

    def ended(self) -> None:
        """Lets scripts end that wait for that."""
        (self.folder / "end").touch()

    def end(self) -> None:
        """Ends the server."""
        self.server.send_signal(signal.SIGTERM)
        self.server.wait(60)


@pytest.fixture
def site(neap: str, tmp_path: Path) -> Iterator[Site]:
    """A server, ended after the test."""
    made = Site(neap, tmp_path)
    yield made
    made.end()
    assert not os.path.exists(made.socket)


def result(process: subprocess.Popen[str]) -> tuple[str, dict[str, Any]]:
    """What the script printed, and its report."""
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    printed = [line for line in error.splitlines() if line and line[0] in "-0123456789"]
    return printed[-1], json.loads(out)[0]


def alone(site: Site, seed: str, printed: str) -> str:
    """What the script prints alone after as many steps."""
    steps = printed.split()[0]
    return site.start(seed, steps, join=False).communicate(timeout=300)[0].strip()


def test_two_scripts_share_and_compute_what_they_compute_alone(site: Site) -> None:
    first = site.start("1", "12", "end")
    until(lambda: site.planned(1))
    printed, beside = result(site.start("2", "12"))
    until(lambda: site.said().count("has gone") == 1)
    site.ended()
    other, report = result(first)
    assert printed == alone(site, "2", printed) and other == alone(site, "1", other)
    # The first was planned anew when the second came, and has all again since that went.
    assert any("has come" in why for why in report["replans"]), report
    assert report["met"] and report["budget_bytes"] == BUDGET and not report["notes"], report
    assert report["swapped_out"] + report["recomputed"] > 0
    assert beside["met"] and beside["predicted_peak_bytes"] <= beside["budget_bytes"] < BUDGET
    assert site.said().count("has come") == 2


def test_a_script_that_dies_leaves_the_other_running(site: Site) -> None:
    first = site.start("1", "12", "end")
    until(lambda: site.planned(1))
    second = site.start("2", "100000")
    until(lambda: site.said().count("has come") == 2)
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()
    until(lambda: site.said().count("has gone") == 1)
    site.ended()
    printed, report = result(first)
    assert report["budget_bytes"] == BUDGET
    assert printed == alone(site, "1", printed)


def test_scripts_go_on_when_the_server_ends(neap: str, tmp_path: Path) -> None:
    site = Site(neap, tmp_path)
    script = site.start("1", "12", "end")
    until(lambda: site.planned(1))
    site.end()
    site.ended()
    _, report = result(script)
    assert report["planned"] > 5
    assert any("the share stays" in note for note in report["notes"])


def test_only_one_process_joins(site: Site) -> None:
    site.environment["WORLD_SIZE"] = "2"
    script = site.start("1", "3")
    assert "--join is for scripts of one process" in script.communicate(timeout=60)[1]
    assert script.returncode == 2


def test_a_share_that_nothing_serves_is_said(tmp_path: Path) -> None:
    path = str(tmp_path / "gpu")
    with pytest.raises(ShareError, match="No such file"):
        Share(path).join_with_plan("script", 1)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    share = Share(path)
    listener.close()
    with pytest.raises(ShareError, match="refused"):
        share.join_with_graph("script", "x.graph.json")
    assert share.newest() is None
    share.close()


OFFER = {"share_bytes": 10**9, "scripts": 2, "link_per_mille": 500, "why": "x has come"}
GARBAGE: dict[str, bytes] = {
    "no JSON": b"garbage\n",
    "no text": b"\xff\xfe\n",
    "a list": b"[1]\n",
    "nothing": b"null\n",
    "too deep": b"[" * 60000 + b"\n",
    "too long": b"x" * 200000,
    "no share": json.dumps({**OFFER, "share_bytes": 0}).encode() + b"\n",
    "a negative share": json.dumps({**OFFER, "share_bytes": -5}).encode() + b"\n",
    "a share that is a text": json.dumps({**OFFER, "share_bytes": "a"}).encode() + b"\n",
    "a share that is no number": b'{"share_bytes":NaN,"scripts":1,"link_per_mille":9,"why":""}\n',
    "a share above all memory": json.dumps({**OFFER, "share_bytes": 10**30}).encode() + b"\n",
    "true": json.dumps({**OFFER, "scripts": True}).encode() + b"\n",
    "no link": json.dumps({**OFFER, "link_per_mille": 0}).encode() + b"\n",
    "more than the link": json.dumps({**OFFER, "link_per_mille": 1001}).encode() + b"\n",
    "no reason": json.dumps({**OFFER, "why": 7}).encode() + b"\n",
    "a key is missing": b'{"share_bytes":5}\n',
    "the end": b"",
}


class Fake:
    """A server that sends these bytes to the first that joins, in turn."""

    def __init__(self, path: Path, *lines: bytes, wait: float = 0.0) -> None:
        self.path, self._lines, self._wait = str(path), lines, wait
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(4)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            # What looks whether a process listens says nothing.
            if not connection.recv(65536):
                continue
            with contextlib.suppress(OSError):
                for line in self._lines:
                    connection.sendall(line)
                    time.sleep(self._wait)
            connection.close()


@pytest.mark.parametrize("line", GARBAGE.values(), ids=list(GARBAGE))
def test_a_line_that_is_no_offer_is_as_if_the_server_had_gone(tmp_path: Path, line: bytes) -> None:
    share = Share(Fake(tmp_path / "gpu", json.dumps(OFFER).encode() + b"\n", line).path)
    assert share.join_with_plan("script", 7).share_bytes == 10**9
    until(lambda: share.newest() is None and share.gone, 20)
    share.took(Offer(1, 1, 1, ""))
    assert share.has_just_gone() and not share.has_just_gone()
    # The same where it comes first.
    with pytest.raises(ShareError, match="nothing serves"):
        Share(Fake(tmp_path / "other", line).path).join_with_plan("script", 7)


def test_a_server_that_is_found_gone_while_a_script_answers_is_noticed(tmp_path: Path) -> None:
    share = Share(Fake(tmp_path / "gpu", json.dumps(OFFER).encode() + b"\n").path)
    offer = share.join_with_plan("script", 7)
    until(lambda: share.took(offer) or share.gone, 20)
    assert share.newest() is None and share.has_just_gone()


def test_what_a_later_server_says_besides_is_not_looked_at(tmp_path: Path) -> None:
    more = {**OFFER, "colour": [1], "why": "x\x1b[31m has come\nerror: forged"}
    server = Fake(tmp_path / "gpu", json.dumps(more).encode() + b"\n", wait=20)
    offer = Share(server.path).join_with_plan("script", 7)
    assert offer == Offer(10**9, 2, 500, "x [31m has come error: forged")


def test_a_server_that_never_stops_sending_and_reads_nothing_stops_no_script(
    tmp_path: Path,
) -> None:
    server = Fake(tmp_path / "gpu", *[json.dumps(OFFER).encode() + b"\n"] * 100_000)
    share = Share(server.path)
    share.join_with_plan("script", 7)
    began = time.monotonic()
    for _ in range(1000):
        offer = share.newest()
        if offer is not None:
            share.took(offer)
    assert time.monotonic() - began < 20


def test_a_socket_of_another_user_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Fake(tmp_path / "gpu", json.dumps(OFFER).encode() + b"\n")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(ShareError, match="another user listens"):
        Share(server.path).join_with_plan("script", 7)


def test_a_late_line_that_is_no_offer_does_not_end_the_training(neap: str, tmp_path: Path) -> None:
    site = Site(neap, tmp_path)
    site.end()
    offer = json.dumps({**OFFER, "share_bytes": BUDGET}).encode() + b"\n"
    server = Fake(tmp_path / "fake", offer, b"garbage\n", b"", wait=1.0)
    site.socket = server.path
    printed, report = result(site.start("1", "150"))
    assert any("the share stays" in note for note in report["notes"]), report
    assert printed == alone(site, "1", printed)


def test_the_newest_offer_counts_and_nothing_is_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "gpu")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    share = Share(path)

    def offer(size: int) -> bytes:
        form = {"share_bytes": size, "scripts": 2, "link_per_mille": 500, "why": "x has come"}
        return json.dumps(form).encode() + b"\n"

    # What is sent before it is read is kept.

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.sendall(offer(5))
        served.append(connection)

    served: list[socket.socket] = []
    thread = threading.Thread(target=serve)
    thread.start()
    first = share.join_with_plan("script", 7)
    thread.join()
    assert (first.share_bytes, first.link_per_mille) == (5, 500)
    assert share.newest() is None
    served[0].sendall(offer(6) + offer(7) + offer(8)[:9])
    newest = share.newest()
    assert newest is not None and newest.share_bytes == 7
    served[0].sendall(offer(8)[9:])
    share.took(newest)
    assert json.loads(served[0].recv(1000)) == {"took_bytes": 7}
    newest = share.newest()
    assert newest is not None and newest.share_bytes == 8
    served[0].close()
    assert share.newest() is None and share.gone
    listener.close()
