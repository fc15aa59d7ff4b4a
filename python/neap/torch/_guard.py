"""neap's own failure never ends a script.

Each method that PyTorch or the script calls is an :func:`entry`. What goes wrong in one is said in
one line, everything comes back to the device, and from then on each entry does what is plain:
what the script would see without neap.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

import neap

_Error = TypeVar("_Error", bound=BaseException)
Method = Callable[..., Any]
_Body = TypeVar("_Body", bound=Method)

ENTRIES: dict[str, Method] = {}
"""The body of each entry, by its qualified name."""


class Guard:
    """One for all that acts in a script.

    Args:
        strict: whether errors of neap's own reach the script.
        give_up: called once, with a line that says what failed.
    """

    def __init__(self, strict: bool = True, give_up: Callable[[str], None] | None = None) -> None:
        self.strict = strict
        self.broken = False
        """Whether something has failed: nothing acts any more."""
        self.end: Callable[[], None] | None = None
        """Takes hooks away that could not be taken away when something failed; none if all are."""
        self._give_up = give_up

    def failed(self, where: str, error: Exception) -> None:
        """Gives up because of an error in an entry; raises it where the script is to see it."""
        if self.strict or getattr(error, "neap_meant", False):
            raise error
        if not self.broken:
            self.broken = True
            if self._give_up is not None:
                self._give_up(line(where, error))


ALONE = Guard()
"""That of objects which no fit made: errors reach the caller."""


def meant(error: _Error) -> _Error:
    """An error that the script is to see: PyTorch's own, or the script's."""
    error.neap_meant = True  # type: ignore[attr-defined]
    return error


@contextmanager
def theirs() -> Iterator[None]:
    """What runs within is the script's or PyTorch's, and so are its errors."""
    try:
        yield
    except BaseException as error:
        meant(error)
        raise


def entry(plain: Method | None = None, ends: bool = False) -> Callable[[_Body], _Body]:
    """Marks a method that PyTorch or the script calls. Its object has the attribute ``guard``.

    Args:
        plain: given the same arguments, does what is to be done without neap; by default nothing.
            It must be right before, after and in the middle of the method.
        ends: whether hooks may be taken away when it is called.
    """

    def mark(function: _Body) -> _Body:
        name = function.__qualname__
        ENTRIES[name] = function

        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard: Guard = self.guard
            if not guard.broken:
                try:
                    return ENTRIES[name](self, *args, **kwargs)
                except Exception as error:
                    guard.failed(name, error)
            if ends and guard.end is not None:
                guard.end()
            return None if plain is None else plain(self, *args, **kwargs)

        return cast(_Body, call)

    return mark


def each(calls: list[Callable[[], object]]) -> list[str]:
    """Makes each of the calls, whatever the others do; the errors of those that failed."""
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def line(where: str, error: Exception) -> str:
    """What is said of an error of neap's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = ""
    if trace is not None:
        at = f", {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
    said = " ".join(str(error).split())
    return (
        f"neap: neap itself failed ({where}{at}: {type(error).__name__}: {said[:300]}); all comes "
        "back to the device and the script goes on without neap. Please report this line in "
        f"neap's issue tracker (neap {neap.__version__}, PyTorch {torch.__version__}); --strict "
        "raises the error"
    )
