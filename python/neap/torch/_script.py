"""What ``neap torch`` and ``python -m neap.torch`` do inside a script that knows nothing of it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from neap.torch import _in_lane
from neap.torch._fit import Fit
from neap.torch._guard import Guard, entry, line
from neap.torch._planning import Learned
from neap.torch._report import size
from neap.torch._schedule import Schedule
from neap.torch._share import Share
from neap.torch._versions import OLDEST, version


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def too_old() -> str | None:
    """Why this PyTorch can't be used, if it can't."""
    if version() < OLDEST:
        return (
            f"neap needs PyTorch {OLDEST[0]}.{OLDEST[1]} or later, this is {torch.__version__}; "
            "the script runs as it is"
        )
    return None


class Script:
    """One process of a script that is being fitted.

    Args:
        fitted: what acts.
        folder: where ``neap torch`` looks for reports, if it does.
    """

    def __init__(self, fitted: Fit, folder: Path | None = None) -> None:
        self.fitted = fitted
        self._folder = folder
        self._process = os.getpid()
        self._ended = False
        self._excepthook: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self.end)

    @property
    def guard(self) -> Guard:
        """The fit's."""
        return self.fitted.guard

    def _failed(self, kind: type[BaseException], value: BaseException, trace: Any) -> None:
        self._look_at(value)
        self._excepthook(kind, value, trace)

    @entry()
    def _look_at(self, value: BaseException) -> None:
        if not isinstance(value, torch.OutOfMemoryError):
            return
        runtime = self.fitted.runtime
        floor = runtime.policy.floor
        if floor and (runtime.schedule is None or runtime.diverged is not None):
            say(
                "neap: out of memory in an iteration without a plan; with all on the host that may "
                f"leave it needs about {size(floor)}"
            )
        if not self.fitted.has_plan:
            say("neap: out of memory before there was a plan")
            if self._folder is not None and os.getpid() == self._process:
                _write(self._folder / f"card-{self._process}", _card())

    @entry(lambda self: self._end())
    def end(self) -> None:
        """Closes, and reports if the process trained."""
        self._end()

    def _end(self) -> None:
        if self._ended or os.getpid() != self._process:
            return
        report = self.fitted.close(bring_back=False)
        self._ended = True
        if not report.planned and not report.unplanned and not self.fitted.has_plan:
            return
        say(str(report))
        if self._folder is not None:
            form = {"pid": self._process, "rank": rank(), **asdict(report)}
            _write(self._folder / f"report-{self._process}.json", form)


def _write(path: Path, form: dict[str, Any]) -> None:
    """Writes a file that appears whole or not at all."""
    partial = path.with_name(f"{path.name}.tmp")
    # The folder is gone when the command outlives ``neap torch``.
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(form), encoding="utf-8")
        os.replace(partial, path)


def _card() -> dict[str, Any]:
    """What the dry device must have in common with the card that this process uses."""
    try:
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "name": about.name,
            "capability": 10 * about.major + about.minor,
            "multiprocessors": about.multi_processor_count,
            "memory_bytes": about.total_memory,
            "devices": torch.cuda.device_count(),
            "available_bytes": torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(),
        }
    except Exception:  # A device that does not answer any more: what is not known is left out.
        return {}


def rank() -> int:
    """The rank of this process."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def install() -> Script | _in_lane.InLane | None:
    """Begins, by the environment that ``neap torch`` made. Does nothing with ``NEAP_OFF=1``."""
    try:
        return _install()
    except Exception as error:
        if os.environ.get("NEAP_TORCH_STRICT") == "1":
            raise
        say(line("install", error))
        return None


def _install() -> Script | _in_lane.InLane | None:
    if os.environ.get("NEAP_OFF") == "1":
        return None
    why = too_old()
    if why is not None:
        say(f"neap: {why}")
        return None
    asked = os.environ.get
    folder = asked("NEAP_TORCH_DIR")
    if asked(_in_lane.ROLE):
        place = Path(folder or ".") / f"report-{os.getpid()}.json"
        return _in_lane.install(say, lambda form: _write(place, form) if folder else None)
    try:
        plan = asked("NEAP_TORCH_PLAN")
        schedule = Schedule.load(plan) if plan else None
        budget: str | int = asked("NEAP_TORCH_BUDGET") or "100%"
        if schedule is not None:
            budget = max(schedule.budget_bytes, 1)
        path = asked("NEAP_TORCH_JOIN")
        if path and asked("WORLD_SIZE", "1") != "1":
            # A rank that waits for bytes would wait for a rank that waits for it.
            raise ValueError("--join is for scripts of one process; leave it out")
        fitted = Fit(
            [],
            [],
            budget,
            asked("NEAP_TORCH_DEVICE") or "",
            say if rank() == 0 else _silent,
            recompute=asked("NEAP_TORCH_RECOMPUTE") != "0",
            strict=asked("NEAP_TORCH_STRICT") == "1",
            schedule=schedule,
            save_plan=(asked("NEAP_TORCH_SAVE_PLAN") or None) if rank() == 0 else None,
            timeline=(asked("NEAP_TORCH_TIMELINE") or None) if rank() == 0 else None,
            cache=asked("NEAP_TORCH_CACHE") != "0",
            early_updates=asked("NEAP_TORCH_EARLY") == "1",
            share=Share(path) if path else None,
            scout=int(asked("NEAP_TORCH_SCOUT") or 0),
            learned=Learned(
                asked("NEAP_TORCH_LATENCIES") or None, asked("NEAP_TORCH_PREDICTOR") or None
            ),
            latencies_out=(asked("NEAP_TORCH_LATENCIES_OUT") or None) if rank() == 0 else None,
        )
    except ValueError as error:
        say(f"neap: {error}")
        sys.exit(2)
    if asked("NEAP_TORCH_PLAN_ONLY") == "1":
        fitted.watch.after_step.append(lambda optimizer: _end_if_settled(fitted))
    return Script(fitted, Path(folder) if folder else None)


def _end_if_settled(fitted: Fit) -> None:
    """Ends a script that runs for its plan alone."""
    if fitted.settled:
        raise SystemExit(0)


def _silent(text: str) -> None:
    """Other ranks do the same as the first, which says it."""
