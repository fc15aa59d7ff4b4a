"""Records what a training script does, operator by operator, below autograd.

A dispatch mode sees every operator with its arguments; weak references see when storages die; the
allocator's statistics, where there is a device, see what an operator takes besides. The mode
changes little of what it records, and what it changes is undone in :mod:`neap.torch._graph`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten

from neap.torch._calls import Call, Calls, view_of
from neap.torch._exact import Exact
from neap.torch._figures import GIVEN_OUT, statistics
from neap.torch._guard import Guard, entry
from neap.torch._holder import Handle, Holder
from neap.torch._recipe import recipe
from neap.torch._spill import Recorded, fetched
from neap.torch._storage import (
    SCALAR_TYPES,
    Op,
    Operand,
    Saved,
    Storage,
    Storages,
    dtype_name,
    has_generator,
    storage_of,
)
from neap.torch._tensors import (
    arguments,
    host,
    is_subclass,
    is_subclass_type,
    node_name,
    offset,
    plain_tensors,
    strides,
    unique,
)
from neap.torch._watch import BACKWARD, Watch, named_tensors

_LAYOUTS = {torch.strided: 0}
_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}

# Operators that write to arguments although their schema does not say so: positions of these
# arguments, and of the flag without which they don't.
_HIDDEN_WRITES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "aten::native_batch_norm": ((3, 4), 5),
    "aten::cudnn_batch_norm": ((3, 4), 5),
    "aten::miopen_batch_norm": ((3, 4), 5),
    "aten::_batch_norm_impl_index": ((3, 4), 5),
    "aten::batch_norm_update_stats": ((1, 2), None),
    "aten::batch_norm_gather_stats": ((3, 4), None),
    "aten::batch_norm_gather_stats_with_counts": ((3, 4), None),
}
_NO_WORK = {"aten::detach", "aten::alias", "aten::record_stream", "aten::is_pinned"}


class Recorder(TorchDispatchMode):
    """Records operators from :meth:`start` to :meth:`stop`, cut into iterations by :meth:`cut`.

    Args:
        device: the type of the device whose tensors count, ``"cuda"`` or ``"cpu"``.
        watch: says where the script is; installed by the caller.
        saved: also record what autograd saves for backward. Changes nothing in what is computed.
        spills: whether what autograd saves is on the host until backward needs it. It is recorded
            as if it stayed.
    """

    def __init__(
        self, device: str, watch: Watch, saved: bool = False, spills: bool = False
    ) -> None:
        super().__init__()
        self.device = device
        self.watch = watch
        self.storages = Storages(device)
        self.ops: list[Op] = []
        self.cuts: list[int] = []
        """The number of operators before each iteration, and one more at the end."""
        self.allocated: list[int] = []
        """Bytes that the allocator had given out at each cut."""
        self.peaks: list[int] = []
        """The most bytes that it had given out in each iteration."""
        self.packs: list[Saved] = []
        self.problems: list[str] = []
        self.optimizers: list[Optimizer] = []
        self.steps: list[tuple[int, int, Optimizer]] = []
        """First operator, operator after the last, and optimizer of each step."""
        self.parameters: set[Storage | None] = set()
        """The storages that parameters had when backward began last."""
        self.backwards: list[tuple[int, int, int, int]] = []
        """Iteration, saved tensors before it, first operator and operator after the last of each
        call of backward.
        """
        self._backward_began = 0, 0
        self.gradients: list[dict[Storage, list[torch.Tensor]]] = []
        self.calls: list[Call] = []
        """Calls of modules, where saved tensors are recorded too."""
        self._saved = saved
        self._hooks: Any = None
        self._calls = Calls(self._now, watch.name_of, self._called, watch.guard)
        self._packed = 0
        self._unpacked = 0
        self._anchors: dict[Storage, torch.UntypedStorage] = {}
        self._nodes: dict[int, str] = {}
        self._step_began: int | None = None
        self._peak = 0
        self._statistics = device == "cuda" and torch.cuda.is_available()
        self._entered = False
        self._exact = Exact(watch)
        self._spill = Recorded(self.storages, lambda: len(self.ops)) if spills else None

    @property
    def guard(self) -> Guard:
        """The watch's."""
        return self.watch.guard

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled runs as it will without a recorder: it saves other tensors."""
        return True

    # -- start and end

    def start(self, optimizers: Iterable[Optimizer]) -> None:
        """Names what lives across iterations and begins."""
        self.optimizers = list(optimizers)
        self._name()
        self.watch.before_step.append(self._before_step)
        self.watch.after_step.insert(0, self._after_step)
        self.watch.before_backward.append(self._before_backward)
        self.watch.after_backward.append(self._after_backward)
        self._exact.start()
        if self._saved:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
            self._calls.start()
        self.__enter__()
        self._entered = True
        self.cut()

    def cut(self) -> None:
        """Here an iteration ends and the next begins."""
        self.look()
        self.cuts.append(len(self.ops))
        self._packed = self._unpacked = 0
        if self._statistics:
            statistics = torch.cuda.memory_stats()
            away = self._away
            self.allocated.append(statistics["allocated_bytes.all.current"] + away)
            if len(self.cuts) > 1:
                self.peaks.append(max(self._peak, statistics["allocated_bytes.all.peak"] + away))
            self._peak = 0
        self._name()

    def uncut(self) -> None:
        """What came after the last cut is forgotten; :meth:`stop` makes that again."""
        del self.ops[self.cuts.pop() :]
        if self._statistics:
            self.allocated.pop()
            self._peak = self.peaks.pop() if self.peaks else 0

    def look(self) -> None:
        """First what only the recording holds is let go, then counted as dead."""
        self._loneliness(len(self.ops))
        self.storages.bury(len(self.ops))

    def stop(self) -> None:
        """Ends. Nothing is left behind in PyTorch."""
        if not self._entered:
            return
        self._entered = False
        self.cut()
        self.__exit__(None, None, None)
        self._let_go()

    def is_on_top(self) -> bool:
        """Whether the mode can be left now: the script has entered none since that it has not
        left.
        """
        return not self._entered or _get_current_dispatch_mode() is self

    def give_up(self) -> None:
        """After a failure: ends where nothing is to be known any more."""
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)
            self._let_go()

    def _let_go(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None
            self._calls.stop()
            self.calls = self._calls.all
        self.watch.before_step.remove(self._before_step)
        self.watch.after_step.remove(self._after_step)
        self.watch.before_backward.remove(self._before_backward)
        self.watch.after_backward.remove(self._after_backward)
        self._exact.stop()
        self._anchors.clear()

    def _name(self) -> None:
        """Roles and names of what lives across iterations; new optimizer states get theirs at the
        next cut.
        """
        optimizers = list(self.optimizers)
        for reference in self.watch.optimizers:
            known = reference()
            if known is not None and not any(known is other for other in optimizers):
                optimizers.append(known)
        self.optimizers = optimizers
        for role, name, tensor in named_tensors(self.watch, optimizers):
            for plain in plain_tensors(tensor):
                storage = self.storages.intern(plain, len(self.ops))
                if storage is None:
                    continue
                if role == "gradient":
                    if storage.role == "activation":
                        storage.role, storage.name = role, storage.name or name
                    continue
                if not storage.name or storage.role in ("activation", "gradient"):
                    storage.role, storage.name = role, name
                storage.persistent = True

    # -- steps

    def _before_step(self, optimizer: Optimizer) -> None:
        gradients: dict[Storage, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                for plain in plain_tensors(parameter.grad):
                    storage = self.storages.intern(plain, len(self.ops))
                    if storage is not None:
                        gradients.setdefault(storage, []).append(parameter)
        self._name()
        self.gradients.append(gradients)
        self._step_began = len(self.ops)

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._step_began is not None:
            self.steps.append((self._step_began, len(self.ops), optimizer))
            self._step_began = None
            self._name()

    def _before_backward(self) -> None:
        self._backward_began = self._packed, len(self.ops)
        named = named_tensors(self.watch, self.optimizers)
        self.parameters = {self.storages.find(t) for role, _, t in named if role == "parameter"}

    def _after_backward(self) -> None:
        packed, first = self._backward_began
        self.backwards.append((len(self.cuts) - 1, packed, first, len(self.ops)))

    # -- calls and saved tensors

    def _now(self) -> tuple[int, int, int]:
        return len(self.ops), self._packed, len(self.cuts) - 1

    def forbid(self, why: str) -> None:
        """The calls of modules that go on just now can't be run again."""
        self._calls.forbid(why)

    def _called(self, call: Call) -> None:
        def known(tensor: torch.Tensor) -> Storage | None:
            if is_subclass(tensor):
                return None
            return self.storages.intern(tensor, len(self.ops))

        call.storages = [known(tensor) for tensor in call.inputs]
        call.views = [view_of(tensor) for tensor in call.inputs]
        call.norm_storages = [known(tensor) for tensor in call.norms]

    @entry(lambda self, tensor: (None, tensor.detach()))
    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._exact.busy:
            return None, tensor
        now = len(self.ops)
        self._loneliness(now)
        storage = None
        if not is_subclass(tensor):
            storage = self.storages.intern(tensor, now)
        saved = Saved(
            place=self._packed,
            storage=storage,
            packed=now - 1,
            view=(tensor.dtype, tuple(tensor.shape), strides(tensor), offset(tensor)),
            node=node_name(tensor),
            module=self.watch.module,
            iteration=len(self.cuts) - 1,
            order=self._unpacked,
            subclass=is_subclass(tensor),
        )
        made = recipe(tensor, self._unpack)
        if made is not None:
            saved.recipe = made.node, [one for one, _ in made.inputs]
        self._packed += 1
        self.packs.append(saved)
        spills = self._spill if storage is not None and not storage.persistent else None
        spilled = None if spills is None else spills.pack(tensor)
        kept = None if spilled is not None else tensor.detach()
        # The latter comes by the dispatch mode, so before it is counted.
        if storage is not None and not storage.persistent:
            storage.saved.append(saved)
            if spilled is None and storage not in self._anchors:
                self._anchors[storage] = tensor.untyped_storage()
        return saved, spilled or kept

    @entry(lambda self, packed: self._value(packed[1]))
    def _unpack(self, packed: Any) -> torch.Tensor:
        saved: Saved | None = packed[0]
        tensor = self._value(packed[1])
        if self._exact.busy or saved is None:
            return tensor
        saved.asked.append((len(self.ops), self._unpacked))
        self._unpacked += 1
        return tensor

    def _value(self, kept: torch.Tensor | Holder | Handle) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        return fetched(kept) if self._spill is None else self._spill.value(kept)

    def _loneliness(self, now: int) -> None:
        """Notes which saved storages nothing but autograd holds before operator ``now``: when it
        starts, or when a tensor is saved.
        """
        gone = []
        for storage, anchor in self._anchors.items():
            count = torch._C._storage_Use_Count(anchor._cdata)
            held = len(storage.saved)
            if count <= 1:
                gone.append(storage)
            elif count <= 1 + held and storage.alone is None:
                storage.alone, storage.alone_from = now, self._packed
        for storage in gone:
            del self._anchors[storage]
        if self._spill is not None:
            self._spill.look()

    # -- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            # Shapes being worked out, as DTensor does: nothing is computed.
            return func(*args, **kwargs)
        if any(is_subclass_type(kind) for kind in types):
            return NotImplemented
        begun = self._operator_begins(args, kwargs)
        out = func(*args, **kwargs)
        if begun is not None:
            self._operator_ended(func, args, kwargs, begun, out)
        return out

    @entry()
    def _operator_begins(
        self, args: Any, kwargs: Any
    ) -> tuple[list[torch.Tensor], set[int], int] | None:
        """The tensors of the device among the arguments, their storages, and what is allocated;
        nothing for an operator of another device.
        """
        flat = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        flat = [x for x in flat if x.device.type == self.device]
        made_on = kwargs.get("device")
        elsewhere = made_on is None or torch.device(made_on).type != self.device
        if not flat and elsewhere and self.device != "cpu":
            return None
        self.look()
        known = {s._cdata for s in map(storage_of, flat) if s is not None}
        return flat, known, self._begin()

    @entry()
    def _operator_ended(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        begun: tuple[list[torch.Tensor], set[int], int],
        out: Any,
    ) -> None:
        flat, known, before = begun
        after = self._end(before)
        try:
            self._note(func, args, kwargs, flat, known, out, after)
        except Exception as error:  # A recording that fails must not fail the script.
            if len(self.problems) < 20:
                self.problems.append(f"{func}: {type(error).__name__}: {error}")

    @property
    def _away(self) -> int:
        """Bytes that are on the host for now."""
        return 0 if self._spill is None else self._spill.away

    def _begin(self) -> int:
        if not self._statistics:
            return 0
        current, peak = statistics(*GIVEN_OUT)
        self._peak = max(self._peak, peak + self._away)
        torch.cuda.reset_peak_memory_stats()
        return current + self._away

    def _end(self, before: int) -> tuple[int, int, int] | None:
        if not self._statistics:
            return None
        current, peak = statistics(*GIVEN_OUT)
        return before, current + self._away, peak + self._away

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        flat: list[torch.Tensor],
        known: set[int],
        out: Any,
        allocated: tuple[int, int, int] | None,
    ) -> None:
        index = len(self.ops)
        schema = func._schema
        name = schema.name
        results = tree_flatten(out)[0]
        returned = [x for x in results if isinstance(x, torch.Tensor)]
        fresh = [
            x
            for x in returned
            if x.device.type == self.device
            and (s := storage_of(x)) is not None
            and s._cdata not in known
        ]
        written = self._written(func, schema, name, args, kwargs)
        on_device = [x for x in returned if x.device.type == self.device]
        if name in _NO_WORK or (not fresh and not written and (on_device or not flat)):
            return  # A view, or nothing of this device.
        makes = unique(self.storages.intern(x, index, born=index) for x in fresh)
        op_args = [self._encode(value, kind) for value, kind in arguments(schema, args, kwargs)]
        # After `set_` an argument has the storage that the operator gave it.
        op_args = [None if isinstance(a, Operand) and a.storage in makes else a for a in op_args]
        reads = unique(self.storages.intern(x, index) for x in flat)
        reads = [s for s in reads if s not in makes]
        writes = [
            s for s in unique(self.storages.intern(x, index) for x in written) if s not in makes
        ]
        # Each at its place: a gradient that is not wanted leaves its place empty.
        outputs: list[Operand | None] = []
        for x in results:
            on = isinstance(x, torch.Tensor) and x.device.type == self.device
            storage = self.storages.find(x) if on else None
            if storage is not None and (storage in makes or storage in writes):
                outputs.append(self._operand(x, storage))
            else:
                outputs.append(None)
        while outputs and outputs[-1] is None:
            outputs.pop()
        shown = {o.storage for o in outputs if o is not None}
        hidden = []
        for x in written:
            storage = self.storages.find(x)
            if storage is not None and storage in writes and storage not in shown:
                shown.add(storage)
                hidden.append(self._operand(x, storage))
        if not reads and not makes:
            return
        for storage in unique([*reads, *makes, *writes]):
            storage.uses.append(index)
        phase, module, node = self._where()
        self.ops.append(
            Op(
                index=index,
                kind=name,
                phase=phase,
                module=module,
                args=op_args,
                outputs=outputs,
                hidden=hidden,
                reads=reads,
                writes=writes,
                makes=makes,
                lists=self._lists(args, kwargs),
                random=torch.Tag.nondeterministic_seeded in func.tags,
                generator=has_generator(args, kwargs),
                node=node,
                iteration=len(self.cuts) - 1,
                step=len(self.steps) if self._step_began is not None else None,
                allocated=allocated,
            )
        )

    def _where(self) -> tuple[str, str, int | None]:
        """Phase, module path, and the number of the autograd function that runs or was made."""
        node = torch._C._current_autograd_node()
        phase = self.watch.phase
        if node is not None:
            number = node._sequence_nr()
            return phase, self.watch.module or self._nodes.get(number, ""), number
        module = self.watch.module
        if phase != BACKWARD and torch.is_grad_enabled():
            self._nodes[torch.autograd._get_sequence_nr() - 1] = module
        return phase, module, None

    def _written(
        self, func: Any, schema: Any, name: str, args: Any, kwargs: Any
    ) -> list[torch.Tensor]:
        if torch.Tag.inplace_view in func.tags:
            return []
        found: list[Any] = []
        positional = len(args)
        for place, argument in enumerate(schema.arguments):
            value = args[place] if place < positional else kwargs.get(argument.name)
            if (argument.alias_info is not None and argument.alias_info.is_write) or (
                name.startswith("c10d::")
                and name.endswith("_")
                and isinstance(value, (list, torch.Tensor))
            ):
                found.append(value)
        places, flag = _HIDDEN_WRITES.get(name, ((), None))
        if places and (flag is None or args[flag]):
            found += [args[place] for place in places if place < positional]
        flat = [x for x in tree_flatten(found)[0] if isinstance(x, torch.Tensor)]
        return [x for x in flat if x.device.type == self.device and x.numel()]

    def _lists(self, args: Any, kwargs: Any) -> list[list[Storage | None]]:
        lists = []
        for value in [*args, *kwargs.values()]:
            if (
                isinstance(value, (list, tuple))
                and value
                and all(isinstance(x, torch.Tensor) for x in value)
            ):
                lists.append(
                    [self.storages.find(x) if x.device.type == self.device else None for x in value]
                )
        return lists

    def _operand(self, tensor: torch.Tensor, storage: Storage) -> Operand:
        return Operand(
            storage=storage,
            dtype=dtype_name(tensor.dtype),
            offset=int(tensor.storage_offset()),
            shape=list(tensor.shape),
            stride=list(tensor.stride()),
        )

    def _encode(self, value: Any, kind: str) -> Any:
        """An argument as the graph format has it, operands as :class:`Operand`."""
        if isinstance(value, torch.Tensor):
            if value.device.type == self.device:
                storage = self.storages.intern(value, len(self.ops))
                return None if storage is None else self._operand(value, storage)
            return host(value)
        if isinstance(value, (list, tuple)):
            if "Tensor" in kind:
                items = [self._encode(x, "Tensor") for x in value]
                items = [x if isinstance(x, Operand) else None for x in items]
                return items if items else {"tensors": []}
            items = [self._encode(x, "") for x in value]
            if not items and ("float" in kind or "number" in kind):
                return {"floats": []}
            if not items and "bool" in kind:
                return {"bools": []}
            if any(x is None or isinstance(x, (str, dict)) for x in items):
                return str(value)
            return items
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, torch.dtype):
            return SCALAR_TYPES.get(value, str(value))
        if isinstance(value, torch.layout):
            return _LAYOUTS.get(value, str(value))
        if isinstance(value, torch.memory_format):
            return _FORMATS.get(value, str(value))
        if isinstance(value, float):
            if value != value:
                return {"float": "nan"}
            if value in (float("inf"), float("-inf")):
                return {"float": "inf" if value > 0 else "-inf"}
            return value
        if isinstance(value, int) or type(value).__name__ in ("SymInt", "SymFloat", "SymBool"):
            number = int(value)
            return number if -(1 << 63) <= number < 1 << 63 else float(number)
        # Printing anything else, such as a storage, may take for ever.
        return str(value) if isinstance(value, torch.device) else type(value).__name__
