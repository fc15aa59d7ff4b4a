"""Every allocation of PyTorch's caching allocator: where it was made, what it is, what stood at the
peak.
"""

from __future__ import annotations

import bisect
import ctypes
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from neap.dry._lines import Line, text, user_line
from neap.torch._recorder import plain_tensors
from neap.torch._storage import blocks
from neap.torch._watch import BACKWARD, OPTIMIZE, Watch, named_tensors

STEP = "step"
OTHER = "other"
CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer_state",
    "buffer",
    "input",
    "activation",
    "workspace",
    "other",
)


class Memory:
    """Notes each allocation as it happens and puts it together with the allocator's history at the
    end.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.steps = 0
        self.places: list[tuple[int, str, str, Line | None]] = []
        """For each allocation: steps before it, phase, module, line."""
        self.names: dict[int, tuple[str, str]] = {}
        """Category and name of allocations that hold what has one."""
        self.marks: list[tuple[int, int, str]] = []
        """Where phases begin: allocations before it, steps, phase."""
        self.frozen: int | None = None
        """Allocations from this one on are recording's, not the script's."""
        self._live: dict[int, int] = {}
        self._phase = ""
        self._began = False
        self._modules: list[tuple[int, str]] = []
        self._device: Callable[[int], None] | None = None
        self._peaks: dict[int, list[int]] = {}
        self._frozen_peaks: dict[int, list[int]] | None = None

    def start(self, snapshot: bool) -> None:
        """Begins, once the device is initialised. With ``snapshot`` PyTorch keeps the stacks of all
        events too.
        """
        torch.cuda.memory._record_memory_history(
            "all", context="all" if snapshot else None, stacks="python", max_entries=20_000_000
        )
        library = ctypes.CDLL(None)
        if hasattr(library, "neap_dry_on_alloc"):
            call = library.neap_dry_on_alloc
            call.argtypes, call.restype = [ctypes.c_uint64], None
            self._device = call
        import torch.cuda._gpu_trace as trace

        torch._C._activate_gpu_trace()
        trace.register_callback_for_memory_allocation(self._allocated)
        reset = torch._C._cuda_resetPeakMemoryStats

        def reset_and_keep(device: int) -> None:
            self.keep_peaks()
            reset(device)

        torch._C._cuda_resetPeakMemoryStats = reset_and_keep
        watch = self.watch
        watch.enter_module.append(self._entered)
        watch.leave_module.append(self._left)
        watch.before_backward.append(lambda: self.mark(BACKWARD))
        watch.after_backward.append(lambda: self.mark(OTHER))
        watch.before_step.append(self._before_step)
        watch.after_step.insert(0, self._after_step)

    # -- as it happens

    def _allocated(self, address: int) -> None:
        if self._device is not None:
            self._device(address)
        self._live[address] = len(self.places)
        watch = self.watch
        module = watch.module
        line = user_line(2)
        phase = self._phase
        node = torch._C._current_autograd_node()
        if node is not None:
            phase = BACKWARD
            if not module:
                module = self._module_of(node._sequence_nr())
        elif module and phase not in (BACKWARD, STEP):
            phase = "forward"
        self.places.append((self.steps, phase or OTHER, module, line))

    def _module_of(self, number: int) -> str:
        """The module whose forward made the autograd function of this number."""
        place = bisect.bisect_right(self._modules, (number, "\U0010ffff")) - 1
        return self._modules[place][1] if place >= 0 else ""

    def _entered(self, module: torch.nn.Module, path: str) -> None:
        if self.watch.backward_depth == 0 and self.watch.stepping is None:
            if self._phase != "forward":
                self.mark("forward")
            if len(self.watch._stack()) == 1:
                self._name_module(module)
        self._modules.append((torch.autograd._get_sequence_nr(), path))

    def _left(self, module: torch.nn.Module, path: str) -> None:
        self._modules.append((torch.autograd._get_sequence_nr(), self.watch.module))

    def _before_step(self, optimizer: Any) -> None:
        for role, name, tensor in named_tensors(self.watch, [optimizer]):
            self._name(tensor, role, name)
        self.mark(STEP)

    def _after_step(self, optimizer: Any) -> None:
        for role, name, tensor in named_tensors(self.watch, [optimizer]):
            if role != "gradient":
                self._name(tensor, role, name)
        self.steps += 1
        self.mark(OTHER)
        if len(self._modules) > 100_000:
            del self._modules[:50_000]

    def _name_module(self, module: torch.nn.Module) -> None:
        if self._began:
            return
        self._began = True
        for role, name, tensor in named_tensors(self.watch, []):
            self._name(tensor, role, name)

    def _name(self, tensor: torch.Tensor, category: str, name: str) -> None:
        for plain in plain_tensors(tensor):
            if plain.device.type != "cuda":
                continue
            number = self._live.get(plain.untyped_storage().data_ptr())
            if number is not None:
                known = self.names.get(number)
                self.names[number] = (category, name or (known[1] if known else ""))

    def mark(self, phase: str) -> None:
        """Here a phase begins."""
        self._phase = phase
        self.marks.append((len(self.places), self.steps, phase))

    def keep_peaks(self) -> None:
        """Keeps the allocator's peaks, which a script may reset."""
        for device in range(torch.cuda.device_count()):
            statistics = torch.cuda.memory_stats(device)
            found = [
                statistics.get("reserved_bytes.all.peak", 0),
                statistics.get("allocated_bytes.all.peak", 0),
            ]
            kept = self._peaks.setdefault(device, [0, 0])
            self._peaks[device] = [max(a, b) for a, b in zip(kept, found)]

    def freeze(self) -> None:
        """What comes now is not the script's alone and does not count."""
        if self.frozen is None:
            self.keep_peaks()
            self.frozen = len(self.places)
            self._frozen_peaks = {k: list(v) for k, v in self._peaks.items()}

    # -- at the end

    def devices(self) -> list[dict[str, int]]:
        """The allocator's own figures, by device."""
        self.keep_peaks()
        peaks = self._frozen_peaks if self._frozen_peaks is not None else self._peaks
        found = []
        for device, (reserved, allocated) in sorted(peaks.items()):
            statistics = torch.cuda.memory_stats(device)
            found.append(
                {
                    "index": device,
                    "peak_reserved_bytes": reserved,
                    "peak_allocated_bytes": allocated,
                    "reserved_bytes": statistics.get("reserved_bytes.all.current", 0),
                    "allocated_bytes": statistics.get("allocated_bytes.all.current", 0),
                    "retries": statistics.get("num_alloc_retries", 0),
                    "ooms": statistics.get("num_ooms", 0),
                }
            )
        return found

    def replay(self, events: Path) -> dict[str, Any]:
        """Writes the allocator's events as CSV and finds peaks by phase, and what stood at them."""
        traces = torch.cuda.memory._snapshot()["device_traces"]
        order = _in_order(traces)
        curve = _Curve(self, order)
        partial = events.with_name(events.name + ".tmp")
        with gzip.open(partial, "wt", compresslevel=1, newline="") as out:
            out.write("op,id,bytes,stream,device\n")
            for device, entry in order:
                for row in curve.take(device, entry):
                    out.write(row)
        os.replace(partial, events)
        form = curve.report(order)
        # The allocator counts blocks that it could not split whole.
        peak = form.get("peak")
        for figures in self.devices():
            if peak is not None and figures["index"] == peak["device"]:
                more = max(0, figures["peak_allocated_bytes"] - peak["allocated_bytes"])
                peak["allocated_bytes"] += more
                peak["categories"]["other"] += more
        return form


def _in_order(traces: list[list[dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """The events of all devices in the order in which they happened."""
    found = [(device, entry) for device, trace in enumerate(traces) for entry in trace]
    if sum(bool(trace) for trace in traces) > 1:
        found.sort(key=lambda pair: pair[1].get("time_us", 0))  # Stable within a device.
    return found


class _Curve:
    """Plays the events and remembers each phase's highest moment."""

    def __init__(self, memory: Memory, order: list[tuple[int, dict[str, Any]]]) -> None:
        self.memory = memory
        # History may have begun after the first allocations were noted, or the other way round.
        allocations = sum(entry["action"] == "alloc" for _, entry in order)
        self.number = len(memory.places) - allocations
        self.ids: dict[tuple[int, int], int] = {}
        self.sizes: dict[int, int] = {}
        self.standing: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.peaks: dict[str, tuple[int, int, int, dict[int, int]]] = {}
        self.phase_reserved: dict[str, int] = {}
        self.marks: list[dict[str, Any]] = []
        self._next_mark = 0
        self._event = 0
        self._forever: set[int] = set()

    def take(self, device: int, entry: dict[str, Any]) -> list[str]:
        action = entry["action"]
        if action in ("segment_alloc", "segment_map"):
            self.reserved[device] = self.reserved.get(device, 0) + entry["size"]
        elif action in ("segment_free", "segment_unmap"):
            self.reserved[device] = self.reserved.get(device, 0) - entry["size"]
        elif action == "alloc":
            number = self.number
            self.number += 1
            self._marks(number)
            self.ids[device, entry["addr"]] = number
            self.sizes[number] = blocks(entry["size"])
            self.standing[device] = self.standing.get(device, 0) + self.sizes[number]
            if self.memory.frozen is None or number < self.memory.frozen:
                self._peak(device, number)
            self._event += 1
            return [f"a,{number},{entry['size']},{entry.get('stream', 0)},{device}\n"]
        elif action == "free_completed" and (device, entry["addr"]) in self.ids:
            number = self.ids.pop((device, entry["addr"]))
            self.standing[device] -= self.sizes.pop(number)
            self._event += 1
            return [f"f,{number},,,{device}\n"]
        elif action == "oom":
            self._event += 1
        return []

    def _marks(self, number: int) -> None:
        marks = self.memory.marks
        while self._next_mark < len(marks) and marks[self._next_mark][0] <= number:
            _, step, phase = marks[self._next_mark]
            self.marks.append({"event": self._event, "step": step, "phase": phase})
            self._next_mark += 1

    def _peak(self, device: int, number: int) -> None:
        phase = self._place(number)[1]
        self.phase_reserved[phase] = max(
            self.phase_reserved.get(phase, 0), self.reserved.get(device, 0)
        )
        best = self.peaks.get(phase)
        if best is None or self.standing[device] > best[0]:
            # Copying what stands at every new peak would take quadratic time; it is found again
            # later.
            self.peaks[phase] = (self.standing[device], device, number, {})

    def _place(self, number: int) -> tuple[int, str, str, Line | None]:
        places = self.memory.places
        return places[number] if 0 <= number < len(places) else (0, OTHER, "", None)

    def report(self, order: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        """Phases, the peak, and what stood at it, as the report has them."""
        self._forever = set(self.ids.values())
        wanted = {(device, number): phase for phase, (_, device, number, _) in self.peaks.items()}
        found = _standing_at(order, len(self.memory.places), set(wanted))
        by_phase = {wanted[key]: standing for key, standing in found.items()}
        phases = [
            {
                "name": STEP if phase == OPTIMIZE else phase,
                "peak_allocated_bytes": best[0],
                "peak_reserved_bytes": self.phase_reserved.get(phase, 0),
            }
            for phase, best in self.peaks.items()
        ]
        result: dict[str, Any] = {"phases": phases, "marks": self.marks[:100_000]}
        result["categories_at_phase"] = [
            {"phase": phase, "categories": self._categories(standing)}
            for phase, standing in by_phase.items()
        ]
        if self.peaks:
            phase = max(self.peaks, key=lambda p: self.peaks[p][0])
            allocated, device, number, _ = self.peaks[phase]
            step, _, module, line = self._place(number)
            standing = by_phase.get(phase, {})
            result["peak"] = {
                "device": device,
                "allocated_bytes": allocated,
                "step": step,
                "phase": phase,
                "module": module,
                "line": text(line),
                "categories": self._categories(standing),
                "blocks": self._largest(standing),
            }
        return result

    def category(self, number: int) -> str:
        """What an allocation is."""
        named = self.memory.names.get(number)
        if named is not None:
            return named[0]
        step, phase, _, _ = self._place(number)
        if phase == STEP:
            return "workspace"
        if phase in ("forward", BACKWARD):
            # Never freed and no tensor of the model's: a library's workspace.
            return "workspace" if number in self._forever and step == 0 else "activation"
        # Between steps and outside any module scripts bring batch data.
        return "input" if step and phase == OTHER else "other"

    def _categories(self, standing: dict[int, int]) -> dict[str, int]:
        found = dict.fromkeys(CATEGORIES, 0)
        for number, size in standing.items():
            found[self.category(number)] += size
        return found

    def _largest(self, standing: dict[int, int]) -> list[dict[str, Any]]:
        rows = []
        for number, size in sorted(standing.items(), key=lambda item: (-item[1], item[0]))[:20]:
            step, phase, module, line = self._place(number)
            named = self.memory.names.get(number)
            where = text(line)
            if where is None and module:
                where = f"backward of {module}" if phase == BACKWARD else module
            rows.append(
                {
                    "bytes": size,
                    "category": self.category(number),
                    "name": (named[1] or None) if named else None,
                    "module": module or None,
                    "line": where,
                    "step": step,
                }
            )
        return rows


def _standing_at(
    order: list[tuple[int, dict[str, Any]]], places: int, wanted: set[tuple[int, int]]
) -> dict[tuple[int, int], dict[int, int]]:
    """What stood on a device right after certain allocations: bytes by number of allocation."""
    number = places - sum(entry["action"] == "alloc" for _, entry in order)
    living: dict[int, dict[int, tuple[int, int]]] = {}
    found = {}
    for device, entry in order:
        here = living.setdefault(device, {})
        if entry["action"] == "alloc":
            here[entry["addr"]] = (number, blocks(entry["size"]))
            if (device, number) in wanted:
                found[device, number] = dict(here.values())
            number += 1
        elif entry["action"] == "free_completed":
            here.pop(entry["addr"], None)
    return found
