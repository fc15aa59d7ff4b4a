"""Kernels of Triton's: what they write is not known any more, though no version counts it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from neap.dry import when_imported
from neap.dry._guard import guarded
from neap.dry._known import plain
from neap.dry._values import lose


def start() -> None:
    """Follows the script's own kernels, and those of compiled graphs."""
    when_imported("triton.runtime.jit", guarded(_own))
    when_imported("torch._inductor.runtime.triton_heuristics", guarded(_compiled))


def _own(module: ModuleType) -> None:
    run = module.JITFunction.run

    @functools.wraps(run)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        # Which of its arguments a kernel writes to is not known.
        _lose(args)
        _lose(kwargs.values())
        return result

    module.JITFunction.run = followed  # type: ignore[attr-defined]


def _compiled(module: ModuleType) -> None:
    run = module.CachingAutotuner.run

    @functools.wraps(run)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        _lose_written(self, args)
        return result

    module.CachingAutotuner.run = followed  # type: ignore[attr-defined]


@guarded
def _lose_written(tuner: Any, args: tuple[Any, ...]) -> None:
    """Forgets the arguments that a compiled graph's kernel writes to, which their names tell."""
    names = tuner.fn.arg_names
    changed = set(getattr(tuner, "mutated_arg_names", ()))
    written = ("out_ptr", "in_out_ptr")
    _lose(
        value
        for name, value in zip(names, args, strict=False)
        if name in changed or name.startswith(written)
    )


@guarded
def _lose(values: Iterable[Any]) -> None:
    for value in values:
        if plain(value):
            lose(value)
