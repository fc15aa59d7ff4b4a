"""A script keeps to its share of a GPU, if it has one: joins with what it does, and plans anew when
the share changes.
"""

from __future__ import annotations

from collections.abc import Callable

from neap.torch import _outside
from neap.torch._connection import ShareError, script_name
from neap.torch._enforce import Enforcement
from neap.torch._planning import PlanError, Planner
from neap.torch._report import Report
from neap.torch._schedule import Schedule
from neap.torch._search import Search
from neap.torch._share import Offer, Share


class Joined:
    """One script's part in sharing a GPU.

    Args:
        share: its connection, if it shares one.
        search: where plans for another budget come from.
        enforcement: where the budget is enforced.
        report: where it is noted.
        say: prints a line.
    """

    def __init__(
        self,
        share: Share | None,
        search: Search,
        enforcement: Enforcement,
        report: Report,
        say: Callable[[str], None],
    ) -> None:
        self._share = share
        self._search = search
        self._enforcement = enforcement
        self._report = report
        self._say = say

    def __bool__(self) -> bool:
        """Whether it shares a GPU."""
        return self._share is not None

    def join(self, planner: Planner) -> Offer | None:
        """Joins the scripts on this GPU with what was watched, and waits for a share.

        Raises:
            ShareError: if nothing serves the socket.
        """
        if self._share is None:
            return None
        self._say("neap: waiting for a share of the GPU")
        with _outside.workplace() as folder:
            graph = str(folder / "watched.graph.json")
            planner.write(graph)
            offer = self._share.join_with_graph(script_name(), graph)
        self._offered(offer, planner)
        return offer

    def took(self, offer: Offer | None) -> None:
        """A plan for this offer acts."""
        if self._share is not None and offer is not None:
            self._share.took(offer)

    def join_with(self, schedule: Schedule) -> None:
        """Joins with a plan that was made before."""
        if self._share is None:
            return
        try:
            offer = self._share.join_with_plan(script_name(), schedule.budget_bytes)
            self._share.took(offer)
        except ShareError as error:
            self._report.notes.append(str(error))
            self._say(f"neap: the script runs by its plan without a share: {error}")

    def _offered(self, offer: Offer, planner: Planner) -> None:
        self._search.budget = lambda peak: offer.share_bytes
        self._say(f"neap: {offer.why}: a share of {offer.share_bytes} bytes")
        planner.use_part_of_link(offer.link_per_mille)

    def ask(self, schedule: Schedule, act: Callable[[Schedule], None]) -> None:
        """Between two iterations: keeps to the share that was offered last, with a new plan where
        the present one does not fit it or leaves room that would make it quicker.
        """
        planner, share, search = self._search.planner, self._share, self._search
        if share is None or planner is None:
            return
        offer = share.newest()
        if share.has_just_gone():
            note = "what divided the GPU among scripts has ended; the share stays as it is"
            self._report.notes.append(note)
            self._say(f"neap: {note}")
        if offer is None:
            return
        try:
            self._offered(offer, planner)
        except PlanError as error:
            self._report.notes.append(str(error))
        fits = schedule.met and search.needs(schedule) <= offer.share_bytes
        slower = schedule.time_ns > schedule.unplanned_iteration_ns
        if fits and search.settled and not (slower and offer.share_bytes > schedule.budget_bytes):
            schedule.budget_bytes = self._report.budget_bytes = offer.share_bytes
            self._enforcement.lift()
            self._enforcement.begin(offer.share_bytes)
        else:
            other = search.for_another_budget(
                f"{offer.why}: the share is {offer.share_bytes} bytes"
            )
            if other is not None:
                act(other)
        share.took(offer)

    def close(self) -> None:
        """Gives the share back."""
        if self._share is not None:
            self._share.close()
