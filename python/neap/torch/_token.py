"""A script's place in a lane of a GPU: it runs while it has the lane's token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neap.torch._connection import Connection, ShareError, printable

_LARGEST = 1 << 60
"""More bytes are no limit."""


@dataclass(frozen=True)
class Go:
    """The script has the token.

    Attributes:
        kept: whether it keeps it until it is asked back; otherwise it is for one iteration.
        most_bytes: what its allocator may reserve until it was measured; none is no limit.
    """

    kept: bool
    most_bytes: int | None


BACK, GIVE_BACK = "back", "give_back"
"""What else a server says: to wait at the end of the iteration, and to give free memory back."""


def read(line: bytes) -> Go | str:
    """What a server has sent.

    Raises:
        ShareError: if it refuses the script.
        ValueError: if it is nothing that a server says.
    """
    try:
        form = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if form in (BACK, GIVE_BACK):
        return str(form)
    if not isinstance(form, dict):
        raise ValueError("it is no object")
    if isinstance(form.get("refused"), str):
        raise ShareError(printable(form["refused"]))
    go = form.get("go")
    if not isinstance(go, dict) or not isinstance(go.get("kept"), bool):
        raise ValueError("it is no token")
    most: Any = go.get("most_bytes")
    if most is not None and (type(most) is not int or not 1 <= most <= _LARGEST):
        raise ValueError("its limit is no number of bytes")
    return Go(go["kept"], most)


class Token(Connection):
    """One script's connection. It ends with the process, which frees its lane.

    Args:
        path: the socket.
        give_back: gives free memory back, and says what the allocator holds then.
    """

    def __init__(self, path: str, give_back: Callable[[], int]) -> None:
        super().__init__(path)
        self.kept = False
        """Whether the token is the script's until it is asked back."""
        self.gave_back = 0
        """How often free memory was given back."""
        self._give_back = give_back

    def join(self, name: str, needs: tuple[int, int] | None, work_ns: int | None) -> Go | None:
        """Comes, and waits for the token; none if there is no server any more.

        Raises:
            ShareError: if nothing serves the socket.
        """
        self.connect()
        self.send({"join": name, "lane": {"needs": needs, "work_ns": work_ns}})
        return self.wait()

    def measured(self, persistent: int, ephemeral: int) -> Go | None:
        """Says what the script needs, and waits for the token."""
        found = {"persistent_bytes": persistent, "ephemeral_bytes": ephemeral}
        self.send({"measured": found})
        return self.wait()

    def ended(self, holds: int, peak: int, waits: bool) -> None:
        """Says that an iteration has ended."""
        self.send({"ended": {"holds_bytes": holds, "peak_bytes": peak, "waits": waits}})

    def is_asked_back(self) -> bool:
        """Whether the script shall wait at the end of this iteration."""
        while self.receive(wait=False) and not self.gone:
            pass
        said = self.said(read)
        while said is not None:
            if said == BACK:
                return True
            said = self.said(read)
        return False

    def wait(self) -> Go | None:
        """Waits for the token; none if there is no server any more."""
        while self.connected:
            said = self.said(read)
            if isinstance(said, Go):
                self.kept = said.kept
                return said
            if said == GIVE_BACK:
                self.gave_back += 1
                self.send({"gave_back_bytes": self._give_back()})
            elif said is None:
                if self.gone:
                    return None
                self.receive(wait=True)
        return None
