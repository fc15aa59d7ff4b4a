"""One process under ``neap dry``: hooks at the start, a report at the end."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import traceback
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer

from neap._files import whole
from neap.dry import _answers, _checks, _counters, _data_dependent, _objects, _ranks, when_imported
from neap.dry._extents import Extents
from neap.dry._guard import guarded, note, problems
from neap.dry._library import Library
from neap.dry._lines import _kind
from neap.dry._memory import Memory
from neap.dry._reads import Reads, last_made_up
from neap.dry._scratch import Scratch
from neap.dry._settings import Settings, settings
from neap.torch import _form, _graph
from neap.torch._record import ScriptRecording
from neap.torch._watch import Watch

if TYPE_CHECKING:
    from neap.dry._on_cpu import Storages

_session: Session | None = None


def attach() -> None:
    """Begins to watch this process, once."""
    global _session
    if _session is None:
        _session = Session(settings())
        _session.attach()


def _storages() -> Storages | None:
    """What counts storages where PyTorch has no part for CUDA."""
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so")
    if os.path.exists(library):
        return None
    # Fake tensors and data loaders take time to import.
    from neap.dry._on_cpu import Storages

    return Storages()


class Session:
    """What is known of this process."""

    def __init__(self, asked: Settings) -> None:
        self.asked = asked
        self.process = os.getpid()
        self.watch = Watch()
        library = Library.found()
        self.memory = Memory(self.watch, library)
        self.reads = Reads(library)
        self.extents = Extents(lambda: self.memory.steps)
        self.scratch = Scratch(asked.folder)
        self.storages = _storages()
        self.steps = 0
        self.ended_by = "exit"
        self.exception: dict[str, Any] | None = None
        self.recorded: dict[str, Any] | None = None
        self.unwritten: list[str] = []
        """Why files that were asked for are not there."""
        self._recording: ScriptRecording | None = None
        self._first: weakref.ref[Optimizer] | None = None
        self._device = False
        self._reported = False

    def attach(self) -> None:
        """Installs every hook. The device's part waits until the script uses the device."""
        self.watch.install()
        if self.storages is not None:
            self.watch.after_step.append(self.storages.stepped)
            self.storages.start()
        if self.memory.library is not None:
            guarded(_checks.start)(self.memory.library)
        torch.cuda._lazy_call(guarded(self._device_used))
        if self.asked.record is not None:
            self._recording = ScriptRecording(
                self.watch,
                after=self.asked.steps or 1,
                done=self._record_done,
                failed=self._record_failed,
                name=os.path.splitext(os.path.basename(sys.argv[0] or "job"))[0] or "job",
            )
        self.watch.after_step.append(self._stepped)  # After the recording, which may end now.
        if not self.asked.allow_writes:
            self.scratch.start()
        if self.asked.ranks is not None:
            _ranks.pretend(self.asked.ranks)
        else:
            when_imported("torch.distributed.distributed_c10d", _objects.exchange)
        _ranks.watch_buckets()
        when_imported("transformers.generation.utils", guarded(_answers.generation))
        self._watch_the_end()

    def _device_used(self) -> None:
        if self._device or os.getpid() != self.process:
            return
        self._device = True
        self.memory.start(self.asked.snapshot is not None)
        self.reads.start()
        self.watch.enter_root.append(guarded(self.extents.called))
        guarded(_counters.start)(self.watch.enter_module)
        guarded(_data_dependent.override)(self.asked.data_dependent)
        guarded(_answers.start)()

    # -- steps

    def _stepped(self, optimizer: Optimizer) -> None:
        # Weak: a script may delete its optimizer, and with it the states on the device.
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is not optimizer:
            return
        self.steps += 1
        wanted = self.asked.steps
        if wanted is None or self.steps < wanted:
            return
        if self._recording is not None and self.recorded is None:
            return  # Two more iterations are for the recording.
        self.ended_by = "steps"
        raise SystemExit(0)

    def _record_done(self, found: _graph.Iteration) -> None:
        assert self.asked.record is not None
        form = _form.graph(found)
        try:
            _form.write(form, self.asked.record)
        except OSError as error:
            self.unwritten.append(f"{self.asked.record}: cannot be written: {error.strerror}")
            self.recorded = {"began": True}
            return
        self.recorded = {
            "began": True,
            "path": self.asked.record,
            "step": self.steps + 1,
            "operators": len(form["operators"]),
            "base_bytes": found.base,
            "steady": found.steady,
            "notes": found.notes,
        }

    def _record_failed(self, why: str) -> None:
        self.recorded = {"began": True, "error": why}

    # -- the end

    def _watch_the_end(self) -> None:
        atexit.register(self.report)
        previous = sys.excepthook

        def excepthook(
            kind: type[BaseException], value: BaseException, trace: TracebackType | None
        ) -> None:
            self._failed(kind, value, trace)
            previous(kind, value, trace)

        sys.excepthook = excepthook
        leave = os._exit

        def leave_with_report(status: int) -> None:
            self.memory.collects = False  # The script wants no finalizers to run.
            self.report()
            leave(status)

        os._exit = leave_with_report  # type: ignore[assignment]

    def _failed(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        memory = isinstance(value, torch.OutOfMemoryError)
        self.ended_by = "oom" if memory else "exception"
        frames = traceback.extract_tb(trace)
        mine = [frame for frame in frames if _kind(frame.filename) == 0] or list(frames)
        self.exception = {
            "type": kind.__name__,
            "message": str(value),
            "file": mine[-1].filename if mine else None,
            "line": mine[-1].lineno if mine else None,
            "traceback": "".join(traceback.format_exception(kind, value, trace)),
        }

    def report(self) -> None:
        """Writes the report, once, and only in a process of its own that used the device."""
        if self._reported or os.getpid() != self.process:
            return
        used = self._device or (self.storages is not None and self.storages.peak > 0)
        if not used and self.exception is None and self.steps == 0:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        self._reported = True
        self.reads.stop()
        if self._recording is not None:
            self._recording.close()
            if self.recorded is None:
                self.recorded = {
                    "began": self._recording.recorder is not None,
                    "error": f"the script took {self.steps} optimizer steps; "
                    f"recording needs {(self.asked.steps or 1) + 2}",
                }
        form: dict[str, Any] = {
            "pid": self.process,
            "rank": int(os.environ.get("RANK", "0") or 0),
            "argv": list(sys.argv),
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "ended_by": self.ended_by,
            "exception": self.exception,
            "last_made_up": last_made_up(),
            "steps": min(self.steps, self.asked.steps or self.steps),
            "devices": [],
            "extents": self.extents.report(),
            "reads": self.reads.rows(),
            "data_dependent": _data_dependent.rows(),
            "late_bucket_bytes": _ranks.late_bucket_bytes(),
            "redirected_writes": self.scratch.redirected,
            "recorded": self.recorded,
            "allocated_only": self.storages.row() if self.storages is not None else None,
        }
        if self._device:
            for part in (self._devices, self._snapshot, self._events):
                try:
                    form.update(part())
                except Exception as error:
                    note(f"report {part.__name__.strip('_')}", error)
        form["unwritten"] = self.unwritten
        form["problems"] = problems
        path = self.asked.folder / f"report-{self.process}.json"
        partial = path.with_suffix(".tmp")
        try:
            partial.write_text(json.dumps(form), encoding="utf-8")
            os.replace(partial, path)
        except FileNotFoundError:
            # A process that the script left behind: the run has ended, and its folder is gone.
            return

    def _devices(self) -> dict[str, Any]:
        devices = self.memory.devices()
        return {
            "devices": devices,
            "allocator": torch.cuda.get_allocator_backend(),
            "history": self.memory.history,
        }

    def _events(self) -> dict[str, Any]:
        return self.memory.replay(self.asked.folder, self.process, self.asked.detail)

    def _snapshot(self) -> dict[str, Any]:
        """Writes the memory snapshot where it was asked for; each rank but the first beside it."""
        path = self.asked.snapshot
        if path is None or not self.memory.history:
            return {}
        rank = int(os.environ.get("RANK", "0") or 0)
        if rank:
            root, extension = os.path.splitext(path)
            path = f"{root}.rank{rank}{extension}"
        try:
            with whole(path) as partial:
                torch.cuda.memory._dump_snapshot(partial)
        except OSError as error:
            self.unwritten.append(f"{path}: cannot be written: {error.strerror}")
            return {}
        return {"snapshot": path}
