"""How fast copies between host and device run, measured in planned iterations."""

from __future__ import annotations

import time
from typing import Any

import torch

from neap.torch._timeline import Timeline

NEWEST = 0.9
"""The weight of the newest measurement; the rest is the average before it."""
EVERY = 8
"""One planned iteration in this many is measured."""
DRIFT = 0.25
"""A plan is made anew when a measured rate differs from the assumed one by this part of it."""
SMALLEST = 1 << 20
"""Copies of fewer bytes show what a copy costs, and not the rate of the link."""


class Meter:
    """Times copies between :meth:`start` and :meth:`stop`; on a GPU by its own events.

    Attributes:
        rates: for each direction, ``"to host"`` and ``"to device"``, bytes in a second.
    """

    def __init__(self, device: str) -> None:
        self.on = False
        self.rates: dict[str, float] = {}
        self._device = device
        self._copies: list[tuple[str, int, Any, Any]] = []
        self._waited = 0

    def start(self) -> None:
        """The copies of the next iteration are timed, unless others are not taken in yet."""
        self.on = not self._copies

    def event(self) -> Any:
        """An event of the current stream, or the time on a device without streams."""
        if self._device != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def copied(self, lane: str, name: str, size: int, began: Any, ended: Any) -> None:
        """A copy was asked for between two events."""
        if size >= SMALLEST:
            self._copies.append((lane, size, began, ended))

    def turn(self) -> bool:
        """An iteration that ran by the plan has ended; whether :attr:`rates` are new."""
        if self.on:
            self.on = False
            return False
        if self._copies:
            return self._take()
        self._waited += 1
        if self._waited >= EVERY:
            self._waited = 0
            self.start()
        return False

    def _take(self) -> bool:
        cuda = self._device == "cuda"
        if cuda and not all(ended.query() for _, _, _, ended in self._copies):
            return False  # The host does not wait for them.
        sums: dict[str, tuple[int, float]] = {}
        for lane, size, began, ended in self._copies:
            ns = began.elapsed_time(ended) * 1e6 if cuda else ended - began
            known = sums.get(lane, (0, 0.0))
            sums[lane] = known[0] + size, known[1] + ns
        self._copies = []
        for lane, (size, ns) in sums.items():
            rate = size * 1e9 / max(ns, 1.0)
            before = self.rates.get(lane, rate)
            self.rates[lane] = NEWEST * rate + (1 - NEWEST) * before
        return True


def drifted(rates: dict[str, float], link: dict[str, int]) -> str | None:
    """Which measured rate is farther from the assumed one than :data:`DRIFT`, in words."""
    for lane, key in (("to host", "d2h"), ("to device", "h2d")):
        if lane in rates and abs(rates[lane] / link[key] - 1) > DRIFT:
            measured, assumed = rates[lane] / 1e9, link[key] / 1e9
            return f"copies {lane} ran at {measured:,.2f} GB/s instead of {assumed:,.2f}"
    return None


def measured_link(rates: dict[str, float], link: dict[str, int]) -> dict[str, int]:
    """A profile's link at the measured rates. When both directions are busy, each keeps the share
    that the profile gives it.
    """
    found = dict(link)
    for lane, key in (("to host", "d2h"), ("to device", "h2d")):
        if lane in rates:
            share = link[f"{key}_contended"] / link[key]
            found[key] = max(int(rates[lane]), 1)
            found[f"{key}_contended"] = max(int(rates[lane] * share), 1)
    return found


def noting(timeline: Timeline | None, meter: Meter | None) -> Timeline | Meter | None:
    """What takes the times of copies now, if anything does."""
    if timeline is not None and timeline.on:
        return timeline
    return meter if meter is not None and meter.on else None


def noted(
    notes: Timeline | Meter | None, to: torch.Tensor, source: torch.Tensor, about: tuple[str, str]
) -> None:
    """Copies on the current stream, and notes when, if anything notes it; ``about`` has the
    direction and a name.
    """
    if notes is None:
        to.copy_(source, non_blocking=True)
        return
    began = notes.event()
    to.copy_(source, non_blocking=True)
    notes.copied(*about, to.nbytes, began, notes.event())
