"""From a recorded iteration to what is done at which moment of the next ones.

The planner gets a graph in which only what PyTorch can carry out is a tensor: activations that
nothing but autograd holds between forward and backward, and optimizer states. All other bytes are
workspace of the operators during which they stand.
"""

from __future__ import annotations

import bisect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neap.torch import _graph
from neap.torch._graph import Iteration
from neap.torch._recorder import Recorder
from neap.torch._states import PIECE, PIECE_BYTES
from neap.torch._storage import Saved, Storage, blocks
from neap.torch._watch import OPTIMIZE

SMALLEST = 64 << 10
"""Storages below this many bytes stay: each copy costs about ten microseconds of the host."""


class PlanError(RuntimeError):
    """No plan could be made; says why."""


@dataclass(eq=False)
class Activation:
    """A storage that can leave between its last use in forward and its first in backward.

    ``leaves`` is the first place at whose start nothing but autograd holds it, ``returns`` the
    place before which backward asks for it, ``gone`` the place at which it is freed.
    """

    storage: Storage
    born: int
    leaves: int
    returns: int
    gone: int


@dataclass
class Schedule:
    """What is done when. Points are ``("pack", n)`` and ``("unpack", n)``: the n-th saved tensor.

    Attributes:
        expected: for each saved tensor of an iteration its view and the function that made it.
        owner: the number of the activation that each saved tensor belongs to, if that is moved.
        sizes: bytes of each activation that is moved.
        actions: at each point what to do, in order: ``("out", a)`` copies an activation to the
            host, ``("drop", a)`` gives its bytes back, ``("in", a)`` brings it back.
        states: for each group of parameters whether its optimizer states stay on the host.
    """

    expected: list[tuple[Any, ...]]
    owner: list[int | None]
    sizes: list[int]
    actions: dict[tuple[str, int], list[tuple[str, int]]]
    away: set[str] = field(default_factory=set)
    peak_bytes: int = 0
    unplanned_peak_bytes: int = 0
    iteration_ns: int = 0
    unplanned_iteration_ns: int = 0
    budget_bytes: int = 0
    swap_bytes: int = 0
    met: bool = True


def executable() -> str:
    """The ``neap`` executable: ``$NEAP``, beside this Python, or on the PATH.

    Raises:
        PlanError: if there is none.
    """
    beside = Path(sys.executable).with_name("neap")
    for found in (os.environ.get("NEAP"), str(beside), shutil.which("neap")):
        if found and os.access(found, os.X_OK):
            return found
    raise PlanError("there is no neap executable; install neap, or set NEAP to where it is")


def activations(recorder: Recorder, found: Iteration) -> list[Activation]:
    """What can leave, in order of birth."""
    movable = []
    for life in found.lives.values():
        storage = life.storage
        saved = [s for s in storage.saved if s.iteration == len(recorder.cuts) - 2]
        if not saved or storage.bytes < SMALLEST or storage.alone is None or life.born is None:
            continue
        asked = [s.unpacked for s in saved if s.unpacked is not None]
        if not asked or life.until is not None:
            continue
        if not found.start < storage.alone <= found.end or min(asked) > found.end:
            continue
        leaves, returns = found.place[storage.alone], found.place[min(asked)]
        # A swap needs an operator between that neither makes nor uses it.
        if life.born < leaves < returns < len(found.nodes):
            movable.append(Activation(storage, life.born, leaves, returns, life.death))
    movable.sort(key=lambda a: (a.born, a.storage.number))
    return movable


def states(found: Iteration) -> dict[Storage, list[int]]:
    """Optimizer states that only updates of single parameters use, with the places of these."""
    uses: dict[Storage, list[int]] = {}
    for place, node in enumerate(found.nodes):
        for storage in dict.fromkeys([*node.reads, *node.writes]):
            if storage.role == "optimizer_state" and storage.bytes >= SMALLEST:
                uses.setdefault(storage, []).append(place)
    return {
        storage: places
        for storage, places in uses.items()
        if all(found.nodes[place].op is None for place in places)
    }


def pieces(found: Iteration, divisible: bool) -> list[list[int]]:
    """Which updates run in one call, by place: as :mod:`neap.torch._states` divides a step, or all
    of them.
    """
    groups: list[list[int]] = []
    size = 0
    for place, node in enumerate(found.nodes):
        if node.op is not None or node.phase != OPTIMIZE:
            continue
        full = bool(groups) and (len(groups[-1]) >= PIECE or size >= PIECE_BYTES)
        after = bool(groups) and groups[-1][-1] != place - 1
        if not groups or (divisible and full) or after:
            groups.append([])
            size = 0
        groups[-1].append(place)
        size += sum(s.bytes for s in node.writes if s.role == "optimizer_state")
    return groups


def reduced(
    found: Iteration,
    movable: Sequence[Activation],
    away: dict[Storage, list[int]],
    durations: dict[str, int],
    divided: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    """The graph that is planned: every byte that can't move is workspace."""
    count = len(found.nodes)
    rest = found.resident()
    touches: list[list[Storage]] = [[] for _ in range(count)]
    for activation in movable:
        size = blocks(activation.storage.bytes)
        life = found.lives[activation.storage]
        for place in range(activation.born, life.last + 1):
            rest[place] -= size
        for place in range(life.last + 1, life.death):
            rest[place] -= size  # Held beyond its last use: `held` counts it.
        for place in range(activation.born + 1, activation.leaves):
            touches[place].append(activation.storage)
        for place in range(activation.returns, min(activation.gone, count)):
            touches[place].append(activation.storage)
    for storage, places in away.items():
        for place in range(count):
            rest[place] -= blocks(storage.bytes)
        together = {place: group for group in divided for place in group}
        for place in sorted({p for at in places for p in together.get(at, [at])}):
            touches[place].append(storage)
    for group in divided:
        # A multi-tensor call holds the temporaries of all its parameters at once.
        scratch = sum(blocks(found.nodes[place].workspace) for place in group)
        for place in group:
            rest[place] += scratch - blocks(found.nodes[place].workspace)
    constant = min(rest) // 512 * 512
    tensors = [
        {"name": s.name, "role": "optimizer_state", "dtype": "u8", "shape": [s.bytes]} for s in away
    ]
    tensors.append({"name": "held", "role": "buffer", "dtype": "u8", "shape": [max(constant, 0)]})
    tensors += [
        {"name": a.storage.name, "role": "activation", "dtype": "u8", "shape": [a.storage.bytes]}
        for a in movable
    ]
    made: dict[int, list[Storage]] = {}
    for activation in movable:
        made.setdefault(activation.born, []).append(activation.storage)
    version: dict[Storage, int] = {}
    operators = []
    for place, node in enumerate(found.nodes):
        reads: list[dict[str, Any]] = [{"tensor": "held", "shape": [0]}]
        writes = []
        for storage in touches[place]:
            seen = version.get(storage, 0)
            reads.append({"tensor": storage.name, "shape": [0], **_version(seen)})
            if storage in node.writes:
                version[storage] = seen + 1
                writes.append({"tensor": storage.name, "shape": [0], **_version(seen + 1)})
        operators.append(
            {
                "name": node.name,
                "kind": "custom",
                "phase": node.phase,
                "args": reads,
                "outputs": [{"tensor": s.name} for s in made.get(place, [])],
                **({"hidden": writes} if writes else {}),
                "workspace_bytes": max(0, rest[place] - max(constant, 0)),
                "replay": "never",
                "duration_ns": durations.get(node.name, 1000),
            }
        )
    return {
        "format": "neap.graph",
        "version": 1,
        "name": found.name,
        "tensors": tensors,
        "operators": operators,
    }


def _version(number: int) -> dict[str, int]:
    return {"version": number} if number else {}


def _run(command: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def durations(graph: Path, device: str, neap: str) -> dict[str, int]:
    """Each operator's time in nanoseconds by the device's roofline."""
    plan = graph.with_name("times.plan.json")
    peak = ["--budget", "100%", "--effort", "0", "--no-portfolio"]
    code, _, error = _run([neap, "plan", str(graph), "--device", device, *peak, "-o", str(plan)])
    if code != 0:
        raise PlanError(f"neap plan failed: {error.strip()}")
    job = json.loads(plan.read_text())["jobs"][0]
    return {row["operator"]: row["ns"] for row in job["latencies"]}


def plan(
    recorder: Recorder,
    found: Iteration,
    budget: Callable[[int], int],
    device: str,
    move_states: bool = True,
) -> Schedule:
    """Asks the planner, and turns its answer into actions at points.

    Args:
        recorder: a recording with saved tensors.
        found: its last iteration.
        budget: the budget in bytes, given the unplanned peak in bytes.
        device: the profile whose times and link count.
        move_states: whether optimizer states may stay on the host between steps.

    Raises:
        PlanError: if the planner fails. A budget that can't be met is no failure: then the plan is
        the
            lowest that can, and ``met`` is false.
    """
    neap = executable()
    movable = activations(recorder, found)
    away = states(found) if move_states else {}
    unplanned = max(found.peak, max(found.resident()))
    asked = budget(unplanned)
    with tempfile.TemporaryDirectory(prefix="neap-") as folder:
        full = Path(folder) / "full.graph.json"
        _graph.write(_graph.graph(found), full)
        times = durations(full, device, neap)
        path = Path(folder) / "job.graph.json"
        form = reduced(found, movable, away, times, pieces(found, move_states))
        _graph.write(form, path)
        output = Path(folder) / "job.plan.json"
        base = [neap, "plan", str(path), "--device", device, "--no-recompute", "--json"]
        code, text, error = _run([*base, "--budget", str(asked), "-o", str(output)])
        met = code == 0
        if code == 1:
            code, text, error = _run([*base, "--budget", "min", "-o", str(output)])
        if code != 0:
            raise PlanError(f"neap plan failed: {error.strip()}")
        form = json.loads(output.read_text())
        figures = json.loads(text)
        drawn = Path(folder) / "timeline.json"
        code, _, error = _run([neap, "simulate", str(output), "--timeline", str(drawn)])
        if code != 0:
            raise PlanError(f"neap simulate failed: {error.strip()}")
        timeline = _Timeline(drawn, found)
    schedule = _schedule(recorder, found, movable, away, form, timeline)
    schedule.met = met
    schedule.budget_bytes = asked
    schedule.peak_bytes = figures["peak_bytes"]
    schedule.unplanned_peak_bytes = unplanned
    schedule.iteration_ns = figures["iteration_ns"]
    schedule.unplanned_iteration_ns = figures["unplanned_iteration_ns"]
    return schedule


def _points(recorder: Recorder, found: Iteration) -> list[tuple[int, tuple[str, int]]]:
    """Moments at which PyTorch calls us: place of the operator that follows, and the point."""
    packs = [s for s in recorder.packs if s.iteration == len(recorder.cuts) - 2]
    points = []
    for saved in packs:
        points.append((found.place.get(saved.packed + 1, len(found.nodes)), ("pack", saved.place)))
        if saved.unpacked is not None and saved.unpacked <= found.end:
            points.append((found.place[saved.unpacked], ("unpack", saved.place)))
    points.sort(key=lambda point: point[0])
    return points


def _schedule(
    recorder: Recorder,
    found: Iteration,
    movable: Sequence[Activation],
    away: dict[Storage, list[int]],
    form: dict[str, Any],
    timeline: _Timeline,
) -> Schedule:
    place = {node.name: number for number, node in enumerate(found.nodes)}
    points = _points(recorder, found)
    job = form["jobs"][0]
    outs: dict[str, int] = {}
    ins: dict[str, int] = {}
    on_host = {s.name for s in away}
    moved_states = set()
    for event in job["events"]:
        name = event.get("tensor")
        after = -1 if event["after"] is None else place[event["after"]]
        if name in on_host:
            moved_states.add(name)
        elif event["event"] == "swap_out":
            outs[name] = after
        elif event["event"] == "swap_in":
            ins[name] = after
    moved = [a for a in movable if a.storage.name in outs and a.storage.name in ins]
    number = {a.storage.name: n for n, a in enumerate(moved)}
    actions: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for activation in sorted(moved, key=lambda a: outs[a.storage.name]):
        name = activation.storage.name
        copied = timeline.left(name, outs[name] + 1)
        # Pack and unpack come one after another; what is due between two waits for the later.
        out = _first(points, max(outs[name] + 1, activation.leaves))
        drop = _first(points, max(copied, activation.leaves))
        comes = max(ins[name] + 1, timeline.comes(name, 0))
        back = _first(points, comes, len(points) - 1)
        home = _first(points, activation.returns, len(points) - 1)
        if out is None or drop is None or back is None or home is None or out >= home:
            continue
        drop, back = max(drop, out), min(back, home)
        if drop >= back:
            continue
        one = number[name]
        actions.setdefault(points[out][1], []).append(("out", one))
        actions.setdefault(points[drop][1], []).append(("drop", one))
        actions.setdefault(points[back][1], []).append(("in", one))
    acted = {one for things in actions.values() for _, one in things}
    packs = [s for s in recorder.packs if s.iteration == len(recorder.cuts) - 2]
    return Schedule(
        expected=[(s.view, s.node) for s in packs],
        owner=[_owner(s, number, acted) for s in packs],
        sizes=[a.storage.bytes for a in moved],
        actions=actions,
        away=moved_states,
        swap_bytes=sum(moved[one].storage.bytes for one in acted),
    )


def _owner(saved: Saved, number: dict[str, int], acted: set[int]) -> int | None:
    one = None if saved.storage is None else number.get(saved.storage.name)
    return one if one in acted else None


def _first(
    points: Sequence[tuple[int, Any]], place: int, otherwise: int | None = None
) -> int | None:
    """The first point at or after the operator at ``place``."""
    low, high = 0, len(points)
    while low < high:
        middle = (low + high) // 2
        if points[middle][0] < place:
            low = middle + 1
        else:
            high = middle
    return low if low < len(points) else otherwise


class _Timeline:
    """What ``neap simulate`` says of a plan: when copies begin and end, in places of operators."""

    def __init__(self, path: Path, found: Iteration) -> None:
        form = json.loads(path.read_text())
        events = form["traceEvents"] if isinstance(form, dict) else form
        lanes = {
            event["tid"]: event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        starts: dict[str, float] = {}
        self._copies: dict[tuple[str, str], tuple[float, float]] = {}
        for event in events:
            if event["ph"] != "X":
                continue
            lane, name = lanes.get(event["tid"], ""), event["name"]
            if lane == "compute":
                starts.setdefault(name, event["ts"])
            else:
                self._copies.setdefault((lane, name), (event["ts"], event["ts"] + event["dur"]))
        self._starts = [starts.get(node.name, 0.0) for node in found.nodes]

    def left(self, name: str, otherwise: int) -> int:
        """The first operator that starts after the tensor's copy to the host has ended."""
        copy = self._copies.get(("d2h", name))
        return otherwise if copy is None else bisect.bisect_left(self._starts, copy[1] - 1e-3)

    def comes(self, name: str, otherwise: int) -> int:
        """The first operator that starts after the tensor's copy to the device has begun."""
        copy = self._copies.get(("h2d", name))
        return otherwise if copy is None else bisect.bisect_left(self._starts, copy[0] - 1e-3)
