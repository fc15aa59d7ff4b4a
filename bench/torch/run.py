"""What fits into a budget inside PyTorch, and at what time: neap beside what users do otherwise.

    neap dry -- python bench/torch/run.py          # on any machine: exact bytes, predicted times
    python bench/torch/run.py                      # on a GPU: measured bytes and times

Prints one Markdown table, and with --plot FILE.svg draws it; with --arena a second one, of neap's
predicted times beside those that `neap plan` predicts for an arena of the same bytes. Each line is
a training job of Adam in a process of its own; peaks are those of the last iterations, when
everything has settled. Predicted times are roofline times of the profile that --device names: the
operators, what runs again, and for copies that nothing hides their bytes over the link.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import neap.torch
import torch
from drawing import Bar, drawn, library
from neap.torch._planning import executable
from settle import settle
from table import Table, mib
from torch import nn
from torch.nn import functional
from ways import CHECKPOINT, ON_CPU, REPEATED, checkpointed, compiled, repeated, saved

ITERATIONS = 8


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        """Width of the stream, and heads of its attention."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x length x width in and out."""
        batch, length, width = x.shape
        parts = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        y = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """GPT-2 small by default, weights of the words tied."""

    def __init__(self, depth: int = 12, width: int = 768, heads: int = 12) -> None:
        """So many blocks of that width."""
        super().__init__()
        self.words, self.places = nn.Embedding(50257, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50257, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Batch x length of tokens in, logits out."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


Training = tuple[nn.Module, Callable[[nn.Module], torch.Tensor], list[nn.Module]]
"""A model, its loss, and the modules of it that checkpointing runs again."""


def of_tokens(model: nn.Module, batch: int, length: int) -> Training:
    """Predicts tokens, batch x length."""
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")

    def loss_of(m: nn.Module) -> torch.Tensor:
        return functional.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten())

    return model, loss_of, repeated(model)


def of_images(model: nn.Module, batch: int, side: int) -> Training:
    """Classifies square images."""
    images = torch.randn(batch, 3, side, side, device="cuda")
    labels = torch.zeros(batch, dtype=torch.long, device="cuda")
    return model, lambda m: functional.cross_entropy(m(images), labels), repeated(model)


def gpt2() -> Training:
    """GPT-2 small, 4 x 512 tokens."""
    return of_tokens(Gpt(), 4, 512)


def small() -> Training:
    """For a try of the script: two blocks, 2 x 64 tokens."""
    return of_tokens(Gpt(2, 64, 2), 2, 64)


def resnet50() -> Training:
    """ResNet-50, 16 images of 224 x 224; torchvision's, or without it that of bench/gpu."""
    try:
        from torchvision.models import resnet50 as make
    except ImportError:
        return checked("resnet50-16")
    return of_images(make(), 16, 224)


def checked(name: str) -> Training:
    """A job of bench/gpu/models.py; of a language model attention and feed-forward are blocks."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))
    from models import JOBS

    job = JOBS[name]
    model = job.make()
    return (of_tokens if type(model).__name__ == "Language" else of_images)(
        model, job.batch, job.size
    )


def link(profile: str) -> tuple[int, int]:
    """Bytes a second to the host and back."""
    shown = subprocess.run([executable(), "device", "show", profile, "--json"], capture_output=True)
    rates = json.loads(shown.stdout)["link"]
    return rates["d2h"], rates["h2d"]


class Offloaded(torch.optim.Adam):
    """Adam whose states are on the host between steps, one parameter's at a time on the device."""

    def step(self, closure: Any = None) -> None:
        """An update of each parameter by itself."""
        groups = [list(group["params"]) for group in self.param_groups]
        for number, group in enumerate(self.param_groups):
            for parameter in groups[number]:
                group["params"] = [parameter]
                state = self.state[parameter]
                for key in ("exp_avg", "exp_avg_sq"):
                    if key in state:
                        state[key] = state[key].to("cuda")
                super().step()
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].to("cpu")
            group["params"] = []
        for group, parameters in zip(self.param_groups, groups):
            group["params"] = parameters


WAYS = ("nothing", CHECKPOINT, ON_CPU, "checkpoint, states on the host")
EARLY = "neap, early updates"
COMPILED = "torch.compile, activation_memory_budget {share}"
"""The partitioner keeps that share of the activations and computes the others again."""


def measured(make: Callable[[], Any], way: str, budget: int, profile: str) -> dict[str, Any]:
    """Trains by one way, or within a budget in bytes, and measures the last iterations."""
    model, loss_of, blocks = make()
    model.cuda()
    if "checkpoint" in way:
        checkpointed(blocks)
    if way.startswith("torch.compile"):
        compiled(model, activation_memory_budget=float(way.split()[-1]))
    kind = Offloaded if "states" in way else torch.optim.Adam
    optimizer = kind(model.parameters())

    def iterate(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            with saved(way):
                loss = loss_of(model)
            loss.backward()
            optimizer.step()
            del loss

    fitted = None
    if budget:
        fitted = neap.torch.fit(
            model, optimizer, budget, profile, verbose=False, early_updates=way == EARLY
        )
    if fitted is not None:
        settle(fitted, lambda: iterate(1))
    else:
        iterate(ITERATIONS - 3)
    torch.cuda.synchronize()
    if fitted is None:
        torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    iterate(3)
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    found: dict[str, Any] = {
        "allocated": statistics["allocated_bytes.all.peak"],
        "reserved": statistics["reserved_bytes.all.peak"],
        "ms": (time.perf_counter() - began) / 3 * 1e3,
    }
    if fitted is not None:
        report = fitted.report()
        ranges = fitted.search.planner.ranges if fitted.search.planner else []
        calls = [r for r in ranges if r.call is not None]
        blocks_again = [r for r in calls if r.call.kind in REPEATED]
        found["predicted"] = report.predicted_iteration_ns / 1e6
        found["plain"] = report.unplanned_iteration_ns / 1e6
        found["met"] = report.met
        # All blocks once more, by the plan's own times.
        found["again"] = sum(r.nanoseconds for r in blocks_again) / 1e6
        fitted.close()
    if way == WAYS[0]:
        found["saved"] = saved_bytes(make)
        found["states"] = 2 * sum(p.numel() * 4 for p in model.parameters())
    return found


def in_an_arena(make: Callable[[], Any], budget: int, profile: str) -> dict[str, Any]:
    """What ``neap plan`` predicts for the recorded iteration in an arena of `budget` bytes: with
    updates where they help, and with all operators in the script's order.
    """
    model, loss_of, _ = make()
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def iteration() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        graph, plan = Path(folder, "job.graph.json"), Path(folder, "job.plan.json")
        neap.torch.record(iteration, model, optimizer, graph)
        asked = [executable(), "plan", str(graph), "--device", profile, "--budget", str(budget)]
        asked += ["-o", str(plan), "--json"]
        found = {}
        for order, more in (("free", []), ("kept", ["--no-reorder"])):
            done = subprocess.run([*asked, *more], capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(done.stderr)
            found[order] = json.loads(done.stdout)["iteration_ns"] / 1e6
    return found


def beside_arena(rows: list[tuple[str, str, str, float, dict[str, float]]]) -> None:
    """A table of models, shares, and times inside PyTorch and in an arena."""
    print()
    columns = ("model", "way", "budget", "inside PyTorch ms", "arena ms", "ratio")
    columns += ("arena in the script's order ms", "ratio to it")
    table = Table(columns, ("model", "way", "budget"))
    for name, way, share, inside, arena in rows:
        times = [f"{inside:,.1f}"]
        for ms in (arena["free"], arena["kept"]):
            times += [f"{ms:,.1f}", f"{inside / ms:.3f}"]
        table.row(name, way, f"{share} % of reserved", *times)


def alone(name: str, way: str, budget: int, device: str) -> dict[str, Any]:
    """The same in a process of its own: what others leave in the allocator would count."""
    row = ["--row", name, way, str(budget), "--device", device]
    done = subprocess.run([sys.executable, sys.argv[0], *row], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0 or not done.stdout.strip():
        sys.exit(f"{name}, {way}: exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def saved_bytes(make: Callable[[], Any]) -> int:
    """What autograd keeps of an iteration, as ``save_on_cpu`` counts it."""
    model, loss_of, _ = make()
    model.cuda()
    total = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        total[0] += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        loss_of(model)
    return total[0]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="a6000", help="whose times are predicted")
    parser.add_argument("--budgets", default="60,50", help="shares of the reserved peak, percent")
    parser.add_argument(
        "--models", default="resnet50,gpt2", help="these, or jobs of bench/gpu/models.py"
    )
    parser.add_argument("--compiled", help="shares for activation_memory_budget, such as 0.5,0.2")
    parser.add_argument("--early", action="store_true", help="neap with early updates besides")
    parser.add_argument("--arena", action="store_true", help="compare with plans for an arena")
    parser.add_argument("--plot", help="draw the table here, as SVG, with matplotlib")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row:
        name, way, budget = asked.row
        own = {"resnet50": resnet50, "gpt2": gpt2, "small": small}
        make = own.get(name, lambda: checked(name))
        if way == "arena":
            print(json.dumps(in_an_arena(make, int(budget), asked.device)))
        else:
            print(json.dumps(measured(make, way, int(budget), asked.device)))
        return
    if asked.plot:
        library()  # If it is absent, that is said before anything is measured.
    dry = float(torch.ones(3, device="cuda").sum().item()) != 3.0
    out, back = link(asked.device)
    kind = "predicted" if dry else "measured"
    columns = ("model", "way", "peak allocated MiB", "peak reserved MiB", f"{kind} ms")
    columns += () if dry else ("predicted ms",)
    table = Table(columns, ("model", "way"))
    bars: list[Bar] = []
    arenas: list[tuple[str, str, str, float, dict[str, float]]] = []

    def row(name: str, way: str, found: dict[str, Any], predicted: float | None) -> None:
        ms = predicted if dry else found["ms"]
        shown = ["not known" if ms is None else f"{ms:,.1f}"]
        if not dry:
            shown.append(f"{found['predicted']:,.1f}" if "predicted" in found else "")
        table.row(name, way, mib(found["allocated"]), mib(found["reserved"]), *shown)
        bars.append(Bar(name, way, found["reserved"], ms))

    for name in asked.models.split(","):
        rows = {way: alone(name, way, 0, asked.device) for way in WAYS}
        nothing = rows[WAYS[0]]
        fits = {
            (share, way): alone(name, way, nothing["reserved"] * int(share) // 100, asked.device)
            for share in asked.budgets.split(",")
            for way in (("neap", EARLY) if asked.early else ("neap",))
        }
        plain, blocks = (next(iter(fits.values()))[key] for key in ("plain", "again"))
        both = (1 / out + 1 / back) * 1e3
        times = plain, plain + blocks, plain + nothing["saved"] * both
        times = (*times, plain + blocks + nothing["states"] * both)
        for way, ms in zip(WAYS, times):
            row(name, way, rows[way], ms)
        plans: dict[str, dict[str, float]] = {}
        for (share, way), found in fits.items():
            unmet = "" if found["met"] else ", not met"
            row(name, f"{way}, {share} % of reserved{unmet}", found, found["predicted"])
            if asked.arena and found["met"]:
                if share not in plans:
                    budget = nothing["reserved"] * int(share) // 100
                    plans[share] = alone(name, "arena", budget, asked.device)
                arenas.append((name, way, share, found["predicted"], plans[share]))
        for share in asked.compiled.split(",") if asked.compiled else ():
            way = COMPILED.format(share=share)
            # The dry device has no times of kernels that the compiler makes.
            row(name, way, alone(name, way, 0, asked.device), None)
    if arenas:
        beside_arena(arenas)
    if asked.plot:
        drawn(bars, kind, asked.plot)


if __name__ == "__main__":
    main()
