"""A script in a lane of a GPU: as it is, but for waiting between two of its iterations.

It joins when it is about to use the device, before it allocates anything there. Its first
iterations show what it keeps between iterations and needs within one, unless the user said so.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._connection import ShareError, script_name
from neap.torch._figures import statistic, statistics
from neap.torch._guard import Guard, entry
from neap.torch._report import size
from neap.torch._token import Go, Token
from neap.torch._watch import Watch, named_tensors

ROLE = "NEAP_TORCH_LANE"
"""In the environment: whether a process may join, or is a part of one that has."""
PART = "part"

_WATCHED = 3
"""The iterations by which a script is measured. The first makes the optimizer's states."""


@dataclass
class LaneReport:
    """What a script did in its lane. Bytes are those that its allocator reserves."""

    lane: bool = True
    met: bool = True
    iterations: int = 0
    persistent_bytes: int = 0
    ephemeral_bytes: int = 0
    peak_bytes: int = 0
    waited_s: float = 0.0
    waits: int = 0
    gave_back: int = 0
    allocator_retries: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kept, within = size(self.persistent_bytes), size(self.ephemeral_bytes)
        first = (
            f"neap: {self.iterations} iterations in a lane: {kept} kept between them, {within} "
            f"more within one; waited {self.waited_s:.1f} s for the token, gave free memory back "
            f"{self.gave_back} times"
        )
        return "\n".join([first, *self.notes])


class _OnDevice:
    """The memory that PyTorch's allocator has on the current device."""

    def __init__(self) -> None:
        self._limited = False

    def limit(self, most: int | None) -> None:
        if most is None and not self._limited:
            return
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total) if most else 1.0)
        self._limited = most is not None

    def settle(self) -> None:
        torch.cuda.synchronize()

    def figures(self) -> tuple[int, int]:
        holds, peak = statistics("reserved_bytes.all.current", "reserved_bytes.all.peak")
        return holds, peak

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def give_back(self) -> int:
        torch.cuda.empty_cache()
        return self.figures()[0]

    def retries(self) -> int:
        return statistic("num_alloc_retries")

    def stop(self) -> None:
        self.limit(None)


class _OnHost:
    """The same without a device: what lives across iterations, and what autograd saves within one
    while the script is measured.
    """

    def __init__(self, kept: Callable[[], int]) -> None:
        self._kept = kept
        self._saved: dict[int, int] = {}
        self._held = self._most = 0
        self._hooks: Any = None

    def limit(self, most: int | None) -> None:
        """Nothing bounds a process on the host."""

    def settle(self) -> None:
        """The host has done what it was asked for."""

    def figures(self) -> tuple[int, int]:
        return self._held, self._held + self._most

    def begin(self) -> None:
        if self._hooks is None:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(
                self._save, lambda tensor: tensor
            )
            self._hooks.__enter__()

    def give_back(self) -> int:
        self._most = max(self._most, sum(self._saved.values()))
        self._saved.clear()
        self._held = max(self._held, self._kept())
        return self._held

    def retries(self) -> int:
        return 0

    def stop(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._saved[storage.data_ptr()] = storage.nbytes()
        return tensor


class InLane:
    """One process of a script in a lane.

    Args:
        path: the server's socket.
        needs: its persistent and ephemeral bytes, if the user said so.
        work_ns: the time of all its iterations alone, if the user said so.
        say: prints a line.
        strict: whether errors of neap's own reach the script.
    """

    def __init__(
        self,
        path: str,
        needs: tuple[int, int] | None,
        work_ns: int | None,
        say: Callable[[str], None],
        strict: bool = False,
    ) -> None:
        self.guard = Guard(strict, self._fails)
        self.watch = Watch(self.guard)
        self._say = say
        self._needs, self._work_ns = needs, work_ns
        self._token = Token(path, self._give_back)
        self._memory: _OnDevice | _OnHost = _OnHost(self._kept)
        self._process = os.getpid()
        self._joined = False
        self._measuring = 0
        """How many more iterations are watched."""
        self._peak = self._persistent = 0
        self._first: Optimizer | None = None
        """The optimizer whose steps end iterations."""
        self._inside = False
        self._noticed = False
        self._report = LaneReport()
        self.watch.named.append(self._uses_host)
        self.watch.before_backward.append(self._uses_host)
        self.watch.before_step.append(lambda optimizer: self._uses_host())
        self.watch.after_step.append(self._stepped)
        self.watch.backward_over.append(self._backward_over)
        self.watch.install()
        # Called before anything is allocated on the device.
        torch.cuda._lazy_call(self._uses_device)

    # -- joining

    @entry()
    def _uses_device(self) -> None:
        if os.getpid() == self._process:
            self._memory.stop()
            self._memory = _OnDevice()
            self._uses_host()

    def _uses_host(self) -> None:
        if not self._joined and os.getpid() == self._process:
            self._join()

    def _join(self) -> None:
        self._joined = True
        # Processes that this one starts are parts of it, and wait with it.
        os.environ[ROLE] = PART
        try:
            go = self._waits(
                lambda: self._token.join(script_name(), self._needs, self._work_ns),
                "waiting for the token of a lane",
            )
        except ShareError as error:
            self._alone(str(error))
            return
        if self._token.refused:
            self._say(f"neap: the server refuses this script: {self._token.refused}")
            raise SystemExit(2)
        if self._needs is None and go is not None:
            self._measuring = _WATCHED
            self._memory.limit(go.most_bytes)
        else:
            self._take_needs(*(self._needs or (0, 0)))

    def _take_needs(self, persistent: int, ephemeral: int) -> None:
        self._report.persistent_bytes, self._report.ephemeral_bytes = persistent, ephemeral

    # -- iterations

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._first is None:
            self._first = optimizer
        if optimizer is not self._first:
            return
        if self.watch.backward_depth:
            self._inside = True
        else:
            self._ended()

    def _backward_over(self) -> None:
        if self._inside:
            self._inside = False
            self._ended()

    def _ended(self) -> None:
        self._report.iterations += 1
        if not self._token.connected or self._noticed or os.getpid() != self._process:
            return
        if self._measuring:
            self._measure()
        elif self._token.kept and not self._token.is_asked_back() and not self._token.gone:
            self._token.ended(*self._memory.figures(), waits=False)
        else:
            self._memory.settle()
            self._token.ended(*self._memory.figures(), waits=True)
            self._waits(self._token.wait)
        if self._token.gone:
            self._alone(self._token.refused or "the server has ended")

    def _measure(self) -> None:
        """Another of the first iterations has ended."""
        memory = self._memory
        memory.settle()
        self._measuring -= 1
        holds = memory.give_back()
        if self._measuring < _WATCHED - 1:
            # The first one is not like the others: it loads, makes states, tries kernels.
            self._peak = max(self._peak, memory.figures()[1])
            self._persistent = max(self._persistent, holds)
        memory.begin()
        if self._measuring:
            self._token.ended(holds, 0, waits=False)
            return
        memory.stop()
        persistent = self._persistent
        self._take_needs(persistent, max(self._peak - persistent, 0))
        self._waits(lambda: self._token.measured(persistent, self._report.ephemeral_bytes))

    def _waits(self, wait: Callable[[], Go | None], why: str = "") -> Go | None:
        if why:
            self._say(f"neap: {why}")
        began = time.perf_counter()
        go = wait()
        self._report.waited_s += time.perf_counter() - began
        self._report.waits += 1
        return go

    def _give_back(self) -> int:
        return self._memory.give_back()

    def _kept(self) -> int:
        """The bytes of what lives across iterations, on the host."""
        optimizers = [] if self._first is None else [self._first]
        return sum(tensor.nbytes for _, _, tensor in named_tensors(self.watch, optimizers))

    # -- ends

    def _alone(self, why: str) -> None:
        """No server passes tokens on any more: the script goes on."""
        self._noticed = True
        line = f"neap: the script goes on alone: {why}"
        self._report.notes.append(line)
        self._say(line)
        self._measuring = 0
        self._memory.stop()
        self._token.close()

    def _fails(self, line: str) -> None:
        self._say(line)
        self._report.notes.append(line)
        self._noticed = True
        self._memory.stop()
        self._token.close()

    def report(self) -> LaneReport:
        """What happened so far."""
        self._report.gave_back = self._token.gave_back
        if isinstance(self._memory, _OnDevice):
            self._report.peak_bytes = self._memory.figures()[1]
            self._report.allocator_retries = self._memory.retries()
        return self._report

    def end(self) -> LaneReport:
        """The process ends, and leaves the lane once it has."""
        self.watch.remove()
        self._memory.stop()
        self._token.last()
        return self.report()


def _needs(text: str) -> tuple[int, int] | None:
    kept, plus, within = text.partition("+")
    return (int(kept), int(within)) if plus else None


def install(say: Callable[[str], None], write: Callable[[dict[str, Any]], None]) -> InLane | None:
    """Begins, by the environment that ``neap torch`` made."""
    asked = os.environ.get
    if asked(ROLE) == PART:
        return None
    if asked("WORLD_SIZE", "1") != "1":
        # A rank that waits for the token would wait for a rank that waits for it.
        say("neap: --join is for scripts of one process; leave it out")
        sys.exit(2)
    work = asked("NEAP_TORCH_WORK")
    script = InLane(
        asked("NEAP_TORCH_JOIN") or "",
        _needs(asked("NEAP_TORCH_NEEDS") or ""),
        int(work) if work else None,
        say,
        asked("NEAP_TORCH_STRICT") == "1",
    )

    def end() -> None:
        process = os.getpid()
        if process != script._process:
            return
        report = script.end()
        if report.iterations:
            say(str(report))
            write({"pid": process, "rank": 0, **asdict(report)})

    atexit.register(end)
    return script
