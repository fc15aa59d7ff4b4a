"""Which Python code runs in this thread, without frame objects.

``sys._getframe`` makes an object for each frame, which lives until its function returns and which
the garbage collector counts: it would run earlier than without neap. From Python 3.11 on the frames
themselves lie in the interpreter's memory, where the device library reads them.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from types import CodeType, FrameType

_ROOM = 256
"""Frames that are looked at."""
_NOT_THROUGH = 2**64 - 1
_WORD = ctypes.sizeof(ctypes.c_void_p)
_START = CodeType.__basicsize__
"""Where the instructions of a code object begin."""


class Frames:
    """The frames of a thread as numbers: for each the address of its code and of the instruction
    that runs, innermost first.
    """

    def __init__(self, library: ctypes.PyDLL, layout: array[int]) -> None:
        self._layout = layout
        self._at = layout.buffer_info()[0]
        self._free: list[array[int]] = []
        """Buffers: a thread may come in before another has read its own."""
        self._read = library.neap_dry_frames
        self._read.restype = ctypes.c_uint64
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]

    def look(self) -> array[int]:
        """Two numbers for each frame, then a 0; :meth:`done` takes them back."""
        words = self._free.pop() if self._free else array("Q", bytes(16 * (_ROOM + 1)))
        many = self._read(self._at, words.buffer_info()[0], _ROOM)
        words[2 * many] = 0
        return words

    def done(self, words: array[int]) -> None:
        """These are not read any more."""
        self._free.append(words)


def code_at(address: int) -> CodeType | None:
    """The code object of a frame that runs; nothing for a frame of the interpreter's own."""
    code = ctypes.cast(address, ctypes.py_object).value
    return code if isinstance(code, CodeType) else None


def line_at(code: CodeType, instruction: int) -> int:
    """The line of an instruction that is given by its address."""
    offset = instruction - id(code) - _START
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno


def found() -> Frames | None:
    """A reader of frames; nothing where neap's device is not there, or this Python keeps its frames
    in a way that is not known.
    """
    library = ctypes.PyDLL(None)
    if sys.version_info < (3, 11) or sys.implementation.name != "cpython":
        return None
    if not hasattr(library, "neap_dry_frames"):
        return None
    layout = _layout(library)
    if layout is None:
        return None
    frames = Frames(library, layout)
    return frames if _right(frames) else None


def _words(address: int, count: int) -> list[int]:
    return (ctypes.c_uint64 * count).from_address(address)[:]


def _inner(frame: FrameType) -> int:
    """The address of the interpreter's frame; a frame object has it after what called it."""
    return _words(id(frame), 4)[3]


def _layout(library: ctypes.PyDLL) -> array[int] | None:
    """Finds where things lie by what is known of the frame that runs here."""
    frame = sys._getframe()
    caller = frame.f_back
    if caller is None:
        return None
    code = frame.f_code
    inner, outer = _inner(frame), _inner(caller)
    words = _words(inner, 9)
    first, after = id(code) + _START, id(code) + sys.getsizeof(code)
    codes = [place for place, word in enumerate(words) if word & ~7 == id(code)]
    callers = [place for place, word in enumerate(words) if word == outer]
    instructions = [place for place, word in enumerate(words) if first <= word < after]
    state = getattr(library, "PyThreadState_GetUnchecked", None)
    state = state or getattr(library, "_PyThreadState_UncheckedGet", None)
    if state is None or [len(codes), len(callers), len(instructions)] != [1, 1, 1]:
        return None
    state.restype = ctypes.c_void_p
    thread = state()
    # Read here and not in another function, whose frame would be the one that runs.
    state_words = (ctypes.c_uint64 * 40).from_address(thread)[:]
    if sys.version_info < (3, 13):  # In between is a structure with the frame that runs.
        at, through = 7, 1 if sys.version_info < (3, 12) else 0
        if (ctypes.c_uint64 * 2).from_address(state_words[at])[through] != inner:
            return None
    else:
        here = [place for place, word in enumerate(state_words) if word == inner]
        if len(here) != 1:
            return None
        at, through = here[0], -1
    return array(
        "Q",
        [
            at * _WORD,
            through * _WORD if through >= 0 else _NOT_THROUGH,
            codes[0] * _WORD,
            callers[0] * _WORD,
            instructions[0] * _WORD,
        ],
    )


def _right(frames: Frames) -> bool:
    """Whether the library sees the frames that Python says there are, called by way of C too."""

    def look(_: int) -> bool:
        words = frames.look().tolist()
        rows = list(zip(words[::2], words[1::2]))
        # The frame of `look` has ended, and this function's own has gone on.
        seen = [
            (code, at - code - _START)
            for code, at in rows[2 : words[::2].index(0)]
            if code_at(code) is not None
        ]
        known = []
        frame = sys._getframe().f_back
        while frame is not None:
            known.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        # The interpreter's own frames have code in some versions.
        ours = {code for code, _ in known}
        return [one for one in seen if one[0] in ours] == known[: _ROOM - 2]

    return all(map(look, range(2)))
