"""A script's connection to ``neap torch --serve``."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

LONGEST = 1 << 16
"""The longest line that is read."""

_CREDENTIALS = struct.Struct("iII")
"""The process, user and group at a socket's other end, as the kernel gives them."""


_Said = TypeVar("_Said")


class ShareError(RuntimeError):
    """There is no share, or no lane; says why."""


class Connection:
    """One script's connection. It ends with the process, which gives back what it had.

    Args:
        path: the socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.gone = False
        """Whether nothing serves the socket any more, or what does is no server of neap's."""
        self.refused = ""
        """Why the server refuses the script, if it does."""
        self._read = b""
        self._process = 0
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        """Only a process that trains joins, so this comes late.

        Raises:
            ShareError: if nothing of this user's serves the socket.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self.path)
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError as error:
            connection.close()
            raise ShareError(f"{self.path} can't be joined: {error.strerror}") from None
        if _CREDENTIALS.unpack(peer)[1] != os.geteuid():
            connection.close()
            raise ShareError(f"{self.path} is not joined: another user listens on it")
        self._socket, self._process = connection, os.getpid()
        # A worker that outlives the script must not keep what it has.
        os.register_at_fork(after_in_child=self._forget)

    @property
    def connected(self) -> bool:
        """Whether there is a connection, which may have gone."""
        return self._socket is not None

    def close(self) -> None:
        """Gives back what the script had."""
        if self._socket is not None and os.getpid() == self._process:
            self._socket.close()
            self._socket = None

    def last(self) -> None:
        """Leaves the end of the connection to that of the process: its memory is free only then."""
        if self._socket is not None and os.getpid() == self._process:
            self._socket.detach()
            self._socket = None

    def said(self, read: Callable[[bytes], _Said]) -> _Said | None:
        """The next that was received, as ``read`` understands it. What it does not understand is
        taken as if the server had gone: a script must not fail by what serves it.
        """
        line = self.line()
        if line is None:
            return None
        try:
            return read(line)
        except ShareError as error:
            self.refused = str(error)
        except ValueError:
            pass
        self.gone = True
        return None

    def line(self) -> bytes | None:
        """The next line that has been received."""
        line, end, rest = self._read.partition(b"\n")
        if not end:
            self.gone |= len(line) > LONGEST
            return None
        self._read = rest
        return line

    def receive(self, wait: bool) -> bool:
        """Receives more, and waits for that or not; whether anything came."""
        if self._socket is None or self.gone:
            return False
        try:
            more = self._socket.recv(LONGEST, 0 if wait else socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            more = b""
        self._read += more
        self.gone = not more or len(self._read) > 2 * LONGEST
        return True

    def send(self, form: dict[str, object]) -> None:
        """Sends a line, and never waits for a server that does not read."""
        if self._socket is None or self.gone:
            return
        line = json.dumps(form).encode() + b"\n"
        try:
            self.gone = self._socket.send(line, socket.MSG_DONTWAIT) != len(line)
        except OSError:
            self.gone = True

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def printable(text: str) -> str:
    """One line of a message, without what a terminal would act by."""
    return "".join(one if one.isprintable() else " " for one in text[:500])


def script_name() -> str:
    """What other scripts call this one: its file and its process."""
    return f"{Path(sys.argv[0]).name or 'python'} ({os.getpid()})"
