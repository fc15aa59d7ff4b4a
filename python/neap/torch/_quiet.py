"""What neap does beside a script must not decide when Python's garbage collector runs.

The collector runs when enough containers were made since it ran last. It then frees cycles of the
script's own, with the memory of the device that they hold: when it runs is part of a script's peak.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def quiet(function: Function) -> Function:
    """``function``, in which the collector does not run. Containers that it leaves still count."""
    enabled, disable, enable = gc.isenabled, gc.disable, gc.enable

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not enabled():
            return function(*args, **kwargs)
        disable()
        try:
            return function(*args, **kwargs)
        finally:
            enable()

    return cast(Function, call)
