"""States of a piece that lie together: what a step leaves behind, and what the script may do."""

from __future__ import annotations

import io

import pytest
import torch
from fitted import same
from neap.torch._slab import Slab
from neap.torch._states import States
from neap.torch._watch import Watch
from torch import nn

pytestmark = pytest.mark.usefixtures("small")


class Trained:
    """A model with parameters of two types, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
        self.model[3:].to(torch.float64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, seed: int) -> None:
        """One with random gradients."""
        torch.manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        """Parameters and states."""
        kept = [s for states in self.optimizer.state.values() for s in states.values()]
        return [*self.model.parameters(), *kept]


def pair() -> tuple[Trained, Trained, States]:
    """The same twice, the second with its states on the host between steps."""
    plain, apart = Trained(), Trained()
    for each in (plain, apart):
        each.step(0)
    states = States(apart.optimizer, Watch())
    states.start(list(apart.model.parameters()))
    return plain, apart, states


def slabs(states: States) -> list[Slab]:
    """All of the present division."""
    return [slab for piece in states._pieces for slab in piece.slabs]


def test_states_come_together_and_leave_nothing_on_the_device() -> None:
    plain, apart, states = pair()
    for seed in range(1, 4):
        plain.step(seed)
        apart.step(seed)
        assert same(plain.values(), apart.values())
        assert all(slab.here.untyped_storage().nbytes() == 0 for slab in slabs(states))
    assert len(slabs(states)) >= 2
    hosts = [host for slab in slabs(states) for _, _, host in slab.hosts()]
    assert len(hosts) == 2 * 12
    states.stop()
    assert same(plain.values(), apart.values())


def test_a_checkpoint_of_two_types_is_saved_and_loaded() -> None:
    plain, apart, states = pair()
    for each in (plain, apart):
        each.step(1)
    file = io.BytesIO()
    torch.save(apart.optimizer.state_dict(), file)  # Memory of two types would be refused.
    for each in (plain, apart):
        each.step(2)
        file.seek(0)
        each.optimizer.load_state_dict(torch.load(file))
        for seed in (3, 4):
            each.step(seed)
    assert same(plain.values(), apart.values())
    assert all(slab.come() for slab in slabs(states)), "they lie together again"


def test_gradients_that_come_by_turns_are_updated_the_same() -> None:
    plain, apart, states = pair()
    for seed in range(1, 7):
        for each in (plain, apart):
            each.model[seed % 2].requires_grad_(False)
            torch.manual_seed(seed)
            for parameter in each.model.parameters():
                parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
            each.optimizer.step()
            each.model.requires_grad_(True)
        assert same(plain.values(), apart.values())
    states.stop()
    assert same(plain.values(), apart.values())


def test_without_memory_the_states_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    _, apart, states = pair()
    apart.step(1)
    whole = Slab.come
    calls = []

    def full(slab: Slab) -> bool:
        calls.append(slab)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("none left")
        return whole(slab)

    monkeypatch.setattr(Slab, "come", full)
    with pytest.raises(torch.OutOfMemoryError):
        apart.step(2)
    monkeypatch.undo()
    kept = [s for states in apart.optimizer.state.values() for s in states.values()]
    assert all(value.untyped_storage().nbytes() > 0 for value in kept)
    assert states._here == []
    apart.step(3)
    states.stop()
