"""Which versions of PyTorch neap knows; and the versions of tensors: PyTorch's check that no saved
tensor was changed, which is lost under hooks, done again.
"""

from __future__ import annotations

import torch

OLDEST, NEWEST = (2, 6), (2, 15)
"""The oldest PyTorch whose hooks do what is needed here, and the newest that neap was tried with;
docs/supported.md says what was tried.
"""


def version() -> tuple[int, ...]:
    """Major and minor number of this PyTorch."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def newer_than_known() -> str | None:
    """A note where this PyTorch is newer than those that neap was tried with."""
    if version() <= NEWEST:
        return None
    return (
        f"PyTorch {torch.__version__} is newer than those that neap was tried with (up to "
        f"{NEWEST[0]}.{NEWEST[1]}); what it does not show any more is left out"
    )


_NOTHING: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def witness(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the version counter and holds no storage."""
    seen = tensor.detach()
    forget(seen)
    return seen


def forget(seen: torch.Tensor) -> None:
    """Takes a tensor's storage away; its version counter stays."""
    kind = seen.dtype, seen.device
    nothing = _NOTHING.get(kind)
    if nothing is None:
        nothing = _NOTHING[kind] = torch.empty(0, dtype=seen.dtype, device=seen.device)
    seen.data = nothing


def changed(seen: torch.Tensor, version: int, shape: list[int]) -> str:
    """PyTorch's own message for a saved tensor that was changed in place."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{seen.type()} {shape}] is at version {seen._version}; expected "
        f"version {version} instead. Hint: enable anomaly detection to find the operation "
        "that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )
