"""Saved tensors that are made anew by the operator that made them, from what it saved itself.

The output of an operator is often saved by the next one, and the operator has saved its own inputs
for backward: then the output can go, and backward makes it again when it asks for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from neap.torch._clock import aside
from neap.torch._guard import meant
from neap.torch._holder import flat, seen_as
from neap.torch._recipe import Recipe, recipe
from neap.torch._versions import witness


@dataclass
class Remake:
    """A storage that goes after forward and is made again in backward.

    Attributes:
        node: the name of the function that made it.
        module: the path of the module whose forward ran.
        packs: the saved tensors that see it, by place in the iteration.
        size: its bytes, at most.
        nanoseconds: how long making it again takes, predicted.
    """

    node: str
    module: str
    packs: list[int]
    size: int
    nanoseconds: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What it is banned by, if it does not come back as it was."""
        return self.node, self.packs[0]


class Remade:
    """Such a storage in one iteration; it lives as long as a saved tensor that sees it.

    Attributes:
        size: its bytes.
        here: all its bytes, once they are there again.
        original: a copy on the host, where what comes back is to be compared.
    """

    __slots__ = ("__weakref__", "_weak", "description", "here", "original", "recipe", "size")

    def __init__(self, description: Remake, recipe: Recipe, tensor: torch.Tensor) -> None:
        self.description = description
        self.recipe = recipe
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self._weak = StorageWeakRef(storage)
        self.here: torch.Tensor | None = None
        self.original: torch.Tensor | None = None

    def sees(self, tensor: torch.Tensor) -> bool:
        """Whether it is the storage of this tensor."""
        cdata = tensor.untyped_storage()._cdata
        return bool(self._weak.cdata == cdata) and not self._weak.expired()

    @property
    def gone(self) -> bool:
        """Whether its bytes were freed."""
        return bool(self._weak.expired())


class Made:
    """What autograd keeps in place of a saved tensor of such a storage."""

    __slots__ = ("conj", "neg", "place", "remade", "seen", "version", "view")

    def __init__(self, place: int, remade: Remade, tensor: torch.Tensor) -> None:
        self.place = place
        self.remade = remade
        self.view = seen_as(tensor)
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()
        self.seen = witness(tensor)
        self.version = tensor._version


class Remakes:
    """Makes the storages of one schedule at a time again.

    Args:
        unpack: the hook for saved tensors that ours belong to.
        value: the tensor that a saved input stands for.
        ensure: brings parameters back that have left the device.
    """

    def __init__(
        self,
        unpack: Callable[[Any], torch.Tensor],
        value: Callable[[Any], torch.Tensor],
        ensure: Callable[[Iterable[torch.Tensor]], None],
    ) -> None:
        self.ran = 0
        self.deaths = 0
        """Storages that were gone before they were made again."""
        self.compared = 0
        self.differing: dict[tuple[str, int], str] = {}
        """What did not come back as it was."""
        self.compare = True
        self._unpack = unpack
        self._value = value
        self._ensure = ensure
        self._descriptions: list[Remake] = []
        self._now: dict[int, weakref.ref[Remade]] = {}
        self._verified: set[tuple[str, int]] = set()

    def follow(self, descriptions: list[Remake]) -> None:
        """From the next iteration on these storages are made again."""
        self._descriptions = descriptions
        self._now = {}

    def begin(self) -> None:
        """An iteration begins."""
        self._now = {}

    def pack(
        self, place: int, number: int, tensor: torch.Tensor, varies: bool = False
    ) -> Made | None:
        """What keeps a saved tensor of the storage of this number, or nothing if it was not made as
        the schedule says; with ``varies`` it may be larger.
        """
        reference = self._now.get(number)
        known = None if reference is None else reference()
        if known is None or not known.sees(tensor):
            description, found = self._descriptions[number], recipe(tensor, self._unpack)
            if (
                found is None
                or found.node != description.node
                or (tensor.untyped_storage().nbytes() > description.size and not varies)
            ):
                return None
            known = Remade(description, found, tensor)
            if self.compare and description.key not in self._verified:
                known.original = flat(tensor.untyped_storage()).to("cpu", copy=True)
            self._now[number] = weakref.ref(known)
        return Made(place, known, tensor)

    def unpack(self, saved: Made) -> torch.Tensor:
        """The saved tensor."""
        remade = saved.remade
        here = remade.here
        if here is None:
            with aside():
                here = remade.here = self._make(remade)
        dtype, shape, stride, offset = saved.view
        # Needs no gradient, so that autograd does not see it.
        bare = torch.empty(0, dtype=dtype, device=here.device)
        found = bare.set_(here.untyped_storage(), offset, shape, stride)
        if saved.conj:
            found = torch.conj(found)
        return torch._neg_view(found) if saved.neg else found

    def _make(self, remade: Remade) -> torch.Tensor:
        description = remade.description
        self.ran += 1
        self.deaths += remade.gone
        # Unlike the other inputs, a bias is not a saved tensor that comes back when asked for.
        self._ensure(one for one in remade.recipe.bias if one is not None)
        made = remade.recipe.follow(self._value)
        original, remade.original = remade.original, None
        size = made.untyped_storage().nbytes()
        if original is None:
            if size != remade.size:
                raise meant(
                    RuntimeError(
                        f"neap: {description.node} of {description.module or 'the script'} gave "
                        f"{size} bytes in backward instead of {remade.size}"
                    )
                )
            return made
        self.compared += 1
        if size == remade.size and torch.equal(flat(made.untyped_storage()).cpu(), original):
            self._verified.add(description.key)
            return made
        self.differing.setdefault(
            description.key, f"saved tensor {description.packs[0]} came back different"
        )
        return original.to(made.device)
