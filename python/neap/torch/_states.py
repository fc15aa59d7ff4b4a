"""Optimizer states that stay on the host and come to the device for their own update only.

Between steps such a state *is* its host tensor in ``optimizer.state``, so that checkpoints hold
what they would hold anyway. The step runs in pieces: the states of one piece come, its parameters
are updated, its states go back. While a piece is updated the next one's states come and the last
one's go, where the plan has room for three pieces. Only classes whose step treats each parameter
alone, and that were compared bit for bit, are run in pieces. A parameter with large states is
updated in parts: these classes compute each element from that element of the gradient and of the
states alone, so each part is updated like a parameter of its own, over the same memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._holder import dense, seen_as
from neap.torch._lane import Lane, copy
from neap.torch._recorder import is_subclass
from neap.torch._storage import blocks
from neap.torch._watch import Watch

DIVISIBLE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
)
PIECE = 64
"""A piece has at least this many parameters or :data:`PIECE_BYTES` of states."""
PIECE_BYTES = 64 << 20

_KEYS = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "sum",
    "acc_delta",
    "exp_inf",
}


def divisible(optimizer: Optimizer) -> bool:
    """Whether this optimizer's step may run in pieces and its states may leave: those of sharded
    parameters (FSDP) may not.
    """
    if any(is_subclass(p) for group in optimizer.param_groups for p in group["params"]):
        return False
    plain = type(optimizer).step
    own = vars(optimizer).get("step")
    # A learning rate scheduler of PyTorch's puts a function there that calls the class's own.
    if own is not None and not (
        getattr(own, "_wrapped_by_lr_sched", False) and getattr(own, "__wrapped__", None) is plain
    ):
        return False
    return type(optimizer) in DIVISIBLE and callable(getattr(plain, "__wrapped__", None))


def full(parameters: int, size: int) -> bool:
    """Whether a piece with `parameters` parameters and `size` bytes of states takes no more."""
    return parameters >= PIECE or size >= PIECE_BYTES


def bounds(size: int, states: int) -> list[tuple[int, int]]:
    """The parts in which a parameter of `size` bytes is updated, each by its first byte and the one
    after its last, given the bytes of all its states.
    """
    count = states // PIECE_BYTES
    if count < 2:
        return [(0, size)]
    step = blocks(-(-size // count))
    return [(first, min(first + step, size)) for first in range(0, size, step)]


@dataclass(eq=False)
class Part:
    """Some elements of a parameter in the order of its memory, `first` to before `after`."""

    parameter: torch.Tensor
    first: int
    after: int
    shadow: torch.Tensor | None = None
    """What the optimizer updates while it updates this part: the same memory as a vector."""

    @property
    def last(self) -> bool:
        """Whether the parameter ends here."""
        return self.after == self.parameter.numel()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that has the parameter's shape and strides."""
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        return flat[self.first : self.after]


class Piece:
    """What is updated by one call of the step.

    Attributes:
        groups: its parameters and parts of parameters, by the optimizer's groups.
        away: the parameters whose states come for it.
        parts: the parts of parameters among what it updates.
    """

    def __init__(self, groups: int) -> None:
        self.groups: list[list[torch.Tensor | Part]] = [[] for _ in range(groups)]
        self.away: list[torch.Tensor] = []
        self.parts: list[Part] = []


class States:
    """Keeps the states of some parameters on the host between the steps of one optimizer.

    Args:
        ahead: whether copies run while other pieces are updated, so that the states of up to three
            pieces are on the device.
    """

    def __init__(self, optimizer: Optimizer, watch: Watch, ahead: bool = False) -> None:
        self.optimizer = optimizer
        self.watch = watch
        self.bytes_in = 0
        self.bytes_out = 0
        self.pieces = 0
        self._ahead = ahead
        self._away: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """For each parameter the host tensors of its states."""
        self._here: list[torch.Tensor] = []
        """Parameters whose states are on the device, or come."""
        self._parts: list[Part] = []
        """The same of parts of parameters."""
        self._leaving: list[torch.Tensor] = []
        """States on the device whose copies to the host may not have ended."""
        self._groups: list[list[torch.Tensor]] | None = None
        self._pieces: list[Piece] = []
        self._divided: list[list[torch.Tensor]] = []
        """The parameters, by group, that :attr:`_pieces` are for."""
        self._large: list[tuple[torch.Tensor, bool]] = []
        """Large parameters among them, and whether they are updated in parts."""
        self._known = -1
        """How many parameters had states then."""
        self._handles: list[Any] = []
        self._in: Lane | None = None
        self._out: Lane | None = None

    def start(self, parameters: list[torch.Tensor]) -> None:
        """From now on steps run in pieces, and these parameters' states live on the host
        between.
        """
        if any(parameter.is_cuda for parameter in parameters):
            self._in, self._out = Lane(), Lane()
            for lane in (self._in, self._out):
                lane.ends = [torch.cuda.Event(), torch.cuda.Event()]
        self._put_away(parameters)
        self._arrived_on_host()
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._finish),
        ]
        self.watch.at_step.append(self._make_room)

    def stop(self) -> None:
        """Brings everything back for good."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.watch.at_step.remove(self._make_room)
        self._restore_groups()
        self._bring(list(self._away), 0)
        self._wait(self._in, 0)
        self._away.clear()

    def _make_room(self, optimizer: Optimizer) -> None:
        """Around the step but for ours come the hooks of the script's own."""
        if optimizer is self.optimizer:
            before, after = self._handles
            first: Any = optimizer._optimizer_step_pre_hooks
            last: Any = optimizer._optimizer_step_post_hooks
            first.move_to_end(before.id)
            last.move_to_end(after.id, last=False)

    def _states(self, parameter: torch.Tensor) -> dict[str, Any]:
        states: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return states

    def _put_away(self, parameters: list[torch.Tensor], number: int = 0) -> None:
        """Asks for copies to the host; :meth:`_arrived_on_host` waits for them."""
        to, source = [], []
        for parameter in parameters:
            states = self._states(parameter)
            hosts = self._away.setdefault(parameter, {})
            for key, state in states.items():
                if key not in _KEYS or not isinstance(state, torch.Tensor) or state.dim() == 0:
                    continue
                known = hosts.get(key)
                if state is known:
                    continue  # It is away already.
                if state.device != parameter.device or state.layout != torch.strided:
                    continue
                if known is None or not alike(known, state):
                    known = hosts[key] = torch.empty_strided(
                        state.size(),
                        state.stride(),
                        dtype=state.dtype,
                        device="cpu",
                        pin_memory=parameter.is_cuda,
                    )
                to.append(known)
                source.append(state)
                states[key] = known
                self.bytes_out += blocks(state.nbytes)
        copy(self._out, to, source, number)
        self._leaving += source

    def _bring(
        self, parameters: list[torch.Tensor], number: int, parts: Sequence[Part] = ()
    ) -> None:
        """Asks for copies to the device."""
        to, source = [], []
        for parameter in parameters:
            hosts = self._away.get(parameter)
            if hosts is None:
                continue
            states = self._states(parameter)
            device = parameter.device
            for key, host in hosts.items():
                if states.get(key) is not host:
                    continue  # The user loaded other states in the meantime.
                # On the compute stream: a side stream would have memory of its own.
                here = torch.empty_strided(
                    host.shape, host.stride(), dtype=host.dtype, device=device
                )
                to.append(here)
                source.append(host)
                states[key] = here
                self.bytes_in += blocks(host.nbytes)
        for part in parts:
            part.shadow = self._shadow(part, to, source)
        copy(self._in, to, source, number)
        self._here += parameters
        self._parts += parts

    def _shadow(
        self, part: Part, to: list[torch.Tensor], source: list[torch.Tensor]
    ) -> torch.Tensor:
        """The part as a parameter with states of its own: views of those on the device, and room
        on the device for those on the host, whose copies are added to the lists.
        """
        parameter = part.parameter
        hosts = self._away.get(parameter, {})
        shadow = part.of(parameter)
        own: dict[str, Any] = {}
        for key, state in self._states(parameter).items():
            if not isinstance(state, torch.Tensor):
                own[key] = state
            elif state is hosts.get(key):
                host = part.of(state)
                own[key] = torch.empty_like(host, device=parameter.device)
                to.append(own[key])
                source.append(host)
                self.bytes_in += blocks(host.nbytes)
            else:
                # All parts count the same steps.
                own[key] = part.of(state) if alike(state, parameter) else state.clone()
        self.optimizer.state[shadow] = own
        return shadow

    def _take_back(self, parts: list[Part], number: int) -> None:
        """Asks for copies of the parts' states to the host."""
        to, source = [], []
        for part in parts:
            shadow, states = part.shadow, self._states(part.parameter)
            if shadow is None:
                continue
            own = self.optimizer.state.pop(shadow)
            hosts = self._away.get(part.parameter, {})
            part.shadow = None
            for key, state in own.items():
                whole = states.get(key)
                if key in hosts and whole is hosts[key]:
                    to.append(part.of(hosts[key]))
                    source.append(state)
                    self.bytes_out += blocks(state.nbytes)
                elif part.last and isinstance(whole, torch.Tensor) and whole.dim() == 0:
                    whole.copy_(state)
        copy(self._out, to, source, number)
        self._leaving += source

    @staticmethod
    def _wait(lane: Lane | None, number: int) -> None:
        """The compute stream waits for the copies of this number."""
        if lane is not None:
            lane.wait(number)

    def _arrived_on_host(self) -> None:
        """The host waits: a tensor in ``optimizer.state`` may be read at once."""
        if self._out is not None:
            self._out.stream.synchronize()
        self._leaving = []

    # -- a step

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._restore_groups()  # A step that raised an exception has no end.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        whole = [group["params"] for group in optimizer.param_groups]
        if any(not isinstance(p, list) for p in whole):
            self._bring(list(self._away), 0)
            self._wait(self._in, 0)
            return None
        if closure is not None:
            # These classes call it once, before they look at a gradient.
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        self._groups = [list(parameters) for parameters in whole]
        pieces = self._divide(self._groups)
        groups = optimizer.param_groups
        try:
            for number, piece in enumerate(pieces):
                if number == 0 or not self._ahead:
                    self._bring(piece.away, number % 2, piece.parts)
                if self._ahead and number + 1 < len(pieces):
                    ahead = pieces[number + 1]
                    self._bring(ahead.away, (number + 1) % 2, ahead.parts)
                self._wait(self._in, number % 2)
                for group, parameters in zip(groups, piece.groups):
                    group["params"] = [updated(one) for one in parameters]
                self.pieces += 1
                step(optimizer)
                self._send_back(piece, number)
        except BaseException:
            self._all_back()
            self._restore_groups()
            raise
        # The step that PyTorch runs itself finds nothing left to update.
        for group in optimizer.param_groups:
            group["params"] = []
        return args, kwargs

    def _divide(self, whole: list[list[torch.Tensor]]) -> list[Piece]:
        """The pieces of a step, which stay as they are while the same parameters have gradients."""
        now = [[p for p in parameters if p.grad is not None] for parameters in whole]
        known = len(self.optimizer.state)
        as_before = all(self._in_parts(p) == parted for p, parted in self._large)
        if known == self._known and as_before and same(now, self._divided):
            return self._pieces
        large: list[tuple[torch.Tensor, bool]] = []
        pieces: list[Piece] = [Piece(len(whole))]
        size = count = 0
        # A parameter without a gradient is passed over by the step.
        for group, parameters in enumerate(now):
            for parameter in parameters:
                states = [
                    state
                    for key, state in self._states(parameter).items()
                    if key in _KEYS and isinstance(state, torch.Tensor)
                ]
                parts: list[Part | None] = [None]
                cuts = bounds(parameter.nbytes, sum(state.nbytes for state in states))
                if len(cuts) > 1:
                    large.append((parameter, self._in_parts(parameter)))
                    if large[-1][1]:
                        item = parameter.itemsize
                        parts = [Part(parameter, a // item, b // item) for a, b in cuts]
                for part in parts:
                    if full(count, size):
                        pieces.append(Piece(len(whole)))
                        size = count = 0
                    count += 1
                    piece = pieces[-1]
                    piece.groups[group].append(part or parameter)
                    if part is not None:
                        piece.parts.append(part)
                        size += len(states) * (part.after - part.first) * parameter.itemsize
                        continue
                    if parameter in self._away:
                        piece.away.append(parameter)
                    size += sum(state.nbytes for state in states)
        self._pieces, self._divided, self._known, self._large = pieces, now, known, large
        return pieces

    def _in_parts(self, parameter: torch.Tensor) -> bool:
        """Whether a large parameter can be updated in parts now: its gradient and states lie in
        memory as it does, and states that stay on the host are there.
        """
        states = self._states(parameter)
        if any(states.get(k) is not host for k, host in self._away.get(parameter, {}).items()):
            return False
        shaped = [s for s in states.values() if isinstance(s, torch.Tensor) and s.dim() > 0]
        return (
            parameter.grad is not None
            and parameter.grad.layout is torch.strided
            and all(alike(one, parameter) for one in [parameter.grad, *shaped])
            and dense(seen_as(parameter), parameter.untyped_storage().nbytes())
        )

    def _send_back(self, piece: Piece, number: int) -> None:
        """A piece's states go; those that went before it are given back."""
        before, self._leaving = self._leaving, []
        self._put_away(piece.away, number % 2)
        self._take_back(piece.parts, number % 2)
        known = set(map(id, [*piece.away, *piece.parts]))
        self._here = [p for p in self._here if id(p) not in known]
        self._parts = [p for p in self._parts if id(p) not in known]
        # Their memory is the compute stream's again.
        if self._ahead:
            if number > 0:
                self._wait(self._out, (number - 1) % 2)
        else:
            self._wait(self._out, number % 2)
            self._leaving = []
        del before

    def _all_back(self) -> None:
        """All states that are still on the device go to the host, which waits for them."""
        if self._here or self._parts:  # A step that raised an exception may have been ahead.
            self._wait(self._in, 0)
            self._wait(self._in, 1)
        self._put_away([p for p in self._here if p in self._away])
        self._take_back(self._parts, 0)
        self._here, self._parts = [], []
        self._arrived_on_host()

    def _finish(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore_groups()
        self._all_back()

    def _restore_groups(self) -> None:
        if self._groups is not None:
            for group, parameters in zip(self.optimizer.param_groups, self._groups):
                group["params"] = parameters
            self._groups = None


def updated(one: torch.Tensor | Part) -> torch.Tensor:
    """What the optimizer updates for it: for a part its memory, with that of its gradient."""
    if isinstance(one, torch.Tensor):
        return one
    shadow, gradient = one.shadow, one.parameter.grad
    assert shadow is not None and gradient is not None
    shadow.grad = one.of(gradient)
    return shadow


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, strides and type."""
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    """Whether two lists of lists hold the same tensors."""
    return len(one) == len(other) and all(
        len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(one, other)
    )
