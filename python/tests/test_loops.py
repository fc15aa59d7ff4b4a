"""Loops as scripts have them: iterations that differ, evaluation, checkpoints, several processes,
several optimizers, and what PyTorch has besides.
"""

from __future__ import annotations

import copy
import gc
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
from jobs import Block, Job, Transformer
from neap.torch import _script
from neap.torch._recompute import possible
from neap.torch._storage import storage_of
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("small")


def held() -> int:
    """Bytes of all tensors that Python can reach."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            storage = storage_of(one)
            if storage is None:
                continue
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def test_a_loop_with_shorter_batches_evaluations_and_checkpoints() -> None:
    def run(budget: str | None) -> tuple[list[torch.Tensor], list[Any], Any, list[int]]:
        torch.manual_seed(5)
        model = Transformer(depth=2, dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters())
        fitted = None
        if budget is not None:
            fitted = neap.torch.fit(model, optimizer, budget, "host", verbose=False)
        losses, checkpoints, sizes = [], [], []
        for step in range(50):
            tokens = torch.randint(0, 32, (2 if step % 3 == 2 else 4, 8))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if step % 5 == 4:
                model.eval()
                with torch.no_grad():
                    losses.append(model(tokens).sum())
                model.train()
                both = (model.state_dict(), optimizer.state_dict())
                checkpoints.append(copy.deepcopy(both) if step < 20 else None)
            if step in (34, 49):
                del loss
                sizes.append(held() - sum(map(_bytes, losses)))
        job = Job(model, optimizer, lambda: losses[0])
        report = None if fitted is None else fitted.close()
        return losses + everything(job), checkpoints, report, sizes

    expected, saved, _, _ = run(None)
    found, fitted_saved, report, sizes = run("60%")
    assert same(expected, found), report
    for (model, optimizer), (other, other_optimizer) in zip(saved[:4], fitted_saved[:4]):
        assert all(torch.equal(model[k], other[k]) for k in model)
        for number, values in optimizer["state"].items():
            pairs = other_optimizer["state"][number]
            assert all(torch.equal(v, pairs[k]) for k, v in values.items())
    watched = report.unplanned["watching"]
    shorter = sum(step % 3 == 2 for step in range(watched, 50))
    assert report.planned == 50 - watched - shorter, report
    assert sizes[1] <= sizes[0], sizes


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def compared(run: Callable[[Any], list[torch.Tensor]], **asked: Any) -> Any:
    """Runs without and within a budget; the report of the second."""
    torch.manual_seed(5)
    expected = run(None)
    torch.manual_seed(5)
    fits: list[Any] = []

    def begin(model: Any, optimizer: Any) -> None:
        fits.append(neap.torch.fit(model, optimizer, "60%", "host", verbose=False, **asked))

    found = run(begin)
    report = fits[0].close()
    assert same(expected, found), report
    return report


def test_two_optimizers_that_take_turns() -> None:
    def run(begin: Any) -> list[torch.Tensor]:
        maker, judge = nn.Sequential(Block(16), Block(16)), nn.Sequential(Block(16), Block(16))
        first = torch.optim.Adam(judge.parameters(), 1e-3)
        second = torch.optim.RMSprop(maker.parameters(), 1e-3)
        if begin is not None:
            begin([maker, judge], [first, second])
        losses = []
        for _ in range(7):
            noise = torch.randn(4, 8, 16)
            first.zero_grad()
            loss = judge(maker(noise).detach()).mean() - judge(torch.randn(4, 8, 16)).mean()
            loss.backward()
            first.step()
            second.zero_grad()
            made = -judge(maker(noise)).mean()
            made.backward()
            second.step()
            losses += [loss.detach(), made.detach()]
        return [*losses, *(p.detach() for m in (maker, judge) for p in m.parameters())]

    report = compared(run)
    assert report.planned >= 3, report


def test_a_scaler_that_skips_steps() -> None:
    def run(begin: Any) -> list[torch.Tensor]:
        model = nn.Sequential(Block(16), Block(16))
        optimizer = torch.optim.Adam(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        if begin is not None:
            begin(model, optimizer)
        losses = []
        for step in range(10):
            optimizer.zero_grad()
            x = torch.randn(4, 8, 16) * (float("inf") if step == 6 else 1.0)
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach().nan_to_num())
        return [*losses, *(p.detach() for p in model.parameters())]

    report = compared(run)
    # The step that was skipped and the next are one iteration.
    assert report.planned == 10 - 3 - 2, report


@pytest.mark.skipif(not possible(), reason="this PyTorch does not show its checkpoint's hooks")
def test_functions_of_torch_func_run_while_neap_acts() -> None:
    def run(begin: Any) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        optimizer = torch.optim.Adam(model.parameters())
        if begin is not None:
            begin(model, optimizer)
        losses = []
        for _ in range(7):
            optimizer.zero_grad()
            x = torch.randn(8, 16)
            slope = torch.func.grad(lambda v: model(v).sum())(x)
            each = torch.func.vmap(torch.func.grad(lambda v: model(v).square().sum()))(x)
            loss = (model(x) - slope.detach()).square().mean() + each.sum() * 0
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(p.detach() for p in model.parameters())]

    plain = torch.autograd.graph.disable_saved_tensors_hooks
    report = compared(run)
    assert report.planned == 4, report
    assert torch.autograd.graph.disable_saved_tensors_hooks is plain


def test_quantised_weights_stay_as_they_are() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.quantize_per_tensor(torch.randn(16, 16), 0.1, 0, torch.qint8)
            self.register_buffer("weight", weight)
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.weight.dequantize() * self.scale)

    def run(begin: Any) -> list[torch.Tensor]:
        model = nn.Sequential(*[Quantised() for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if begin is not None:
            begin(model, optimizer)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 16)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(p.detach() for p in model.parameters())]

    report = compared(run)
    assert report.planned == 3, report


def test_an_iteration_by_hand_for_optimizers_that_are_not_pytorchs() -> None:
    def run(begin: Any) -> list[torch.Tensor]:
        model = nn.Sequential(Block(16), Block(16))
        fits: list[Any] = []
        if begin is not None:
            fits.append(neap.torch.fit(model, [], "60%", "host", verbose=False))
        losses = []
        for _ in range(6):
            if fits:
                with fits[0].iteration():
                    losses.append(one(model))
            else:
                losses.append(one(model))
        if fits:
            report = fits[0].close()
            assert report.planned == 3, report
        return [*losses, *(p.detach() for p in model.parameters())]

    def one(model: nn.Module) -> torch.Tensor:
        loss = model(torch.randn(4, 8, 16)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        return loss.detach()

    torch.manual_seed(5)
    expected = run(None)
    torch.manual_seed(5)
    assert same(expected, run(True))


def test_a_pytorch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch, "__version__", "2.3.1+cu121")
    assert _script.install() is None
    assert "needs PyTorch 2.6 or later, this is 2.3.1" in capsys.readouterr().err


RANKS = """
import os, sys, time, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import neap.torch
from neap.torch import _states

_states.SMALLEST = 1
torch.set_num_threads(1)
rank, budget, kind = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
torch.distributed.init_process_group("gloo")
torch.manual_seed(1)
def part():
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
model = nn.Sequential(*[part() for _ in range(6)])
if kind == "ddp":
    model = DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    for part in model:
        fully_shard(part)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
if budget != "none":
    fitted = neap.torch.fit(model, optimizer, budget, sys.argv[3], verbose=False)
torch.manual_seed(7 + rank)
for step in range(7):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 16)).square().mean()
    loss.backward()
    optimizer.step()
    print(rank, step, repr(loss.item()))
total = [p.detach() for p in model.parameters()]
total = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in total]
print(rank, [repr(p.double().sum().item()) for p in total])
if budget != "none":
    report = fitted.close()
    print(rank, report.planned, report.recomputed, report.notes, file=sys.stderr)
torch.distributed.destroy_process_group()
if kind == "fsdp" and budget == "none":
    time.sleep(0.05)  # Gloo's threads still free tensors; PyTorch may abort in them at the end.
"""


def ranks(folder: Path, *arguments: str) -> tuple[list[str], str]:
    """What two ranks print, by rank, and what they say."""
    script = folder / "ranks.py"
    script.write_text(RANKS)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
        "WORLD_SIZE": "2",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    both = [process.communicate(timeout=300) for process in started]
    said = "\n".join(error for _, error in both)
    assert all(process.returncode == 0 for process in started), said
    return [out for out, _ in both], said


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_compute_what_they_compute_without(kind: str, tmp_path: Path) -> None:
    if kind == "fsdp" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        pytest.skip("fully_shard on the CPU needs a later PyTorch")
    expected, _ = ranks(tmp_path, "none", kind)
    found, said = ranks(tmp_path, "60%", kind, "host")
    assert expected == found, said
    # DDP arranges its buckets anew after the first iteration, so one more is watched.
    planned = 3 if kind == "ddp" else 4
    assert f"0 {planned} " in said and f"1 {planned} " in said, said
