"""Fits a training script into a memory budget: watches, plans, acts, and says what it did."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import Optimizer

from neap.torch import _graph
from neap.torch._planning import PlanError, Schedule, plan
from neap.torch._record import device_of
from neap.torch._recorder import Recorder
from neap.torch._runtime import Runtime
from neap.torch._states import States, divisible
from neap.torch._watch import Watch

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_budget(budget: str | int) -> Callable[[int], int]:
    """A budget as users write it: bytes (``12GiB``), or a share of the unplanned peak (``60%``).

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(budget, int):
        size = budget
        if size <= 0:
            raise ValueError(f"the budget is {budget}; give bytes above 0, such as 12GiB, or 60%")
        return lambda peak: size
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[KMGT]?i?B?)\s*", budget)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"the budget is {budget!r}; give bytes, such as 12GiB, or a share, 60%")
    number, unit = float(found[1]), found[2]
    if unit == "%":
        return lambda peak: int(peak * number / 100)
    scale = _UNITS[unit.rstrip("B").rstrip("i")]
    if "i" not in unit and unit not in ("", "B"):
        scale = 1000 ** (["K", "M", "G", "T"].index(unit[0]) + 1)
    return lambda peak: int(number * scale)


@dataclass
class Report:
    """What happened so far. Bytes and nanoseconds are whole numbers.

    Attributes:
        planned: iterations that ran by the plan from beginning to end.
        unplanned: iterations that ran without it, by reason.
        peak_allocated_bytes, peak_reserved_bytes: measured since the plan acts; 0 on the CPU.
    """

    budget_bytes: int = 0
    predicted_peak_bytes: int = 0
    unplanned_peak_bytes: int = 0
    predicted_iteration_ns: int = 0
    unplanned_iteration_ns: int = 0
    met: bool = False
    planned: int = 0
    unplanned: dict[str, int] = field(default_factory=dict)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    allocator_retries: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    swapped_bytes: int = 0
    freed: int = 0
    kept: int = 0
    late: int = 0
    state_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def size(count: int) -> str:
            return f"{count / (1 << 20):,.1f} MiB"

        lines = [
            f"neap: {self.planned} iterations ran by the plan, "
            f"{sum(self.unplanned.values())} without it",
            *(f"  {count} because: {why}" for why, count in sorted(self.unplanned.items())),
        ]
        if self.predicted_peak_bytes:
            lines.append(
                f"  peak predicted {size(self.predicted_peak_bytes)}, without the plan "
                f"{size(self.unplanned_peak_bytes)}, budget {size(self.budget_bytes)}"
            )
        if self.peak_allocated_bytes:
            lines.append(
                f"  peak measured: allocated {size(self.peak_allocated_bytes)}, reserved "
                f"{size(self.peak_reserved_bytes)}; {self.allocator_retries} allocator retries"
            )
        lines.append(
            f"  {self.swapped_out} swap-outs ({size(self.swapped_bytes)}), {self.swapped_in} "
            f"swap-ins, {self.late} of them late; {self.kept} left out; optimizer states moved "
            f"{size(self.state_bytes)}"
        )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


class Fit:
    """A script that is being fitted. Made by :func:`fit`; also a context manager that closes it."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Optimizer],
        budget: str | int,
        profile: str,
        say: Callable[[str], None],
        attempts: int = 3,
    ) -> None:
        self.watch = Watch()
        self.schedule: Schedule | None = None
        self._budget = parse_budget(budget)
        self._profile = profile
        self._say = say
        self._attempts = attempts
        self._models = models
        self._optimizers = list(optimizers)
        self._steps = 0
        self._recorder: Recorder | None = None
        self._report = Report()
        self._states: list[States] = []
        self._closed = False
        self._off = os.environ.get("NEAP_OFF") == "1"
        self._planning_ended = False
        if self._off:
            return
        for place, model in enumerate(models):
            self.watch.name_root(model, "" if place == 0 else type(model).__name__)
        self.device = device_of(models) if models else "cpu"
        self.runtime = Runtime(self.device)
        self.watch.install()
        self.watch.after_step.append(self._stepped)
        # Once, before anything of the script's own: a hook that is pushed inside another's block
        # would be popped with it.
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self.runtime.pack, self.runtime.unpack
        )
        self._hooks.__enter__()

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> Report:
        """Takes everything away again; states come back to the device. The report stays."""
        if not self._closed and not self._off:
            self._closed = True
            if self._recorder is not None:
                self._recorder.stop()
                self._recorder = None
            self.runtime.schedule = None
            self._hooks.__exit__(None, None, None)
            self.watch.remove()
            for states in self._states:
                states.stop()
        return self.report()

    def report(self) -> Report:
        """What happened so far."""
        if self._off:
            return self._report
        counts, report = self.runtime.counts, self._report
        report.swapped_out, report.swapped_in = counts.swapped_out, counts.swapped_in
        report.swapped_bytes = counts.bytes_out
        report.freed, report.kept, report.late = counts.deaths, counts.kept, counts.late
        report.state_bytes = sum(s.bytes_in + s.bytes_out for s in self._states)
        if self.device == "cuda":
            statistics = torch.cuda.memory_stats()
            report.peak_allocated_bytes = statistics.get("allocated_bytes.all.peak", 0)
            report.peak_reserved_bytes = statistics.get("reserved_bytes.all.peak", 0)
            report.allocator_retries = statistics.get("num_alloc_retries", 0)
        return report

    # -- iterations

    def _stepped(self, optimizer: Optimizer) -> None:
        if not self._optimizers:
            # A script that was not changed shows its optimizer, and so its device, here.
            self._optimizers.append(optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.device = self.runtime.device = parameter.device.type
        if optimizer is not self._optimizers[0]:
            return
        self._steps += 1
        if self.schedule is not None:
            why = self.runtime.end()
            if why is None:
                self._report.planned += 1
            else:
                self._count(why)
            self.runtime.begin()
            return
        if self._planning_ended:
            self._count("there is no plan")
            return
        self._count("watching")
        try:
            self._watch_on()
        except Exception as error:  # Planning must never fail the script.
            self._give_up(f"{type(error).__name__}: {error}")

    def _count(self, why: str) -> None:
        self._report.unplanned[why] = self._report.unplanned.get(why, 0) + 1

    def _give_up(self, why: str) -> None:
        self._planning_ended = True
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None
        self._report.notes.append(why)
        self._say(f"neap: the script runs without a plan: {why}")

    def _watch_on(self) -> None:
        """The first step makes the states; the next iterations are recorded until two are alike."""
        if self._recorder is None:
            self._recorder = Recorder(self.device, self.watch, saved=True)
            self._recorder.start(self._optimizers)
            return
        if len(self._recorder.cuts) < 2:
            self._recorder.cut()
            return
        self._recorder.stop()
        recorder, self._recorder = self._recorder, None
        found = _graph.iteration(
            recorder, type(self._models[0]).__name__ if self._models else "job"
        )
        if not found.steady:
            self._attempts -= 1
            if self._attempts == 0:
                self._give_up("no two iterations in a row were alike")
            return
        self._say("neap: planning")
        try:
            self.schedule = plan(
                recorder, found, self._budget, self._profile, all(map(divisible, self._optimizers))
            )
        except PlanError as error:
            self._give_up(str(error))
            return
        self._act(self.schedule, recorder)

    def _act(self, schedule: Schedule, recorder: Recorder) -> None:
        report = self._report
        report.budget_bytes = schedule.budget_bytes
        report.predicted_peak_bytes = schedule.peak_bytes
        report.unplanned_peak_bytes = schedule.unplanned_peak_bytes
        report.predicted_iteration_ns = schedule.iteration_ns
        report.unplanned_iteration_ns = schedule.unplanned_iteration_ns
        report.met = schedule.met
        if not schedule.met:
            report.notes.append("the budget can't be met; this is the lowest peak that was found")
        self.runtime.follow(schedule)
        if all(map(divisible, self._optimizers)):
            self._move_states(schedule)
        if self.device == "cuda":
            # What the first iterations left in the allocator's cache would count as reserved.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._say(
            f"neap: the plan acts: peak {schedule.peak_bytes} of {schedule.unplanned_peak_bytes} "
            f"bytes, budget {schedule.budget_bytes}; {len(schedule.sizes)} activations and "
            f"{len(schedule.away)} states are swapped"
        )

    def _move_states(self, schedule: Schedule) -> None:
        """Steps run in pieces; states that the plan moves leave with all of their parameter's."""
        names = {name.split(":", 1)[-1] for name in schedule.away}
        for optimizer in self._optimizers:
            known = {
                parameter: path
                for root in self.watch.roots.values()
                if (module := root()) is not None
                for path, parameter in module.named_parameters()
            }
            wanted = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if known.get(parameter) in names
            ]
            states = States(optimizer, self.watch)
            states.start(wanted)
            self._states.append(states)


def fit(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    budget: str | int,
    device: str = "a6000",
    verbose: bool = True,
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
        budget: bytes (``12GiB``), or a share of the unplanned peak (``60%``).
        device: the profile by whose times and link the plan is made: a name that
            ``neap device list`` shows, or a ``*.device.json``.
        verbose: whether to say on stderr when planning begins and when the plan acts.

    Raises:
        ValueError: if the budget can't be understood.
    """
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)

    def say(text: str) -> None:
        if verbose:
            print(text, file=sys.stderr, flush=True)

    return Fit(models, optimizers, budget, device, say)
