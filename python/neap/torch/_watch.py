"""Where a training script is: which module runs, which phase of the iteration, when an optimizer
steps.

PyTorch's global hooks tell, so that a script needs no change. Nothing here touches a tensor.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from neap.torch._guard import ALONE, Guard, entry
from neap.torch._quiet import quiet

FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZE = "optimize"

StepCallback = Callable[[Optimizer], None]


@functools.cache
def _pause_at_exit() -> None:
    """Lets gloo's threads free their last tensors before the interpreter ends.

    A tensor that was watched has a Python object, so freeing it takes the interpreter's lock;
    PyTorch aborts the process when a thread asks for the lock after the interpreter has ended.
    """
    atexit.register(time.sleep, 0.05)


class _Inside:
    """The modules whose forward runs in a thread, outermost first, and their paths."""

    __slots__ = ("modules", "paths")

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []
        self.paths: list[str] = []


class Watch:
    """Follows a script by global hooks between :meth:`install` and :meth:`remove`.

    Attributes:
        at_step: called with the optimizer when a step is entered, ahead of all its own hooks.
        before_piece: called with the number of a piece, from 1 on, before a step in pieces brings
            the states that come next.
        before_step, after_step: called with the optimizer around each of its steps; where the step
            calls a closure for the loss, after the first such call.
        around_backward: entered around each call of backward, with the tensors it begins at.
        enter_module, leave_module: called with the module and its path.
        enter_root: called with the path of a module that is called from outside any other, and its
            arguments.
        roots: the modules that were called from outside any other module, by name.
    """

    def __init__(self, guard: Guard = ALONE) -> None:
        self.guard = guard
        self.at_step: list[StepCallback] = []
        self.before_piece: list[Callable[[int], None]] = []
        self.before_step: list[StepCallback] = []
        self.after_step: list[StepCallback] = []
        self.enter_module: list[Callable[[torch.nn.Module, str], None]] = []
        self.leave_module: list[Callable[[torch.nn.Module, str], None]] = []
        self.enter_root: list[Callable[[str, Any, Any], None]] = []
        self.before_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self.backward_over: list[Callable[[], None]] = []
        """Called after those of :attr:`after_backward`."""
        self.around_backward: Callable[[Sequence[Any]], AbstractContextManager[None]] | None = None
        self.named: list[Callable[[], None]] = []
        """Called when modules have got paths."""
        self.roots: dict[str, weakref.ref[torch.nn.Module]] = {}
        self.optimizers: list[weakref.ref[Optimizer]] = []
        self.stepping: Optimizer | None = None
        self.within_step = False
        """Whether a step's hooks may be running: none may be taken away then."""
        self.backward_depth = 0
        self.backwards = 0
        """How many runs of backward there were since an optimizer stepped last."""
        self.closures = False
        """Whether a step was given a closure."""
        self._unnamed = ""
        """What the root is called whose path is empty."""
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._main = _Inside()
        self._others: dict[int, _Inside] = {}
        """The same of threads other than the main one, while any module runs there."""
        self._main_thread = threading.main_thread().ident
        self._handles: list[Any] = []
        self._engine: Any = None
        self._plain_call: Any = None
        """``Module.__call__`` as it was."""
        self._call: Any = None
        """What stands in its place, once the hooks are there."""
        self._modules = False
        """Whether that tells of modules; else it only passes on."""
        self._thread = 0
        """The thread that is followed; in others, backward may overlap its own."""

    # -- installing

    def install(self) -> None:
        """Registers the hooks; does nothing when they are there already."""
        if self._handles:
            return
        if torch.distributed.is_available():
            _pause_at_exit()
        self._handles = [
            register_optimizer_step_pre_hook(quiet(self._before_step)),
            register_optimizer_step_post_hook(quiet(self._after_step)),
        ]
        self._thread = threading.get_ident()
        self._engine = torch.autograd._engine_run_backward
        torch.autograd._engine_run_backward = self._run_backward
        self.notice_modules()

    def remove(self) -> None:
        """Takes the hooks away again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        # Another tool may have wrapped ours in the meantime; then ours stays beneath it and only
        # passes on.
        if torch.autograd._engine_run_backward == self._run_backward:
            torch.autograd._engine_run_backward = self._engine
        self._leave_modules()

    def ignore_modules(self) -> None:
        """From now on modules call nothing here: each call would cost the host some microseconds.
        Modules that are not named by then stay without a path.
        """
        if not (self.enter_module or self.leave_module):
            self._leave_modules()

    def notice_modules(self) -> None:
        """Ends :meth:`ignore_modules`."""
        self._modules = True
        if torch.nn.Module.__call__ is self._call:
            return
        # PyTorch's global hooks would have each call of a module make closures, which the
        # collector counts.
        plain = self._plain_call = torch.nn.Module.__call__
        enter, leave = quiet(self._enter), quiet(self._leave)
        is_compiling = torch.compiler.is_compiling

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._modules:
                return plain(module, *args, **kwargs)
            enter(module, args, kwargs)
            try:
                return plain(module, *args, **kwargs)
            finally:
                leave(module)

        self._call = torch.nn.Module.__call__ = call  # type: ignore[method-assign, assignment]

    def _leave_modules(self) -> None:
        self._modules = False
        if torch.nn.Module.__call__ is self._call:
            torch.nn.Module.__call__ = self._plain_call  # type: ignore[method-assign]

    @contextmanager
    def installed(self) -> Iterator[Watch]:
        """Installs for a ``with`` block."""
        self.install()
        try:
            yield self
        finally:
            self.remove()

    # -- what is known

    @property
    def module(self) -> str:
        """The path of the innermost module whose forward runs in this thread, or an empty
        string.
        """
        inside = self._inside()
        return inside.paths[-1] if inside is not None and inside.paths else ""

    @property
    def depth(self) -> int:
        """How many modules' forwards run in this thread, one inside the other."""
        inside = self._inside()
        return len(inside.modules) if inside is not None else 0

    @property
    def phase(self) -> str:
        """Forward, backward or optimize, by what runs now."""
        if self.stepping is not None:
            return OPTIMIZE
        if self.backward_depth or torch._C._current_autograd_node() is not None:
            return BACKWARD
        return FORWARD

    def name_root(self, module: torch.nn.Module, name: str = "") -> None:
        """Names a module and all below it, before or instead of the first call."""
        if name in self.roots and self.roots[name]() is module:
            return
        for gone in [known for known, reference in self.roots.items() if reference() is None]:
            del self.roots[gone]
        taken = {*self.roots, self._unnamed}
        if name in taken and (name or self.roots):
            name = unused(name or type(module).__name__, taken)
        if not name:  # Parts of it have paths without a name in front, and must not have its own.
            parts = (child for child, _ in module.named_children())
            self._unnamed = unused(type(module).__name__, {*self.roots, *parts})
        self.roots[name] = weakref.ref(module)
        for path, child in module.named_modules():
            self._paths.setdefault(child, ".".join(part for part in (name, path) if part))
        for call in [*self.named]:
            call()

    def path_of(self, module: torch.nn.Module) -> str | None:
        """The path of a module that is known."""
        return self._paths.get(module)

    def name_of(self, module: torch.nn.Module) -> str:
        """The path of a module, by which :meth:`module_of` finds it; a name of its own for a root
        whose path is empty.
        """
        path = self._paths.get(module)
        if path == "":
            return self._unnamed
        return type(module).__name__ if path is None else path

    def module_of(self, path: str) -> torch.nn.Module | None:
        """The module of a path or name that is known."""
        if path and path == self._unnamed:
            unnamed = self.roots.get("")
            return None if unnamed is None else unnamed()
        for name, reference in self.roots.items():
            root = reference()
            if root is None or not f"{path}.".startswith(f"{name}." if name else ""):
                continue
            rest = path[len(name) :].lstrip(".") if name else path
            try:
                found = root.get_submodule(rest)
            except AttributeError:
                continue
            if self._paths.get(found) == path:
                return found
        return None

    # -- hooks

    def _inside(self) -> _Inside | None:
        thread = threading.get_ident()
        return self._main if thread == self._main_thread else self._others.get(thread)

    @entry(ends=True)
    def _enter(self, module: torch.nn.Module, args: Any = (), kwargs: Any = None) -> None:
        inside = self._inside()
        if inside is None:
            inside = self._others[threading.get_ident()] = _Inside()
        if not inside.modules and torch.is_grad_enabled():
            self.stepping = None  # A step that raised an exception has no end.
        path = self._paths.get(module)
        if path is None:
            if inside.modules:  # Made on the fly, inside a known one.
                path = f"{inside.paths[-1]}.<{type(module).__name__}>".lstrip(".")
                self._paths[module] = path
            else:
                self.name_root(module)
                path = self._paths[module]
        if not inside.modules:
            for tell in [*self.enter_root]:
                tell(path, args, kwargs or {})
        inside.modules.append(module)
        inside.paths.append(path)
        for call in [*self.enter_module]:
            call(module, path)

    def _left(self, module: torch.nn.Module) -> None:
        """A module has ended that was entered before something failed."""
        inside = self._inside()
        while inside is not None and any(one is module for one in inside.modules):
            inside.modules.pop()
            inside.paths.pop()

    @entry(_left)
    def _leave(self, module: torch.nn.Module) -> None:
        inside = self._inside()
        # An exception may have skipped inner ones.
        while inside is not None and inside.modules:
            found, path = inside.modules.pop(), inside.paths.pop()
            for call in [*self.leave_module]:
                call(found, path)
            if found is module:
                break
        if inside is not self._main and inside is not None and not inside.modules:
            del self._others[threading.get_ident()]

    @entry()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self.within_step = True
        if not any(known() is optimizer for known in self.optimizers):
            self.optimizers.append(weakref.ref(optimizer))
        for call in [*self.at_step]:
            call(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None or not callable(closure):
            self._begin_step(optimizer)
            return None
        # Forward and backward run inside the step, which begins where they end.
        self.closures = True
        outside = self._outside(optimizer, closure)
        if len(args) > 1:
            return (args[0], outside, *args[2:]), kwargs
        return args, {**kwargs, "closure": outside}

    @entry()
    def _begin_step(self, optimizer: Optimizer) -> None:
        for call in [*self.before_step]:
            call(optimizer)
        self.stepping = optimizer

    def _outside(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        begun = False

        def outside() -> Any:
            nonlocal begun
            self.stepping = None
            found = closure()
            if begun:
                self.stepping = optimizer
            else:
                begun = True
                self._begin_step(optimizer)
            return found

        return outside

    @entry(lambda self, *step: self._step_is_over())
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step_is_over()
        for call in [*self.after_step]:
            call(optimizer)
        self.backwards = 0

    def _step_is_over(self) -> None:
        self.stepping, self.within_step = None, False

    def _run_engine(self, args: Any, kwargs: Any) -> Any:
        around = self.around_backward
        if around is None:
            return self._engine(*args, **kwargs)
        with around(args[0]):
            return self._engine(*args, **kwargs)

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            self.backwards += 1
            return self._run_engine(args, kwargs)
        if self.backward_depth == 0:
            self._enter_backward()
        self.backward_depth += 1
        try:
            return self._run_engine(args, kwargs)
        finally:
            self.backward_depth -= 1
            if self.backward_depth == 0:
                self._leave_backward()

    @quiet
    @entry(ends=True)
    def _enter_backward(self) -> None:
        for call in [*self.before_backward]:
            call()

    @quiet
    @entry(ends=True)
    def _leave_backward(self) -> None:
        self.backwards += 1
        for call in [*self.after_backward, *self.backward_over]:
            call()


class Around:
    """Hooks around one optimizer's steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._handles: list[Any] = []

    def add(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """From now on calls ``before`` and ``after``, as hooks of a step are called."""
        self._handles = [
            self._optimizer.register_step_pre_hook(before),
            self._optimizer.register_step_post_hook(after),
        ]

    def remove(self) -> bool:
        """Takes the hooks away; whether there were any."""
        there = bool(self._handles)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return there

    def move_inside(self) -> None:
        """Of all the optimizer's hooks these run last before a step, and first after it."""
        before, after = self._handles
        first: Any = self._optimizer._optimizer_step_pre_hooks
        last: Any = self._optimizer._optimizer_step_post_hooks
        first.move_to_end(before.id)
        last.move_to_end(after.id, last=False)


def unused(name: str, taken: Any) -> str:
    """``name``, or ``name_2``, ``name_3`` … where that is taken."""
    if name not in taken:
        return name
    number = 2
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def named_tensors(
    watch: Watch, optimizers: list[Optimizer]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """What lives across iterations: role, name and tensor of each parameter, buffer, state and
    gradient.

    Parameters are named as their modules name them; those in no known module by the place in their
    optimizer.
    """
    names: dict[torch.Tensor, str] = {}
    taken: set[str] = set()

    def named(kind: str, prefix: str, path: str, tensor: torch.Tensor) -> str:
        name = unused(".".join(part for part in (prefix, path) if part), taken)
        taken.add(name)
        return name

    for prefix, reference in watch.roots.items():
        module = reference()
        if module is None:
            continue
        for path, parameter in module.named_parameters():
            if parameter not in names:
                names[parameter] = named("parameter", prefix, path, parameter)
                yield "parameter", names[parameter], parameter
        for path, buffer in module.named_buffers():
            if buffer not in names:
                names[buffer] = named("buffer", prefix, path, buffer)
                yield "buffer", names[buffer], buffer
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in names:
                    names[parameter] = named("parameter", "", f"group{number}.{place}", parameter)
                    yield "parameter", names[parameter], parameter
    for owner, name in names.items():
        if owner.grad is not None:
            yield "gradient", f"grad:{name}", owner.grad
    for optimizer in optimizers:
        for owner, states in optimizer.state.items():
            if isinstance(owner, torch.Tensor):
                for key, state in state_tensors(states):
                    yield "optimizer_state", f"{key}:{names.get(owner, 'parameter')}", state


def state_tensors(states: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among what an optimizer keeps for a parameter, lists and dictionaries
    included.
    """
    yield from _tensors("", states)


def _tensors(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from _tensors(f"{prefix}.{place}", inner)
