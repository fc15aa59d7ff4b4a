"""Callbacks for trainers: :func:`for_transformers` and :func:`for_lightning`."""

from __future__ import annotations

import importlib
import os
from typing import Any

from neap.torch._fit import Fit, _say
from neap.torch._report import Report
from neap.torch._schedule import Schedule


class _Fitting:
    """What both callbacks share: a fit from the beginning of training to its end."""

    def __init__(self, asked: dict[str, Any], plan: str | os.PathLike[str] | None) -> None:
        self.report: Report | None = None
        self._asked = asked
        self._plan = plan
        self._fit: Fit | None = None

    def begin(self) -> None:
        self.end()
        schedule = None if self._plan is None else Schedule.load(self._plan)
        asked = dict(self._asked)
        if schedule is not None:
            asked["budget"] = max(schedule.budget_bytes, 1)
        say = _say(asked.pop("verbose"))
        # Trainers wrap models and optimizers: the first step shows what really steps.
        self._fit = Fit([], [], say=say, schedule=schedule, **asked)

    def end(self) -> None:
        if self._fit is not None:
            self.report = self._fit.close()
            self._fit._say(str(self.report))
            self._fit = None


def for_transformers(
    budget: str | int = "100%",
    device: str = "a6000",
    plan: str | os.PathLike[str] | None = None,
    verbose: bool = True,
    recompute: bool = True,
    enforce: bool = True,
) -> Any:
    """A ``transformers.TrainerCallback`` that fits the training into a budget.

    ``Trainer(..., callbacks=[neap.torch.callbacks.for_transformers("12GiB")])``. Arguments are
    those of :func:`neap.torch.fit`, or the plan of :func:`neap.torch.apply`. After training the
    callback has a ``report``.

    Raises:
        ImportError: if transformers is not installed.
    """
    base = importlib.import_module("transformers").TrainerCallback
    fitting = _Fitting(_asked(budget, device, verbose, recompute, enforce), plan)

    class NeapCallback(base):  # type: ignore[misc, valid-type]
        """Begins before the first step and ends after the last."""

        @property
        def report(self) -> Report | None:
            """What happened, once training has ended."""
            return fitting.report

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            """Training begins."""
            fitting.begin()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            """Training has ended."""
            fitting.end()

    return NeapCallback()


def for_lightning(
    budget: str | int = "100%",
    device: str = "a6000",
    plan: str | os.PathLike[str] | None = None,
    verbose: bool = True,
    recompute: bool = True,
    enforce: bool = True,
) -> Any:
    """A Lightning ``Callback`` that fits the training into a budget.

    ``Trainer(callbacks=[neap.torch.callbacks.for_lightning("12GiB")])``. Arguments as for
    :func:`for_transformers`.

    Raises:
        ImportError: if neither ``lightning`` nor ``pytorch_lightning`` is installed.
    """
    try:
        base = importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        base = importlib.import_module("pytorch_lightning").Callback
    fitting = _Fitting(_asked(budget, device, verbose, recompute, enforce), plan)

    class NeapCallback(base):  # type: ignore[misc, valid-type]
        """Begins before the first step and ends after the last."""

        @property
        def report(self) -> Report | None:
            """What happened, once training has ended."""
            return fitting.report

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Training begins."""
            fitting.begin()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """Training has ended."""
            fitting.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            """Training failed."""
            fitting.end()

    return NeapCallback()


def _asked(
    budget: str | int, device: str, verbose: bool, recompute: bool, enforce: bool
) -> dict[str, Any]:
    return {
        "budget": budget,
        "profile": device,
        "verbose": verbose,
        "recompute": recompute,
        "enforce": enforce,
    }
