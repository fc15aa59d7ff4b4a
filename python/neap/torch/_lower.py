"""Optimizer steps as one update for each parameter.

Multi-tensor steps touch all parameters at once, so that nothing of them can leave the device
meanwhile. Where the step of one parameter does not depend on other parameters, the step becomes
one update for each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._storage import Op, Storage, blocks

# The kinds that the graph format knows, with the states that they take in order and the setting
# that a state depends on.
_KNOWN: dict[type, tuple[str, list[tuple[str, str | None]]]] = {
    torch.optim.SGD: ("neap::sgd", [("momentum_buffer", "momentum")]),
    torch.optim.Adam: (
        "neap::adam",
        [("exp_avg", None), ("exp_avg_sq", None), ("max_exp_avg_sq", "amsgrad")],
    ),
    torch.optim.AdamW: (
        "neap::adamw",
        [("exp_avg", None), ("exp_avg_sq", None), ("max_exp_avg_sq", "amsgrad")],
    ),
    torch.optim.RMSprop: (
        "neap::rmsprop",
        [("square_avg", None), ("momentum_buffer", "momentum"), ("grad_avg", "centered")],
    ),
    torch.optim.Adagrad: ("neap::adagrad", [("sum", None)]),
    torch.optim.NAdam: ("neap::nadam", [("exp_avg", None), ("exp_avg_sq", None)]),
    torch.optim.RAdam: ("neap::radam", [("exp_avg", None), ("exp_avg_sq", None)]),
    torch.optim.Adamax: ("neap::adamax", [("exp_avg", None), ("exp_inf", None)]),
    torch.optim.Adadelta: ("neap::adadelta", [("square_avg", None), ("acc_delta", None)]),
    torch.optim.ASGD: ("neap::asgd", [("ax", None)]),
    torch.optim.Rprop: ("neap::rprop", [("prev", None), ("step_size", None)]),
}

# States that follow from the number of the step.
_COUNTERS = ("step", "mu_product", "eta", "mu")

# Settings that are pairs of numbers, and the names of the two in a graph.
_PAIRS = {
    "betas": ("beta1", "beta2"),
    "etas": ("eta1", "eta2"),
    "step_sizes": ("step_size1", "step_size2"),
}


@dataclass(eq=False)
class Update:
    """What an optimizer step does to one parameter, or to several that depend on each other."""

    kind: str
    reads: list[Storage]
    writes: list[Storage]
    workspace: int
    origin: range


class _Groups:
    """Sets of storages that belong together (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[Storage, Storage] = {}

    def root(self, storage: Storage) -> Storage:
        self._parent.setdefault(storage, storage)
        while self._parent[storage] is not storage:
            self._parent[storage] = self._parent[self._parent[storage]]
            storage = self._parent[storage]
        return storage

    def join(self, storages: list[Storage]) -> None:
        for other in storages[1:]:
            self._parent[self.root(other)] = self.root(storages[0])


def settings(optimizer: Optimizer) -> dict[str, float] | None:
    """The numbers among an optimizer's settings, or nothing where its groups differ."""
    found: list[dict[str, float]] = []
    for group in optimizer.param_groups:
        numbers: dict[str, float] = {}
        for key, value in group.items():
            if isinstance(value, (bool, int, float)):
                numbers[key] = float(value)
            elif key in _PAIRS and all(isinstance(x, (int, float)) for x in value):
                numbers.update(zip(_PAIRS[key], map(float, value), strict=True))
        for key in ("foreach", "fused", "initial_lr"):
            numbers.pop(key, None)
        found.append(numbers)
    return found[0] if found and all(other == found[0] for other in found) else None


def lower(
    ops: list[Op],
    optimizer: Optimizer,
    gradients: dict[Storage, list[torch.Tensor]],
    owned: list[list[Storage]],
    alone: bool,
) -> tuple[list[Update], str | None]:
    """The updates of a step, or the reason why it has to stay as it was recorded.

    Args:
        ops: the step's operators.
        gradients: the storages of gradients at its start, with the parameters that each belongs to.
        owned: for each parameter its storage and those of its states.
        alone: whether this is the job's only optimizer; only then may updates have the format's own
            kinds.
    """
    if not ops:
        return [], "it has no operators"
    end = ops[-1].index + 1
    made = {s for op in ops for s in op.makes}
    written = {s for op in ops for s in [*op.writes, *op.makes]}
    for storage in made:
        if not storage.persistent and (storage.died is None or storage.died > end):
            return [], f"it makes {storage.name or 'a tensor'} that outlives it"
    for storage in written - made:
        if not storage.persistent and storage.role != "gradient":
            return [], f"it writes to {storage.name or 'a tensor'}, which is not its own"
    # What is read alone binds nothing together: learning rates on the device, buckets of several
    # gradients.
    common = {
        s
        for op in ops
        for s in op.reads
        if s not in written
        and (
            s.role not in ("parameter", "optimizer_state", "gradient")
            or len(gradients.get(s, ())) > 1
        )
    }
    groups = _Groups()
    for storages in owned:
        groups.join(storages)
    for op in ops:
        why = _join(op, groups, common)
        if why is not None:
            return [], why
    return _updates(ops, optimizer, groups, common, made, alone)


def _join(op: Op, groups: _Groups, common: set[Storage]) -> str | None:
    """Joins what an operator makes depend on each other."""
    listed = {s for values in op.lists for s in values if s is not None}
    lengths = {len(values) for values in op.lists}
    if op.lists and len(lengths) == 1 and op.kind.startswith(("aten::_foreach", "aten::_fused")):
        count = lengths.pop()
        lists = [*op.lists]
        if len(op.outputs) == count:
            lists.append([None if o is None else o.storage for o in op.outputs])
        for place in range(count):
            groups.join(
                [s for values in lists if (s := values[place]) is not None and s not in common]
            )
        rest = [s for s in [*op.reads, *op.writes] if s not in listed and s not in common]
        if rest:
            return f"{op.kind} uses {rest[0].name or 'a tensor'} for all parameters"
        return None
    groups.join([s for s in [*op.reads, *op.writes, *op.makes] if s not in common])
    return None


def _updates(
    ops: list[Op],
    optimizer: Optimizer,
    groups: _Groups,
    common: set[Storage],
    made: set[Storage],
    alone: bool,
) -> tuple[list[Update], str | None]:
    members: dict[Storage, list[Storage]] = {}
    touched: dict[Storage, list[Op]] = {}
    extra: dict[Storage, list[Storage]] = {}
    for op in ops:
        roots = []
        for storage in dict.fromkeys([*op.reads, *op.writes, *op.makes]):
            if storage in common:
                continue
            root = groups.root(storage)
            found = members.setdefault(root, [])
            if storage not in found:
                found.append(storage)
            if root not in roots:
                roots.append(root)
        for root in roots:
            touched.setdefault(root, []).append(op)
            for storage in op.reads:
                if storage in common and storage not in extra.setdefault(root, []):
                    extra[root].append(storage)
    written = {s for op in ops for s in op.writes}
    values = settings(optimizer)
    known = _KNOWN.get(type(optimizer)) if alone and values is not None else None
    order = {"parameter": 0, "gradient": 1}
    updates = []
    for root, storages in members.items():
        parameters = [s for s in storages if s.role == "parameter"]
        if not parameters:
            if all(s in made or s.role == "gradient" for s in storages):
                continue  # What the step computes and drops without a parameter, such as a norm.
            return [], f"it uses {storages[0].name or 'a tensor'} without a parameter"
        lasting = [s for s in storages if s not in made or s.persistent]
        kind = f"optimizer::{type(optimizer).__name__}"
        lasting.sort(key=lambda s: order.get(s.role, 2))
        if known is not None and values is not None and len(parameters) == 1:
            wanted = [key for key, on in known[1] if on is None or values.get(on)]
            states = {s.name.split(":")[0]: s for s in lasting if s.role == "optimizer_state"}
            for counter in _COUNTERS:
                states.pop(counter, None)
            if sorted(states) == sorted(wanted) and [s.role for s in lasting[:2]] == list(order):
                lasting = [*lasting[:2], *(states[key] for key in wanted)]
                kind = known[0]
        updates.append(
            Update(
                kind=kind,
                reads=[*lasting, *(extra.get(root, []) if not kind.startswith("neap::") else [])],
                writes=[s for s in lasting if s in written],
                workspace=_scratch(touched[root], set(storages) & made),
                origin=range(ops[0].index, ops[-1].index + 1),
            )
        )
    return updates, None


def _scratch(ops: list[Op], mine: set[Storage]) -> int:
    """The most bytes of temporaries that these operators hold at once."""
    standing = most = 0
    living: list[Storage] = []
    for op in ops:
        for storage in [s for s in living if s.died is not None and s.died <= op.index]:
            living.remove(storage)
            standing -= blocks(storage.bytes)
        for storage in op.makes:
            if storage in mine and not storage.persistent:
                living.append(storage)
                standing += blocks(storage.bytes)
        most = max(most, standing)
    return most
