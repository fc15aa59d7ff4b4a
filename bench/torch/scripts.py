"""Whether unmodified scripts keep a budget under ``neap torch``, and whether its report is true.

    python bench/torch/scripts.py [--budget 60] [--only plain,trainer]

Five scripts run as ``neap dry -- neap torch --budget 60% -- python SCRIPT``. Each prints, at its
end, the peak that PyTorch's allocator reserved since its tenth step and how often it had to try
again; one line of the table for each. Scripts whose library is not installed are left out, and
named. Exits 1 if a budget is missed, the allocator had to try again, or the report says something
else than the script saw. The executable is $NEAP, or ``neap`` on the PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from table import Table, mib, yes

COLUMNS = (
    "script",
    "peak without",
    "budget",
    "predicted",
    "reserved",
    "retries",
    "planned",
    "report true",
    "good",
)

HEAD = """
import json, torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook as after
from torch.optim.optimizer import register_optimizer_step_pre_hook as before
seen = {{"reserved": 0, "steps": 0, "retries": 0, "retries_before": 0}}
def look(*_):
    found = torch.cuda.memory_stats()
    if seen["steps"] >= {settled}:
        seen["reserved"] = max(seen["reserved"], found["reserved_bytes.all.peak"])
        seen["retries"] = found["num_alloc_retries"] - seen["retries_before"]
    else:
        seen["retries_before"] = found["num_alloc_retries"]
def count(*_):
    look()
    seen["steps"] += 1
    if seen["steps"] == {settled}:
        torch.cuda.reset_peak_memory_stats()
before(look)
after(count)
def tell():
    look()
    json.dump(seen, open({out!r}, "w"))
"""
"""What measures: PyTorch's own hooks around each step. Peaks are read before neap may begin to
measure anew, as it does after a step. Nothing of it knows of neap.
"""

PLAIN = """
from torchvision.models import resnet50
model = resnet50().cuda()
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(16, 3, 224, 224).cuda(), torch.zeros(16, dtype=torch.long).cuda()
for step in range(30):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""

TRAINER = """
import transformers
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6))
data = [{"input_ids": torch.zeros(512, dtype=torch.long)} for _ in range(120)]
data = [{**one, "labels": one["input_ids"]} for one in data]
settings = transformers.TrainingArguments("trained", per_device_train_batch_size=4, report_to=[],
    num_train_epochs=1, save_strategy="no", disable_tqdm=True)
transformers.Trainer(model=model, args=settings, train_dataset=data).train()
"""

LIGHTNING = """
try:
    import lightning.pytorch as L
except ImportError:
    import pytorch_lightning as L
from torchvision.models import vit_b_16
class Task(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = vit_b_16()
    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
data = [(torch.randn(3, 224, 224), 0) for _ in range(240)]
loader = torch.utils.data.DataLoader(data, batch_size=8)
trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, accelerator="gpu", devices=1)
trainer.fit(Task(), loader)
"""

TIMM = """
import timm, timm.loss, timm.optim, timm.scheduler, timm.utils
model = timm.create_model("convnext_tiny", drop_path_rate=0.1).cuda()
optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=10)
average = timm.utils.ModelEmaV3(model)
x, y = torch.randn(16, 3, 224, 224).cuda(), torch.zeros(16, dtype=torch.long).cuda()
loss_function = timm.loss.LabelSmoothingCrossEntropy(0.1)
for step in range(30):
    loss = loss_function(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    timm.utils.dispatch_clip_grad(model.parameters(), 1.0)
    optimizer.step()
    average.update(model, step=step)
    scheduler.step_update(step)
"""

AMP = """
from torchvision.models import resnet50
model = resnet50().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
x, y = torch.randn(16, 3, 224, 224).cuda(), torch.zeros(16, dtype=torch.long).cuda()
for step in range(30):
    for part in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y) / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

SCRIPTS = {
    "plain": PLAIN,
    "trainer": TRAINER,
    "lightning": LIGHTNING,
    "timm": TIMM,
    "accumulation with AMP": AMP,
}


def measured(name: str, budget: str, folder: Path, settled: int) -> tuple[list[str], bool]:
    """The cells of one script's line, and whether all is as promised."""
    out, path = folder / "seen.json", folder / "train.py"
    head = HEAD.format(out=str(out), settled=settled)
    path.write_text(head + SCRIPTS[name] + "tell()\n")
    neap = os.environ.get("NEAP", "neap")
    report, dry = folder / "report.json", [neap, "dry", "--"]
    inner = [neap, "torch", "--budget", budget, "--json", "--", sys.executable, str(path)]
    shell = ["sh", "-c", '"$@" > "$0"', str(report), *inner]
    done = subprocess.run(dry + shell, cwd=folder, capture_output=True, text=True)
    if not out.exists():
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        missing = any("ModuleNotFound" in line or "ImportError" in line for line in lines)
        return [f"{'left out' if missing else 'failed'}: {(lines or ['?'])[-1][:80]}"], missing
    seen: dict[str, Any] = json.loads(out.read_text())
    claims: dict[str, Any] = json.loads(report.read_text())[0]
    budget_bytes, reserved = claims["budget_bytes"], seen["reserved"]
    true = claims["met"] == (reserved <= budget_bytes)
    true &= claims["peak_reserved_bytes"] >= reserved
    true &= claims["planned"] + sum(claims["unplanned"].values()) == seen["steps"]
    good = true and reserved <= budget_bytes and seen["retries"] == 0
    sizes = [claims["unplanned_peak_bytes"], budget_bytes, claims["predicted_peak_bytes"], reserved]
    cells = [mib(size) for size in sizes]
    cells += [str(seen["retries"]), f"{claims['planned']} of {seen['steps']}"]
    cells += [yes(true), yes(good)]
    return cells, good


def main() -> int:
    """Prints the table; 1 if a script misses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="60%", help="bytes, or a share of the unplanned peak")
    parser.add_argument("--only", help="some of the scripts, by name")
    parser.add_argument("--settled", type=int, default=20, help="measure from this step on")
    asked = parser.parse_args()
    table = Table(COLUMNS, ("script", "report true", "good"))
    missed = 0
    for name in asked.only.split(",") if asked.only else SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            line, good = measured(name, asked.budget, Path(folder), asked.settled)
        missed += not good
        table.row(name, *line)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
