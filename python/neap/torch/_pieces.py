"""The pieces of an optimizer's step: which parameters, or parts of them, one call updates."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from neap.torch._slab import Slab


@dataclass(eq=False)
class Part:
    """Some elements of a parameter in the order of its memory, `first` to before `after`."""

    parameter: torch.Tensor
    first: int
    after: int
    shadow: torch.Tensor | None = None
    """What the optimizer updates while it updates this part: the same memory as a vector."""

    @property
    def last(self) -> bool:
        """Whether the parameter ends here."""
        return self.after == self.parameter.numel()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that has the parameter's shape and strides."""
        start = tensor.storage_offset() + self.first
        return tensor.detach().as_strided((self.after - self.first,), (1,), start)


class Moves:
    """Copies of states, and what takes whose place in the optimizer's state once they were asked
    for: what fails before leaves every state where its values are.
    """

    def __init__(self) -> None:
        self.to: list[torch.Tensor] = []
        self.source: list[torch.Tensor] = []
        self._places: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def add(
        self,
        to: torch.Tensor,
        source: torch.Tensor,
        states: dict[str, Any] | None = None,
        key: str = "",
    ) -> None:
        """``source`` is to be copied; then ``to`` is to be the state of this name."""
        self.to.append(to)
        self.source.append(source)
        if states is not None:
            self._places.append((states, key, to))

    def run(self) -> None:
        """Copies at once."""
        with torch.no_grad():
            for to, source in zip(self.to, self.source):
                to.copy_(source)

    def take_place(self) -> None:
        """The copies were asked for."""
        for states, key, to in self._places:
            states[key] = to


class Piece:
    """What is updated by one call of the step.

    Attributes:
        groups: its parameters and parts of parameters, by the optimizer's groups.
        away: the parameters whose states come for it.
        parts: the parts of parameters among what it updates.
        slabs: where the states of all parameters in :attr:`away` lie; none while they lie apart.
        present: those of the slabs that are on the device.
    """

    def __init__(self, groups: int) -> None:
        self.groups: list[list[torch.Tensor | Part]] = [[] for _ in range(groups)]
        self.away: list[torch.Tensor] = []
        self.parts: list[Part] = []
        self.slabs: list[Slab] = []
        self.present: list[Slab] = []

    def whole(self) -> bool:
        """Whether all states that come for it are on the device, in slabs."""
        return bool(self.slabs) and len(self.present) == len(self.slabs)


def free(leaving: list[torch.Tensor | Slab]) -> None:
    """Gives the memory of slabs back; a tensor's is given back with the tensor."""
    for one in leaving:
        if isinstance(one, Slab):
            one.free()


def updated(one: torch.Tensor | Part) -> torch.Tensor:
    """What the optimizer updates for it: for a part its memory, with that of its gradient."""
    if isinstance(one, torch.Tensor):
        return one
    shadow, gradient = one.shadow, one.parameter.grad
    assert shadow is not None and gradient is not None
    shadow.grad = one.of(gradient)
    return shadow


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, strides and type."""
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    """Whether two lists of lists hold the same tensors."""
    return len(one) == len(other) and all(
        len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(one, other)
    )
