"""How tensors and arguments of operators look to a recording."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from neap.torch._storage import DTYPES, PLAIN, Storage


def arguments(schema: Any, args: Any, kwargs: Any) -> list[tuple[Any, str]]:
    """All arguments of a call in the order of its schema, defaults included, with their types."""
    found = []
    for place, argument in enumerate(schema.arguments):
        if place < len(args):
            value = args[place]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            value = argument.default_value if argument.has_default_value() else None
        found.append((value, str(argument.type)))
    return found


def host(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor on the host, with its value if it is a number."""
    form: dict[str, Any] = {"host": DTYPES.get(tensor.dtype, "u8"), "shape": list(tensor.shape)}
    if (
        tensor.dim() == 0
        and tensor.device.type == "cpu"
        and not tensor.is_complex()
        and not is_subclass(tensor)
    ):
        number = float(tensor.item())
        if number == number and number not in (float("inf"), float("-inf")):
            form["value"] = number
    return form


def node_name(tensor: torch.Tensor) -> str:
    """The autograd function that made a tensor; empty for a leaf.

    What ``reshape`` makes has another name while a dispatch mode is on, so all views have one.
    """
    function = tensor.grad_fn
    name: str = "" if function is None else function.name()
    return "view" if name in VIEWS else name


VIEWS = ("ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0")


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor consists of: itself, those inside a subclass such as
    ``DTensor``, or none of a lazy module's parameter that has no shape yet.
    """
    if torch.nn.parameter.is_lazy(tensor):
        return []
    if not is_subclass(tensor):
        return [tensor]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    inner = []
    for name in flatten()[0]:
        value = getattr(tensor, name)
        if isinstance(value, torch.Tensor):
            inner += plain_tensors(value)
    return inner


def is_subclass_type(kind: type) -> bool:
    """Whether tensors of this class dispatch by themselves."""
    if kind in PLAIN:
        return False
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def is_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor dispatches by itself and has no storage of its own."""
    return is_subclass_type(type(tensor))


def bytes_of_elements(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements; 0 for one that does not say."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides; empty for a tensor without."""
    return tuple(tensor.stride()) if tensor.layout == torch.strided else ()


def offset(tensor: torch.Tensor) -> int:
    """Offset into the storage; 0 for a tensor without."""
    return int(tensor.storage_offset()) if tensor.layout == torch.strided else 0


def unique(storages: Iterable[Storage | None]) -> list[Storage]:
    """Each once, in order, without nothings."""
    return list(dict.fromkeys(s for s in storages if s is not None))
