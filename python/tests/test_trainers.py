"""Callbacks inside real trainers: numbers stay as they are, iterations are planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neap.torch.callbacks
import pytest
import torch
from fitted import same
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("small")
STEPS = 8


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_a_callback_for_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")

    def train(callbacks: list[Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=16, n_layer=4, n_head=2
        )
        model = transformers.GPT2LMHeadModel(config)
        texts = [{"input_ids": torch.randint(0, 64, (16,))} for _ in range(4 * STEPS)]
        texts = [{**text, "labels": text["input_ids"]} for text in texts]
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model, args=settings, train_dataset=texts, callbacks=callbacks
        )
        trainer.train()
        return weights(model)

    expected = train([])
    fitting = neap.torch.callbacks.for_transformers("60%", device="host", verbose=False)
    assert same(expected, train([fitting])), fitting.report
    assert fitting.report.planned == STEPS - 3, fitting.report
    assert fitting.report.predicted_peak_bytes < fitting.report.unplanned_peak_bytes
    assert fitting.report.freed + fitting.report.recomputed_deaths > 0, fitting.report


def test_a_callback_for_lightning(tmp_path: Path, slow: str) -> None:
    try:
        import lightning.pytorch as lightning
    except ImportError:
        pytest.skip("lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            parts = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))]
            parts += [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))]
            self.layers = nn.Sequential(*parts, *[nn.Linear(16, 16) for _ in range(2)])

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return functional.mse_loss(self.layers(batch), batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    def train(callbacks: list[Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = Module()
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=callbacks,
        )
        trainer.fit(model, torch.utils.data.DataLoader(torch.randn(64 * STEPS, 16), batch_size=64))
        return weights(model)

    expected = train([])
    for device in ("host", slow):
        fitting = neap.torch.callbacks.for_lightning("60%", device=device, verbose=False)
        assert same(expected, train([fitting])), fitting.report
        assert fitting.report.planned == STEPS - 3, fitting.report
        # Lightning's forward and backward run inside the optimizer's step, as its closure.
        assert not any("operators" in why for why in fitting.report.excluded), fitting.report
        moved = fitting.report.state_bytes + fitting.report.recomputed_deaths
        assert moved + fitting.report.freed > 0, fitting.report
