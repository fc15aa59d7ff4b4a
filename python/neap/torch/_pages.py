"""Keeps what PyTorch's allocator reserves within a limit, where free memory lies in pieces.

With expandable segments the allocator gives memory back in whole pages of 20 MiB, and a tensor that
outlives its neighbours keeps the page around it. At points of a schedule it gives back what is
free. Where that is not enough, the tensors of pages that are at most half full are copied, to free
memory of the device or to the host, freed, and allocated anew: the allocator puts them into gaps of
fuller pages. A tensor stays the object that it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from neap.torch._enforce import reserved_now, segments
from neap.torch._holder import Counts, Holder, Kept, flat
from neap.torch._loans import with_others
from neap.torch._pinned import host_memory
from neap.torch._schedule import PAGE, Point, Schedule
from neap.torch._storage import has_names, storage_of
from neap.torch._tensors import is_subclass

_SMALLEST = 1 << 20
"""PyTorch's allocator keeps smaller blocks in segments of their own."""

_PAGE_NS = 150_000
"""Nanoseconds to unmap a page and to map one again. This is not measured: CUDA's calls are reported
to take 126 us together for pages of 2 MiB (vAttention, ASPLOS 2025).
"""

_WAIT_NS = 100_000
"""Nanoseconds that a device is idle because the host has waited for it; not measured either."""

_BESIDE, _THROUGH_HOST = 150, 10
"""Bytes per nanosecond that can be moved on the device and through the host, about."""

Views = Sequence[torch.Tensor]
"""All tensors of one storage."""


class Pages:
    """What does so for one schedule at a time.

    Args:
        counts: where the report's figures are counted.
        parameters: the parameters by name, for their gradients.
    """

    def __init__(self, counts: Counts, parameters: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._counts = counts
        self._parameters = parameters
        self._points: dict[Point, int] = {}
        self._schedule: Schedule | None = None
        self._saved: list[weakref.ref[torch.Tensor]] = []
        self.acts = False
        """Whether there are such points."""
        self.moves = False
        """Whether tensors may move, so that saved ones must be known."""
        self.spent_ns = 0
        """How long giving memory back and reserving it again takes in this iteration, about."""

    def follow(self, schedule: Schedule | None) -> None:
        """From now on does what ``schedule`` says."""
        trims = () if schedule is None else schedule.trims
        self._points = {(kind, number): more for kind, number, more in trims}
        self._schedule = schedule
        self.acts = bool(trims)
        self.moves = schedule is not None and schedule.moves
        self._saved = []

    def begin(self) -> None:
        """An iteration begins; what the script kept of the last one may still be there."""
        self.spent_ns = 0
        self._saved = [one for one in self._saved if one() is not None]

    def saved(self, tensor: torch.Tensor, packed: Holder | Kept | object) -> None:
        """Autograd keeps ``packed`` in place of ``tensor``."""
        if isinstance(packed, Holder):
            self._saved.append(weakref.ref(tensor))
        elif type(packed) is tuple:
            self._saved += {weakref.ref(tensor), weakref.ref(packed[0])}

    def at(self, point: Point, holders: Callable[[], list[Holder]]) -> bool:
        """Gives memory back if too much would be reserved after this point; whether it did."""
        more = self._points.get(point)
        return more is not None and self.keep(more, holders)

    def keep(self, more: int, holders: Callable[[], list[Holder]]) -> bool:
        """Gives memory back if ``more`` bytes would be too much; whether it did."""
        before, limit = reserved_now(), 0 if self._schedule is None else self._schedule.limit
        if before + more <= limit:
            return False
        self._counts.trims += 1
        torch.cuda.empty_cache()
        after = reserved_now()
        self.spent_ns += _WAIT_NS + (before - after) // PAGE * _PAGE_NS
        enough = after + more <= limit
        # When an iteration begins all that is free goes, and nothing is in the way yet.
        if enough or more >= limit or not self.moves or with_others():
            return True
        parameters = list(self._parameters().values())
        gradients = [one.grad for one in parameters if one.grad is not None]
        stay = set(map(id, parameters))
        saved = [one for one in (reference() for reference in self._saved) if one is not None]
        tensors = [*gradients, *(one for one in saved if id(one) not in stay)]
        storages = _on_sparse_pages(tensors, holders(), after + more - limit)
        total = sum(one[0].untyped_storage().nbytes() for one in storages)
        if total:
            beside = after + total + PAGE <= limit
            _move(storages, total, beside)
            self._counts.bytes_moved += total
            rate = _BESIDE if beside else _THROUGH_HOST
            self.spent_ns += 2 * _WAIT_NS + total // PAGE * _PAGE_NS + total // rate
        return True


def _move(storages: Sequence[Views], total: int, beside: bool) -> None:
    """Allocates these storages of ``total`` bytes anew, after the allocator has given back the
    pages that they leave. Meanwhile their content is on the device, ``beside`` them, or on the
    host. The pages that they leave have room for all of them.
    """
    sizes = [one[0].untyped_storage().nbytes() for one in storages]
    if beside:
        try:
            kept = torch.empty(total, dtype=torch.uint8, device=storages[0][0].device)
        except torch.cuda.OutOfMemoryError:  # Other processes have what the budget leaves.
            beside = False
    if not beside:
        kept = host_memory(total, pin=any(one[0].is_cuda for one in storages))
    away: list[tuple[torch.Tensor, Views]] = []
    seen: dict[int, tuple[int, torch.Size, tuple[int, ...]]] = {}
    start = 0
    for one, size in zip(storages, sizes):
        copy = kept[start : start + size]
        start += size
        copy.copy_(flat(one[0].untyped_storage()), non_blocking=True)
        away.append((copy, one))
        for tensor in one:
            seen[id(tensor)] = int(tensor.storage_offset()), tensor.shape, tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    torch.cuda.empty_cache()
    for copy, one in sorted(away, key=lambda pair: -pair[0].nbytes):  # Stable, and so the same.
        new = torch.empty_like(copy, device=one[0].device)
        new.copy_(copy, non_blocking=True)
        for tensor in one:
            bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = bare.set_(new.untyped_storage(), *seen[id(tensor)])
    if beside:
        away.clear()
        del kept, copy
        torch.cuda.empty_cache()


def _on_sparse_pages(
    tensors: Iterable[torch.Tensor], holders: Iterable[Holder], most: int
) -> list[Views]:
    """Storages on pages that hold little: at most half a page, of storages that can all move and
    take less than a page in all. Chosen are those of the emptiest pages, until these give back
    ``most`` bytes and a page more than the storages take elsewhere.
    """
    movable = {one[0].untyped_storage().data_ptr(): one for one in _movable(tensors, holders)}
    live: dict[tuple[int, int], int] = {}
    fixed: set[tuple[int, int]] = set()
    lying: dict[tuple[int, int], list[int]] = {}
    for address, pages in _blocks():
        for page, inside in pages:
            live[page] = live.get(page, 0) + inside
            if address in movable:
                lying.setdefault(page, []).append(address)
            else:
                fixed.add(page)
    size = {address: one[0].untyped_storage().nbytes() for address, one in movable.items()}
    kept = {page: sum(size[one] for one in all_on) for page, all_on in lying.items()}
    found: set[int] = set()
    left = most + PAGE
    for page in sorted(lying, key=lambda page: (kept[page], page)):
        if left <= 0:
            break
        if page in fixed or live[page] > PAGE // 2 or kept[page] >= PAGE:
            continue
        new = [address for address in lying[page] if address not in found]
        left -= PAGE - sum(size[address] for address in new)
        found.update(new)
    return [one for address, one in movable.items() if address in found]


def _blocks() -> Iterator[tuple[int, list[tuple[tuple[int, int], int]]]]:
    """The address of each block in use among the large ones, and the pages that it lies on, each
    as its segment and its number there, with the bytes on it.
    """
    for segment in segments():
        first = address = segment["address"]
        if segment["segment_type"] == "small" or segment.get("segment_pool_id", (0, 0)) != (0, 0):
            continue  # Captured graphs have pools of their own, and know addresses there.
        page = PAGE if segment["is_expandable"] else segment["total_size"]
        for block in segment["blocks"]:
            size, start = block["size"], address - first
            if block["state"] != "inactive":
                pages = [
                    ((first, n), min(start + size, (n + 1) * page) - max(start, n * page))
                    for n in range(start // page, (start + size - 1) // page + 1)
                ]
                yield address, pages
            address += size


def _movable(tensors: Iterable[torch.Tensor], holders: Iterable[Holder]) -> list[Views]:
    """The tensors of each storage that nothing but they and the holders hold."""
    known: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        if _plain(tensor):
            known.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    copied = set()
    for holder in holders:
        here = holder.here
        if here is not None:
            key = here.untyped_storage()._cdata
            known.setdefault(key, {})[id(here)] = here
            if holder.coming or (holder.base is not None and holder.host is not None):
                copied.add(key)  # Perhaps still on a stream of its own.
    movable: list[Views] = []
    for key, found in known.items():
        one = list(found.values())
        storage = one[0].untyped_storage()
        alone = torch._C._storage_Use_Count(key) == len(one) + 1  # The other one is `storage`.
        if alone and key not in copied and storage.nbytes() > _SMALLEST:
            movable.append(one)
    return movable


def _plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than a view of its storage."""
    special = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    special |= tensor.is_quantized or has_names(tensor)
    return not special and not is_subclass(tensor) and storage_of(tensor) is not None
