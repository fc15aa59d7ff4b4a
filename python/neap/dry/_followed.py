"""The operators whose values are computed beside the device where their operands are known.

They are what masks, lengths, positions and labels go through, and what shapes are made of. Names
are those of ATen; every overload that has a kernel of its own is meant, in place and with ``out``
too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


def _names(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


_ELEMENTWISE = _names(
    """eq ne lt le gt ge isnan isposinf isneginf signbit where
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ __ilshift__
    __irshift__
    add sub rsub mul div floor_divide remainder fmod neg abs sign sgn minimum maximum fmin fmax
    clamp clamp_min clamp_max pow floor ceil round trunc frac sqrt log2 gcd lcm heaviside"""
)
_REDUCED = """
    any sum prod mean max min amax amin aminmax argmax argmin count_nonzero nansum median mode
    kthvalue cumsum cumprod cummax cummin _cummax_helper _cummin_helper trace
"""
_MOVED = """
    isin index index_select gather take index_put index_put_ _index_put_impl_ index_add index_copy
    index_fill index_reduce scatter scatter_add scatter_reduce masked_fill masked_select
    masked_scatter put cat stack repeat repeat_interleave flip roll rot90 tril triu sort argsort
    topk searchsorted bucketize bincount histc _unsafe_index _unsafe_index_put
    _unsafe_masked_index constant_pad_nd nonzero_static
"""
_MADE = "arange range eye linspace logspace full"
_WHOLE = _names("copy_ fill_ zero_")
FOLLOWED = _ELEMENTWISE | _WHOLE | _names(_REDUCED, _MOVED, _MADE)

_APART = _names(
    """squeeze_ unsqueeze_ transpose_ t_ as_strided_ swapaxes_ swapdims_ detach_ resize_ resize_as_
    set_ record_stream requires_grad_ rename_ retain_grad sparse_resize_ sparse_resize_and_clear_
    _coalesced_ copy_sparse_to_sparse_ resize_as_sparse_ _resize_output_ relu_ all"""
)
"""Operators that change a tensor's form and none of its values; ``relu_``, which calls another one
that is followed; and ``all``, which has an answer of its own."""

_SCALARS_ON_DEVICE = _names("pow.Tensor_Tensor pow.Tensor_Tensor_out")
"""Overloads that PyTorch itself gives a number on the device, which no Python code can be given."""

DEPENDENT = _names("nonzero _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive")
"""Operators whose result's size depends on values."""

CLEARING = _names(
    "nll_loss2d_forward multilabel_margin_loss_backward _ctc_loss _ctc_loss_backward lu_unpack",
    "linalg_lu_factor_ex linalg_ldl_factor_ex _linalg_det _linalg_slogdet",
)
"""Operators that fill their result by another operator before their kernel writes to it."""

RUNNING = _names(
    """native_batch_norm cudnn_batch_norm batch_norm_update_stats batch_norm_gather_stats
    batch_norm_gather_stats_with_counts"""
)
"""Operators that write to a running mean and variance, which their schema does not say."""


class Operator(NamedTuple):
    """An operator to follow.

    Attributes:
        name: with its overload, as a library takes it.
        call: the overload itself.
        numbers: the places of tensors for which a number may come.
        computed: whether its values are computed.
        written: the names of arguments that it writes to.
        whole: whether it writes all of a tensor, whatever that was.
        by_itself: whether its kernel changes the tensor that it is given by no other operator.
    """

    name: str
    call: Any
    numbers: tuple[int, ...]
    computed: bool
    written: tuple[str, ...]
    whole: bool
    by_itself: bool


def operators() -> tuple[list[Operator], list[Operator], list[Operator]]:
    """Those without effects, those that write to their arguments, and those that take ``out``.

    Only what has a kernel of its own on the device: all others consist of these.
    """
    plain: list[Operator] = []
    in_place: list[Operator] = []
    with_out: list[Operator] = []
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        base, _, overload = name.partition(".")
        if name == full or base in _APART | DEPENDENT or name in _SCALARS_ON_DEVICE:
            continue
        on_device = _has(full, "CUDA") or base == "copy_"
        if not on_device or _has(full, "BackendSelect"):
            continue
        call = getattr(getattr(torch.ops.aten, base), overload or "default")
        vars(call)  # Python makes this dictionary when first asked: not in the script's first step.
        written = [
            a
            for a in call._schema.arguments
            if (a.alias_info and a.alias_info.is_write)
            or (base in RUNNING and a.name.startswith("running_"))
        ]
        into_out = any(argument.kwarg_only for argument in written)
        found = Operator(
            name,
            call,
            _numbers(call, 1 if written and not into_out else 0),
            base in FOLLOWED or base.rstrip("_") in FOLLOWED,
            tuple(argument.name for argument in written),
            base in _WHOLE,
            base in _WHOLE or base.rstrip("_") in _ELEMENTWISE,
        )
        if not written:
            if found.computed or base in CLEARING:
                plain.append(found)
        elif into_out:
            with_out.append(found)
        else:
            in_place.append(found)
    return plain, in_place, with_out


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _numbers(call: Any, first: int) -> tuple[int, ...]:
    """The places, from the first one on, of tensors for which a number may come: it comes as the
    other operand of a tensor.
    """
    places = [
        place
        for place, argument in enumerate(call._schema.arguments)
        if not argument.kwarg_only and str(argument.type) == "Tensor"
    ]
    return tuple(place for place in places if place >= first) if len(places) > 1 else ()
