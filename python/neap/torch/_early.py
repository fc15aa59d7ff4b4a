"""Updates inside backward: each parameter's as soon as its gradient is complete, which is then
freed.

Only where the user allows it: a script that looks at gradients after backward, or does not always
take the step, is another script then. What can be seen of that is refused with a sentence, in the
watched iterations (:func:`why_not`) or when it happens later (an error, because the update can't be
taken back).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._graph import Iteration, Life, Node
from neap.torch._guard import Guard, entry, meant, theirs
from neap.torch._loans import with_others
from neap.torch._recorder import Recorder
from neap.torch._states import divisible
from neap.torch._storage import Storage, blocks
from neap.torch._turns import Turns
from neap.torch._watch import BACKWARD, OPTIMIZE, Watch


class Completions:
    """Notes in a recording when each gradient is complete.

    Attributes:
        at: for each parameter the iterations and numbers of operators when autograd had
            accumulated its gradient.
        changed: whether the optimizer's settings changed between backward and a step.
    """

    def __init__(self, recorder: Recorder, optimizer: Optimizer) -> None:
        self.at: dict[torch.Tensor, list[tuple[int, int]]] = {}
        self.changed = False
        self._recorder = recorder
        self._optimizer = optimizer
        self._settings: list[dict[str, Any]] | None = None
        self._handles = []
        recorder.watch.after_backward.append(self._backward_ended)
        recorder.watch.before_step.append(self._step_begins)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.is_leaf:
                    handle = parameter.register_post_accumulate_grad_hook(self._noted)
                    self._handles.append(handle)

    @property
    def guard(self) -> Guard:
        """The watch's."""
        return self._recorder.watch.guard

    @entry()
    def _noted(self, parameter: torch.Tensor) -> None:
        now = len(self._recorder.cuts) - 1, len(self._recorder.ops)
        self.at.setdefault(parameter, []).append(now)

    def _backward_ended(self) -> None:
        self._settings = settings(self._optimizer)

    def _step_begins(self, optimizer: Optimizer) -> None:
        if optimizer is self._optimizer and self._settings is not None:
            self.changed |= self._settings != settings(optimizer)

    def stop(self) -> None:
        """Takes the hooks away, if they are there."""
        watch = self._recorder.watch
        if self._backward_ended in watch.after_backward:
            watch.after_backward.remove(self._backward_ended)
            watch.before_step.remove(self._step_begins)
        for handle in self._handles:
            handle.remove()
        self._handles = []


def why_not(optimizers: list[Optimizer], watch: Watch) -> str | None:
    """Why updates must stay in the step, as far as it shows without a recording."""
    if len(optimizers) != 1:
        return "there are several optimizers"
    optimizer = optimizers[0]
    if not divisible(optimizer):
        return f"the step of {type(optimizer).__name__} is not known to treat parameters alone"
    if with_others():
        return "other processes take part in the gradients"
    if watch.closures:
        return "the step calls a closure"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has step hooks of the script's own"
    for group in optimizer.param_groups:
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in group["params"]):
            return "gradients have hooks of the script's own"
    return None


def moved(recorder: Recorder, found: Iteration, completions: Completions) -> Iteration | str:
    """The iteration with each update where its gradient is complete, or why that is not sound."""
    which = found.which
    if any("_amp_" in op.kind for op in recorder.ops[found.start : found.end]):
        return "gradients are scaled (GradScaler)"
    updates = [place for place, node in enumerate(found.nodes) if _single(node) is not None]
    gradients = {s for place in updates for s in found.nodes[place].reads if s.role == "gradient"}
    last = max((p for p, n in enumerate(found.nodes) if n.phase == BACKWARD), default=0)
    for place in range(last + 1, len(found.nodes)):
        node = found.nodes[place]
        if node.op is not None and gradients & {*node.reads, *node.writes}:
            return "gradients are read or changed between backward and the step (clipping)"
    if completions.changed:
        return "the optimizer's settings change between backward and the step"
    at: dict[Storage, int] = {}
    for parameter, times in completions.at.items():
        storage = recorder.storages.find(parameter)
        when = [op for iteration, op in times if iteration == which]
        if storage is None or not when:
            continue
        if len(when) > 1:
            return "a gradient is accumulated more than once an iteration"
        at[storage] = found.place.get(when[0], len(found.nodes))
    order, early = _order(found, at)
    if not early:
        return "no update can move"
    if any(s not in found.lives or found.lives[s].born is None for s in gradients):
        return "gradients stay from one iteration to the next"
    if updates and min(updates) <= last:
        return "backward goes on after the step"
    return _rearranged(found, order, early)


def _single(node: Node) -> Storage | None:
    """The parameter of an update of one parameter."""
    if node.op is not None or node.phase != OPTIMIZE or not node.writes:
        return None
    parameters = [s for s in node.writes if s.role == "parameter"]
    return parameters[0] if len(parameters) == 1 else None


def updated(found: Iteration) -> list[str]:
    """The parameters whose updates :func:`moved` put into backward."""
    places = (node for node in found.nodes if node.op is None and node.phase == BACKWARD)
    return [s.name for node in places for s in node.writes if s.role == "parameter"]


def _order(found: Iteration, at: dict[Storage, int]) -> tuple[list[int], set[int]]:
    """Old places in their new order, and which of them are updates that moved."""
    used: dict[Storage, int] = {}
    for place, node in enumerate(found.nodes):
        if _single(node) is None:
            for storage in [*node.reads, *node.writes]:
                used[storage] = place
    ahead: dict[int, list[int]] = {}
    early: set[int] = set()
    for place, node in enumerate(found.nodes):
        parameter = _single(node)
        target = None if parameter is None else at.get(parameter)
        # An operator that still reads the parameter or a gradient keeps the update where it is.
        if target is None or any(used.get(s, -1) >= target for s in [*node.reads, *node.writes]):
            continue
        ahead.setdefault(target, []).append(place)
        early.add(place)
    order: list[int] = []
    for place in range(len(found.nodes)):
        order += ahead.get(place, [])
        if place not in early:
            order.append(place)
    return order, early


def _rearranged(found: Iteration, order: list[int], early: set[int]) -> Iteration:
    count = len(order)
    new = [0] * (count + 1)
    for place, old in enumerate(order):
        new[old] = place
    new[count] = count
    # What happened before an update that moved happens before what follows it now.
    stays = [*new]
    following = count
    for old in range(count - 1, -1, -1):
        if old in early:
            stays[old] = following
        else:
            following = new[old]
    freed: dict[Storage, int] = {}
    for old in early:
        for storage in found.nodes[old].reads:
            if storage.role == "gradient":
                freed[storage] = max(freed.get(storage, 0), new[old])
    lives: dict[Storage, Life] = {}
    held = [node.held for node in found.nodes]
    for storage, life in found.lives.items():
        born = None if life.born is None else new[life.born]
        if storage in freed:
            end = freed[storage]
            lives[storage] = Life(storage, born, end, end + 1)
            # What held it after its update holds it no more.
            for old in range(life.last + 1, life.death if life.until is None else 0):
                held[old] -= blocks(storage.bytes)
            continue
        until = None if life.until is None else stays[life.until]
        end = new[life.last]
        lives[storage] = Life(storage, born, end, max(stays[life.death], end + 1), until)
    nodes: list[Node] = []
    standing = 0
    for old in reversed(order):  # An update holds what the operator after it holds.
        node = found.nodes[old]
        if old in early:
            nodes.append(replace(node, phase=BACKWARD, held=standing))
        else:
            standing = held[old]
            nodes.append(replace(node, held=standing))
    nodes.reverse()
    moved_to = {op: stays[old] for op, old in found.place.items()}
    return replace(found, nodes=nodes, lives=lives, place=moved_to)


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups, for a comparison."""

    def plain(value: Any) -> Any:
        return (id(value), value._version) if isinstance(value, torch.Tensor) else value

    return [
        {key: plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


class Early:
    """Updates parameters inside backward between :meth:`start` and :meth:`stop`.

    Args:
        parameters: those that are updated there. Others are updated in the step: the script reads
            them before it.
        turns: what brings states that are away for their update.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        watch: Watch,
        parameters: Collection[torch.Tensor],
        turns: Turns,
    ) -> None:
        self.optimizer = optimizer
        self.watch = watch
        self.updates = 0
        self._parameters = set(parameters)
        self._turns = turns
        self._group: dict[torch.Tensor, int] = {}
        self._done: set[torch.Tensor] = set()
        self._settings: list[dict[str, Any]] | None = None
        self._handles: list[Any] = []

    def start(self) -> None:
        """From now on updates run early."""
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter in self._parameters:
                    self._group[parameter] = number
                    handle = parameter.register_post_accumulate_grad_hook(self._ready)
                    self._handles.append(handle)
        self._handles.append(self.optimizer.register_step_pre_hook(self._before))

    def stop(self) -> None:
        """From now on all updates run in the step."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._group = [], {}

    @property
    def guard(self) -> Guard:
        """The watch's."""
        return self.watch.guard

    @entry()
    def _ready(self, parameter: torch.Tensor) -> None:
        """Its gradient is complete."""
        if parameter.grad is None or self.watch.stepping is not None:
            return
        if parameter in self._done:
            raise meant(
                RuntimeError(
                    "neap: a gradient was accumulated again before the optimizer's step, after its "
                    "parameter had been updated early; leave early_updates off for this script"
                )
            )
        if self._settings is None:
            self._settings = settings(self.optimizer)
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        mine = self._group[parameter]
        step = type(self.optimizer).step.__wrapped__  # type: ignore[attr-defined]
        try:
            for number, group in enumerate(groups):
                group["params"] = [parameter] if number == mine else []
            self._turns.before(parameter)
            with theirs():
                step(self.optimizer)
            parameter.grad = None
            self._done.add(parameter)
            self.updates += 1
            self._turns.after(parameter)
        finally:
            for group, parameters in zip(groups, whole):
                group["params"] = parameters

    @entry()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The step itself updates only what has a gradient still."""
        before, self._settings, self._done = self._settings, None, set()
        if before is not None and before != settings(optimizer):
            raise meant(
                RuntimeError(
                    "neap: the optimizer's settings (such as the learning rate) changed between "
                    "backward and the step, after updates had been made early; leave early_updates "
                    "off for this script"
                )
            )
