"""A script's share of a GPU: the connection to ``neap torch --serve``."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LONGEST = 1 << 16
"""The longest line that is read."""
_MOST = 64
"""How many offers are read at once, so that no server keeps a script between two iterations."""
_LARGEST = 1 << 60
"""More bytes are no share."""


_CREDENTIALS = struct.Struct("iII")
"""The process, user and group at a socket's other end, as the kernel gives them."""


class ShareError(RuntimeError):
    """There is no share; says why."""


@dataclass
class Offer:
    """What a script may use from now on. What else a later server says of it is not looked at.

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

    @staticmethod
    def read(line: bytes) -> Offer:
        """What a server has sent.

        Raises:
            ShareError: if it has refused a share.
            ValueError: if it is no offer.
        """
        try:
            form = json.loads(line)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(form, dict):
            raise ValueError("it is no object")
        if isinstance(form.get("refused"), str):
            raise ShareError(_printable(form["refused"]))
        why = form.get("why", "")
        if not isinstance(why, str):
            raise ValueError("its reason is no text")
        return Offer(
            _whole(form, "share_bytes", _LARGEST),
            _whole(form, "scripts", _LARGEST),
            _whole(form, "link_per_mille", 1000),
            _printable(why),
        )


def _whole(form: dict[str, Any], key: str, most: int) -> int:
    value = form.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{key} is no number from 1 to {most}")
    return value


def _printable(text: str) -> str:
    """One line of a message, without what a terminal would act by."""
    return "".join(one if one.isprintable() else " " for one in text[:500])


class Share:
    """One script's connection. It ends with the process, which gives the share back.

    Args:
        path: the socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.gone = False
        """Whether nothing serves the socket any more, or what does is no server of neap's."""
        self._noticed = False
        """Whether it was asked after that."""
        self.refused = ""
        """Why the server gives no share, if it said so."""
        self._read = b""
        self._process = 0
        self._socket: socket.socket | None = None

    def _connect(self) -> None:
        """Only a process that trains joins, so this comes late."""
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
        for _ in range(_MOST):
            if self._socket is None or self.gone:
                break
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

    def has_just_gone(self) -> bool:
        """Whether the server has gone, the first time that this is asked since it has."""
        before, self._noticed = self._noticed, self.gone
        return self.gone and not before

    def close(self) -> None:
        """Gives the share back."""
        if self._socket is not None and os.getpid() == self._process:
            self._socket.close()
            self._socket = None

    def _wait(self) -> Offer:
        while not self.gone:
            offer = self._line()
            if offer is not None:
                return offer
            if self._socket is None:
                raise ShareError("it has given its share back")
            if not self.gone:
                try:
                    self._add(self._socket.recv(_LONGEST))
                except OSError:
                    self.gone = True
        raise ShareError(self.refused or f"nothing serves {self.path} any more")

    def _add(self, more: bytes) -> None:
        self._read += more
        self.gone = not more or len(self._read) > 2 * _LONGEST

    def _line(self) -> Offer | None:
        """The next offer. What is none is taken as if the server had gone: a script must not fail
        by what serves it.
        """
        line, end, rest = self._read.partition(b"\n")
        if not end:
            self.gone |= len(line) > _LONGEST
            return None
        self._read = rest
        try:
            return Offer.read(line)
        except ShareError as error:
            self.refused = str(error)
        except ValueError:
            pass
        self.gone = True
        return None

    def _send(self, form: dict[str, object]) -> None:
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


def script_name() -> str:
    """What other scripts call this one: its file and its process."""
    return f"{Path(sys.argv[0]).name or 'python'} ({os.getpid()})"
