"""`neap.torch.fit`: every number stays what it is without neap, bit for bit."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import neap.torch
import pytest
import torch
from fitted import everything, same
from jobs import Job, LowRank, Transformer, classify, cnn, language, squared
from torch import nn

pytestmark = pytest.mark.usefixtures("small")
ITERATIONS = 7
Make = Callable[[], Job]


def cnn_adam() -> Job:
    model = cnn()
    return classify(model, torch.optim.Adam(model.parameters()), size=16)


def cnn_groups() -> Job:
    model = cnn()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.02}]
    return classify(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9), size=16)


def transformer_dropout() -> Job:
    model = Transformer(dropout=0.1)
    return language(model, torch.optim.AdamW(model.parameters()), batch=4)


def transformer_checkpointed() -> Job:
    model = Transformer(again=True, tied=False)
    return language(model, torch.optim.AdamW(model.parameters(), foreach=True), batch=4)


def accumulated_and_clipped() -> Job:
    model = cnn()
    optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.5)

    def iteration() -> torch.Tensor:
        for _ in range(2):
            loss = model(torch.randn(4, 3, 16, 16)).square().mean() / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, iteration)


def lstm() -> Job:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])

    model = Tagger()
    optimizer = torch.optim.Adagrad(model.parameters())

    return squared(model, optimizer, 4, 12, 8)


def unet() -> Job:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
            self.inner = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(2, 16), nn.SiLU())
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.out = nn.Conv2d(16, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.down(x)
            return self.out(torch.cat([a, self.up(self.inner(a))], 1))

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)

    def iteration() -> torch.Tensor:
        images = torch.randn(2, 3, 16, 16)
        optimizer.zero_grad(set_to_none=False)
        loss = (model(images) - images).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(model, optimizer, iteration)


def changing_scalar_and_average() -> Job:
    job = cnn_adam()
    average = copy.deepcopy(job.model)
    step = [0]
    inner = job.iteration
    job.model.register_forward_hook(lambda module, args, output: output * (1 + step[0] / 10))

    def iteration() -> torch.Tensor:
        step[0] += 1
        loss = inner()
        with torch.no_grad():
            for old, new in zip(average.parameters(), job.model.parameters()):
                old.lerp_(new, 0.1)
        return loss + average[7].weight.sum()

    return Job(job.model, job.optimizer, iteration)


def low_rank() -> Job:
    model = Transformer(tied=False)
    for block in model.blocks:
        block.mlp[0] = LowRank(block.mlp[0])
    trained = [p for n, p in model.named_parameters() if n.endswith((".a", ".b"))]
    return language(model, torch.optim.Adadelta(trained), batch=4)


JOBS: list[Make] = [
    cnn_adam,
    cnn_groups,
    transformer_dropout,
    transformer_checkpointed,
    accumulated_and_clipped,
    lstm,
    unet,
    changing_scalar_and_average,
    low_rank,
]


def run(make: Make, budget: str | None, iterations: int = ITERATIONS) -> tuple[Any, ...]:
    torch.manual_seed(5)
    job = make()
    fitted = None
    if budget is not None:
        fitted = neap.torch.fit(job.model, job.optimizer, budget, device="host", verbose=False)
    losses = [job.iteration().clone() for _ in range(iterations)]
    report = None if fitted is None else fitted.close()
    return losses + everything(job), report


@pytest.mark.parametrize("make", JOBS, ids=lambda make: make.__name__)
def test_numbers_are_those_without_neap(make: Make) -> None:
    expected, _ = run(make, None)
    for budget in ("70%", "50%"):
        found, report = run(make, budget)
        assert same(expected, found), report
        assert report.planned == ITERATIONS - 3, report
        assert report.swapped_out > 0 or report.state_bytes > 0, report
        # Each copy to the host has freed its storage, and each came back.
        assert report.swapped_in == report.freed == report.swapped_out
        assert report.predicted_peak_bytes < report.unplanned_peak_bytes


def test_iterations_that_differ_run_correctly_without_the_plan() -> None:
    def make() -> Job:
        model = Transformer(dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters())
        count = [0]

        def iteration() -> torch.Tensor:
            count[0] += 1
            length = 5 if count[0] % 5 == 0 else 8
            tokens = torch.randint(0, 32, (4, length))
            optimizer.zero_grad()
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            if count[0] % 4 == 0:
                with torch.no_grad():
                    loss = loss + model(tokens).sum()
            return loss.detach()

        return Job(model, optimizer, iteration)

    expected, _ = run(make, None, 12)
    found, report = run(make, "70%", 12)
    assert same(expected, found)
    differing = {why: n for why, n in report.unplanned.items() if why != "watching"}
    assert sum(differing.values()) == 2
    assert all("saved tensor" in why for why in differing)
    assert report.planned == 12 - 3 - 2


def test_checkpoints_are_those_without_neap() -> None:
    def states(budget: str | None) -> list[Any]:
        torch.manual_seed(1)
        job = cnn_adam()
        if budget is not None:
            fitted = neap.torch.fit(job.model, job.optimizer, budget, "host", verbose=False)
        found = []
        for _ in range(6):
            job.iteration()
            found.append(copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict())))
        if budget is not None:
            fitted.close()
        return found

    for (model, optimizer), (other_model, other_optimizer) in zip(states(None), states("50%")):
        assert all(torch.equal(model[k], other_model[k]) for k in model)
        assert optimizer["param_groups"] == other_optimizer["param_groups"]
        for number, values in optimizer["state"].items():
            for key, value in values.items():
                assert torch.equal(value, other_optimizer["state"][number][key])


def test_a_saved_tensor_that_is_changed_in_place_raises_as_ever() -> None:
    job = cnn_adam()
    with neap.torch.fit(job.model, job.optimizer, "60%", "host", verbose=False):
        for _ in range(5):
            job.iteration()
        x = torch.ones(300, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_closing_and_errors_leave_nothing_behind() -> None:
    job = cnn_adam()
    fitted = neap.torch.fit(job.model, job.optimizer, "60%", "host", verbose=False)
    for _ in range(5):
        job.iteration()
    job.model.register_forward_hook(lambda module, args, output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.iteration()
    fitted.close()
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    assert top is None or top(True) is None  # PyTorch 2.6 lacks it.
    assert all(s["exp_avg"].device == p.device for p, s in job.optimizer.state.items())


def test_neap_off_turns_all_of_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEAP_OFF", "1")
    job = cnn_adam()
    fitted = neap.torch.fit(job.model, job.optimizer, "60%")
    assert not torch.nn.modules.module._global_forward_hooks
    job.iteration()
    assert fitted.close().planned == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 << 30), ("50%", 500), ("1.5 MiB", 3 << 19), ("7", 7), ("2GB", 2 * 10**9)],
)
def test_budgets(text: str, size: int) -> None:
    assert neap.torch._report.parse_budget(text)(1000) == size


@pytest.mark.parametrize("text", ["", "-3", "12 parsecs", "0%"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="budget"):
        neap.torch._report.parse_budget(text)


def test_a_loop_without_an_optimizer_is_reported_as_such() -> None:
    job = cnn_adam()
    fitted = neap.torch.fit(job.model, [], "60%", verbose=False)
    job.model(torch.ones(2, 3, 8, 8)).sum().backward()
    assert str(fitted.close()).startswith("neap: no iteration was seen")


def test_a_report_of_a_small_job_has_figures_above_zero() -> None:
    report = neap.torch.Report(
        planned=1, predicted_peak_bytes=3 << 10, unplanned_peak_bytes=5 << 20, budget_bytes=4 << 20
    )
    assert "peak predicted 3.0 KiB, without the plan 5.0 MiB, budget 4.0 MiB, of" in str(report)
    report.predicted_peak_bytes = report.budget_bytes - 512
    assert "budget 4.0 MiB, of which 512 B are left to the allocator\n" in str(report)
    report.predicted_peak_bytes += 512
    assert "budget 4.0 MiB\n" in str(report)


SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]))
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten())
model.append(nn.Linear(32 * 28 * 28, 4))
optimizer = torch.optim.Adam(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 3, 32, 32)).square().mean()
    loss.backward()
    if loss.isfinite():
        optimizer.step()
    schedule.step()
    print(repr(loss.item()), schedule.get_last_lr())
print(sum(p.double().sum().item() for p in model.parameters()))
sys.exit(7)
"""


def test_an_unchanged_script_prints_the_same_and_keeps_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}

    def run_it(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command, str(script), "3"],
            env=environment,
            capture_output=True,
            text=True,
        )

    plain = run_it()
    planned = run_it("-m", "neap.torch", "--budget", "60%", "--device", "host")
    assert (plain.returncode, planned.returncode) == (7, 7), planned.stderr
    assert plain.stdout == planned.stdout
    assert "3 iterations ran by the plan" in planned.stderr, planned.stderr
    wrong = run_it("-m", "neap.torch", "--budget", "much")
    assert wrong.returncode == 2
    assert "give bytes" in wrong.stderr


def test_a_step_that_is_skipped_makes_one_iteration_without_the_plan() -> None:
    def make() -> Job:
        model = cnn()
        optimizer = torch.optim.Adam(model.parameters())
        count = [0]

        def iteration() -> torch.Tensor:
            count[0] += 1
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3, 16, 16)).square().mean()
            loss.backward()
            if count[0] != 6:  # As a guard against NaN, or GradScaler, would.
                optimizer.step()
            return loss.detach()

        return Job(model, optimizer, iteration)

    expected, _ = run(make, None, 10)
    found, report = run(make, "60%", 10)
    assert same(expected, found)
    assert report.planned == 10 - 3 - 2, report


def test_a_budget_that_no_plan_meets_is_reported() -> None:
    job = cnn_adam()
    with neap.torch.fit(job.model, job.optimizer, "20%", verbose=False) as fitted:
        for _ in range(ITERATIONS):
            job.iteration()
        report = fitted.report()
    assert report.predicted_peak_bytes > report.budget_bytes and report.planned > 0, report
    assert not report.met and any("can't be met" in note for note in report.notes), report


@pytest.mark.usefixtures("calls_alone")
def test_what_a_call_needs_to_run_again_leaves_too(tmp_path: Path) -> None:
    """The inputs of the calls are saved by nothing else, and PyTorch saves them in its own way."""
    shown = subprocess.run(
        [os.environ["NEAP"], "device", "show", "host", "--json"], capture_output=True
    )
    form = json.loads(shown.stdout)
    # Neither copies nor running again are always quicker.
    form["link"] = {key: max(value // 10, 1) for key, value in form["link"].items()}
    device = tmp_path / "link.device.json"
    device.write_text(json.dumps(form))

    class Waves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(torch.sin(torch.exp(torch.sin(x))))

    layers = [nn.Sequential(nn.Linear(64, 64, bias=False), Waves()) for _ in range(6)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fitted = neap.torch.fit(model, optimizer, "40%", device=str(device), verbose=False)
    before = last = 0
    for _ in range(6):
        model(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts = fitted.runtime.counts
        last, before = counts.swapped_out - before, counts.swapped_out
    schedule = fitted.schedule
    assert schedule is not None and schedule.again
    done = [action for actions in schedule.actions.values() for action in actions]
    moved = {one for what, one in done if what == "out"}
    assert moved & {owner for again in schedule.again for _, owner in again.inputs}
    assert last == len(moved)
    fitted.close()
