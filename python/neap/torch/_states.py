"""Optimizer states that stay on the host and come to the device for their own update only.

Between steps such a state *is* its host tensor in ``optimizer.state``, so that checkpoints hold
what they would hold anyway. The step runs in pieces: the states of one piece come, its parameters
are updated, its states go back. Only classes whose step treats each parameter alone, and that were
compared bit for bit, are run in pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

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
PIECE = 16
"""A piece has at least this many parameters or :data:`PIECE_BYTES` of states."""
PIECE_BYTES = 16 << 20

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


class States:
    """Keeps the states of some parameters on the host between the steps of one optimizer."""

    def __init__(self, optimizer: Optimizer, watch: Watch) -> None:
        self.optimizer = optimizer
        self.watch = watch
        self.bytes_in = 0
        self.bytes_out = 0
        self.pieces = 0
        self._away: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """For each parameter the host tensors of its states."""
        self._here: list[torch.Tensor] = []
        self._groups: list[list[torch.Tensor]] | None = None
        self._handles: list[Any] = []

    def start(self, parameters: list[torch.Tensor]) -> None:
        """From now on steps run in pieces, and these parameters' states live on the host
        between.
        """
        for parameter in parameters:
            self._put_away(parameter)
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
        for parameter in list(self._away):
            self._bring(parameter)
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

    def _put_away(self, parameter: torch.Tensor) -> None:
        states = self._states(parameter)
        hosts = self._away.setdefault(parameter, {})
        for key, state in states.items():
            if key not in _KEYS or not isinstance(state, torch.Tensor) or state.dim() == 0:
                continue
            if state.device != parameter.device or state.layout != torch.strided:
                continue
            known = hosts.get(key)
            if state is known:
                continue  # It is away already.
            if (
                known is None
                or known.shape != state.shape
                or known.stride() != state.stride()
                or known.dtype != state.dtype
            ):
                known = torch.empty_strided(
                    state.size(),
                    state.stride(),
                    dtype=state.dtype,
                    device="cpu",
                    pin_memory=parameter.is_cuda,
                )
                hosts[key] = known
            # Copies to the host are waited for: the tensor in `optimizer.state` may be read at
            # once.
            known.copy_(state)
            self.bytes_out += blocks(state.numel() * state.element_size())
            states[key] = known

    def _bring(self, parameter: torch.Tensor) -> None:
        states = self._states(parameter)
        for key, host in self._away.get(parameter, {}).items():
            if states.get(key) is not host:
                continue  # The user loaded other states in the meantime.
            here = torch.empty_strided(
                host.size(), host.stride(), dtype=host.dtype, device=parameter.device
            )
            here.copy_(host, non_blocking=True)
            self.bytes_in += blocks(host.numel() * host.element_size())
            states[key] = here

    # -- a step

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._restore_groups()  # A step that raised an exception has no end.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        whole = [group["params"] for group in optimizer.param_groups]
        if any(not isinstance(p, list) for p in whole):
            for parameter in list(self._away):
                self._bring(parameter)
            self._here = list(self._away)
            return None
        if closure is not None:
            # These classes call it once, before they look at a gradient.
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        self._groups = [list(parameters) for parameters in whole]
        pieces = self._divide(self._groups)
        try:
            for piece in pieces:
                wanted = {id(p) for p in piece}
                for group, parameters in zip(optimizer.param_groups, self._groups):
                    group["params"] = [p for p in parameters if id(p) in wanted]
                for parameter in piece:
                    self._bring(parameter)
                self._here = piece
                self.pieces += 1
                step(optimizer)
                self._send_back()
        except BaseException:
            self._send_back()
            self._restore_groups()
            raise
        # The step that PyTorch runs itself finds nothing left to update.
        for group in optimizer.param_groups:
            group["params"] = []
        return args, kwargs

    def _divide(self, whole: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        pieces: list[list[torch.Tensor]] = [[]]
        size = 0
        for parameters in whole:
            for parameter in parameters:
                if parameter.grad is None:
                    continue  # The step passes over it.
                if len(pieces[-1]) >= PIECE or size >= PIECE_BYTES:
                    pieces.append([])
                    size = 0
                pieces[-1].append(parameter)
                for key, state in self._states(parameter).items():
                    if key in _KEYS and isinstance(state, torch.Tensor):
                        size += state.numel() * state.element_size()
        return pieces

    def _send_back(self) -> None:
        for parameter in self._here:
            if parameter in self._away:
                self._put_away(parameter)
        self._here = []

    def _finish(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore_groups()
        self._send_back()

    def _restore_groups(self) -> None:
        if self._groups is not None:
            for group, parameters in zip(self.optimizer.param_groups, self._groups):
                group["params"] = parameters
            self._groups = None
