"""Commands that end in time, whatever the driver does.

Output goes to files: a process that outlives its parent can't keep a pipe open, and what it said is
there afterwards. A process that a driver holds in the kernel can't be ended at all; it is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PATIENCE_S = 5.0
"""How long a process that was killed may take to go, and nvidia-smi to answer."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class Failed(Exception):
    """A command did not do its work; the text says why."""


class Impossible(Exception):
    """This machine lacks what a line needs; the text says what."""


class OutOfTime(Exception):
    """The call's time is over; the line is for the next one."""


class Done(NamedTuple):
    """What a command left behind.

    Attributes:
        code: its exit code.
        out: what it printed.
        err: what it said on stderr.
        pinned_bytes: the most host memory that drivers pinned meanwhile, as the kernel counts it;
            less than zero where it does not count.
        clocks: the lowest and the highest clock of the multiprocessors meanwhile, in MHz.
    """

    code: int
    out: str
    err: str
    pinned_bytes: int
    clocks: tuple[int, int] | None


def smi(query: str) -> str:
    """What nvidia-smi answers; nothing where it is not there or does not answer in time."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def pinned() -> int:
    """Bytes of host memory that drivers have pinned now; less than zero where the kernel does not
    count them.
    """
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return -1
    counts = dict(line.split() for line in text.splitlines())
    both = counts.get("nr_foll_pin_acquired"), counts.get("nr_foll_pin_released")
    return (int(both[0]) - int(both[1])) * PAGE if both[0] and both[1] else -1


class Watch(threading.Thread):
    """Looks at clocks and pinned memory until it is stopped."""

    def __init__(self) -> None:
        """Starts."""
        super().__init__(daemon=True)
        self.clocks: list[int] = []
        self._before = pinned()
        self._most = self._before
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        """Each question for clocks costs the driver time, so they are few."""
        asks, at = True, 0
        while not self._over.wait(0.25):
            self._most = max(self._most, pinned())
            at += 1
            if asks and at % 8 == 1:
                clock = smi("--query-gpu=clocks.sm").splitlines()
                asks = bool(clock)
                self.clocks += [int(clock[0])] if clock and clock[0].isdigit() else []

    def stop(self) -> tuple[int, tuple[int, int] | None]:
        """The bytes that were pinned at most beyond those at the start, and the clocks' ends."""
        self._over.set()
        self.join(2 * PATIENCE_S)
        clocks = (min(self.clocks), max(self.clocks)) if self.clocks else None
        return (-1 if self._before < 0 else self._most - self._before), clocks


_running: set[Process] = set()


def end_all() -> None:
    """Ends every command that runs."""
    for process in list(_running):
        process.kill()


class Process:
    """A command in a process group of its own."""

    def __init__(self, command: Sequence[str], files: Path, env: Mapping[str, str]) -> None:
        """Starts it.

        Args:
            command: what to run.
            files: output goes to this path with ``.out`` and ``.err`` after it.
            env: the environment.

        Raises:
            Failed: if there is no such program.
        """
        self.command = command
        self.out, self.err = Path(f"{files}.out"), Path(f"{files}.err")
        try:
            with open(self.out, "wb") as out, open(self.err, "wb") as err:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=env,
                    # Not a session of its own: what ends this script's ends the command too.
                    preexec_fn=os.setpgrp,
                )
            _running.add(self)
        except OSError as problem:
            raise Failed(f"{command[0]}: {problem.strerror}") from None

    def wait(self, seconds: float) -> int | None:
        """The exit code, or nothing if it still runs after that time."""
        try:
            return self._process.wait(max(seconds, 0.01))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> bool:
        """Ends the whole group; whether the command is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        _running.discard(self)
        return self.wait(PATIENCE_S) is not None

    def said(self) -> tuple[str, str]:
        """What it printed so far, and what it said on stderr."""
        return tuple(file.read_text("utf-8", "replace") for file in (self.out, self.err))  # type: ignore[return-value]


def together(processes: Sequence[Process], until: float) -> list[int]:
    """Waits for all of them; ends all where one fails or the time is over.

    Args:
        processes: what runs.
        until: a time of ``time.monotonic``.

    Returns:
        The exit codes.

    Raises:
        TimeoutError: if the time is over; the text names what could not be ended.
    """
    codes: list[int | None] = [None] * len(processes)
    try:
        while True:
            codes = [p.wait(0.02) for p in processes]
            if None not in codes or any(codes):
                break
            if time.monotonic() >= until:
                stuck = [p.command[0] for p in processes if not p.kill()]
                more = f"; {stuck[0]} is held by the kernel, and was left" if stuck else ""
                raise TimeoutError(more)
            time.sleep(0.05)
    finally:
        # What a command started may outlive it, and would keep the GPU.
        for process in processes:
            process.kill()
    return [-1 if code is None else code for code in codes]
