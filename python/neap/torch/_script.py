"""What ``neap torch`` and ``python -m neap.torch`` do inside a script that knows nothing of it."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from neap.torch._fit import Fit
from neap.torch._schedule import Schedule
from neap.torch._share import Share

OLDEST = (2, 6)
"""The oldest PyTorch whose hooks do what is needed here."""


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def too_old() -> str | None:
    """Why this PyTorch can't be used, if it can't."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
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

    def _failed(self, kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if isinstance(value, torch.OutOfMemoryError) and not self.fitted.has_plan:
            say("neap: out of memory before there was a plan")
            if self._folder is not None and os.getpid() == self._process:
                (self._folder / f"oom-{self._process}").touch()
        self._excepthook(kind, value, trace)

    def end(self) -> None:
        """Closes, and reports if the process trained."""
        if self._ended or os.getpid() != self._process:
            return
        self._ended = True
        report = self.fitted.close(bring_back=False)
        if not report.planned and not report.unplanned and not self.fitted.has_plan:
            return
        say(str(report))
        if self._folder is not None:
            form = {"pid": self._process, "rank": rank(), **asdict(report)}
            path = self._folder / f"report-{self._process}.json"
            partial = path.with_suffix(".tmp")
            try:
                partial.write_text(json.dumps(form), encoding="utf-8")
                os.replace(partial, path)
            except OSError:  # The folder is gone when the command outlives ``neap torch``.
                return


def rank() -> int:
    """The rank of this process."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def install() -> Script | None:
    """Begins, by the environment that ``neap torch`` made. Does nothing with ``NEAP_OFF=1``."""
    if os.environ.get("NEAP_OFF") == "1":
        return None
    why = too_old()
    if why is not None:
        say(f"neap: {why}")
        return None
    asked = os.environ.get
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
            asked("NEAP_TORCH_DEVICE") or "a6000",
            say if rank() == 0 else _silent,
            recompute=asked("NEAP_TORCH_RECOMPUTE") != "0",
            strict=asked("NEAP_TORCH_STRICT") == "1",
            schedule=schedule,
            save_plan=(asked("NEAP_TORCH_SAVE_PLAN") or None) if rank() == 0 else None,
            timeline=(asked("NEAP_TORCH_TIMELINE") or None) if rank() == 0 else None,
            cache=asked("NEAP_TORCH_CACHE") != "0",
            early_updates=asked("NEAP_TORCH_EARLY") == "1",
            share=Share(path) if path else None,
        )
    except ValueError as error:
        say(f"neap: {error}")
        sys.exit(2)
    folder = asked("NEAP_TORCH_DIR")
    return Script(fitted, Path(folder) if folder else None)


def _silent(text: str) -> None:
    """Other ranks do the same as the first, which says it."""
