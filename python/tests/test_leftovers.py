"""Storages of an iteration that outlive it are collected at its end, or named and not claimed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from neap.torch import _leftovers, fit
from torch import nn

KEPT: list[torch.Tensor] = []


class Tied(torch.autograd.Function):
    """Keeps its output where its own node finds it: only the collector frees both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.output = torch.tanh(x @ weight)
        return ctx.output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Chain(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(16, 16) / 8 for _ in range(3)])
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = Tied.apply(x, weight) if self.tied else torch.tanh(x @ weight)
        return x


def standing() -> int:
    """Bytes of the CPU's tensors that Python still finds."""
    found = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.numel() == 64 * 16:
            found[one.untyped_storage()._cdata] = one.nbytes
    return sum(found.values())


def trained(tied: bool, keep: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """The report, and what stood after each iteration."""
    monkeypatch.setattr(_leftovers, "SMALLEST", 4096)
    KEPT.clear()
    model = Chain(tied)
    optimizer = torch.optim.AdamW(model.parameters())
    stood = []
    gc.collect()
    gc.disable()
    try:
        with fit(model, optimizer, budget="90%", verbose=False) as acting:
            for _ in range(12):
                optimizer.zero_grad()
                output = model(torch.ones(64, 16))
                if keep:
                    KEPT.append(output.detach())
                loss = output.square().mean()
                loss.backward()  # The loss holds the graph until there is another one.
                optimizer.step()
                stood.append(standing())
            del loss
            report = acting.report()
    finally:
        gc.enable()
    return report, stood


@pytest.mark.usefixtures("small")
def test_cycles_of_an_iteration_are_collected_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    report, stood = trained(True, False, monkeypatch)
    assert report.planned > 4
    assert len(set(stood[-5:])) == 1, stood
    assert any("aten::tanh" in note and "reference cycles" in note for note in report.notes)


@pytest.mark.usefixtures("small")
def test_what_a_script_keeps_is_named_and_no_budget_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report, stood = trained(False, True, monkeypatch)
    assert stood[-1] > stood[-2] > stood[-3]
    assert report.kept_bytes == 64 * 16 * 4
    assert not report.met
    assert any("keeps" in note and "aten::tanh" in note for note in report.notes)


@pytest.mark.usefixtures("small")
def test_nothing_is_collected_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = trained(False, False, monkeypatch)
    assert report.kept_bytes == 0
    assert not any("cycles" in note or "keeps" in note for note in report.notes)
