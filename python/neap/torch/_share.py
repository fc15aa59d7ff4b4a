"""A script's share of a GPU: the connection to ``neap torch --serve``."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 1 << 16
"""The longest line that is read."""


class ShareError(RuntimeError):
    """There is no share; says why."""


@dataclass
class Offer:
    """What a script may use from now on.

    Attributes:
        share_bytes: what its allocator may reserve.
        scripts: how many scripts share the GPU.
        link_per_mille: the part of the link to plan for, in thousandths.
        why: why the shares have changed.
    """

    share_bytes: int
    scripts: int
    link_per_mille: int
    why: str


class Share:
    """One script's connection. It ends with the process, which gives the share back.

    Args:
        path: the socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.gone = False
        """Whether nothing serves the socket any more."""
        self._read = b""
        self._process = 0
        self._socket: socket.socket | None = None

    def _connect(self) -> None:
        """Only a process that trains joins, so this comes late."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self.path)
        except OSError as error:
            connection.close()
            raise ShareError(f"{self.path} can't be joined: {error.strerror}") from None
        self._socket, self._process = connection, os.getpid()
        # A worker that outlives the script must not keep its share.
        os.register_at_fork(after_in_child=self._forget)

    def join_with_graph(self, name: str, graph: str) -> Offer:
        """Joins with an iteration, and waits for a share: scripts that have to give bytes up do so
        between two of their iterations.

        Raises:
            ShareError: if nothing serves the socket.
        """
        self._connect()
        self._send({"join": name, "graph": graph})
        return self._wait()

    def join_with_plan(self, name: str, budget: int) -> Offer:
        """Joins with a plan that was made before, for a budget that stays.

        Raises:
            ShareError: if nothing serves the socket.
        """
        self._connect()
        self._send({"join": name, "fixed_bytes": budget})
        return self._wait()

    def took(self, offer: Offer) -> None:
        """Says that the script keeps to an offer."""
        self._send({"took_bytes": offer.share_bytes})

    def newest(self) -> Offer | None:
        """The last offer that has come since it was asked, if any has. Never waits."""
        found = None
        while self._socket is not None and not self.gone:
            offer = self._line()
            if offer is not None:
                found = offer
                continue
            try:
                more = self._socket.recv(_LONGEST, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                more = b""
            self._add(more)
        return found

    def close(self) -> None:
        """Gives the share back."""
        if self._socket is not None and os.getpid() == self._process:
            self._socket.close()
            self._socket = None

    def _wait(self) -> Offer:
        while True:
            offer = self._line()
            if offer is not None:
                return offer
            if self._socket is None:
                raise ShareError("it has given its share back")
            try:
                self._add(self._socket.recv(_LONGEST))
            except OSError:
                self.gone = True
            if self.gone:
                raise ShareError(f"nothing serves {self.path} any more")

    def _add(self, more: bytes) -> None:
        self._read += more
        self.gone = not more or len(self._read) > _LONGEST

    def _line(self) -> Offer | None:
        line, end, rest = self._read.partition(b"\n")
        if not end:
            return None
        self._read = rest
        return Offer(**json.loads(line))

    def _send(self, form: dict[str, object]) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(json.dumps(form).encode() + b"\n")
        except OSError:
            self.gone = True

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def script_name() -> str:
    """What other scripts call this one: its file and its process."""
    return f"{Path(sys.argv[0]).name or 'python'} ({os.getpid()})"
