"""Files, folders and processes that planning uses. None of them makes a script wait for long, and
none stays behind when a signal ends the script meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

from neap._files import whole

LARGEST = 256 << 20
"""The bytes of the largest file that is read."""

_ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process where it does not say otherwise."""

_running: dict[subprocess.Popen[str], int] = {}
"""The processes that were started, each with the thread that waits for it."""
_starting: set[int] = set()
"""Threads that are about to start a process."""
_ending = threading.Event()
"""Whether a signal ends this process."""
_folders: set[str] = set()

_Made = TypeVar("_Made")


def read(path: str | os.PathLike[str], own: bool = False) -> bytes:
    """The content of a regular file. A pipe or a device is refused and never waited for.

    Args:
        own: whether a file is refused that another user owns or may write to.

    Raises:
        OSError: if it can't be read.
        ValueError: if it is no such file, or too large.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(opened, "rb") as file:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is no file")
        if about.st_size > LARGEST:
            raise ValueError(f"it is larger than {LARGEST} bytes")
        if own and (about.st_uid != os.geteuid() or about.st_mode & 0o022):
            raise ValueError("another user may write to it")
        return file.read(LARGEST)


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file that appears whole or not at all, also when power is lost.

    Raises:
        OSError: if it can't be written.
    """
    with whole(path) as partial, open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make(folder: Path) -> None:
    """Makes a folder and those above it, for this user alone whatever the umask is.

    Raises:
        OSError: if it can't be made.
    """
    if not folder.is_dir():
        make(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)


def cache() -> Path:
    """The cache folder, as the executable has it: NEAP_CACHE, or ``neap`` under XDG_CACHE_HOME or
    ~/.cache.
    """
    named = os.environ.get("NEAP_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "neap"


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A new folder that is gone afterwards, with the processes that :func:`run` has started: also
    where TERM or HUP ends the script meanwhile.
    """
    within = os.environ.get("NEAP_TORCH_DIR")
    usable = within is not None and os.access(within, os.W_OK)
    folder = tempfile.mkdtemp(prefix="neap-", dir=within if usable else None)
    _folders.add(folder)
    changed = []
    if threading.current_thread() is threading.main_thread():
        # A script's own handler stays, and one that ignores a signal does.
        changed = [one for one in _ENDS if signal.getsignal(one) is signal.SIG_DFL]
        for one in changed:
            signal.signal(one, _end)
    try:
        yield Path(folder)
    finally:
        for one in changed:
            if signal.getsignal(one) is _end:
                signal.signal(one, signal.SIG_DFL)
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)


def run(command: list[str], seconds: float, given: str = "") -> tuple[int, str, str]:
    """The exit code of a command, and what it prints, given this on its standard input.

    Raises:
        OSError: if it can't be started.
        TimeoutError: if it takes longer; it has been ended.
    """
    if threading.current_thread() is threading.main_thread():
        # There a signal's handler could run while a process is half started.
        return _on_a_thread(lambda: _ran(command, seconds, given))
    return _ran(command, seconds, given)


def _ran(command: list[str], seconds: float, given: str) -> tuple[int, str, str]:
    # What preloads a device into this process is not meant for others.
    clean = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    pipe = subprocess.PIPE
    _starting.add(threading.get_ident())
    try:
        if _ending.is_set():
            raise TimeoutError("the script ends")
        process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            encoding="utf-8",
            errors="replace",
            env=clean,
            # It ends with all that it has started.
            start_new_session=True,
        )
        _running[process] = threading.get_ident()
    finally:
        _starting.discard(threading.get_ident())
    try:
        out, error = process.communicate(given, timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(process)  # Also where it has ended, and what it has started has not.
        raise TimeoutError(f"it took longer than {seconds:.0f} s") from None
    finally:
        if process.poll() is None:
            _kill(process)
            process.wait()
        _running.pop(process, None)
    return process.returncode, out, error


def _on_a_thread(work: Callable[[], _Made]) -> _Made:
    """What ``work`` makes on another thread. The processes that it has started end with it, however
    it ends.
    """
    made: list[_Made] = []
    failed: list[BaseException] = []

    def make() -> None:
        try:
            made.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=make)
    try:
        thread.start()
        thread.join()
    except RuntimeError:  # The interpreter ends, and starts no thread any more.
        return work()
    except BaseException:
        _stop()
        if thread.ident is not None:
            thread.join()
        raise
    if failed:
        raise failed[0]
    return made[0]


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def stop(thread: int) -> None:
    """Ends the process that this thread waits for, if there is one."""
    for process, waits in list(_running.items()):
        if waits == thread:
            _kill(process)


def _stop() -> None:
    for process in list(_running):
        _kill(process)


def _end(number: int, frame: FrameType | None) -> None:
    """Cleans up, and ends this process as the signal would have."""
    _ending.set()
    latest = time.monotonic() + 1
    while _starting and time.monotonic() < latest:
        time.sleep(0.001)
    _stop()
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
