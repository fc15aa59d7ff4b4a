"""Optimizer states that stay on the host and come to the device for their own update only.

Between steps such a state *is* its host tensor in ``optimizer.state``, so that checkpoints hold
what they would hold anyway. The step runs in pieces: the states of one piece come, its parameters
are updated, its states go back. While a piece is updated the next one's states come and the last
one's go, where the plan has room for three pieces. The states of a piece lie
together, see :mod:`neap.torch._slab`. Only classes whose step treats each parameter
alone, and that were compared bit for bit, are run in pieces. A parameter with large states is
updated in parts: these classes compute each element from that element of the gradient and of the
states alone, so each part is updated like a parameter of its own, over the same memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from neap.torch._clock import aside
from neap.torch._guard import Guard, each, entry, theirs
from neap.torch._holder import dense, seen_as
from neap.torch._lane import Lane, copy
from neap.torch._pieces import Moves, Part, Piece, alike, free, same, updated
from neap.torch._pinned import host_memory
from neap.torch._slab import Slab
from neap.torch._storage import blocks
from neap.torch._tensors import is_subclass
from neap.torch._watch import Around, Watch

DIVISIBLE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
)
SMALLEST = 64 << 10
"""Storages below this many bytes stay: each copy costs about ten microseconds of the host."""
PIECE = 64
"""A piece has no more parameters."""
PIECE_BYTES = 64 << 20
"""A piece has about this many bytes of states, where the plan asks for no smaller pieces."""

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


def full(parameters: int, size: int, more: int, piece: int) -> bool:
    """Whether a piece with `parameters` parameters and `size` bytes of states takes no `more`
    bytes, where pieces of `piece` bytes are wanted. All states of a piece are on the device for its
    update, so what would make it much larger begins the next.
    """
    return parameters >= PIECE or size >= piece or (size > 0 and 2 * (size + more) > 3 * piece)


def bounds(size: int, states: int, piece: int) -> list[tuple[int, int]]:
    """The parts in which a parameter of `size` bytes is updated, each by its first byte and the one
    after its last, given the bytes of all its states and those that a piece should have.
    """
    count = states // piece
    if count < 2:
        return [(0, size)]
    step = blocks(-(-size // count))
    return [(first, min(first + step, size)) for first in range(0, size, step)]


class States:
    """Keeps the states of some parameters on the host between the steps of one optimizer.

    Args:
        ahead: whether copies run while other pieces are updated, so that the states of up to three
            pieces are on the device.
        piece: the bytes of states that a piece should have; nothing for :data:`PIECE_BYTES`.
    """

    def __init__(
        self, optimizer: Optimizer, watch: Watch, ahead: bool = False, piece: int | None = None
    ) -> None:
        self.optimizer = optimizer
        self.watch = watch
        self.bytes_in = 0
        self.bytes_out = 0
        self.pieces = 0
        self._ahead = ahead
        self._piece = piece or PIECE_BYTES
        self._away: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """For each parameter the host tensors of its states."""
        self._here: list[Piece] = []
        """Pieces whose states are on the device, or come."""
        self._leaving: list[torch.Tensor | Slab] = []
        """States on the device whose copies to the host may not have ended."""
        self._groups: list[list[torch.Tensor]] | None = None
        """The parameters of each group, while a step has others in their place."""
        self._given: Any = None
        """The arguments of the step that runs, once its closure was called."""
        self._left: list[Piece] | None = None
        """The pieces of that step that are yet to be updated."""
        self._pieces: list[Piece] = []
        self._divided: list[list[torch.Tensor]] = []
        """The parameters, by group, that :attr:`_pieces` are for."""
        self._large: list[tuple[torch.Tensor, bool]] = []
        """Large parameters among them, and whether they are updated in parts."""
        self._known = -1
        """How many parameters had states then."""
        self._apart = False
        """Whether the states of some piece do not lie together yet."""
        self._around = Around(optimizer)
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
        for parameter in parameters:
            self._away[parameter] = {}
        moves = Moves()
        self._leave(parameters, moves)
        copy(self._out, moves.to, moves.source, 0)
        moves.take_place()
        self._leaving += moves.source
        self._arrived_on_host()
        self._around.add(self._before, self._finish)
        self.watch.at_step.append(self._make_room)

    @property
    def guard(self) -> Guard:
        """The watch's."""
        return self.watch.guard

    def stop(self) -> None:
        """Brings everything back for good."""
        if self._around.remove():
            self._back_for_good()

    def give_up(self) -> None:
        """After a failure: the same, within a step when that has ended. Hooks stay until
        :meth:`stop`, as they may be running.
        """
        if self._given is None:
            self._back_for_good()

    def _back_for_good(self) -> None:
        if self._make_room in self.watch.at_step:
            self.watch.at_step.remove(self._make_room)
        self._restore_groups()
        self._bring_all()
        self._away.clear()
        self._pieces, self._known = [], -1

    def _make_room(self, optimizer: Optimizer) -> None:
        """Around the step but for ours come the hooks of the script's own."""
        if optimizer is self.optimizer:
            self._around.move_inside()

    def _states(self, parameter: torch.Tensor) -> dict[str, Any]:
        states: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return states

    def _leave(self, parameters: list[torch.Tensor], moves: Moves) -> None:
        """Tensors of the host are to take the place of these parameters' states."""
        for parameter in parameters:
            states = self._states(parameter)
            hosts = self._away[parameter]
            # What is not updated in parts is copied once more, into the pinned memory of a slab.
            total = sum(s.nbytes for s in states.values() if isinstance(s, torch.Tensor))
            pinned = parameter.is_cuda and len(bounds(parameter.nbytes, total, self._piece)) > 1
            for key, state in states.items():
                if key not in _KEYS or not isinstance(state, torch.Tensor) or state.dim() == 0:
                    continue
                known = hosts.get(key)
                if state is known:
                    continue  # It is away already.
                if state.device != parameter.device or state.layout != torch.strided:
                    continue
                if known is None or not alike(known, state):
                    # As many elements as the strides reach over.
                    like = torch.empty_strided(
                        state.size(), state.stride(), dtype=state.dtype, device="meta"
                    )
                    pool = host_memory(like.untyped_storage().nbytes(), pinned)
                    bare = torch.empty(0, dtype=state.dtype)
                    known = hosts[key] = bare.set_(
                        pool.untyped_storage(), 0, state.size(), state.stride()
                    )
                moves.add(known, state, states, key)
                self.bytes_out += blocks(state.nbytes)

    def _come(self, parameters: list[torch.Tensor], moves: Moves) -> None:
        """Tensors of the device, each in memory of its own, are to take the place of these
        parameters' states.
        """
        for parameter in parameters:
            states = self._states(parameter)
            device = parameter.device
            for key, host in self._away[parameter].items():
                if states.get(key) is not host:
                    continue  # The user loaded other states in the meantime.
                # On the compute stream: a side stream would have memory of its own.
                here = torch.empty_strided(
                    host.shape, host.stride(), dtype=host.dtype, device=device
                )
                moves.add(here, host, states, key)
                self.bytes_in += blocks(host.nbytes)

    def _bring(self, piece: Piece, number: int) -> None:
        """Asks for copies of a piece's states to the device."""
        moves = Moves()
        try:
            for slab in piece.slabs:
                if slab.come():
                    piece.present.append(slab)
                    moves.add(slab.here, slab.host)
                    self.bytes_in += slab.size
            for part in piece.parts:
                part.shadow = self._shadow(part, moves)
            if piece.away and not piece.whole():
                self._come(piece.away, moves)
            copy(self._in, moves.to, moves.source, number)
        except BaseException:  # No memory: what did not come yet is still on the host.
            self._forget_shadows(piece.parts)
            for slab in piece.present:
                slab.go()
                slab.free()
            piece.present = []
            raise
        moves.take_place()
        self._here.append(piece)

    def _bring_all(self) -> None:
        """All states come, by copies that are waited for."""
        moves = Moves()
        self._come(list(self._away), moves)
        moves.run()
        moves.take_place()

    def _put_away(self, piece: Piece, number: int, plainly: bool = False) -> None:
        """Asks for copies of a piece's states to the host, or makes them at once; their memory is
        given back later.
        """
        moves = Moves()
        whole = piece.whole()
        going = [slab for slab in piece.present if slab.is_here()]
        for slab in going:
            moves.add(slab.host, slab.here)
            self.bytes_out += slab.size
        if piece.away and not (whole and len(going) == len(piece.present)):
            self._leave(piece.away, moves)
        self._take_back(piece.parts, moves)
        if plainly:
            moves.run()
        else:
            copy(self._out, moves.to, moves.source, number)
        for slab in going:
            slab.go()
        moves.take_place()
        self._forget_shadows(piece.parts)
        self._leaving += [*moves.source, *piece.present]
        piece.present = []

    def _shadow(self, part: Part, moves: Moves) -> torch.Tensor:
        """The part as a parameter with states of its own: views of those on the device, and room
        on the device for those on the host, which are to be copied.
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
                moves.add(own[key], host)
                self.bytes_in += blocks(host.nbytes)
            else:
                # All parts count the same steps.
                own[key] = part.of(state) if alike(state, parameter) else state.clone()
        self.optimizer.state[shadow] = own
        return shadow

    def _take_back(self, parts: list[Part], moves: Moves) -> None:
        """The parts' states are to go to the host."""
        for part in parts:
            shadow, states = part.shadow, self._states(part.parameter)
            if shadow is None:
                continue
            hosts = self._away.get(part.parameter, {})
            for key, state in self.optimizer.state[shadow].items():
                whole = states.get(key)
                if key in hosts and whole is hosts[key]:
                    moves.add(part.of(hosts[key]), state)
                    self.bytes_out += blocks(state.nbytes)
                elif part.last and isinstance(whole, torch.Tensor) and whole.dim() == 0:
                    whole.copy_(state)

    def _forget_shadows(self, parts: list[Part]) -> None:
        for part in parts:
            if part.shadow is not None:
                del self.optimizer.state[part.shadow]
                part.shadow = None

    @staticmethod
    def _wait(lane: Lane | None, number: int) -> None:
        """The compute stream waits for the copies of this number."""
        if lane is not None:
            lane.wait(number)

    def _arrived_on_host(self) -> None:
        """The host waits: a tensor in ``optimizer.state`` may be read at once."""
        if self._out is not None:
            self._out.stream.synchronize()
        free(self._leaving)
        self._leaving = []

    # -- a step

    @entry(lambda self, optimizer, args, kwargs: self._plainly(optimizer, args, kwargs))
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._restore_groups()  # A step that raised an exception has no end.
        self._given = self._left = None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        whole = [group["params"] for group in optimizer.param_groups]
        if any(not isinstance(p, list) for p in whole):
            self._bring_all()
            return None
        if closure is not None:
            # These classes call it once, before they look at a gradient.
            with torch.enable_grad(), theirs():
                loss = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        self._given = args, kwargs
        if self.guard.broken:  # What failed in the closure has brought everything back.
            return self._plainly(optimizer, args, kwargs)
        self._groups = [list(parameters) for parameters in whole]
        pieces = self._divide(self._groups)
        self._left = list(pieces)
        try:
            for number, piece in enumerate(pieces):
                for call in self.watch.before_piece if number else ():
                    call(number)
                with aside():
                    if number == 0 or not self._ahead:
                        self._bring(piece, number % 2)
                    if self._ahead and number + 1 < len(pieces):
                        self._bring(pieces[number + 1], (number + 1) % 2)
                    self._wait(self._in, number % 2)
                self.pieces += 1
                self._update(piece)
                with aside():
                    self._send_back(piece, number)
        except BaseException:
            try:
                self._all_back()
            finally:
                self._restore_groups()
            raise
        # The step that PyTorch runs itself finds nothing left to update.
        for group in optimizer.param_groups:
            group["params"] = []
        return self._given

    def _update(self, piece: Piece) -> None:
        """Runs the step for a piece whose states are on the device."""
        for group, parameters in zip(self.optimizer.param_groups, piece.groups):
            group["params"] = [updated(one) for one in parameters]
        step = type(self.optimizer).step.__wrapped__  # type: ignore[attr-defined]
        try:
            with theirs():
                step(self.optimizer)
        except BaseException:
            self._given = self._left = None
            raise
        if self._left is not None:
            self._left.remove(piece)

    def _plainly(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """After a failure: all states are on the device, and what is left of the step runs."""
        self._restore_groups()
        self._in = self._out = None
        each([lambda: self._all_back(plainly=True), self._bring_all])
        given, left = self._given, self._left
        if left is None or len(left) == len(self._pieces):  # PyTorch's own step updates all.
            self._given = self._left = None
            self._back_for_good()
            return given
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        for piece in list(left):
            come, go = Moves(), Moves()
            for part in piece.parts:
                part.shadow = self._shadow(part, come)
            come.run()
            self._update(piece)
            self._take_back(piece.parts, go)
            go.run()
            self._forget_shadows(piece.parts)
        for group in optimizer.param_groups:
            group["params"] = []
        return given

    def _divide(self, whole: list[list[torch.Tensor]]) -> list[Piece]:
        """The pieces of a step, which stay as they are while the same parameters have gradients."""
        now = [[p for p in parameters if p.grad is not None] for parameters in whole]
        known = len(self.optimizer.state)
        as_before = all(self._in_parts(p) == parted for p, parted in self._large)
        if known == self._known and as_before and same(now, self._divided):
            if self._apart:
                self._lay_together(self._pieces)
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
                size_of_states = sum(state.nbytes for state in states)
                cuts = bounds(parameter.nbytes, size_of_states, self._piece)
                if len(cuts) > 1:
                    large.append((parameter, self._in_parts(parameter)))
                    if large[-1][1]:
                        item = parameter.itemsize
                        parts = [Part(parameter, a // item, b // item) for a, b in cuts]
                for part in parts:
                    more = size_of_states
                    if part is not None:
                        more = len(states) * (part.after - part.first) * parameter.itemsize
                    if full(count, size, more, self._piece):
                        pieces.append(Piece(len(whole)))
                        size = count = 0
                    count += 1
                    size += more
                    piece = pieces[-1]
                    piece.groups[group].append(part or parameter)
                    if part is not None:
                        piece.parts.append(part)
                    elif parameter in self._away:
                        piece.away.append(parameter)
        laid = any(piece.slabs for piece in self._pieces)
        self._pieces, self._divided, self._known, self._large = pieces, now, known, large
        self._apart = laid
        if not laid:
            self._lay_together(pieces)
        return pieces

    def _lay_together(self, pieces: list[Piece]) -> None:
        """Moves the states of each piece next to each other on the host, one slab for each type:
        ``torch.save`` refuses memory that tensors of two types share. Where the script uses
        gradients by turns, states would be moved again and again, so this is done for a division
        that comes twice in a row, or where no states lie together yet.
        """
        self._apart = False
        for piece in pieces:
            found = [
                (parameter, key, host)
                for parameter in ([] if piece.slabs else piece.away)
                for key, host in self._away[parameter].items()
            ]
            if any(self._states(parameter).get(key) is not host for parameter, key, host in found):
                self._apart = True  # The script loaded others; the next step may find them here.
                continue
            for kind in dict.fromkeys(host.dtype for _, _, host in found):
                slab = Slab(self.optimizer, [one for one in found if one[2].dtype == kind])
                for owner, key, host in slab.hosts():
                    host.copy_(self._away[owner][key])
                    self._states(owner)[key] = self._away[owner][key] = host
                piece.slabs.append(slab)

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
        self._put_away(piece, number % 2)
        self._here.remove(piece)
        # Their memory is the compute stream's again.
        if self._ahead:
            if number > 0:
                self._wait(self._out, (number - 1) % 2)
        else:
            self._wait(self._out, number % 2)
            before += self._leaving
            self._leaving = []
        free(before)

    def _all_back(self, plainly: bool = False) -> None:
        """All states that are still on the device go to the host, which waits for them."""
        if self._here:  # A step that raised an exception may have been ahead.
            self._wait(self._in, 0)
            self._wait(self._in, 1)
        for piece in self._here:
            self._put_away(piece, 0, plainly)
        self._here = []
        self._arrived_on_host()

    @entry(lambda self, *step: self._finish_plainly())
    def _finish(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore_groups()
        with aside():
            self._all_back()
        self._given = self._left = None

    def _finish_plainly(self) -> None:
        """After a failure: the step has ended, and everything comes back for good."""
        self._restore_groups()
        self._in = self._out = None
        each([lambda: self._all_back(plainly=True)])
        self._given = self._left = None
        self._back_for_good()

    def _restore_groups(self) -> None:
        if self._groups is not None:
            for group, parameters in zip(self.optimizer.param_groups, self._groups):
                group["params"] = parameters
            self._groups = None
