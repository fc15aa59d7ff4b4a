"""Whether scripts whose iterations change from step to step keep a budget under ``neap torch``.

    python bench/torch/changing.py [--budget 60] [--only bert,gan] [--settled 24]

Each script takes 60 steps as ``neap dry -- neap torch --budget B -- python SCRIPT``, where B is a
share in percent of what the script reserves without neap. The script itself measures, by PyTorch's
own hook after each step, what the allocator reserves from the step ``--settled`` on, and how often
it had to try again; one line of the table for each. Scripts whose library is not installed are
left out, and named. Exits 1 if a budget is missed. The executable is $NEAP, or ``neap`` on the
PATH.
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

from scripts import HEAD
from table import Table, mib, yes

COLUMNS = (
    "script",
    "without neap",
    "budget",
    "reserved",
    "retries",
    "by plan",
    "by policy",
    "swapped",
    "good",
)

START = """
import random
import torch.nn.functional as F
random.seed(0)
def encoder(width, depth, heads=8, causal=False):
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
def step(loss, *optimizers):
    loss.backward()
    for one in optimizers:
        one.step()
        one.zero_grad()
"""

BERT = """
embed, body = nn.Embedding(30000, 512).cuda(), encoder(512, 8).cuda()
head = nn.Linear(512, 2).cuda()
optimizer = torch.optim.AdamW([*embed.parameters(), *body.parameters(), *head.parameters()])
for number in range(60):
    length = random.randint(64, 384)
    x = torch.randint(0, 30000, (16, length)).cuda()
    y = torch.zeros(16, dtype=torch.long).cuda()
    step(F.cross_entropy(head(body(embed(x))[:, 0]), y), optimizer)
"""

GPT = """
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(8000, 512), encoder(512, 8)
        self.head = nn.Linear(512, 8000)
    def forward(self, x):
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        return self.head(self.body(self.embed(x), mask=mask))
model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for number in range(60):
    x = torch.randint(0, 8000, (8, random.randint(64, 512))).cuda()
    step(F.cross_entropy(model(x).flatten(0, 1), x.flatten()), optimizer)
"""

T5 = """
class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8000, 512), nn.Linear(512, 8000)
        self.body = nn.Transformer(512, 8, 4, 4, 2048, batch_first=True)
    def forward(self, x, y):
        return self.head(self.body(self.embed(x), self.embed(y)))
model = T5().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for number in range(60):
    x = torch.randint(0, 8000, (16, random.randint(64, 384))).cuda()
    y = torch.randint(0, 8000, (16, random.randint(16, 128))).cuda()
    step(F.cross_entropy(model(x, y).flatten(0, 1), y.flatten()), optimizer)
"""

AUDIO = """
class Audio(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(80, 384, 3, padding=1), nn.GELU(),
                                   nn.Conv1d(384, 384, 3, 2, 1), nn.GELU())
        self.body, self.head = encoder(384, 6, 6), nn.Linear(384, 500)
    def forward(self, x):
        return self.head(self.body(self.front(x).transpose(1, 2)))
model = Audio().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for number in range(60):
    frames = random.randint(200, 1500)
    x, lengths = torch.randn(8, 80, frames).cuda(), torch.full((8,), (frames + 1) // 2).cuda()
    step(model(x).square().mean(), optimizer)
"""

CROPS = """
from torchvision.models import resnet50
model = resnet50().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for number in range(60):
    large, small = random.randrange(160, 257, 32), random.randrange(64, 129, 32)
    out = model(torch.randn(8, 3, large, large).cuda())
    out = torch.cat([out, model(torch.randn(16, 3, small, small).cuda())])
    step(out.square().mean(), optimizer)
"""

RETINA = """
from torchvision.models.detection import retinanet_resnet50_fpn
model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, min_size=320, max_size=800,
                               trainable_backbone_layers=5).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
for number in range(60):
    images, targets = [], []
    for _ in range(2):
        h, w = random.randint(300, 600), random.randint(300, 600)
        images.append(torch.rand(3, h, w).cuda())
        boxes = torch.tensor([[10.0, 10.0, 100.0, 100.0]]).repeat(random.randint(1, 5), 1)
        labels = torch.ones(len(boxes), dtype=torch.long)
        targets.append({"boxes": boxes.cuda(), "labels": labels.cuda()})
    step(sum(model(images, targets).values()), optimizer)
"""

UNET = """
def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(),
                         nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [32, 64, 128, 256]
        self.down = nn.ModuleList(block(a, b) for a, b in zip([3, *widths], widths))
        self.up = nn.ModuleList(block(a + b, a) for a, b in zip(widths, widths[1:]))
        self.head = nn.Conv2d(32, 4, 1)
    def forward(self, x):
        kept = []
        for one in self.down:
            x = one(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = kept.pop()
        for one in reversed(self.up):
            y = kept.pop()
            x = one(torch.cat([y, F.interpolate(x, y.shape[-2:])], 1))
        return self.head(x)
model = UNet().cuda()
optimizer = torch.optim.Adam(model.parameters())
for number in range(60):
    h, w = random.randrange(128, 385, 16), random.randrange(128, 385, 16)
    step(model(torch.randn(4, 3, h, w).cuda()).square().mean(), optimizer)
"""

GRAPH = """
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
    def forward(self, x, edges):
        message = self.message(torch.cat([x[edges[0]], x[edges[1]]], 1)).relu()
        summed = torch.zeros_like(x).index_add(0, edges[1], message)
        return x + self.update(torch.cat([x, summed], 1)).relu()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(256) for _ in range(6))
    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(x, edges)
        return x
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
for number in range(60):
    nodes = random.randint(4000, 16000)
    edges = torch.randint(0, nodes, (2, 4 * nodes)).cuda()
    step(model(torch.randn(nodes, 256).cuda(), edges).square().mean(), optimizer)
"""

EXPERTS = """
class Experts(nn.Module):
    def __init__(self, width=512, count=4):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, width))
            for _ in range(count))
    def forward(self, x, parts):
        out, order = torch.zeros_like(x), torch.randperm(len(x)).cuda().split(parts)
        for one, expert in zip(order, self.experts):
            if len(one):
                out = out.index_add(0, one, expert(x[one]))
        return x + out
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(6))
    def forward(self, x):
        for layer in self.layers:
            cuts = sorted(random.randint(0, len(x)) for _ in range(3))
            x = layer(x, [b - a for a, b in zip([0, *cuts], [*cuts, len(x)])])
        return x
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
for number in range(60):
    step(model(torch.randn(8192, 512).cuda()).square().mean(), optimizer)
"""

TRAINER = """
import transformers
torch.manual_seed(0)
config = transformers.BertConfig(num_hidden_layers=6, vocab_size=8000)
model = transformers.BertForSequenceClassification(config)
data = [{"input_ids": [5] * random.randint(32, 384), "labels": 0} for _ in range(960)]
class Tokenizer:
    def __call__(self, rows):
        longest = max(len(one["input_ids"]) for one in rows)
        rows = [one["input_ids"] for one in rows]
        ids = torch.tensor([one + [0] * (longest - len(one)) for one in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(),
                "labels": torch.zeros(len(rows), dtype=torch.long)}
settings = transformers.TrainingArguments("trained", per_device_train_batch_size=16, report_to=[],
    num_train_epochs=1, save_strategy="no", disable_tqdm=True, GROUP)
trainer = transformers.Trainer(model=model, args=settings, train_dataset=data,
                               data_collator=Tokenizer())
trainer.train()
"""

ACCUMULATION = """
from torchvision.models import resnet50
model = resnet50().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for number in range(60):
    for _ in range(random.randint(1, 4)):
        model(torch.randn(12, 3, 160, 160).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

GAN = """
def more(b):
    parts = [(nn.Conv2d(b, b, 3, 1, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)) for _ in range(3)]
    return [one for part in parts for one in part]
def conv(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), *more(b))
def up(a, b):
    return nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), *more(b))
critic = nn.Sequential(conv(3, 64), conv(64, 128), conv(128, 256), conv(256, 256), nn.Flatten(),
                       nn.Linear(256 * 16, 1)).cuda()
maker = nn.Sequential(nn.Linear(128, 256 * 16), nn.Unflatten(1, (256, 4, 4)), up(256, 256),
                      up(256, 128), up(128, 64), up(64, 32), nn.Conv2d(32, 3, 3, 1, 1)).cuda()
first = torch.optim.Adam(critic.parameters())
second = torch.optim.Adam(maker.parameters())
for number in range(60):
    real = torch.randn(64, 3, 64, 64).cuda()
    with torch.no_grad():
        fake = maker(torch.randn(64, 128).cuda())
    step(critic(fake).mean() - critic(real).mean(), first)
    if number % 2:
        step(-critic(maker(torch.randn(64, 128).cuda())).mean(), second)
        first.zero_grad()
"""

PPO = """
more = [one for _ in range(6) for one in (nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU())]
body = nn.Sequential(nn.Conv2d(4, 64, 8, 4), nn.ReLU(), *more, nn.Conv2d(64, 128, 4, 2),
                     nn.ReLU(), nn.Conv2d(128, 128, 3), nn.ReLU(), nn.Flatten(),
                     nn.Linear(128 * 49, 512), nn.ReLU()).cuda()
actor, critic = nn.Linear(512, 6).cuda(), nn.Linear(512, 1).cuda()
model = nn.ModuleList([body, actor, critic])
optimizer = torch.optim.Adam(model.parameters())
for number in range(8):
    rollout = []
    with torch.no_grad():
        for _ in range(8):
            frames = torch.randn(64, 4, 84, 84).cuda()
            hidden = body(frames)
            rollout.append((frames, F.log_softmax(actor(hidden), 1)[:, 0], critic(hidden)[:, 0]))
    for epoch in range(4):
        for which in torch.randperm(8).split(4):
            parts = zip(*[rollout[one] for one in which.tolist()])
            frames, before, value = map(torch.cat, parts)
            hidden = body(frames)
            ratio = (F.log_softmax(actor(hidden), 1)[:, 0] - before).exp()
            loss = ratio.clamp(0.8, 1.2).mean() + (critic(hidden)[:, 0] - value).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
"""

LSTM = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(8000, 512), nn.LSTM(512, 1024, 3, batch_first=True)
        self.head = nn.Linear(1024, 8000)
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True)
        return self.head(self.body(packed)[0].data)
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
for number in range(60):
    lengths = sorted((random.randint(10, 200) for _ in range(32)), reverse=True)
    x = torch.randint(0, 8000, (32, lengths[0])).cuda()
    step(model(x, torch.tensor(lengths)).square().mean(), optimizer)
"""

EVALUATION = """
from torchvision.models import resnet50
model = resnet50().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for number in range(60):
    step(model(torch.randn(16, 3, 160, 160).cuda()).square().mean(), optimizer)
    if number % 5 == 4:
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                model(torch.randn(32, 3, 160, 160).cuda())
        model.train()
"""

LAST = """
from torchvision.models import resnet50
model = resnet50().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(10):
    for images in (16, 16, 16, 16, 16, 7):
        step(model(torch.randn(images, 3, 160, 160).cuda()).square().mean(), optimizer)
"""

LARGER = """
body, head = encoder(512, 8).cuda(), nn.Linear(512, 2).cuda()
optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()])
for number in range(60):
    length = 512 if number >= 40 and number % 10 == 0 else random.randint(64, 256)
    step(head(body(torch.randn(16, length, 512).cuda())[:, 0]).square().mean(), optimizer)
"""

SCRIPTS = {
    "bert": BERT,
    "gpt": GPT,
    "two lengths": T5,
    "audio": AUDIO,
    "two crops": CROPS,
    "retinanet": RETINA,
    "unet": UNET,
    "graph": GRAPH,
    "experts": EXPERTS,
    "trainer": TRAINER.replace("GROUP", ""),
    "trainer by length": TRAINER.replace("GROUP", "GROUPED"),
    "accumulation": ACCUMULATION,
    "gan": GAN,
    "ppo": PPO,
    "lstm": LSTM,
    "evaluation": EVALUATION,
    "last batch": LAST,
    "larger later": LARGER,
}


def scripts() -> dict[str, str]:
    """The scripts as they run, without what measures."""
    found = {name: START + text for name, text in SCRIPTS.items()}
    grouped = 'train_sampling_strategy="group_by_length"'
    try:
        import transformers

        if not hasattr(transformers.TrainingArguments, "train_sampling_strategy"):
            grouped = "group_by_length=True"
    except ImportError:
        pass
    return {name: text.replace("GROUPED", grouped) for name, text in found.items()}


def ran(folder: Path, before: list[str]) -> tuple[dict[str, Any] | None, str]:
    """What a script saw under the dry device, and its messages."""
    out, neap = folder / "seen.json", os.environ.get("NEAP", "neap")
    out.unlink(missing_ok=True)
    shell = ["sh", "-c", '"$@" > "$0"', str(folder / "report.json"), *before]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [neap, "dry", "--", *shell, sys.executable, str(folder / "train.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if os.environ.get("SHOW"):
        print(done.stderr, file=sys.stderr)
    return (json.loads(out.read_text()) if out.exists() else None), done.stderr


def measured(text: str, percent: int, folder: Path, settled: int) -> tuple[list[str], bool]:
    """The cells of one script's line, and whether all is as promised."""
    head = HEAD.format(out=str(folder / "seen.json"), settled=settled)
    (folder / "train.py").write_text(head + text + "tell()\n")
    alone, error = ran(folder, [])
    if alone is None:
        lines = [line for line in error.splitlines() if "Error" in line]
        missing = any("ModuleNotFound" in line or "ImportError" in line for line in lines)
        return [f"{'left out' if missing else 'failed'}: {(lines or ['?'])[-1][:80]}"], missing
    budget = alone["reserved"] * percent // 100
    neap = os.environ.get("NEAP", "neap")
    inner = [neap, "torch", "--budget", str(budget), "--json", "--"]
    seen, error = ran(folder, inner)
    if seen is None:
        return [mib(alone["reserved"]), mib(budget), f"failed: {error[-300:]!r}"], False
    claims: dict[str, Any] = json.loads((folder / "report.json").read_text())[0]
    reserved, steps = seen["reserved"], seen["steps"]
    retries = seen["retries_before"] + seen["retries"]
    good = reserved <= budget and retries == 0
    cells = [mib(alone["reserved"]), mib(budget), mib(reserved), str(retries)]
    cells += [f"{claims['planned']} of {steps}", str(claims.get("by_policy", 0))]
    cells += [mib(claims["swapped_bytes"] // max(1, steps)), yes(good)]
    return cells, good


def main() -> int:
    """Prints the table; 1 if a script misses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=int, default=60, help="percent of what is reserved alone")
    parser.add_argument("--only", help="some of the scripts, by name")
    parser.add_argument("--settled", type=int, default=24, help="measure from this step on")
    asked = parser.parse_args()
    table = Table(COLUMNS, ("script", "good"))
    missed, found = 0, scripts()
    for name in asked.only.split(",") if asked.only else found:
        with tempfile.TemporaryDirectory() as folder:
            line, good = measured(found[name], asked.budget, Path(folder), asked.settled)
        missed += not good
        table.row(name, *line)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
