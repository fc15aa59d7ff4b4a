"""Recording as users call it: a function that runs iterations, and hooks for scripts that can't be
changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from neap.torch import _form, _graph
from neap.torch._recorder import Recorder
from neap.torch._watch import Watch


def record(
    iteration: Callable[[], Any],
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] = (),
    path: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Runs ``iteration`` three times and records the third as a job graph.

    The first makes the optimizer's states, the second shows when what one iteration leaves behind
    is freed in the next. All three train as they would without recording.

    Args:
        iteration: one whole training iteration, ``optimizer.step()`` included. Called without
            arguments.
        model: the model, or several.
        optimizer: its optimizer, or several.
        path: where to write the ``*.graph.json``; nothing is written if not given.
        name: the job's name; by default the class of the model.

    Returns:
        The graph (format ``neap.graph``, version 1). Sizes are in bytes.

    Raises:
        ValueError: if the iteration runs no operator on the model's device.
    """
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    watch = Watch()
    watch.name_root(models[0])
    for other in models[1:]:
        watch.name_root(other, type(other).__name__)
    with watch.installed():
        iteration()
        recorder = Recorder(device_of(models), watch)
        recorder.start(optimizers)
        try:
            iteration()
            recorder.cut()
            iteration()
        finally:
            recorder.stop()
    found = _graph.iteration(recorder, name or type(models[0]).__name__)
    form = _form.graph(found)
    if path is not None:
        _form.write(form, path)
    return form


def device_of(models: Sequence[torch.nn.Module]) -> str:
    """The type of the device that the first parameter is on."""
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            return tensor.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


class ScriptRecording:
    """Records an iteration of a running script: from one optimizer step to the next, two times.

    Args:
        watch: installed hooks.
        after: how many optimizer steps to let pass first; at least one, so that the states exist.
        done: called with the finished iteration.
        failed: called with a sentence if there is nothing to record.
    """

    def __init__(
        self,
        watch: Watch,
        after: int,
        done: Callable[[_graph.Iteration], None],
        failed: Callable[[str], None],
        name: str = "job",
    ) -> None:
        self.watch = watch
        self.recorder: Recorder | None = None
        self._after = max(1, after)
        self._steps = 0
        self._done = done
        self._failed = failed
        self._name = name
        self._optimizer: Any = None
        watch.after_step.append(self._stepped)

    def close(self) -> None:
        """Stops, done or not."""
        if self._stepped in self.watch.after_step:
            self.watch.after_step.remove(self._stepped)
        if self.recorder is not None:
            self.recorder.stop()

    def _stepped(self, optimizer: Optimizer) -> None:
        # Iterations are counted by the optimizer that stepped first; a script may have others.
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self._steps += 1
        if self._steps == self._after:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            device = parameters[0].device.type if parameters else "cpu"
            self.recorder = Recorder(device, self.watch)
            self.recorder.start([optimizer])
        elif self._steps == self._after + 1 and self.recorder is not None:
            self.recorder.cut()
        elif self._steps == self._after + 2 and self.recorder is not None:
            self.close()
            try:
                self._done(_graph.iteration(self.recorder, self._name))
            except Exception as error:
                self._failed(f"{type(error).__name__}: {error}")
