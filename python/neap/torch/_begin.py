"""How a script begins to be fitted: with a budget, or by a plan that was made before."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._fit import Fit
from neap.torch._planning import Learned
from neap.torch._report import say_on_stderr
from neap.torch._schedule import Schedule


def fit(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    budget: str | int,
    device: str = "",
    verbose: bool = True,
    recompute: bool = True,
    strict: bool = False,
    early_updates: bool = False,
    latencies: str | os.PathLike[str] | None = None,
    predictor: str | os.PathLike[str] | None = None,
) -> Fit:
    """Lets a training loop run within ``budget`` bytes of device memory. Call it once, before the
    loop.

    The first iterations run as they are and are watched; then a plan is made, and acts from the
    next iteration on. Every number stays what it would be without neap, bit for bit. An iteration
    that differs from the planned one is noticed and runs without the plan. ``NEAP_OFF=1`` in the
    environment turns all of it off.

    Args:
        model: the model, or several.
        optimizer: the optimizer that ends an iteration by its step, or several, that one first.
        budget: bytes (``12GiB``) that PyTorch may reserve, or a share of the unplanned peak
            (``60%``).
        device: the profile by whose times and link the plan is made: a name that
            ``neap device list`` shows, or a ``*.device.json``; without it the script's card.
        verbose: whether to say on stderr when planning begins and when the plan acts.
        recompute: whether calls of modules and operators may run again in backward.
        strict: whether PyTorch may not reserve more than the budget while the plan acts. Otherwise
            what has no plan (an evaluation, memory that the script keeps later) may, where the
            device has room; a share of a GPU always binds. Also whether an unexpected error of
            neap's own is raised; otherwise it is said in a line, everything comes back to the
            device, and the script goes on without neap (``NEAP_TORCH_STRICT=1`` raises, too).
        early_updates: whether each parameter may be updated inside backward as soon as its
            gradient is complete, which is then freed. Only for a loop that takes the step after
            each backward and does not look at gradients; what can be seen of anything else is
            refused, and the report says why.
        latencies: a table of operator times for the first plan, which :meth:`Fit.latencies` or
            ``neap profile`` wrote. Later plans go by times that are measured in the script.
        predictor: what ``neap train`` wrote, for operators that the table lacks.

    Raises:
        ValueError: if the budget can't be understood, or one of the files is not there.
    """
    return Fit(
        _models(model),
        _optimizers(optimizer),
        budget,
        device,
        say_on_stderr(verbose),
        recompute=recompute,
        strict=strict,
        early_updates=early_updates,
        learned=Learned(_file(latencies), _file(predictor)),
    )


def apply(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    plan: str | os.PathLike[str] | Schedule,
    verbose: bool = True,
    strict: bool = False,
) -> Fit:
    """Lets a training loop run by a plan that was made before, from the first iteration on.

    Args:
        model, optimizer, verbose, strict: as for :func:`fit`.
        plan: what ``neap torch --save-plan FILE`` wrote, or a schedule.

    Raises:
        ValueError: if the file is no plan.
    """
    schedule = plan if isinstance(plan, Schedule) else Schedule.load(plan)
    return Fit(
        _models(model),
        _optimizers(optimizer),
        max(schedule.budget_bytes, 1),
        "",
        say_on_stderr(verbose),
        strict=strict,
        schedule=schedule,
    )


def _file(path: str | os.PathLike[str] | None) -> str | None:
    """Where a file is, whatever the folder is later.

    Raises:
        ValueError: if there is none.
    """
    if path is None:
        return None
    if not os.path.isfile(path):
        raise ValueError(f"{os.fspath(path)} is no file")
    return os.path.abspath(path)


def _models(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    return [model] if isinstance(model, torch.nn.Module) else list(model)


def _optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
