"""Optimizer states that are on the device around their parameter's update inside backward only.

Backward brings them shortly before the update, which asks for their copy to the host; when backward
returns or raises, all of them are on the host, and the host has waited for the copies. Then such a
state *is* its host tensor in ``optimizer.state``, as in :mod:`neap.torch._states`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._guard import Guard, entry
from neap.torch._lane import Lane, copy
from neap.torch._slab import Slab
from neap.torch._watch import Around, Watch

COME, GO = "come", "go"
"""Actions: the states of a parameter come to the device, and their memory is given back."""
ACTIONS = (COME, GO)

Turn = list[tuple[str, int]]


class _Turn:
    """The states of one parameter that move.

    Attributes:
        keys: which states.
        slabs: where they lie, one for each type; none while the script's own are in their place.
        here: whether they are on the device.
        versions: those of the states on the device when they were last the same on the host.
        copied: whether a copy to the host was asked for since they came.
    """

    def __init__(self, parameter: torch.Tensor, keys: Sequence[str]) -> None:
        self.parameter = parameter
        self.keys = keys
        self.slabs: list[Slab] = []
        self.here = False
        self.versions: list[int] = []
        self.copied = False


class Turns:
    """Moves states of some parameters of one optimizer, between :meth:`start` and :meth:`stop`.

    Args:
        wanted: each parameter with the names of its states that move; actions name it by its place.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        watch: Watch,
        wanted: Sequence[tuple[torch.Tensor, Sequence[str]]],
    ) -> None:
        self.bytes = 0
        """How much was copied."""
        self.acting = False
        """Whether this iteration is as planned, so that actions give memory back."""
        self._optimizer = optimizer
        self._watch = watch
        self._turns = [_Turn(parameter, keys) for parameter, keys in wanted]
        self._numbers = {parameter: n for n, (parameter, _) in enumerate(wanted)}
        self._around = Around(optimizer)
        self._in: Lane | None = None
        self._out: Lane | None = None

    @property
    def guard(self) -> Guard:
        """The watch's."""
        return self._watch.guard

    def start(self) -> None:
        """The states leave."""
        if any(turn.parameter.is_cuda for turn in self._turns):
            self._in, self._out = Lane(), Lane()
            for lane in (self._in, self._out):
                lane.ends = [torch.cuda.Event() for _ in self._turns]
        for turn in self._turns:
            self._lay(turn)
        self._watch.after_backward.append(self.leave)
        self._around.add(self._before_step, self._after_step)

    def stop(self) -> None:
        """The states come back for good, each in memory of its own."""
        if not self._around.remove():
            return
        self._watch.after_backward.remove(self.leave)
        self.leave()
        for turn in self._turns:
            self._abandon(turn)

    def give_up(self) -> None:
        """After a failure: all states are on the device, by copies that are waited for. Hooks stay
        until :meth:`stop`, as they may be running.
        """
        self._in = self._out = None
        for turn in self._turns:
            self._abandon(turn)

    # -- what a plan asks for

    def act(self, actions: Turn) -> None:
        """Does what is due at a point. What goes makes room for what comes."""
        for what, number in actions:
            if what == GO:
                self._go(number)
        for what, number in actions:
            if what == COME:
                self._come(number)

    def before(self, parameter: torch.Tensor) -> None:
        """The parameter is updated next: its states are on the device."""
        number = self._numbers.get(parameter)
        if number is None:
            return
        self._come(number)  # Where the plan has not asked for them, or this is no planned point.
        if self._turns[number].here and self._in is not None:
            self._in.wait(number)

    def after(self, parameter: torch.Tensor) -> None:
        """The parameter was updated: the copy to the host is asked for."""
        number = self._numbers.get(parameter)
        if number is not None:
            self._copy_out(number)
            if not self.acting:
                self._go(number)

    def leave(self) -> None:
        """All states that are on the device go to the host, which waits for them."""
        for number, turn in enumerate(self._turns):
            if turn.here:
                self._go(number)
        if self._out is not None:
            self._out.stream.synchronize()

    # -- one turn

    def _lay(self, turn: _Turn) -> None:
        """Puts the states on the host, next to each other."""
        states = self._optimizer.state.get(turn.parameter, {})
        device = turn.parameter.device
        found = [
            (key, state)
            for key in turn.keys
            if isinstance(state := states.get(key), torch.Tensor)
            and state.device == device
            and state.layout is torch.strided
        ]
        for kind in dict.fromkeys(state.dtype for _, state in found):
            alike = [(turn.parameter, k, s) for k, s in found if s.dtype == kind]
            slab = Slab(self._optimizer, alike)
            for _, key, host in slab.hosts():
                host.copy_(states[key])
                states[key] = host
            turn.slabs.append(slab)

    def _come(self, number: int) -> None:
        turn = self._turns[number]
        if turn.here or not turn.slabs:
            return
        came: list[Slab] = []
        try:
            came += [slab for slab in turn.slabs if slab.come()]
            if len(came) == len(turn.slabs):
                copy(self._in, [s.here for s in came], [s.host for s in came], number)
        except BaseException:  # No memory: what did not come is still on the host.
            for slab in turn.slabs:
                if slab.go():
                    slab.free()
            raise
        if len(came) < len(turn.slabs):
            for slab in came:
                slab.here.copy_(slab.host)
            self._abandon(turn)
            return
        self.bytes += sum(slab.size for slab in turn.slabs)
        turn.here, turn.copied = True, False
        turn.versions = _versions(turn)

    def _copy_out(self, number: int) -> None:
        turn = self._turns[number]
        if turn.here:
            turn.versions = _versions(turn)
            copy(self._out, [s.host for s in turn.slabs], [s.here for s in turn.slabs], number)
            self.bytes += sum(slab.size for slab in turn.slabs)
            turn.copied = True

    def _go(self, number: int) -> None:
        turn = self._turns[number]
        if not turn.here:
            return
        if self._in is not None:
            self._in.wait(number)
        if turn.versions != _versions(turn):  # Something else has written to them.
            self._copy_out(number)
        if turn.copied and self._out is not None:
            self._out.wait(number)
        if not all([slab.go() for slab in turn.slabs]):
            self._abandon(turn)
            return
        for slab in turn.slabs:
            slab.free()
        turn.here = False

    def _abandon(self, turn: _Turn) -> None:
        """The script has put in states of its own: those of ours that are left stay on the device
        in memory of their own.
        """
        states: dict[str, Any] = self._optimizer.state.get(turn.parameter, {})
        if self._out is not None:
            self._out.stream.synchronize()
        for slab in turn.slabs:
            for _, key, host in slab.hosts():
                if states.get(key) is host:
                    states[key] = host.to(turn.parameter.device, copy=True)
        turn.slabs, turn.here = [], False

    # -- updates in the step

    @entry()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """What has a gradient still is updated in the step."""
        for turn in self._turns:
            if turn.parameter.grad is not None:
                self.before(turn.parameter)

    @entry()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for turn in self._turns:
            if turn.here:
                self.after(turn.parameter)
        self.leave()
        for turn in self._turns:
            if not turn.slabs:
                self._lay(turn)


def _versions(turn: _Turn) -> list[int]:
    return [version for slab in turn.slabs for version in slab.versions()]
