"""Nothing of neap's may end or change a script: what goes wrong here is noted and reported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

problems: list[str] = []
"""What went wrong, each once, in order."""


def note(where: str, error: BaseException) -> None:
    """Remembers an error of neap's own."""
    text = f"{where}: {type(error).__name__}: {error}"
    if text not in problems and len(problems) < 20:
        problems.append(text)


def guarded(function: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
    """``function``, which gives ``otherwise`` where it raises an exception."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            note(function.__name__, error)
            return otherwise

    return call
