"""Moves what stays on the device together, so that what comes and goes finds one large gap.

The optimizer's states and the workspaces of cuBLAS were allocated among the activations and
gradients of the first iteration. Where they stay, the allocator's free memory is in pieces, and
large tensors need new memory although enough is free. Between two iterations nothing else lives but
parameters, gradients and states: the last two are copied to the host, freed, and allocated anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._storage import storage_of
from neap.torch._tensors import is_subclass
from neap.torch._watch import Watch, named_tensors

SMALLEST = 1 << 20
"""PyTorch's allocator keeps smaller blocks in segments of their own."""


def compact(watch: Watch, optimizers: Sequence[Optimizer]) -> dict[torch.device, int]:
    """Allocates states and gradients anew, next to each other; the bytes of cuBLAS's workspaces,
    by device, which are allocated before them.

    Tensors stay the objects that they are. What shares its memory with another tensor stays where
    it is, and so does everything where the host's free memory is less than twice what it takes, or
    where a captured CUDA graph may know addresses.
    """
    if any(group.get("capturable") for o in optimizers for group in o.param_groups):
        return {}
    found = list(named_tensors(watch, list(optimizers)))
    moved = {id(t): t for role, _, t in found if role == "optimizer_state" and _alone(t)}
    moved.update({id(t): t for role, _, t in found if role == "gradient" and _alone(t)})
    total = sum(t.numel() * t.element_size() for t in moved.values())
    devices = {t.device for _, _, t in found if t.is_cuda}
    if not devices or 2 * total > _free_on_the_host():
        return {}
    return _through_the_host(moved.values(), devices)


def _alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the device is all that uses its storage."""
    if not tensor.is_cuda or is_subclass(tensor) or tensor.layout != torch.strided:
        return False
    storage = storage_of(tensor)
    size = tensor.numel() * tensor.element_size()
    # The tensor and `storage` own it.
    return (
        storage is not None
        and size >= SMALLEST
        and storage.nbytes() == size
        and torch._C._storage_Use_Count(storage._cdata) == 2
    )


def _through_the_host(
    tensors: Iterable[torch.Tensor], devices: Iterable[torch.device]
) -> dict[torch.device, int]:
    away: list[tuple[torch.Tensor, torch.device, torch.Tensor]] = []
    with torch.no_grad():
        try:
            for tensor in tensors:
                host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
                host.copy_(tensor)
                away.append((tensor, tensor.device, host))
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            sizes = _without_workspaces(devices)
            make_workspaces(sizes)
        finally:
            for tensor, device, host in away:
                here = torch.empty_strided(
                    host.size(), host.stride(), dtype=host.dtype, device=device
                )
                here.copy_(host)
                tensor.data = here
    return sizes


def _without_workspaces(devices: Iterable[torch.device]) -> dict[torch.device, int]:
    """Frees the workspaces that cuBLAS keeps for each thread and stream; their bytes."""
    torch.cuda.synchronize()
    before = {device: torch.cuda.memory_allocated(device) for device in devices}
    torch._C._cuda_clearCublasWorkspaces()
    return {d: given - torch.cuda.memory_allocated(d) for d, given in before.items()}


def make_workspaces(sizes: dict[torch.device, int]) -> None:
    """Has cuBLAS's workspaces allocated before anything else: a product in this thread, and one in
    autograd's where ``sizes``, in bytes, are those of two. A script without products gets none.
    """
    torch.cuda.empty_cache()
    with (
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), lambda kept: kept),
    ):
        for device, size in sizes.items():
            if size == 0:
                continue
            before = torch.cuda.memory_allocated(device)
            one = torch.ones(16, 16, device=device, requires_grad=True)
            product = torch.mm(one, one).sum()
            made = torch.cuda.memory_allocated(device) - before
            if made < size:  # Autograd's thread had one too.
                torch.autograd.grad(product, one)
            del one, product


def _free_on_the_host() -> int:
    """Bytes; 0 where Linux does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 0
