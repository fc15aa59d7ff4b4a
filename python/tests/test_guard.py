"""neap's own failure never ends a script: each entry point fails in turn, and numbers stay."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fitted import same
from jobs import Block, Job, classify, cnn, trained
from neap.torch import _guard, _loans, _planning, _states, _turns
from neap.torch._fit import Fit
from neap.torch._schedule import Schedule
from neap.torch._script import Script
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("small")

WATCHED, PLANNED = 4, 5


class Words(nn.Module):
    """Blocks, and logits that are larger than all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, dropout=0.1) for _ in range(3))
        self.head = nn.Linear(16, 600)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), torch.arange(96))


def words() -> Job:
    """Activations leave, calls run again, states stay away."""
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters())
    return trained(model, optimizer, lambda: model(torch.randn(4, 24, 16)))


def images() -> Job:
    """Batch norms; operators run again."""
    model = cnn()
    return classify(model, torch.optim.Adam(model.parameters()), size=16)


def wide() -> Job:
    """Mostly parameters: states come for early updates, or in pieces of the step, in parts."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())
    return trained(model, optimizer, lambda: model(torch.randn(2, 64)).square().mean())


def closure() -> Job:
    """The step calls back."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = model(torch.randn(64, 16)).square().mean()
        found.backward()
        return found

    return Job(model, optimizer, lambda: optimizer.step(loss).detach())


def odd() -> Job:
    """What a recorder treats specially: `cumprod`, the CTC loss and `torch.func`."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 6))
    optimizer = torch.optim.Adam(model.parameters())

    def loss_of() -> torch.Tensor:
        x = torch.randn(5, 2, 8)
        scale = torch.func.grad(lambda one: one.square().sum())(x)
        logits = functional.log_softmax(model(x).cumprod(2), 2)
        lengths = torch.tensor([5, 5]), torch.tensor([2, 1])
        targets = torch.tensor([[1, 2], [3, 0]])
        return functional.ctc_loss(logits, targets, *lengths) + 0 * scale.sum()

    return trained(model, optimizer, loss_of)


@dataclass
class Story:
    """A script, and what is asked for it."""

    make: Callable[[], Job]
    budget: str
    early: bool = False
    by_hand: bool = False
    only: tuple[str, ...] = ("",)
    """How the names of the entries begin that are tried in it."""
    calls: bool = False
    """Whether calls of modules run again: operators don't, and the link is slow."""


STORIES = {
    "words": Story(words, "35%", only=("Runtime", "States", "Watch._leave_backward")),
    "again": Story(words, "45%", only=("_Run", "Recompute", "Runtime"), calls=True),
    "images": Story(images, "60%"),
    "early": Story(wide, "45%", early=True),
    "pieces": Story(wide, "60%"),
    "closure": Story(closure, "60%"),
    "odd": Story(odd, "80%", by_hand=True),
}


@pytest.fixture(autouse=True)
def device(small: None, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the stories in which calls run again; errors are not raised."""
    SLOW[:] = [slow]
    monkeypatch.delenv("NEAP_TORCH_STRICT")


SLOW: list[str] = []


def run(story: Story, fit: bool, plan: Schedule | None = None, strict: bool = False) -> Any:
    """Losses and all that a script ends with; the fit, and what was said."""
    said: list[str] = []
    torch.manual_seed(3)
    job = story.make()
    fitted = script = None
    before = sys.excepthook
    if fit:
        early = story.early
        kept = None if plan is None else plan.budget_bytes
        fitted = Fit(
            [job.model],
            [job.optimizer],
            kept or story.budget,
            SLOW[0] if story.calls else "host",
            said.append,
            early_updates=early,
            schedule=plan,
            strict=strict,
        )
        script = Script(fitted)
    losses = []
    for _ in range(PLANNED if plan is not None else WATCHED + PLANNED):
        if fitted is not None and story.by_hand:
            with fitted.iteration():
                losses.append(job.iteration())
        else:
            losses.append(job.iteration())
    if script is not None and fitted is not None:
        script._excepthook = lambda *about: None
        script._failed(ValueError, ValueError("the script's"), None)
        fitted.report()
        script.end()
        fitted.close()
        sys.excepthook = before
    return [*losses, *ends(job)], fitted, said


def ends(job: Job) -> list[torch.Tensor]:
    """Parameters, buffers, optimizer states in the order of parameters, and random numbers."""
    states = job.optimizer.state_dict()["state"]
    return [
        *(p.detach() for p in job.model.parameters()),
        *job.model.buffers(),
        *(v for n in sorted(states) for v in states[n].values() if isinstance(v, torch.Tensor)),
        torch.get_rng_state(),
    ]


class Counted:
    """Puts a body in place of an entry's that counts calls, and fails at one of them."""

    def __init__(self, fails: int = 0, late: bool = False) -> None:
        self.calls: dict[str, int] = {}
        self._fails, self._late = fails, late

    def body(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = count = self.calls.get(name, 0) + 1
            if count == self._fails and not self._late:
                raise KeyError("made to fail")
            found = plain(*args, **kwargs)
            if count == self._fails:
                raise KeyError("made to fail late")
            return found

        return body


@pytest.fixture
def bodies() -> Iterator[dict[str, Callable[..., Any]]]:
    """The entries' bodies, put back at the end."""
    plain = dict(_guard.ENTRIES)
    yield plain
    _guard.ENTRIES.update(plain)


KNOWN: dict[str, Any] = {}


def story(name: str, bodies: dict[str, Any]) -> Any:
    """Of a story: what ends without neap, watched and planned; its plan; how often each entry is
    called when it is watched and when it is planned.
    """
    if name not in KNOWN:
        asked = STORIES[name]
        counts = []
        plan = None
        for given in (False, True):
            counted = Counted()
            _guard.ENTRIES.update({n: counted.body(n, body) for n, body in bodies.items()})
            with pytest.MonkeyPatch.context() as patch:
                if asked.calls:
                    patch.setattr(_planning, "operators", lambda *about: [])
                _, fitted, said = run(asked, True, plan if given else None, strict=True)
            plan = plan or fitted.schedule
            counts.append(counted.calls)
            assert not fitted.guard.broken, said
        _guard.ENTRIES.update(bodies)
        watched = run(asked, False)[0]
        assert plan is not None, name
        planned = run(asked, False, plan)[0]
        KNOWN[name] = watched, planned, plan, counts
    return KNOWN[name]


def fails(name: str, entry: str, bodies: dict[str, Any], given: bool, at: int, late: bool) -> None:
    """Whether the numbers stay where this call of this entry fails."""
    watched, planned, plan, _ = KNOWN[name]
    counted = Counted(at, late)
    _guard.ENTRIES.update(bodies)
    _guard.ENTRIES[entry] = counted.body(entry, bodies[entry])
    found, fitted, said = run(STORIES[name], True, plan if given else None)
    where = f"{entry}, call {at} {'late' if late else ''} of {name}, plan given: {given}"
    assert counted.calls.get(entry, 0) >= at, where
    assert fitted.guard.broken, where
    assert same(planned if given else watched, found), (where, said)
    lines = [line for line in said if "neap itself failed" in line]
    assert len(lines) == 1 and "KeyError: 'made to fail" in lines[0], (where, said)
    assert "issue tracker" in lines[0] and entry in lines[0], lines
    assert lines[0] in fitted._report.notes and not any(
        "and then" in n for n in fitted._report.notes
    )
    on_host = [s for s in fitted._updates._states if s._groups is not None]
    assert not on_host, where


@pytest.mark.parametrize("name", STORIES)
def test_each_entry_point_fails_in_turn(name: str, bodies: dict[str, Any]) -> None:
    _, _, _, counts = story(name, bodies)
    tried = 0
    for given, calls in zip((False, True), counts):
        for entry, count in calls.items():
            if (not given and entry in counts[1]) or not entry.startswith(STORIES[name].only):
                continue  # It is tried where there is a plan, when more is away.
            # In the middle of an iteration, and once when much is away.
            for late in (False, True):
                at = max(1, count * (11 if late else 6) // 20)
                try:
                    fails(name, entry, bodies, given, at, late)
                except AssertionError:
                    raise
                except BaseException as error:
                    trace = "".join(traceback.format_exception(error))
                    raise AssertionError(f"{entry} ({given=}, {late=}): {trace}") from None
                tried += 1
    assert tried >= 10


def test_every_entry_point_is_tried(bodies: dict[str, Any]) -> None:
    called: set[str] = set()
    for name in STORIES:
        for calls in story(name, bodies)[3]:
            called |= calls.keys()
    # A process that first uses a GPU comes to the last one: test_lanes tries it.
    assert called | {"InLane._uses_device"} == set(_guard.ENTRIES)


INNER = [
    (_states, "copy", "pieces"),
    (_turns, "copy", "early"),
    (_loans, "copy", "words"),
    (_planning.Planner, "plan", "words"),
    (_planning, "_run", "words"),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where, what, name", INNER)
def test_what_entries_call_fails_for_good(
    where: Any, what: str, name: str, late: bool, bodies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, planned, plan, _ = story(name, bodies)
    plain = getattr(where, what)
    planner = where is _planning or where is _planning.Planner
    calls = [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > (7 if late and not planner else 0):
            raise TypeError("no copies any more")
        return plain(*args, **kwargs)

    monkeypatch.setattr(where, what, failing)
    found, fitted, said = run(STORIES[name], True, None if planner else plan)
    assert same(watched if planner else planned, found), said
    if calls[0]:
        assert fitted.guard.broken, said


def test_strict_raises(bodies: dict[str, Any]) -> None:
    _, _, plan, _ = story("words", bodies)
    counted = Counted(100)
    _guard.ENTRIES["Runtime.pack"] = counted.body("Runtime.pack", bodies["Runtime.pack"])
    with pytest.raises(KeyError, match="made to fail"):
        run(STORIES["words"], True, plan, strict=True)
    _guard.ENTRIES.update(bodies)
    from neap.torch import _fit

    for acting in list(_fit._ACTING):
        acting.close()


def test_errors_of_the_script_stay_its_own(bodies: dict[str, Any]) -> None:
    _, _, plan, _ = story("pieces", bodies)
    job = wide()
    said: list[str] = []
    fitted = Fit([job.model], [job.optimizer], 1 << 30, "host", said.append, schedule=plan)
    job.iteration()
    job.optimizer.param_groups[0]["eps"] = "none"
    with pytest.raises(TypeError):
        job.iteration()
    job.optimizer.param_groups[0]["eps"] = 1e-8
    x = torch.randn(2, 64, requires_grad=True)
    y = x.exp()
    z = y.sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
        y.sum().backward()
    assert not fitted.guard.broken and not any("itself" in line for line in said), said
    job.iteration()
    fitted.close()
