"""How a saved tensor can be made again by the operator that made it, from what that saved itself.

Autograd's function of a tensor shows the operator's inputs and every setting as they are in this
iteration, so nothing is taken from the recording but which tensors to treat so. Only operators are
repeated that have no effects and draw no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from neap.torch._guard import meant
from neap.torch._versions import changed

_aten = torch.ops.aten
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Alias", "T", "Transpose", "Permute")
) | frozenset(("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SplitBackward0"))
"""Functions whose result lies in the memory of what they were given."""


@dataclass(frozen=True)
class Kind:
    """An operator that may run again.

    Attributes:
        operator: its name below autograd.
        saved: the inputs that its function in autograd saves.
        settings: its settings, as the function has them.
        call: the operator, given inputs, settings and, if there is one, the bias.
        bias: which of its inputs is a bias, which the function does not save.
        unbiased: the setting that is nothing, or a zero, where there is no bias.
    """

    operator: str
    saved: tuple[str, ...]
    settings: tuple[str, ...]
    call: Callable[..., torch.Tensor]
    bias: int | None = None
    unbiased: str | None = None


def _addmm(one: Any, other: Any, beta: Any, alpha: Any, bias: Any) -> torch.Tensor:
    found: torch.Tensor = _aten.addmm.default(bias, one, other, beta=beta, alpha=alpha)
    return found


def _convolution(x: Any, weight: Any, *rest: Any) -> torch.Tensor:
    *settings, bias = rest
    found: torch.Tensor = _aten.convolution.default(x, weight, bias, *settings)
    return found


def _group_norm(x: Any, weight: Any, n: int, c: int, size: int, *rest: Any) -> torch.Tensor:
    groups, eps, bias = rest
    found: torch.Tensor = _aten.native_group_norm.default(x, weight, bias, n, c, size, groups, eps)[
        0
    ]
    return found


def _max_pool(x: Any, *settings: Any) -> torch.Tensor:
    found: torch.Tensor = _aten.max_pool2d_with_indices.default(x, *settings)[0]
    return found


KINDS = {
    "GeluBackward0": Kind(
        "aten::gelu",
        ("self",),
        ("approximate",),
        lambda x, approximate: _aten.gelu.default(x, approximate=approximate),
    ),
    "SiluBackward0": Kind("aten::silu", ("self",), (), _aten.silu.default),
    "HardswishBackward0": Kind("aten::hardswish", ("self",), (), _aten.hardswish.default),
    "LeakyReluBackward0": Kind(
        "aten::leaky_relu", ("self",), ("negative_slope",), _aten.leaky_relu.default
    ),
    "MulBackward0": Kind("aten::mul", ("self", "other"), (), _aten.mul.Tensor),
    "MmBackward0": Kind("aten::mm", ("self", "mat2"), (), _aten.mm.default),
    "BmmBackward0": Kind("aten::bmm", ("self", "mat2"), (), _aten.bmm.default),
    "AddmmBackward0": Kind("aten::addmm", ("mat1", "mat2"), ("beta", "alpha"), _addmm, bias=0),
    "ConvolutionBackward0": Kind(
        "aten::convolution",
        ("input", "weight"),
        ("stride", "padding", "dilation", "transposed", "output_padding", "groups"),
        _convolution,
        bias=2,
        unbiased="bias_sym_sizes_opt",
    ),
    "NativeGroupNormBackward0": Kind(
        "aten::native_group_norm",
        ("input", "weight"),
        ("N", "C", "HxW", "group", "eps"),
        _group_norm,
        bias=2,
    ),
    "MaxPool2DWithIndicesBackward0": Kind(
        "aten::max_pool2d_with_indices",
        ("self",),
        ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
        _max_pool,
    ),
}
"""By the name of the function in autograd. Batch norms are not among them: they move statistics;
nor is the layer norm, whose function does not show its epsilon.
"""


class Recipe:
    """How to make a tensor's storage again: the operator with the inputs of this iteration.

    Attributes:
        node: the name of autograd's function.
        inputs: what autograd's hooks gave for the inputs when they were saved.
        settings: the operator's settings, in order.
        bias: the bias, in a list, or nothing where there is none.
    """

    __slots__ = ("_version", "bias", "inputs", "node", "settings")

    def __init__(
        self, node: str, inputs: list[Any], settings: list[Any], bias: list[torch.Tensor | None]
    ) -> None:
        self.node = node
        self.inputs = inputs
        self.settings = settings
        self.bias = bias
        self._version = [None if one is None else one._version for one in bias]

    def follow(self, value: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Runs the operator; ``value`` gives the tensor that a hook's result stands for.

        Raises:
            RuntimeError: if an input was changed in place.
        """
        for one, version in zip(self.bias, self._version):
            if one is not None and one._version != version:
                raise meant(RuntimeError(changed(one, version or 0, list(one.shape))))
        with torch.no_grad(), _as_it_was():
            return KINDS[self.node].call(*map(value, self.inputs), *self.settings, *self.bias)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Operators below autocast saw what autocast had made of their inputs."""
    kinds = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)


def recipe(tensor: torch.Tensor, unpack: Callable[[Any], torch.Tensor]) -> Recipe | None:
    """How the storage of a tensor that is being saved can be made again, if it can be: if all that
    it needs was saved by the hooks that ``unpack`` belongs to.
    """
    if tensor._version != 0:  # Its memory was changed after the operator.
        return None
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    kind = None if node is None else KINDS.get(node.name())
    if node is None or kind is None:
        return None
    try:
        saved = [getattr(node, f"_raw_saved_{name}") for name in kind.saved]
        if any(one.unpack_hook != unpack for one in saved):
            return None
        inputs = [one.data for one in saved]
        settings = [getattr(node, f"_saved_{name}") for name in kind.settings]
        bias = _bias(node, kind)
    except Exception:  # It is not saved, or this PyTorch does not show it.
        return None
    return None if bias is None else Recipe(node.name(), inputs, settings, bias)


def _bias(node: Any, kind: Kind) -> list[torch.Tensor | None] | None:
    """The bias as the last argument, no argument for an operator without, or nothing if there is
    one that autograd does not show.
    """
    if kind.bias is None:
        return []
    if kind.unbiased is not None and not any(getattr(node, f"_saved_{kind.unbiased}") or ()):
        return [None]
    leaf = node.next_functions[kind.bias][0]
    bias = getattr(leaf, "variable", None)
    return [bias] if type(bias) in (torch.Tensor, torch.nn.Parameter) else None
