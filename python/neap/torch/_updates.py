"""How the optimizers' updates run by a plan: in pieces of the step, or inside backward."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim.optimizer import Optimizer

from neap.torch._early import Early, why_not
from neap.torch._guard import each
from neap.torch._schedule import Schedule, parameter_of
from neap.torch._states import States, divisible
from neap.torch._turns import Turns
from neap.torch._watch import Watch, named_tensors


class Updates:
    """The updates of a script.

    Args:
        optimizers: those of the script that are known; the list may grow.
        not_early: called with the reason where updates must stay in the step.
    """

    def __init__(
        self, watch: Watch, optimizers: list[Optimizer], not_early: Callable[[str], None]
    ) -> None:
        self._watch = watch
        self._optimizers = optimizers
        self._not_early = not_early
        self._states: list[States] = []
        self._soon: Early | None = None
        self.turns: Turns | None = None
        """What moves states around updates inside backward, by the present plan."""
        self._made = 0
        """Updates inside backward by the plans before this one."""

    @property
    def state_bytes(self) -> int:
        """Bytes of states that were copied since the present plan acts."""
        turned = 0 if self.turns is None else self.turns.bytes
        return turned + sum(states.bytes_in + states.bytes_out for states in self._states)

    @property
    def early(self) -> int:
        """Updates that ran inside backward."""
        return self._made + (0 if self._soon is None else self._soon.updates)

    def stop(self, bring_back: bool = True) -> None:
        """All updates run in the step, as they would without a plan.

        Args:
            bring_back: whether states come back to the device; else nothing changes for them.
        """
        if bring_back:
            for states in self._states:
                states.stop()
            if self.turns is not None:
                self.turns.stop()
        if self._soon is not None:
            self._made += self._soon.updates
            self._soon.stop()
            self._soon = None

    def give_up(self) -> list[str]:
        """After a failure: all states are on the device, or will be when the step has ended that
        runs just now. Gives what failed again.
        """
        return each([one.give_up for one in (*self._states, self.turns) if one is not None])

    def forget(self) -> None:
        """After :meth:`stop`: holds no optimizer any more."""
        self._states, self.turns = [], None

    def follow(self, schedule: Schedule | None) -> None:
        """Steps run in pieces; states that the plan moves leave with all of their parameter's.
        Without a plan all updates run in the step.
        """
        self.stop()
        self.forget()
        if schedule is None:
            return
        if schedule.early:
            self._update_early(schedule)
        elif all(map(divisible, self._optimizers)):
            for optimizer in self._optimizers:
                self._move_states(optimizer, schedule)

    def join(self, optimizer: Optimizer, schedule: Schedule) -> None:
        """An optimizer that was not known steps for the first time while a plan acts."""
        if len(self._optimizers) == 1:
            self.follow(schedule)
        elif not schedule.early and all(map(divisible, self._optimizers)):
            self._move_states(optimizer, schedule)

    def _move_states(self, optimizer: Optimizer, schedule: Schedule) -> None:
        names = set(map(parameter_of, schedule.away))
        known = {
            tensor: name
            for role, name, tensor in named_tensors(self._watch, [optimizer])
            if role == "parameter"
        }
        wanted = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if known.get(parameter) in names
        ]
        states = States(optimizer, self._watch, schedule.ahead, schedule.piece)
        states.start(wanted)
        self._states.append(states)

    def _update_early(self, schedule: Schedule) -> None:
        """Updates run inside backward, unless something shows that they must not."""
        if not self._optimizers:
            return  # It is known at the first step.
        why = why_not(self._optimizers, self._watch)
        if why is not None:
            self._not_early(why)
            return
        optimizer = self._optimizers[0]
        known = {
            name: tensor
            for role, name, tensor in named_tensors(self._watch, [optimizer])
            if role == "parameter"
        }
        named = {*schedule.soon, *(parameter_of(names[0]) for names in schedule.turns)}
        if not named <= known.keys():
            self._not_early("the plan is for other parameters")
            return
        wanted = [
            (known[parameter_of(names[0])], [name.split(":", 1)[0] for name in names])
            for names in schedule.turns
        ]
        self.turns = Turns(optimizer, self._watch, wanted)
        self.turns.start()
        soon = [known[name] for name in schedule.soon]
        self._soon = Early(optimizer, self._watch, soon, self.turns)
        self._soon.start()
