"""Computes small values beside the device, where all that they follow from is known.

A kernel in Python stands before each operator of :mod:`neap.dry._followed`: at the dispatcher's key
``BackendSelect``, which every thread includes and which lies below autograd, autocast and modes, so
that these see nothing of it. It calls the real operator, whose allocations stay PyTorch's own, and
then computes the same on the host, in the memory of the device.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from neap.dry import _known
from neap.dry._followed import Operator, operators
from neap.dry._guard import note as problem
from neap.dry._known import (
    UNKNOWN,
    base_of,
    content,
    followed,
    forget_storage,
    makers,
    note,
    noted_version,
    on_host,
    plain,
    version_of,
    versions,
)

_library: Any = None
_KEY = "BackendSelect"
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_NUMBERS = frozenset((int, float, bool, complex))
_CONTAINERS = frozenset((list, tuple))
_WHERE = torch.ops.aten.where.self
_capturing = torch._C._cuda_isCurrentStreamCapturing
_function_modes = torch._C._is_torch_function_mode_enabled
_SELF = ("self",)


def start() -> None:
    """Follows values from now on."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    functional, in_place, with_out = operators()
    for kernel, group in ((_functional, functional), (_in_place, in_place), (_with_out, with_out)):
        for operator in group:
            try:
                stand_before(operator.name, partial(kernel, operator.call, operator))
            except Exception as error:
                problem(f"values of {operator.name}", error)
    apply = torch.nn.Module._apply

    def moves(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        # A parameter that goes to the device keeps its count of versions.
        before = [_address(p) for p in self._parameters.values()]
        result: torch.nn.Module = apply(self, *args, **kwargs)
        for parameter, at in zip(self._parameters.values(), before, strict=False):
            if parameter is not None:
                _known.moved(parameter, at)
        return result

    torch.nn.Module._apply = moves  # type: ignore[method-assign]


def _address(parameter: Any) -> int:
    return base_of(parameter) if plain(parameter) else 0


def stand_before(name: str, kernel: Any) -> None:
    """Has a kernel called before an operator's own, with the keys that are left."""
    _library.impl(name, kernel, _KEY, with_keyset=True)


def real(call: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """The real operator."""
    return call.redispatch(keys & _BELOW, *args, **kwargs)


def on_the_host(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The same operator on the CPU, over the memory of its operands."""
    return call.redispatch(_HOST, *map(_alias, args), **{k: _alias(v) for k, v in kwargs.items()})


def _alias(value: Any) -> Any:
    if plain(value):
        return on_host(value)
    if value.__class__ in _CONTAINERS:
        return [_alias(part) for part in value]
    return value


def known(values: Any) -> int:
    """What is known of all tensors among some values: the least certain of it."""
    most = _known.KNOWN
    for value in values:
        kind = value.__class__
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not value.is_cuda:
                found = _known.KNOWN if value.is_cpu else UNKNOWN
            elif value.layout is torch.strided:
                found = content(value)
            else:
                found = UNKNOWN
        elif kind in _CONTAINERS:
            found = known(value)
        elif isinstance(value, torch.Tensor):
            found = UNKNOWN  # A subclass, which may hide its memory.
        else:
            continue
        if found == UNKNOWN:
            return UNKNOWN
        most = max(most, found)
    return most


def both(one: int, other: int) -> int:
    """What is known of what follows from two operands."""
    return max(one, other) if one and other else UNKNOWN


def _with_tensors(call: Any, args: Any) -> Any:
    """Arguments with tensors for numbers, of the type that these have beside the other operand."""
    first = 1 if call is _WHERE else 0
    pair: Any = args[first : first + 2]
    kind = torch.result_type(*pair)
    changed = [*args]  # `list()` makes one anew each time, which the garbage collector counts.
    for place in range(first, first + 2):
        value = args[place]
        if value.__class__ in _NUMBERS:
            number: Any = value
            changed[place] = torch.scalar_tensor(number, dtype=kind, device="cpu")
    return tuple(changed)


def beside(work: Any, *args: Any) -> None:
    """Does what comes after an operator, unseen by the script's modes; a failure ends nothing."""
    try:
        if _function_modes():
            with torch._C.DisableTorchFunction():
                work(*args)
        else:
            work(*args)
    except Exception as error:
        problem("values", error)


class _Exchanging(threading.local):
    """Whether this thread exchanges objects between ranks: their bytes are real then, and what is
    known of tensors does not count.
    """

    depth = 0


exchanging = _Exchanging()


# -- kernels


def _functional(call: Any, operator: Operator, keys: Any, *args: Any, **kwargs: Any) -> Any:
    for place in operator.numbers:
        if args[place].__class__ in _NUMBERS:
            args = _with_tensors(call, args)
            break
    if exchanging.depth:
        return call.redispatch(keys & _BELOW, *args, **kwargs)
    result = call.redispatch(keys & _BELOW, *args, **kwargs)
    first = result[0] if result.__class__ is tuple and result else result
    if first.__class__ is torch.Tensor and first.is_cuda:
        beside(settle, call, operator.name, result, args, kwargs, operator.computed)
    return result


def settle(
    call: Any, name: str, result: Any, args: Any, kwargs: Any, computed: bool = True
) -> None:
    """Computes the values of a new result, if they can be known."""
    results = result if result.__class__ is tuple else (result,)
    state = UNKNOWN
    if computed:
        # Most operands are unknown, and most often the first one is.
        state = known(args)
        if state and kwargs:
            state = both(state, known(kwargs.values()))
        if state and not all(map(_may_hold, results)):
            state = UNKNOWN
    if state and not _capturing():
        try:
            values = on_the_host(call, *args, **kwargs)
        except Exception:
            pass  # The CPU has no such kernel, or refuses what a GPU only finds out later.
        else:
            put(result, values, state)
            return
    for tensor in results:
        if plain(tensor):
            lose(tensor)
            if tensor.numel() == 1:
                makers[tensor.data_ptr()] = name


def _may_hold(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (plain(value) and followed(value))


def put(result: Any, values: Any, state: int) -> None:
    """Writes a new result's values to its memory."""
    if result.__class__ is not tuple:
        result, values = (result,), (values,)
    for tensor, value in zip(result, values, strict=True):
        # An operator leaves out what it was not asked for.
        if plain(tensor) and tensor.numel() and tensor.shape == value.shape:
            on_host(tensor).copy_(value)
            note(tensor, version_of(tensor), state)


def _in_place(
    call: Any, operator: Operator, keys: Any, self: Any, *args: Any, **kwargs: Any
) -> Any:
    for place in operator.numbers:
        if args[place - 1].__class__ in _NUMBERS:
            args = _with_tensors(call, (self, *args))[1:]
            break
    if exchanging.depth:
        return call.redispatch(keys & _BELOW, self, *args, **kwargs)
    if operator.written != _SELF or self.__class__ is list:
        result = call.redispatch(keys & _BELOW, self, *args, **kwargs)
        beside(_written, call, operator, (self, *args))
        return result
    if not self.is_cuda:
        if operator.whole and args and plain(args[0]):
            content(args[0])  # The host reads it: what was written unseen is to be forgotten.
        return call.redispatch(keys & _BELOW, self, *args, **kwargs)
    before = None
    if not operator.by_itself and operator.computed and plain(self) and content(self):
        before = on_host(self).clone()
    result = call.redispatch(keys & _BELOW, self, *args, **kwargs)
    if before is not None:
        on_host(self).copy_(before)
    if plain(self):
        base = base_of(self)
        if base in versions or operator.whole:
            beside(_rewrite, call, operator, base, self, args, kwargs)
    return result


def _rewrite(call: Any, operator: Operator, base: int, self: Any, args: Any, kwargs: Any) -> None:
    """Computes what an operator in place makes of a tensor, or forgets what it was.

    PyTorch is going to count this write in the tensor's version, unless another operator's kernel
    makes it.
    """
    noted = noted_version(base)
    version = version_of(self)
    if noted is not None and version > noted:
        forget_storage(self, base)
        noted = None
    state = UNKNOWN
    if operator.computed and followed(self):
        if not operator.whole:
            state = known((self, *args))
        elif _trusted(self, args):
            state = known(args)
    if state and not _capturing():
        try:
            on_the_host(call, self, *args, **kwargs)
        except Exception:
            state = UNKNOWN
    # A tensor's `data` counts for itself, from 0 on.
    version = max(version + 1, noted or 0)
    if state:
        note(self, version, state)
    elif noted is not None:
        versions[base] = version
        _known.forget(self)


def _trusted(tensor: torch.Tensor, args: Any) -> bool:
    """Whether what fills a tensor is going to stay: many operators clear floats or copy them to a
    place of their own, or take bytes for a workspace, and then their kernel writes there unseen.
    Those that do so with one float are in :data:`neap.dry._followed.CLEARING`.
    """
    value = args[0] if args else 0
    if isinstance(value, torch.Tensor):
        # A lazy module's parameter has no device yet.
        same = value.__class__ not in _known.PLAIN or (
            value.is_cuda and value.dtype is tensor.dtype
        )
        return not (same and tensor.is_floating_point())
    if tensor.is_floating_point():
        return bool(value) or tensor.numel() == 1  # A mask of ones, say, or a number.
    return tensor.dtype is not torch.uint8 or tensor.numel() <= _known.FILLED


def _written(call: Any, operator: Operator, args: Any) -> None:
    """Forgets what an operator wrote that writes to lists of tensors, or to several."""
    for argument, value in zip(call._schema.arguments, args, strict=False):
        if argument.name in operator.written:
            for tensor in value if value.__class__ is list else (value,):
                if plain(tensor):
                    lose(tensor)


def lose(tensor: torch.Tensor) -> None:
    """Forgets a plain tensor's whole storage."""
    base = base_of(tensor)
    if base in versions:
        forget_storage(tensor, base)


def _with_out(call: Any, operator: Operator, keys: Any, *args: Any, **kwargs: Any) -> Any:
    for place in operator.numbers:
        if args[place].__class__ in _NUMBERS:
            args = _with_tensors(call, args)
            break
    if exchanging.depth:
        return call.redispatch(keys & _BELOW, *args, **kwargs)
    result = call.redispatch(keys & _BELOW, *args, **kwargs)
    for name in operator.written:
        tensor = kwargs[name]
        if not plain(tensor):
            return result
    beside(_fill_out, call, operator, args, kwargs)
    return result


def _fill_out(call: Any, operator: Operator, args: Any, kwargs: Any) -> None:
    """Computes what an operator writes to the tensors that it was given for that."""
    outs = [kwargs[name] for name in operator.written]
    state = UNKNOWN
    if all(map(followed, outs)):
        others = [value for name, value in kwargs.items() if name not in operator.written]
        state = known((*args, others))
    if state and not _capturing():
        try:
            on_the_host(call, *args, **kwargs)
        except Exception:
            state = UNKNOWN
    for tensor in outs:
        if state:
            note(tensor, version_of(tensor) + 1, state)
        else:
            lose(tensor)
