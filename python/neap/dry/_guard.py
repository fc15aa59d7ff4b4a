"""Nothing of neap's may end or change a script: what goes wrong here is noted and reported, and
Python's garbage collector does not run because of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from neap.torch._quiet import quiet

problems: list[str] = []
"""What went wrong, each once, in order."""


def note(where: str, error: BaseException) -> None:
    """Remembers an error of neap's own."""
    text = f"{where}: {type(error).__name__}: {error}"
    if text not in problems and len(problems) < 20:
        problems.append(text)


def guarded(function: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
    """``function``, which gives ``otherwise`` where it raises an exception, and in which the
    collector does not run.
    """

    @quiet
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            note(function.__name__, error)
            return otherwise

    return call
