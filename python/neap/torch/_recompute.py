"""Runs planned calls of modules again in backward, under PyTorch's own checkpoint.

``torch.utils.checkpoint`` (non-reentrant) restores random numbers and autocast and runs the forward
a second time when backward first asks for something that it saved. Added here: which calls (by the
schedule), the running statistics of batch norms, which must move once only, Python's and NumPy's
random numbers, PyTorch's error for saved tensors that were changed in place, and a comparison of
everything that comes back, bit for bit, the first time that a call is run again.

The forward of a module is replaced on its class: instances stay as they are, so that copies and
checkpoints of a model hold nothing of this.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from neap.torch._calls import updating_norms, view_of
from neap.torch._clock import aside
from neap.torch._guard import Guard, entry, meant
from neap.torch._schedule import Again, Schedule
from neap.torch._settings import State
from neap.torch._storage import start_of
from neap.torch._versions import changed, witness
from neap.torch._wanted import serves

if TYPE_CHECKING:
    from neap.torch._runtime import Runtime

_FORWARDS: dict[type, Any] = {}
"""Classes whose forward is replaced, with what their own ``__dict__`` had, or nothing."""
_ACTIVE: list[Recompute] = []
_LOCAL = threading.local()


def possible() -> bool:
    """Whether this PyTorch shows the hooks of its checkpoint; 2.6 does not."""
    return hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


class Recompute:
    """The calls that run again, for one schedule at a time.

    Args:
        runtime: numbers the saved tensors and knows whether the iteration is as planned.
        find: the module of a path.
    """

    def __init__(self, runtime: Runtime, find: Callable[[str], torch.nn.Module | None]) -> None:
        self.runtime = runtime
        self.ran = 0
        """Calls that were run again."""
        self.ran_ns = 0
        self.deaths = 0
        """Storages that were gone between forward and backward."""
        self.compared = 0
        """Saved tensors that were compared with what came back."""
        self.differing: dict[tuple[str, int], str] = {}
        """Calls that did not give the same again, with what differed."""
        self._find = find
        self._planned: dict[int, dict[int, Again]] = {}
        self._modules: list[torch.nn.Module] = []
        self._open: list[Again] = []
        self._counts: dict[int, int] = {}
        self.verified: set[tuple[str, int]] = set()
        """Calls that were compared."""
        self.compare = True
        """Whether to compare; no use on a device that computes nothing."""
        self.entering: Entering | None = None
        """The call whose inputs PyTorch's checkpoint is saving just now."""

    def follow(self, schedule: Schedule | None) -> None:
        """From the next iteration on runs the calls of ``schedule`` again."""
        self.stop()
        self._open = list(schedule.again) if schedule is not None and possible() else []
        self.resolve()

    def resolve(self) -> None:
        """Finds the modules of calls whose module was not known yet."""
        missing = []
        for again in self._open:
            module = self._find(again.module)
            if module is None:
                missing.append(again)
                continue
            if id(module) not in self._planned:
                self._modules.append(module)
                _replace(type(module))
            self._planned.setdefault(id(module), {})[again.number] = again
        self._open = missing
        if self._planned and self not in _ACTIVE:
            _ACTIVE.append(self)

    @property
    def resolved(self) -> bool:
        """Whether the modules of all calls are known."""
        return not self._open

    def stop(self) -> None:
        """Puts every class back as it was."""
        if self in _ACTIVE:
            _ACTIVE.remove(self)
        self._planned, self._modules, self._open = {}, [], []
        if not _ACTIVE:
            _restore()

    def begin(self) -> None:
        """An iteration begins."""
        self._counts = {}
        self.entering = None

    @property
    def guard(self) -> Guard:
        """The runtime's."""
        return self.runtime.guard

    @entry()
    def wanted(self, module: torch.nn.Module) -> Again | None:
        """What the schedule says of this call of ``module``, which is counted."""
        calls = self._planned.get(id(module))
        # In backward a module runs only because the script itself recomputes.
        if (
            calls is None
            or not torch.is_grad_enabled()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._current_autograd_node() is not None
        ):
            return None
        number = self._counts.get(id(module), 0)
        self._counts[id(module)] = number + 1
        runtime = self.runtime
        if runtime.schedule is None or runtime.diverged is not None:
            return None
        again = calls.get(number)
        if again is not None and runtime.count != again.first_pack:
            runtime.diverge(
                f"{again.module} ran after {runtime.count} saved tensors instead of "
                f"{again.first_pack}"
            )
            return None
        return again

    def run(
        self,
        again: Again,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Calls ``forward`` so that what it saves is made anew in backward."""
        ready = self._ready(again, module, forward, args, kwargs)
        if ready is None:
            return forward(module, *args, **kwargs)
        call, flat, tensors = ready
        del ready, args, kwargs
        try:
            return checkpoint(
                flat,
                *tensors,
                use_reentrant=False,
                context_fn=lambda: (call.forward(), _EachTime(call.again)),
            )
        finally:
            self.entering = None
            call.ended()

    @entry()
    def _ready(
        self,
        again: Again,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> tuple[_Run, Callable[..., Any], list[torch.Tensor]] | None:
        """The call, as a function of the tensors among its arguments; nothing if it is not as
        planned.
        """
        leaves, spec = tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[n] for n in places]
        varies = self.runtime.schedule is not None and self.runtime.schedule.varies
        for given, (view, _) in zip(tensors, again.inputs):
            if view is not None and not serves(view, view_of(given), varies):
                self.runtime.diverge(
                    f"{again.module} was called with {tuple(given.shape)} instead of {view[1]}"
                )
                break
        if len(tensors) != len(again.inputs):
            self.runtime.diverge(f"{again.module} was called with other arguments")
        if self.runtime.diverged is not None:
            return None
        rest = [None if n in set(places) else leaf for n, leaf in enumerate(leaves)]
        # A forward may ask whether two arguments are the same tensor.
        which = list(dict.fromkeys(map(id, tensors)))
        first = [list(map(id, tensors)).index(one) for one in which]
        same = [which.index(id(tensor)) for tensor in tensors]
        tensors = [tensors[n] for n in first]
        owners = {start_of(tensors[at]): again.inputs[n][1] for at, n in enumerate(first)}

        def flat(*given: torch.Tensor) -> Any:
            filled = list(rest)
            for n, one in zip(places, same):
                filled[n] = given[one]
            own, named = tree_unflatten(filled, spec)
            return forward(module, *own, **named)

        call = _Run(self, again, module)
        self.entering = Entering(owners)
        return call, flat, tensors


class Entering:
    """The inputs of a call, while PyTorch's checkpoint saves them. Older PyTorch saves an
    empty tensor of its own besides.

    Args:
        owners: by the address at which an input's storage begins the activation that it belongs to.
    """

    def __init__(self, owners: dict[int | None, int | None]) -> None:
        self._owners = owners

    def owner(self, tensor: torch.Tensor) -> int | None:
        """The activation that an input belongs to."""
        return self._owners.get(start_of(tensor))


class _EachTime:
    """A context that is made anew each time that it is entered: PyTorch's checkpoint enters the one
    of the second forward for each backward over the same graph.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class _Saved:
    """What autograd keeps in place of a tensor that a call saved and that will be made anew."""

    __slots__ = ("inner", "number", "original", "shape", "stays", "stride", "version", "witness")

    def __init__(self, number: int, inner: Any, witness: torch.Tensor, shape: torch.Size) -> None:
        self.number = number
        self.inner = inner
        self.witness = witness
        self.version = witness._version
        self.shape = shape
        self.stays: Any = None
        self.original: torch.Tensor | None = None
        """A copy on the host, where what comes back is to be compared. That of a slice is dense."""
        self.stride: tuple[int, ...] = ()
        """How the original lies in memory then."""


class _Run:
    """One call, from its forward to its backward."""

    def __init__(self, owner: Recompute, again: Again, module: torch.nn.Module) -> None:
        self.owner = owner
        self.description = again
        self.module = module
        self.stays = set(again.stays)
        self.verify = owner.compare and again.key not in owner.verified
        self.mortal: list[StorageWeakRef] = []
        self.counted = False
        self.randoms: tuple[Any, Any] = (None, None)
        self.state = State(module)

    @property
    def guard(self) -> Guard:
        """The runtime's."""
        return self.owner.runtime.guard

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward, inside PyTorch's own hooks, which these call."""
        self.owner.entering = None
        self.randoms = _randoms()
        inner = torch._C._autograd._top_saved_tensors_default_hooks(True)
        with torch.autograd.graph.saved_tensors_hooks(
            functools.partial(self._pack, inner[0]), functools.partial(self._unpack, inner[1])
        ):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the second forward."""
        self._begins_again()
        try:
            with aside(), self.state.restored(), self._alone():
                yield
        finally:
            self._ended_again()

    @entry()
    def ended(self) -> None:
        """The first forward has ended."""
        self.state.look()
        runtime, again = self.owner.runtime, self.description
        if runtime.diverged is None and runtime.count != again.after_pack:
            runtime.diverge(
                f"{again.module} saved {runtime.count - again.first_pack} tensors "
                f"instead of {again.after_pack - again.first_pack}"
            )

    @entry()
    def _begins_again(self) -> None:
        self.state.prove(self.description.module)
        runtime = self.owner.runtime
        if runtime.timeline is not None:
            runtime.timeline.enter(f"again: {self.description.module}")
        runtime.loans.ensure(self.module.parameters())

    @entry()
    def _ended_again(self) -> None:
        timeline = self.owner.runtime.timeline
        if timeline is not None:
            timeline.leave(f"again: {self.description.module}")
        self.owner.ran += 1
        self.owner.ran_ns += self.description.nanoseconds

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """What the second forward does to random numbers and running statistics is undone."""
        now = _randoms()
        _LOCAL.within = getattr(_LOCAL, "within", 0) + 1
        changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for norm in updating_norms(self.module):
                changed.append((norm._buffers, dict(norm._buffers)))
                with torch.no_grad():
                    for name, buffer in list(norm._buffers.items()):
                        norm._buffers[name] = None if buffer is None else buffer.clone()
            _set_randoms(self.randoms)
            yield
        finally:
            for buffers, before in changed:
                buffers.update(before)
            _set_randoms(now)
            _LOCAL.within -= 1

    def _pack(self, inner: Callable[[Any], Any], tensor: torch.Tensor) -> _Saved:
        return self._saved(inner(tensor), tensor)

    @entry(lambda self, inner, tensor: _Saved(-1, inner, witness(tensor), tensor.shape))
    def _saved(self, inner: Any, tensor: torch.Tensor) -> _Saved:
        """What autograd keeps of a tensor, given what PyTorch's checkpoint keeps."""
        runtime = self.owner.runtime
        number = runtime.counted(tensor)
        saved = _Saved(number, inner, witness(tensor), tensor.shape)
        if number in self.stays:
            saved.stays = runtime.stays(number, tensor)
        elif self.verify:
            saved.original, saved.stride = tensor.detach().to("cpu", copy=True), tensor.stride()
        if saved.stays is None and tensor.layout == torch.strided:
            self.mortal.append(StorageWeakRef(tensor.untyped_storage()))
        runtime.packed(number)
        return saved

    def _unpack(self, inner: Callable[[Any], torch.Tensor], saved: _Saved) -> torch.Tensor:
        if saved.witness._version != saved.version:
            raise meant(RuntimeError(changed(saved.witness, saved.version, list(saved.shape))))
        self._asked_for(saved)
        if saved.stays is not None:
            return self.owner.runtime.unpack_of(saved.stays)
        if saved.original is None:
            return inner(saved.inner)
        return self._compared(inner, saved, saved.original)

    @entry()
    def _asked_for(self, saved: _Saved) -> None:
        self.owner.runtime.unpacked(saved.number)
        if saved.stays is None and not self.counted:
            self.counted = True
            self.owner.deaths += sum(reference.expired() for reference in set(self.mortal))
            self.mortal = []

    def _compared(
        self, inner: Callable[[Any], torch.Tensor], saved: _Saved, original: torch.Tensor
    ) -> torch.Tensor:
        """What came back if it is the same bit for bit, else the original."""
        self.owner.compared += 1
        self.owner.verified.add(self.description.key)
        try:
            found = inner(saved.inner)
        except torch.utils.checkpoint.CheckpointError as error:
            why = str(error).splitlines()[0]
            device = saved.witness.device
        else:
            if self._is_same(found, saved, original):
                return found
            why = f"saved tensor {saved.number} of {tuple(original.shape)} came back different"
            device = found.device
        self.owner.differing.setdefault(self.description.key, why)
        return original.to(device)

    @entry()
    def _is_same(self, found: torch.Tensor, saved: _Saved, original: torch.Tensor) -> bool:
        return found.stride() == saved.stride and same_bits(found, original)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits, whatever these mean."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8)

    return torch.equal(bits(one), bits(other))


def _randoms() -> tuple[Any, Any]:
    """Python's and NumPy's random states; NumPy's only where something imported it."""
    numpy = sys.modules.get("numpy")
    found = getattr(getattr(numpy, "random", None), "get_state", None)
    return random.getstate(), None if found is None else found()


def _set_randoms(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def again_within() -> bool:
    """Whether a call is being run again in this thread."""
    return bool(getattr(_LOCAL, "within", 0))


def _replace(kind: type[torch.nn.Module]) -> None:
    if kind in _FORWARDS:
        return
    _FORWARDS[kind] = kind.__dict__.get("forward")
    # A base class may have been replaced before.
    plain = getattr(kind.forward, "_neap_plain", kind.forward)

    @functools.wraps(plain)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(self) is kind and not torch.compiler.is_compiling() and not again_within():
            for active in _ACTIVE:
                again = active.wanted(self)
                if again is not None:
                    return active.run(again, self, plain, args, kwargs)
        return plain(self, *args, **kwargs)

    forward._neap_plain = plain  # type: ignore[attr-defined]
    kind.forward = forward  # type: ignore[method-assign]


def _restore() -> None:
    for kind, own in _FORWARDS.items():
        if own is None:
            del kind.forward  # type: ignore[attr-defined]
        else:
            kind.forward = own  # type: ignore[attr-defined]
    _FORWARDS.clear()
