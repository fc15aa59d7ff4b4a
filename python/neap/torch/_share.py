"""A script's share of a GPU: the connection to ``neap torch --serve``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from neap.torch._connection import Connection, ShareError, printable

_MOST = 64
"""How many offers are read at once, so that no server keeps a script between two iterations."""
_LARGEST = 1 << 60
"""More bytes are no share."""


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
            raise ShareError(printable(form["refused"]))
        why = form.get("why", "")
        if not isinstance(why, str):
            raise ValueError("its reason is no text")
        return Offer(
            _whole(form, "share_bytes", _LARGEST),
            _whole(form, "scripts", _LARGEST),
            _whole(form, "link_per_mille", 1000),
            printable(why),
        )


def _whole(form: dict[str, Any], key: str, most: int) -> int:
    value = form.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{key} is no number from 1 to {most}")
    return value


class Share(Connection):
    """One script's connection. It ends with the process, which gives the share back.

    Args:
        path: the socket.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._noticed = False
        """Whether it was asked after the server had gone."""

    def join_with_graph(self, name: str, graph: str) -> Offer:
        """Joins with an iteration, and waits for a share: scripts that have to give bytes up do so
        between two of their iterations. The limits on its swaps are those that the command gave.

        Raises:
            ShareError: if nothing serves the socket.
        """
        self.connect()
        asked: dict[str, object] = {"join": name, "graph": graph}
        if limits := os.environ.get("NEAP_TORCH_LIMITS"):
            asked["limits"] = [int(one) for one in limits.split(":")]
        self.send(asked)
        return self._wait()

    def join_with_plan(self, name: str, budget: int) -> Offer:
        """Joins with a plan that was made before, for a budget that stays.

        Raises:
            ShareError: if nothing serves the socket.
        """
        self.connect()
        self.send({"join": name, "fixed_bytes": budget})
        return self._wait()

    def took(self, offer: Offer) -> None:
        """Says that the script keeps to an offer."""
        self.send({"took_bytes": offer.share_bytes})

    def newest(self) -> Offer | None:
        """The last offer that has come since it was asked, if any has. Never waits."""
        found = None
        for _ in range(_MOST):
            if not self.connected or self.gone:
                break
            offer = self.said(Offer.read)
            if offer is not None:
                found = offer
            elif not self.receive(wait=False):
                break
        return found

    def has_just_gone(self) -> bool:
        """Whether the server has gone, the first time that this is asked since it has."""
        before, self._noticed = self._noticed, self.gone
        return self.gone and not before

    def _wait(self) -> Offer:
        while not self.gone:
            offer = self.said(Offer.read)
            if offer is not None:
                return offer
            if not self.connected:
                raise ShareError("it has given its share back")
            self.receive(wait=True)
        raise ShareError(self.refused or f"nothing serves {self.path} any more")
