"""Watches a script until its iterations are known well enough for a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.optim.optimizer import Optimizer

from neap.torch import _graph
from neap.torch._early import Completions, moved, why_not
from neap.torch._grown import Larger, grown
from neap.torch._kinds import Kinds
from neap.torch._leftovers import Leftovers
from neap.torch._recorder import Recorder
from neap.torch._sizes import Seen, seen
from neap.torch._watch import Watch
from neap.torch._widest import Former, widest


@dataclass(frozen=True)
class Watched:
    """What was watched.

    Attributes:
        recorder: the finished recording.
        iteration: the iteration that is planned for.
        sizes: where sizes vary, the iterations of its kind.
        shorter: whether watched iterations end earlier than the planned one, and save the same
            until then.
        soon: the iteration with updates inside backward, where that is allowed and sound.
        peak: the most that an iteration needed, in bytes.
    """

    recorder: Recorder
    iteration: _graph.Iteration
    sizes: list[Seen]
    shorter: bool
    soon: _graph.Iteration | None
    peak: int


class Watching:
    """Watches one script.

    Args:
        watch: its modules and optimizers.
        kinds: what is known of its iterations.
        leftovers: what its iterations leave behind.
        attempts: the most iterations that are watched until they leave nothing more behind.
        not_early: called with why updates can't run inside backward, where that was asked for.
    """

    def __init__(
        self,
        watch: Watch,
        kinds: Kinds,
        leftovers: Leftovers,
        attempts: int,
        not_early: Callable[[str], None] | None,
    ) -> None:
        self.recorder: Recorder | None = None
        self.spills = False
        """Whether what autograd saves is on the host meanwhile: a budget binds already."""
        self._watch, self._kinds, self._leftovers = watch, kinds, leftovers
        self._attempts = attempts
        self._not_early = not_early
        self._completions: Completions | None = None
        self._former: Former | None = None
        """The iteration of varying sizes that was planned for last."""
        self._watched: Watched | None = None
        """What was found last, where sizes vary."""

    def begin(self, device: str, optimizers: list[Optimizer]) -> None:
        """The next iteration is watched."""
        self.recorder = Recorder(device, self._watch, True, self.spills)
        self.recorder.start(optimizers)
        if self._not_early is not None:
            why = why_not(optimizers, self._watch)
            if why is None:
                self._completions = Completions(self.recorder, optimizers[0])
            else:
                self._not_early(why)

    def ended(self) -> bool:
        """An iteration has ended that was watched; whether it is the last one."""
        recorder = self.recorder
        assert recorder is not None
        enough = self._kinds.seen_enough(recorder)
        if self._kinds.turns:
            return False
        recorded = len(recorder.cuts)
        anew = self._leftovers.watched(recorder) and recorded < self._attempts
        if anew or not enough:
            recorder.cut()
        return enough and not anew

    def no_more_come(self) -> bool:
        """The script ends, and what was watched must do; whether it can."""
        recorder = self.recorder
        if recorder is None or len(recorder.cuts) <= 2:
            return False
        recorder.uncut()
        self._kinds.no_more_come()
        return True

    def found(self, name: str, optimizers: list[Optimizer]) -> Watched:
        """Ends, and says what was watched.

        Args:
            name: the graph's name.
            optimizers: the script's.

        Raises:
            ValueError: if no iteration was recorded.
        """
        recorder, completions = self.recorder, self._completions
        assert recorder is not None
        self.stop()
        sizes: list[Seen] = []
        if self._kinds.varies:
            sizes = seen(recorder)
            iteration = widest(recorder, name, self._former)
            self._former = recorder, iteration
        else:
            iteration = _graph.iteration(recorder, name)
        soon = self._soon(recorder, iteration, completions, optimizers)
        shorter = _graph.some_are_shorter(recorder, iteration.which)
        peak = max([*recorder.peaks, iteration.peak])
        watched = Watched(recorder, iteration, sizes, shorter, soon, peak)
        self._watched = watched if self._kinds.varies else None
        return watched

    def grown(self, larger: Larger) -> Watched | None:
        """What was found last, but as large as iterations were since; nothing if that can't be
        predicted.
        """
        known = self._watched
        iteration = None if known is None else grown(known.recorder, known.iteration, larger)
        if known is None or iteration is None or not iteration.steady:
            return None
        self._former = known.recorder, iteration
        peak = max(known.peak, iteration.peak)
        self._watched = replace(known, iteration=iteration, peak=peak)
        return self._watched

    def stop(self) -> None:
        """Watches no more."""
        if self._completions is not None:
            self._completions.stop()
        if self.recorder is not None:
            self.recorder.stop()
        self.recorder = self._completions = None

    def forget(self) -> None:
        """What was watched says nothing any more."""
        self._former = self._watched = None

    def _soon(
        self,
        recorder: Recorder,
        iteration: _graph.Iteration,
        completions: Completions | None,
        optimizers: list[Optimizer],
    ) -> _graph.Iteration | None:
        if completions is None or self._kinds.varies or not iteration.steady:
            return None
        soon = why_not(optimizers, self._watch) or moved(recorder, iteration, completions)
        if isinstance(soon, str):
            if self._not_early is not None:
                self._not_early(soon)
            return None
        return soon
