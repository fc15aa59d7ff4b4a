"""The optimizer whose steps end iterations: the first one that was given, or that steps.

A script that was not changed may let go of it and go on with another: one for each fold of the
data, one for the head and then one for everything.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

from torch.optim.optimizer import Optimizer

from neap.torch._watch import Watch

_OTHERS = 8
"""Iterations, at least, after which the first one is taken to step no more."""


class First:
    """Notices when the first optimizer steps no more.

    Args:
        optimizers: those of the script that are known. If there are some already, they were given,
            and the first of them stays.
        gone: called with the reason, and with how many steps of other optimizers went by.
        stays: whether nothing is noticed.
    """

    def __init__(
        self,
        optimizers: list[Optimizer],
        watch: Watch,
        gone: Callable[[str, int], None],
        stays: bool = False,
    ) -> None:
        self._optimizers = optimizers
        self._watch = watch
        self._given = stays or bool(optimizers)
        self._gone = gone
        self._others = self._most_others = 0
        """Iterations in which only others stepped since its last step; the most between two of its
        steps. Optimizers that step one after another do so in one iteration.
        """
        self._references = 0
        """How often it is referred to while an iteration runs."""
        self._later = ""
        """Why it is to be forgotten when backward has ended."""

    def stepped(self, optimizer: Optimizer) -> bool:
        """An optimizer has stepped; whether an iteration ends."""
        if self._optimizers and optimizer is self._optimizers[0]:
            self._most_others = max(self._most_others, self._others)
            self._others = 0
            return True
        if not self._watch.backwards:
            return False
        self._others += 1
        if not self._given and self._others > max(_OTHERS, 3 * self._most_others):
            self._begin_anew("the optimizer that stepped first steps no more")
            self._optimizers.append(optimizer)
        return False

    def comes(self) -> None:
        """An optimizer is going to step for the first time."""
        if self._watch.backwards:
            self.look()

    def saves(self) -> None:
        """The first tensor of an iteration has been saved."""
        if self._given or not self._optimizers:
            return
        known, self._references = self._references, sys.getrefcount(self._optimizers[0])
        if self._references < known:
            self.look()

    def look(self) -> None:
        """Looks whether the script still holds it."""
        if self._given or not self._optimizers or self._watch.stepping is not None:
            return
        if not is_held(self._optimizers[0]):
            self._begin_anew("the optimizer that stepped first is gone")

    def backward_over(self) -> None:
        """Optimizers may have stepped inside backward, where nothing can begin anew."""
        if self._later:
            self._begin_anew(self._later)

    def _begin_anew(self, why: str) -> None:
        self._later = why if self._watch.backward_depth else ""
        if self._later:
            return
        others, self._others, self._most_others = self._others, 0, 0
        self._gone(why, others)


def is_held(known: object) -> bool:
    """Whether anything but neap's objects and their lists holds ``known``. A variable of the caller
    counts. Takes time: all objects of the process are looked through.
    """
    referrers = gc.get_referrers(known)
    ours = sum(_is_ours(one) for one in referrers)
    del referrers
    probe = object()  # Held by a variable of this function, as `known` is.
    return sys.getrefcount(known) - sys.getrefcount(probe) > ours


def _is_ours(holder: object, depth: int = 3) -> bool:
    """Whether it is an object of neap's, or a container within one."""
    if type(holder).__module__.startswith("neap."):
        return True
    if depth == 0 or type(holder) not in (dict, list, tuple):
        return False
    return any(_is_ours(one, depth - 1) for one in gc.get_referrers(holder))
