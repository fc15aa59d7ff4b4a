"""The ``neap.graph`` file of an iteration."""

from __future__ import annotations

import json
import os
from typing import Any

from neap._files import whole
from neap.torch._graph import Iteration, Node, from_host
from neap.torch._storage import Operand, Storage, blocks
from neap.torch._watch import OPTIMIZE


def graph(found: Iteration) -> dict[str, Any]:
    """The ``neap.graph`` of version 1."""
    form: dict[str, Any] = {"format": "neap.graph", "version": 1, "name": found.name}
    if found.optimizer is not None:
        form["optimizer"] = found.optimizer
    form["recorded_peak_bytes"] = found.peak
    version: dict[Storage, int] = {}
    inputs = 0
    operators = []
    waiting = _waiting(found)
    held = _held(found, waiting)
    for place, node in enumerate(found.nodes):
        operator, inputs = _operator(node, version, found, inputs, held[place])
        operators.append(operator)
    form["tensors"] = [_tensor(s, None) for s in found.always]
    for node in found.nodes:
        for storage in node.makes:
            until = 0 if storage in waiting else found.lives[storage].until
            form["tensors"].append(
                _tensor(storage, None if until is None else found.nodes[until].name)
            )
    form["operators"] = operators
    return form


def _waiting(found: Iteration) -> set[Storage]:
    """Gradients that wait for a ``zero_grad`` at the end of the iteration. A plan frees them after
    their update, as it does where the loop begins with ``zero_grad``.
    """
    count = len(found.nodes)
    return {
        storage
        for storage, life in found.lives.items()
        if storage.role == "gradient"
        and life.until is None
        and life.death >= count
        and found.nodes[life.last].phase == OPTIMIZE
    }


def _held(found: Iteration, waiting: set[Storage]) -> list[int]:
    """Bytes that are held without use during each operator, but for these gradients."""
    held = [node.held for node in found.nodes]
    for storage in waiting:
        for place in range(found.lives[storage].last + 1, len(held)):
            held[place] -= blocks(storage.bytes)
    return held


def _tensor(storage: Storage, until: str | None) -> dict[str, Any]:
    form: dict[str, Any] = {
        "name": storage.name,
        "role": storage.role,
        "dtype": storage.dtype,
        "shape": storage.shape,
    }
    size = _SIZES[storage.dtype]
    for extent in storage.shape:
        size *= extent
    if size != storage.bytes:
        form["bytes"] = storage.bytes
    if until is not None:
        form["kept_until"] = until
    return form


def _operator(
    node: Node, version: dict[Storage, int], found: Iteration, inputs: int, held: int
) -> tuple[dict[str, Any], int]:
    form: dict[str, Any] = {"name": node.name, "kind": node.kind, "phase": node.phase}
    op = node.op
    if op is None:
        args: list[Any] = [_operand(s, None, version.get(s, 0)) for s in node.reads]
        if not node.reads and node.makes:
            storage = node.makes[0]
            args = [{"host": storage.dtype, "shape": storage.shape, "input": inputs}]
            inputs += 1
    else:
        args = []
        batch = from_host(op)
        for value in op.args:
            if batch and isinstance(value, dict) and "host" in value and value["shape"]:
                value = {**value, "input": inputs}
                inputs += 1
            args.append(_argument(value, version))
    for storage in node.makes:
        version[storage] = 0
    for storage in node.writes:
        version[storage] = version.get(storage, 0) + 1
    changed = {*node.makes, *node.writes}
    outputs: list[Any] = []
    hidden: list[Any] = []
    shown: set[Storage] = set()
    if op is not None:
        for output in op.outputs:
            good = output is not None and output.storage in changed
            outputs.append(_view(output, version) if good and output is not None else None)
            if output is not None:
                shown.add(output.storage)
    for storage in [*node.makes, *node.writes]:
        if storage in shown:
            continue
        shown.add(storage)
        (outputs if op is None and storage in node.makes else hidden).append(
            _operand(storage, None, version[storage])
        )
    form["args"] = args
    form["outputs"] = outputs
    if hidden:
        form["hidden"] = hidden
    scratch = blocks(node.workspace) + held + blocks(found.base)
    if scratch:
        form["workspace_bytes"] = scratch
    replay = _replay(node, found)
    if replay != "pure":
        form["replay"] = replay
    if node.random:
        form["random"] = True
    return form, inputs


_UPDATES_ON_THE_SIDE = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
}
_WITHOUT_REPLAY = ("c10d", "neap::", "optimizer::", "triton", "rng", "prim")


def _replay(node: Node, found: Iteration) -> str:
    """Whether an operator may be run again: never where it writes what outlives the iteration or is
    not PyTorch's own.
    """
    if (
        node.op is None
        or not node.kind.startswith("aten::")
        or (not node.makes and not node.writes)
    ):
        return "never"
    if all(s in found.lives for s in node.writes):
        return "pure"
    return "skip_updates" if node.kind in _UPDATES_ON_THE_SIDE else "never"


_SIZES = {
    "f32": 4,
    "f64": 8,
    "f16": 2,
    "bf16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "bool": 1,
    "c64": 8,
    "c128": 16,
}


def _operand(storage: Storage, view: Operand | None, version: int) -> dict[str, Any]:
    form: dict[str, Any] = {"tensor": storage.name}
    if version:
        form["version"] = version
    if view is None:
        return form
    if view.dtype != storage.dtype:
        form["dtype"] = view.dtype
    if view.offset:
        form["offset"] = view.offset
    if view.shape != storage.shape:
        form["shape"] = view.shape
    if view.stride != _contiguous(view.shape) and all(view.shape):
        form["stride"] = view.stride
    return form


def _contiguous(shape: list[int]) -> list[int]:
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= extent
    return stride[::-1]


def _view(operand: Operand, version: dict[Storage, int]) -> dict[str, Any]:
    return _operand(operand.storage, operand, version.get(operand.storage, 0))


def _argument(value: Any, version: dict[Storage, int]) -> Any:
    if isinstance(value, Operand):
        return _view(value, version)
    if isinstance(value, list):
        return [_argument(x, version) for x in value]
    return value


def write(form: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a graph with a line for each tensor and operator; the file appears whole or not at
    all.
    """

    def text(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    with whole(path) as partial, open(partial, "w", encoding="utf-8") as out:
        head = {k: v for k, v in form.items() if k not in ("tensors", "operators")}
        out.write(text(head)[:-1])
        for key in ("tensors", "operators"):
            out.write(f',\n"{key}":[\n' + ",\n".join(map(text, form[key])) + "\n]")
        out.write("}\n")
