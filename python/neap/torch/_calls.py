"""Notes each call of a module during a recording: what went in, what came out, and whether the
call could be run again.

A call can be run again when its result depends on nothing but its arguments, parameters, buffers
and PyTorch's random numbers, and when it changes nothing that stays. What the operators read and
write is judged later, in :mod:`neap.torch._ranges`; here is judged what only Python shows.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten

from neap.torch._guard import Guard, entry

View = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_PLAIN_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_OWN = {
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
}


@dataclass(eq=False)
class Call:
    """One call of a module while gradients were on.

    Attributes:
        module: the module, while it lives.
        number: how many such calls of it came before in the iteration.
        iteration: the iteration that it belongs to.
        first, after: the operators that it ran.
        first_pack, after_pack: the saved tensors of the iteration that it made.
        inputs: the tensors among its arguments, in the order of ``tree_flatten``.
        norms: buffers of its batch norms that training updates.
        why_not: why it can't be run again, as far as Python shows; ``None`` if it can.
    """

    module: weakref.ref[torch.nn.Module]
    path: str
    kind: str
    number: int
    iteration: int
    first: int
    first_pack: int
    inputs: list[torch.Tensor]
    after: int = 0
    after_pack: int = 0
    inside: Call | None = None
    norms: list[torch.Tensor] = field(default_factory=list)
    storages: list[Any] = field(default_factory=list)
    """The inputs' storages as the recording knows them."""
    views: list[View | None] = field(default_factory=list)
    norm_storages: list[Any] = field(default_factory=list)
    why_not: str | None = None


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """All arguments of a call as a flat list, and how to put them together again."""
    return tree_flatten((args, kwargs))


def view_of(tensor: torch.Tensor) -> View | None:
    """Type, shape, strides and offset; nothing for a tensor without strides."""
    if tensor.layout != torch.strided:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def updating_norms(module: torch.nn.Module) -> list[_NormBase]:
    """The batch and instance norms in a module whose running statistics a forward moves."""
    return [
        m
        for m in module.modules()
        if isinstance(m, _NormBase) and m.training and m.track_running_stats
    ]


def _attributes(module: torch.nn.Module) -> dict[tuple[int, str], Any]:
    """What the modules below ``module`` keep in attributes, as far as a comparison can tell."""
    found: dict[tuple[int, str], Any] = {}
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in _OWN:
                size = len(value) if isinstance(value, (list, dict, set)) else None
                found[id(part), name] = (value, size)
        for name, buffer in part._buffers.items():
            found[id(part), f"buffer {name}"] = (buffer, None)
    return found


def _changed(before: dict[tuple[int, str], Any], after: dict[tuple[int, str], Any]) -> str | None:
    """The name of an attribute that differs."""
    for key in before.keys() | after.keys():
        if key not in before or key not in after:
            return key[1]
        (old, size), (new, new_size) = before[key], after[key]
        same = old is new or (isinstance(old, _PLAIN) and type(old) is type(new) and old == new)
        if not same or size != new_size:
            return key[1]
    return None


def python_reason(module: torch.nn.Module, leaves: list[Any]) -> str | None:
    """Why a call of ``module`` with these arguments can't be run again; ``None`` if nothing shows.

    Only what can be seen without running it.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                return f"an argument is a {type(leaf).__name__}"
        elif not isinstance(leaf, _PLAIN + _PLAIN_TORCH):
            return f"an argument is a {type(leaf).__name__}, which a forward may change"
    for part in module.modules():
        own = part is module
        if "forward" in vars(part):
            return "a forward was replaced on an instance"
        if getattr(part, "_compiled_call_impl", None) is not None:
            return "a module is compiled"
        if isinstance(part, torch.jit.ScriptModule):
            return "a module is scripted"
        if not own and (part._forward_hooks or part._forward_pre_hooks):
            return "a module inside has hooks"
        if not own and (part._backward_hooks or part._backward_pre_hooks):
            return "a module inside has backward hooks"
    return None


class Calls:
    """Notes calls between :meth:`start` and :meth:`stop`.

    Args:
        now: says the number of operators and saved tensors so far, and the iteration.
        name_of: the name of a module, by which it can be found again.
    """

    def __init__(
        self,
        now: Callable[[], tuple[int, int, int]],
        name_of: Callable[[torch.nn.Module], str],
        began: Callable[[Call], None],
        guard: Guard,
    ) -> None:
        self.guard = guard
        self.all: list[Call] = []
        self._now = now
        self._name_of = name_of
        self._began = began
        self._numbers: dict[tuple[int, int], int] = {}
        self._open: list[Call] = []
        self._thread = 0
        """The thread of the calls that are open."""
        self._plain: Any = None

    def start(self) -> None:
        """From now on ``Module.__call__`` goes through here."""
        self._plain = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(module, args, kwargs)

        torch.nn.Module.__call__ = call  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        """Puts back what was there."""
        if self._plain is not None:
            torch.nn.Module.__call__ = self._plain  # type: ignore[method-assign]
            self._plain = None
        for call in self.all:
            call.inputs, call.norms = [], []

    def forbid(self, why: str) -> None:
        """What goes on just now can't be run again."""
        for call in self._open:
            call.why_not = why

    def _call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        plain = self._plain or torch.nn.Module.__call__  # None once it has ended.
        # In backward a module runs only because something recomputes.
        if (
            not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch._C._current_autograd_node() is not None
        ):
            return plain(module, *args, **kwargs)
        begun = self._begins(module, args, kwargs)
        if begun is None:
            return plain(module, *args, **kwargs)
        call, before = begun
        try:
            return plain(module, *args, **kwargs)
        except BaseException:
            call.why_not = "it raised an exception"
            raise
        finally:
            self._ended(module, call, before)

    @entry()
    def _begins(
        self, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[Call, dict[tuple[int, str], Any]] | None:
        """The call, and the attributes of the modules before it."""
        leaves = arguments(args, kwargs)[0]
        op, pack, iteration = self._now()
        number = self._numbers.get((id(module), iteration), 0)
        self._numbers[id(module), iteration] = number + 1
        call = Call(
            module=weakref.ref(module),
            path=self._name_of(module),
            kind=type(module).__name__,
            number=number,
            iteration=iteration,
            first=op,
            first_pack=pack,
            inputs=[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)],
            inside=self._open[-1] if self._open else None,
            why_not=python_reason(module, leaves),
        )
        for norm in updating_norms(module):
            call.norms += [b for b in norm.buffers(recurse=False)]
        self._began(call)
        call.inputs, call.norms = [], []  # Keeping them would change when they are freed.
        if not self._open:
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():
            call.why_not = "two threads run modules at once"
            self.forbid(call.why_not)
        before = _attributes(module) if call.why_not is None else {}
        self._open.append(call)
        return call, before

    @entry()
    def _ended(
        self, module: torch.nn.Module, call: Call, before: dict[tuple[int, str], Any]
    ) -> None:
        self._open.remove(call)
        call.after, call.after_pack, ended = self._now()
        if ended != call.iteration:
            call.why_not = "it spans two iterations"
        if call.why_not is None and before:
            name = _changed(before, _attributes(module))
            if name is not None:
                call.why_not = f"its forward changes the attribute {name}"
        self.all.append(call)
