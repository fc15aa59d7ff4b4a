"""Runs iterations until a plan has settled."""

from __future__ import annotations

from collections.abc import Callable

from neap.torch import Fit

STEADY = 4
"""How many iterations in a row must run by a plan that is final."""


def settle(fitted: Fit, iterate: Callable[[], object]) -> None:
    """Runs up to 80 iterations until the plan is final; what a later one shows may still change
    it.
    """
    settled = 0
    for _ in range(80):
        iterate()
        settled = settled + 1 if fitted.settled else 0
        if settled == STEADY:
            return
