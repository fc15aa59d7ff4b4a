"""Callbacks for trainers: :func:`for_transformers` and :func:`for_lightning`."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import Any

from neap.torch._fit import Fit
from neap.torch._report import Report, say_on_stderr
from neap.torch._schedule import Schedule


@dataclass
class _Fitting:
    """What both callbacks share: a fit from the beginning of training to its end.

    Args:
        budget, device, verbose, recompute, strict: as for :func:`neap.torch.fit`.
        plan: as for :func:`neap.torch.apply`, in place of a budget.
    """

    budget: str | int = "100%"
    device: str = ""
    plan: str | os.PathLike[str] | None = None
    verbose: bool = True
    recompute: bool = True
    strict: bool = False
    _report: Report | None = field(default=None, init=False)
    _fit: Fit | None = field(default=None, init=False)

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Training begins."""
        self.end()
        schedule = None if self.plan is None else Schedule.load(self.plan)
        # Trainers wrap models and optimizers: the first step shows what really steps.
        self._fit = Fit(
            [],
            [],
            self.budget if schedule is None else max(schedule.budget_bytes, 1),
            self.device,
            say_on_stderr(self.verbose),
            recompute=self.recompute,
            strict=self.strict,
            schedule=schedule,
        )

    def end(self, *args: Any, **kwargs: Any) -> None:
        """Training has ended, or failed."""
        if self._fit is not None:
            self._report = self._fit.close()
            if self.verbose:
                say_on_stderr(True)(str(self._report))
            self._fit = None

    @property
    def report(self) -> Report | None:
        """What happened so far; the whole training once it has ended."""
        return self._report if self._fit is None else self._fit.report()


def _callback(base: type, fitting: _Fitting, begins: str, ends: tuple[str, ...]) -> Any:
    """An object of a trainer's class of callbacks, with ``report``."""
    about: dict[str, Any] = {
        "__doc__": "Begins before the first step and ends after the last.",
        "report": property(lambda self: fitting.report),
        begins: lambda self, *args, **kwargs: fitting.begin(),
    }
    for end in ends:
        about[end] = lambda self, *args, **kwargs: fitting.end()
    return type("NeapCallback", (base,), about)()


def for_transformers(budget: str | int = "100%", **asked: Any) -> Any:
    """A ``transformers.TrainerCallback`` that fits the training into a budget.

    ``Trainer(..., callbacks=[neap.torch.callbacks.for_transformers("12GiB")])``. The callback's
    ``report`` says what happened.

    Args:
        budget: bytes (``12GiB``) that PyTorch may reserve, or a share of the unplanned peak
            (``60%``).
        asked: ``device``, ``verbose``, ``recompute`` and ``strict`` as for
            :func:`neap.torch.fit`, or ``plan=`` as for :func:`neap.torch.apply`.

    Raises:
        ImportError: if transformers is not installed.
        TypeError: if an argument is none of these.
    """
    base = importlib.import_module("transformers").TrainerCallback
    return _callback(base, _Fitting(budget, **asked), "on_train_begin", ("on_train_end",))


def for_lightning(budget: str | int = "100%", **asked: Any) -> Any:
    """A Lightning ``Callback`` that fits the training into a budget.

    ``Trainer(callbacks=[neap.torch.callbacks.for_lightning("12GiB")])``. Arguments as for
    :func:`for_transformers`.

    Raises:
        ImportError: if neither ``lightning`` nor ``pytorch_lightning`` is installed.
        TypeError: if an argument is none of these.
    """
    try:
        base = importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        base = importlib.import_module("pytorch_lightning").Callback
    ends = ("on_train_end", "on_exception")
    return _callback(base, _Fitting(budget, **asked), "on_train_start", ends)
