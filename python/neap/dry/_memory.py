"""Every allocation of PyTorch's caching allocator as it happens: where it was made, in which phase,
and what the tensor in it is called.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from neap.dry._curve import STEP, Curve, merged
from neap.dry._cycles import Collections
from neap.dry._guard import guarded
from neap.dry._library import NOWHERE, Library
from neap.dry._lines import user_line
from neap.dry._places import OTHER, Marks, Modules, Names, Places
from neap.torch._figures import PEAKS, statistics
from neap.torch._quiet import quiet
from neap.torch._storage import start_of
from neap.torch._tensors import plain_tensors
from neap.torch._watch import BACKWARD, Watch, named_tensors

EVENTS = 20_000_000
"""Events that PyTorch keeps of a run."""


class Memory:
    """Notes where each allocation comes from, and puts that together with the allocator's history
    at the end.

    Where PyTorch keeps no history (``backend:cudaMallocAsync``, an allocator of the user's), the
    figures are what the device gave out.
    """

    def __init__(self, watch: Watch, library: Library | None = None) -> None:
        self.watch = watch
        self.library = library
        self.steps = 0
        self.places = Places()
        self.names = Names()
        self.marks = Marks()
        self.emptied: set[int] = set()
        """Allocations before each call of ``torch.cuda.empty_cache``."""
        self.collected: set[int] = set()
        """Allocations that only the garbage collector freed, known at the end."""
        self.collects = True
        """Whether the collector may run once more at the end."""
        self._collections = Collections(library) if library is not None else None
        self.history = False
        """Whether PyTorch keeps one."""
        self._phase = ""
        self._began = False
        self._modules = Modules()
        self._peaks: dict[int, list[int]] = {}
        self._given: dict[str, int] = {}
        """The most that the first device had given out, by phase."""

    def start(self, snapshot: bool) -> None:
        """Begins, once the device is initialised. With ``snapshot`` PyTorch keeps the stacks of all
        events too.
        """
        if self.library is not None:
            self.library.watch_allocations(guarded(self._place, NOWHERE), snapshot)
        self.history = self._record_history(snapshot)
        if self._collections is not None:
            self._collections.start()
        reset = torch._C._cuda_resetPeakMemoryStats

        keep = quiet(self.keep_peaks)

        def reset_and_keep(device: int) -> None:
            keep()
            reset(device)

        torch._C._cuda_resetPeakMemoryStats = reset_and_keep
        empty = torch._C._cuda_emptyCache

        def note_and_empty() -> None:
            self.emptied.add(self._count())
            empty()

        torch._C._cuda_emptyCache = note_and_empty
        watch = self.watch
        watch.enter_module.append(guarded(self._entered))
        watch.leave_module.append(guarded(self._left))
        watch.before_backward.append(guarded(lambda: self.mark(BACKWARD)))
        watch.after_backward.append(guarded(lambda: self.mark(OTHER)))
        watch.before_step.append(guarded(self._before_step))
        watch.after_step.insert(0, guarded(self._after_step))

    def _record_history(self, snapshot: bool) -> bool:
        """Has PyTorch keep the allocator's events, whatever the script asks of it later."""
        record = torch.cuda.memory._record_memory_history

        def ours(context: str | None, stacks: str) -> None:
            record("all", context=context, stacks=stacks, max_entries=EVENTS)

        # Stacks "all" are what the device library takes for its own call, and leaves out.
        where = ("all", "python") if snapshot else ("state", "all")
        try:
            ours(*where if self.library is not None or snapshot else (None, "python"))
        except RuntimeError:
            return False

        def asked(enabled: Any = "all", *args: Any, **kwargs: Any) -> None:
            names = ("context", "stacks", "max_entries", "device", "clear_history")
            given = {**dict(zip(names, args)), **kwargs}
            context = given.get("context", "all") if isinstance(enabled, str) else "all"
            if not enabled or context is None:
                return
            if self.library is not None:
                self.library.watch_allocations(guarded(self._place, NOWHERE), True)
            ours(context, given.get("stacks", "all") if isinstance(enabled, str) else "python")

        torch.cuda.memory._record_memory_history = asked
        return True

    # -- as it happens

    def _place(self) -> int:
        watch = self.watch
        module = watch.module
        phase = self._phase
        node = torch._C._current_autograd_node()
        if node is not None:
            phase = BACKWARD
            if not module:
                module = self._modules.at(node._sequence_nr())
        elif module and phase not in (BACKWARD, STEP):
            phase = "forward"
        return self.places.number(phase or OTHER, module, user_line(1))

    def _entered(self, module: torch.nn.Module, path: str) -> None:
        if self.watch.backward_depth == 0 and self.watch.stepping is None:
            if self._phase != "forward":
                self.mark("forward")
            if self.watch.depth == 1:
                self._name_module(module)
        self._modules.add(torch.autograd._get_sequence_nr(), path)

    def _left(self, module: torch.nn.Module, path: str) -> None:
        self._modules.add(torch.autograd._get_sequence_nr(), self.watch.module)

    def _before_step(self, optimizer: Any) -> None:
        for role, name, tensor in named_tensors(self.watch, [optimizer]):
            self._name(tensor, role, name)
        self.mark(STEP)

    def _after_step(self, optimizer: Any) -> None:
        for role, name, tensor in named_tensors(self.watch, [optimizer]):
            if role != "gradient":
                self._name(tensor, role, name)
        self.steps += 1
        self.places.stepped(self._count())
        self.mark(OTHER)

    def _name_module(self, module: torch.nn.Module) -> None:
        if self._began:
            return
        self._began = True
        for role, name, tensor in named_tensors(self.watch, []):
            self._name(tensor, role, name)

    def _name(self, tensor: torch.Tensor, category: str, name: str) -> None:
        if self.library is None:
            return
        for plain in plain_tensors(tensor):
            start = start_of(plain) if plain.device.type == "cuda" else None
            number = None if start is None else self.library.allocation_at(start)
            if number is not None:
                self.names.add(number, category, name)

    def _count(self) -> int:
        return self.library.allocations() if self.library is not None else 0

    def mark(self, phase: str) -> None:
        """Here a phase begins."""
        self._take_given()
        self._phase = phase
        self.marks.add(self._count(), self.steps, phase)

    def _take_given(self) -> None:
        if self.library is not None:
            phase = self._phase or OTHER
            given = self.library.take_peak(0)
            self._given[phase] = max(given, self._given.get(phase, 0))

    def _most_given(self, device: int) -> int:
        if device == 0:
            self._take_given()
            return max(self._given.values(), default=0)
        return self.library.take_peak(device) if self.library is not None else 0

    def keep_peaks(self) -> None:
        """Keeps the allocator's peaks, which a script may reset."""
        for device in range(torch.cuda.device_count()):
            found = [0, 0]
            with contextlib.suppress(RuntimeError):
                found = [*statistics(*PEAKS, device=device)]
            given = self._most_given(device)
            if not self.history:
                found = [given, given]
            kept = self._peaks.setdefault(device, [0, 0])
            self._peaks[device] = [max(a, b) for a, b in zip(kept, found)]

    # -- at the end

    def devices(self) -> list[dict[str, int]]:
        """The allocator's own figures, by device."""
        self.keep_peaks()
        if not any(reserved for reserved, _ in self._peaks.values()) and self._most_given(0):
            # PyTorch goes around its own allocator (PYTORCH_NO_CUDA_MEMORY_CACHING).
            self.history = False
            self.keep_peaks()
        found = []
        for device, (reserved, allocated) in sorted(self._peaks.items()):
            try:
                statistics = torch.cuda.memory_stats(device)
            except RuntimeError:
                statistics = {}
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

    def replay(self, folder: Path, process: int, detail: bool) -> dict[str, Any]:
        """Writes the allocator's events as CSV and finds peaks by phase, and what stood at them;
        with ``detail`` also writes what each allocation is.
        """
        if not self.history:
            return {
                "phases": [
                    {"name": phase, "peak_allocated_bytes": most, "peak_reserved_bytes": most}
                    for phase, most in self._given.items()
                ]
            }
        snapshot = torch.cuda.memory._snapshot()
        traces = snapshot["device_traces"]
        library = self.library
        records = library.all_allocations() if library is not None else []
        workspaces = library.workspace_allocations() if library is not None else set()
        if self._collections is not None:  # What this frees is not in the snapshot.
            self.collected = self._collections.found(self.collects)
        curve = Curve(self, records, workspaces)
        order = list(merged(traces, [device for _, device in records]))
        curve.write_events(order, folder / f"events-{process}.csv.gz")
        form = curve.report(order)
        settings = snapshot.get("allocator_settings", {})
        form["alloc_conf"] = settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
        if detail:
            curve.write_allocations(folder / f"allocations-{process}.json")
        # The allocator counts blocks that it could not split whole.
        peak = form.get("peak")
        for figures in self.devices():
            if peak is not None and figures["index"] == peak["device"]:
                more = max(0, figures["peak_allocated_bytes"] - peak["allocated_bytes"])
                peak["allocated_bytes"] += more
                peak["categories"]["other"] += more
                if peak["cycles"] is not None:
                    peak["cycles"]["peak_at_once_bytes"] += more
                    peak["cycles"]["peak_never_bytes"] += more
        return form
