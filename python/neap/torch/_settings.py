"""What a call reads of its modules besides its arguments, between its forward and its backward.

Autograd keeps what a forward saved. A call that runs again reads its modules anew: they must be as
they were. Plain attributes are put back for that time; tensors that were written to can't be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from neap.torch._calls import updating_norms
from neap.torch._guard import meant

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class State:
    """The plain attributes and tensors of a module and all below it.

    Args:
        module: whose forward begins.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._attributes = [(one, _plain(one)) for one in module.modules()]
        self._tensors: list[tuple[str, torch.Tensor, int]] = []

    def look(self) -> None:
        """The forward has ended. What it wrote itself, such as running statistics, is no change."""
        norms = set(updating_norms(self._module))
        for path, one in self._module.named_modules():
            own = [*one._parameters.items(), *(() if one in norms else one._buffers.items())]
            self._tensors += [
                (f"{path}.{name}".lstrip("."), tensor, tensor._version)
                for name, tensor in own
                if tensor is not None and not tensor.is_inference()
            ]

    def prove(self, module: str) -> None:
        """The forward is about to run again.

        Raises:
            RuntimeError: if a tensor was written to since, or another one took its place.
        """
        now: dict[str, torch.Tensor] = {}
        now.update(self._module.named_parameters(remove_duplicate=False))
        now.update(self._module.named_buffers(remove_duplicate=False))
        for name, tensor, version in self._tensors:
            if now.get(name) is not tensor or tensor._version != version:
                where = ".".join(part for part in (module, name) if part)
                raise meant(
                    RuntimeError(
                        f"neap: {where} was changed between forward and backward, so the call of "
                        f"{module or 'the model'} can't run again; pass recompute=False to "
                        "neap.torch.fit, or --no-recompute to neap torch"
                    )
                )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The attributes are those of the first forward, until the block ends."""
        changed: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        for module, then in self._attributes:
            now = _plain(module)
            if now != then:
                changed.append((module, now))
                module.__dict__.update(then)
        try:
            yield
        finally:
            for module, now in changed:
                module.__dict__.update(now)


def _plain(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes whose values can't change themselves."""
    return {name: one for name, one in module.__dict__.items() if isinstance(one, _SIMPLE)}
