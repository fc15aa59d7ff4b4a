"""One call of the check: its settings, its time, and the commands of its lines."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from command import (
    PATIENCE_S,
    Done,
    Failed,
    Impossible,
    OutOfTime,
    Process,
    Watch,
    end_all,
    together,
)
from lines import FAIL, NOT, PASS, Line, Lines, Saw

LONGEST_S = 60.0
"""No line takes longer."""
TIMED = 8
"""Of the iterations of a script, how many at the end are timed."""

# What a machine or a job lacks, in the words of Python, neap and compute-sanitizer.
LACKS = re.compile(
    r"No module named '(?!neap)[^']*'|the CUDA device lacks [^(]*"
    r"|the gradient of an attention bias is not supported|Device not supported"
    r"|no NVIDIA driver on this machine|has no setting \w+|Failed to find C compiler"
    r"|Cannot find a working triton|\w+ \d+ \(lib[\w.]+\) is not found"
    r"|the driver is for CUDA [\d.]+"
)


def median(times: Sequence[float]) -> float:
    """Of all iterations but the first, which warms up."""
    return statistics.median(times[1:] or times)


def last_word(text: str) -> str:
    """The last line that was said, or the last that is an error's."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error|\w*Error|\w*Exception)\b", line)]
    return ((errors or lines)[-1:] or ["it said nothing"])[0][:300]


class Check:
    """One call.

    Attributes:
        flags: of the command line.
        manifest: what the pack was made with: jobs, budgets, plans.
        lines: what ended.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        """Reads the pack's manifest, and what earlier calls with the same settings left."""
        self.flags = flags
        self.root, self.out = Path(flags.pack), Path(flags.out)
        self.manifest: dict[str, Any] = json.loads((self.root / "pack.json").read_text("utf-8"))
        flags.device = flags.device or self.manifest["device"]
        self._ends = time.monotonic() + flags.seconds
        self._of_thread = threading.local()
        asked = {"pack": self.manifest, "quick": flags.quick}
        asked |= {key: getattr(flags, key) for key in ("python", "cuda_libs", "device")}
        self.lines = Lines(self.out, asked)
        self.work = self.out / "work"
        self.work.mkdir(exist_ok=True)
        self.dead = ""
        """Why nothing more can be asked of the GPU."""
        self._stopped = False

    @property
    def facts(self) -> dict[str, Any]:
        """What earlier lines saw."""
        return self.lines.facts

    def fact(self, key: str, of: str) -> Any:
        """One fact; a line that needs it is not possible without it.

        Args:
            key: its name.
            of: the line that gives it.

        Raises:
            Impossible: if that line did not.
        """
        if key not in self.facts:
            raise Impossible(f"needs what the line '{of}' did not give")
        return self.facts[key]

    # Lines

    def all(self, lines: Sequence[Line]) -> None:
        """Does the lines in their order, those that may stand beside each other at once.

        Raises:
            OutOfTime: if there is not time for all.
        """
        self.lines.sequence, at = lines, 0
        while at < len(lines):
            end = at + 1
            while end < len(lines) and lines[at].beside and lines[end].beside:
                end += 1
            some = [line for line in lines[at:end] if not self.lines.ended(line.name)]
            at = end
            with ThreadPoolExecutor(self.facts.get("beside", 1)) as pool:
                in_time = list(pool.map(self._one, some))
            if not all(in_time):
                raise OutOfTime

    def stop(self, *_: object) -> None:
        """Ends the call now, after a signal; the lines that run are for the next one."""
        self._stopped = True
        end_all()

    def _one(self, line: Line) -> bool:
        """Whether there was time for a line."""
        left = self._ends - time.monotonic()
        if self._stopped or left < min(line.needs_s, self.flags.seconds / 2):
            return False
        began = time.monotonic()
        self._of_thread.until = min(began + LONGEST_S, self._ends)
        self._of_thread.whole = left >= LONGEST_S
        self._of_thread.name = re.sub(r"\W+", "-", line.name)
        if self.lines.lost(line.name):
            saw = Saw(False, "began twice, and the machine was gone before it ended")
            self.lines.end(line, FAIL, saw, 0.0)
            return True
        self.lines.begin(line.name)
        try:
            if self.dead:
                raise Impossible(self.dead)
            saw = line.work(self)
            result = PASS if saw.good else FAIL
        except OutOfTime:
            self.lines.leave(line.name)
            return False
        except Impossible as lack:
            result, saw = NOT, Saw(False, str(lack))
        except Failed as failed:
            result, saw = FAIL, Saw(False, str(failed))
            self._look_after_failure(line.name)
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as problem:
            result, saw = FAIL, Saw(False, f"{type(problem).__name__}: {problem}")
        self.lines.end(line, result, saw, time.monotonic() - began)
        return True

    def _look_after_failure(self, name: str) -> None:
        """Whether the GPU still answers: after an error that it does not survive, or with a process
        that the driver holds, each later line would wait for a minute and say something else.
        """
        if not self.facts.get("answers") or self.dead:
            return
        probe = [self.flags.own_python, str(self.root / "bench/gpu/check/probe.py")]
        process = Process(probe, self.work / "after-failure", self.environment())
        try:
            answered = together([process], time.monotonic() + 4 * PATIENCE_S) == [0]
        except TimeoutError:
            answered = False
        if not answered:
            self.dead = f"the GPU does not answer since the line '{name}'"

    # Commands

    def environment(self, **more: str) -> dict[str, str]:
        """Of every command: what neap and PyTorch keep is kept in the pack's folders, so that the
        second call finds it.
        """
        kept = {"NEAP_CACHE": str(self.root / "kernels"), "NEAP": str(self.neap_path)}
        kept |= {"PYTHONPATH": str(self.root / "python"), "NEAP_TORCH_CACHE": "0"}
        kept |= {"TORCHINDUCTOR_CACHE_DIR": str(self.out / "compiled")}
        kept |= {"TRITON_CACHE_DIR": str(self.out / "compiled" / "triton")}
        # Several compile at once, each by processes of its own.
        kept |= {"TORCHINDUCTOR_COMPILE_THREADS": "6"}
        # Scripts import others' modules that are beside them, and write no files there.
        kept |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
        return os.environ | kept | more

    @property
    def neap_path(self) -> Path:
        """The executable of the pack."""
        return self.root / "neap"

    def path(self, name: str) -> Path:
        """A file of the lines' own."""
        return self.work / name

    def command(
        self,
        command: Sequence[str],
        fine: Sequence[int] = (0,),
        watched: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Done:
        """Runs one command within the line's time.

        Raises:
            Failed: if its exit code is not fine.
            Impossible: if it says what the machine lacks.
            OutOfTime: if the call is over first.
        """
        return self.commands([command], fine, watched, env)[0]

    def commands(
        self,
        commands: Sequence[Sequence[str]],
        fine: Sequence[int] = (0,),
        watched: bool = False,
        env: Mapping[str, str] | None = None,
        ready: Path | None = None,
    ) -> list[Done]:
        """The same for several at once; the others start when the first has made a file."""
        here = self._of_thread
        watch = Watch() if watched else None
        processes: list[Process] = []
        try:
            for number, command in enumerate(commands):
                while number and ready and not ready.exists():
                    if time.monotonic() >= here.until or processes[0].wait(0.1) is not None:
                        break
                files = self.path(f"{here.name}-{number}")
                processes.append(Process(command, files, self.environment(**(env or {}))))
            codes = together(processes, here.until)
        except TimeoutError as late:
            if not here.whole and not str(late):
                raise OutOfTime from None
            raise Failed(f"takes longer than {LONGEST_S:.0f} s: {commands[0][0]}{late}") from None
        finally:
            seen = watch.stop() if watch else (-1, None)
        if self._stopped:
            raise OutOfTime
        done = [Done(code, *p.said(), *seen) for code, p in zip(codes, processes)]
        # The one that failed by itself, before those that were ended for it.
        for found, command in sorted(zip(done, commands), key=lambda both: both[0].code < 0):
            if found.code not in fine:
                self._refuse(found, command)
        return done

    def _refuse(self, done: Done, command: Sequence[str]) -> None:
        with open(self.out / "errors.log", "a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\nexit code {done.code}\n{done.err[-20000:]}\n")
        lack = LACKS.search(done.err)
        if lack:
            raise Impossible(lack[0])
        raise Failed(f"exit code {done.code}: {last_word(done.err)}")

    def neap(self, *arguments: str, watched: bool = False) -> Any:
        """What neap answers, as JSON."""
        done = self.command([str(self.neap_path), "--json", *arguments], watched=watched)
        return json.loads(done.out)

    def libraries(self) -> list[str]:
        """Where neap looks for CUDA's libraries."""
        libs = self.flags.cuda_libs or self.facts.get("cuda_libs")
        return ["--on", "cuda", *(["--cuda-libs", libs] if libs else [])]

    @property
    def device(self) -> str:
        """The profile of this GPU: as it was measured, or the built-in one that plans are for."""
        measured = self.out / "measured.device.json"
        return str(measured) if measured.exists() else self.flags.device

    def script(self, name: str, *arguments: str) -> list[str]:
        """The command of a script of the pack, in the Python that has PyTorch.

        Raises:
            Impossible: if there is none.
        """
        python = self.facts.get("python")
        if not python:
            raise Impossible("no PyTorch")
        return [python, str(self.root / name), *arguments]

    def model(self, job: str, *arguments: str) -> list[str]:
        """The command of a job of bench/gpu/models.py."""
        return self.script("bench/gpu/models.py", job, *arguments)


def where(program: str) -> str | None:
    """A program's path; NVIDIA's are looked for in their usual folder too."""
    return shutil.which(program) or shutil.which(program, path="/usr/local/cuda/bin")
