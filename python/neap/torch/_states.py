"""Optimizer states that stay on the host and come to the device for their own update only.

Between steps such a state *is* its host tensor in ``optimizer.state``, so that checkpoints hold
what they would hold anyway. The step runs in pieces: the states of one piece come, its parameters
are updated, its states go back. While a piece is updated the next one's states come and the last
one's go, where the plan has room for three pieces. Only classes whose step treats each parameter
alone, and that were compared bit for bit, are run in pieces.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._lane import Lane
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


class Piece:
    """What is updated by one call of the step.

    Attributes:
        groups: its parameters, by the optimizer's groups.
        away: those whose states come for it.
    """

    def __init__(self, groups: int) -> None:
        self.groups: list[list[torch.Tensor]] = [[] for _ in range(groups)]
        self.away: list[torch.Tensor] = []


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
        self._leaving: list[torch.Tensor] = []
        """States on the device whose copies to the host may not have ended."""
        self._groups: list[list[torch.Tensor]] | None = None
        self._pieces: list[Piece] = []
        self._divided: list[list[torch.Tensor]] = []
        """The parameters, by group, that :attr:`_pieces` are for."""
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
        self._copy(self._out, to, source, number)
        self._leaving += source

    def _bring(self, parameters: list[torch.Tensor], number: int) -> None:
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
        self._copy(self._in, to, source, number)
        self._here += parameters

    @staticmethod
    def _copy(
        lane: Lane | None, to: list[torch.Tensor], source: list[torch.Tensor], number: int
    ) -> None:
        if not to:
            return
        with torch.no_grad():
            if lane is None:
                torch._foreach_copy_(to, source)
                return
            with lane:
                torch._foreach_copy_(to, source, non_blocking=True)
                lane.ended(number)

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
                    self._bring(piece.away, number % 2)
                if self._ahead and number + 1 < len(pieces):
                    self._bring(pieces[number + 1].away, (number + 1) % 2)
                self._wait(self._in, number % 2)
                for group, parameters in zip(groups, piece.groups):
                    group["params"] = parameters
                self.pieces += 1
                step(optimizer)
                self._send_back(piece.away, number)
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
        if known == self._known and same(now, self._divided):
            return self._pieces
        pieces: list[Piece] = [Piece(len(whole))]
        size = count = 0
        # A parameter without a gradient is passed over by the step.
        for group, parameters in enumerate(now):
            for parameter in parameters:
                if full(count, size):
                    pieces.append(Piece(len(whole)))
                    size = count = 0
                count += 1
                pieces[-1].groups[group].append(parameter)
                if parameter in self._away:
                    pieces[-1].away.append(parameter)
                for key, state in self._states(parameter).items():
                    if key in _KEYS and isinstance(state, torch.Tensor):
                        size += state.nbytes
        self._pieces, self._divided, self._known = pieces, now, known
        return pieces

    def _send_back(self, piece: list[torch.Tensor], number: int) -> None:
        """A piece's states go; those that went before it are given back."""
        before, self._leaving = self._leaving, []
        self._put_away(piece, number % 2)
        known = set(map(id, piece))
        self._here = [p for p in self._here if id(p) not in known]
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
        if self._here:  # A step that raised an exception may have been ahead.
            self._wait(self._in, 0)
            self._wait(self._in, 1)
        self._put_away([p for p in self._here if p in self._away])
        self._here = []
        self._arrived_on_host()

    def _finish(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore_groups()
        self._all_back()

    def _restore_groups(self) -> None:
        if self._groups is not None:
            for group, parameters in zip(self.optimizer.param_groups, self._groups):
                group["params"] = parameters
            self._groups = None


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, strides and type."""
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    """Whether two lists of lists hold the same tensors."""
    return len(one) == len(other) and all(
        len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(one, other)
    )
