"""Copies on a stream of their own, beside the compute stream."""

from __future__ import annotations

from typing import Any

import torch


class Lane:
    """A stream for copies in one direction.

    Attributes:
        stream: the stream.
        ends: for each copy, by number, the event at its end. They are used again in each iteration:
            a wait that was asked for holds the state that the event had then.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.ends: list[Any] = []
        self._coming: dict[int, torch.Tensor] = {}
        self._fence = torch.cuda.Event()
        self._device = self.stream.device_index
        self._compute: Any = None
        self._handle = 0
        """The compute stream's, while that is known."""
        # What `torch.cuda.set_stream` and the methods of an event do with a given stream.
        self._switch = torch._C._cuda_setStream
        self._raw = torch._C._cuda_getCurrentRawStream
        event: Any = torch.cuda.Event.__base__
        self._record, self._wait = event.record, event.wait
        self._to = _named(self.stream)
        self._back: tuple[int, int, int] = (0, 0, 0)

    def compute(self) -> Any:
        """The stream on which the script computes. Making its object anew each time takes longer
        than asking for its handle.
        """
        handle = self._raw(self._device)
        if self._compute is None or self._handle != handle:
            self._compute, self._handle = torch.cuda.current_stream(self._device), handle
            self._back = _named(self._compute)
        return self._compute

    def __enter__(self) -> None:
        """What runs within goes to this stream, after all that was asked of the compute stream."""
        self._record(self._fence, self.compute())
        self._wait(self._fence, self.stream)
        self._switch(*self._to)

    def __exit__(self, *error: object) -> None:
        self._switch(*self._back)

    def ended(self, number: int) -> None:
        """The copy of this number has been asked for."""
        self._record(self.ends[number], self.stream)

    def wait(self, number: int) -> None:
        """The compute stream goes on after the copy of this number."""
        self._wait(self.ends[number], self.compute())

    def comes(self, number: int, here: torch.Tensor) -> None:
        """The copy of this number to the device has been asked for. Its memory, which the compute
        stream gave out, is held until that waits for the copy.
        """
        self._coming[number] = here
        self.ended(number)

    def arrived(self, number: int) -> None:
        """The compute stream goes on after the copy of this number to the device."""
        self.wait(number)
        self._coming.pop(number, None)

    def settle(self) -> None:
        """The same for the copies that nothing has waited for."""
        for number in [*self._coming]:
            self.arrived(number)


def _named(stream: Any) -> tuple[int, int, int]:
    """What PyTorch knows a stream by."""
    return stream.stream_id, stream.device_index, stream.device_type


def copy(
    lane: Lane | None, to: list[torch.Tensor], source: list[torch.Tensor], number: int
) -> None:
    """Asks for copies on a lane, or copies at once where there is none."""
    if not to:
        return
    with torch.no_grad():
        if lane is None:
            torch._foreach_copy_(to, source)
            return
        with lane:
            torch._foreach_copy_(to, source, non_blocking=True)
            lane.ended(number)
