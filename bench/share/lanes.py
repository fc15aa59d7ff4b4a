#!/usr/bin/env python3
"""Three scripts in lanes on the dry device: is the device's fullest instant within what was
promised, and is what happened what `neap share` predicts?

    NEAP=target/release/neap bench/share/lanes.py [--given] [--steps 30] [--apart 3] [POLICY …]

ResNet-50, GPT-2 and a ViT, each started some seconds after the one before, under each policy, with
a budget of the sum of what they keep and the most that one needs within an iteration, and 5 %.
Needs a Python with PyTorch for CUDA, torchvision and transformers. With --given each script says
its needs when it comes; otherwise it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NEAP = os.environ.get("NEAP", "target/release/neap")
MODELS = ("resnet50", "gpt2", "vit")
DEVICE = "a6000"
SCRIPT = """
import sys, torch
name, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
if name == "gpt2":
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(n_layer=12)).cuda()
    def loss():
        tokens = torch.randint(50257, (4, 256), device="cuda")
        return model(tokens, labels=tokens).loss
else:
    import torchvision
    make = torchvision.models.resnet50 if name == "resnet50" else torchvision.models.vit_b_16
    model, size = make().cuda(), 16
    def loss():
        images = torch.randn(size, 3, 224, 224, device="cuda")
        labels = torch.randint(1000, (size,), device="cuda")
        return torch.nn.functional.cross_entropy(model(images), labels)
optimizer = torch.optim.Adam(model.parameters())
for step in range(steps):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
"""


def alone(model: str, folder: Path) -> dict[str, Any]:
    """What one script needs, measured alone."""
    lane = [NEAP, "torch", "--serve", str(folder / "alone"), "--budget", "40GiB", "--mode", "lanes"]
    script = [sys.executable, str(folder / "train.py"), model, "5"]
    command = [NEAP, "dry", "--device", DEVICE, "--", *lane, "--json", "--", *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    at = done.stdout.find("[")
    if at < 0:
        sys.exit(done.stdout + done.stderr)
    report: dict[str, Any] = json.JSONDecoder().raw_decode(done.stdout[at:])[0][0]
    return report


def inside(options: argparse.Namespace) -> None:
    """Runs the server and the scripts, within one `neap dry`."""
    folder = Path(options.inside)
    needs = json.loads((folder / "needs.json").read_text())
    policy, socket = options.policies[0], str(folder / options.policies[0])
    serve = [NEAP, "torch", "--serve", socket, "--budget", str(needs["budget"]), "--mode", "lanes"]
    serve += ["--policy", policy, "--log", f"{socket}.jsonl", "--timeline", f"{socket}.json"]
    server = subprocess.Popen(serve)
    while not os.path.exists(socket):
        time.sleep(0.01)
    scripts = []
    for model in MODELS:
        join = [NEAP, "torch", "--join", socket, "--json"]
        if options.given:
            kept, within = needs[model]
            join += ["--needs", f"{kept}+{within}", "--work", str(needs["work"][model])]
        join += ["--", sys.executable, str(folder / "train.py"), model, str(options.steps)]
        out = open(f"{socket}-{model}.json", "w")  # noqa: SIM115
        scripts.append(subprocess.Popen(join, stdout=out))
        time.sleep(options.apart)
    failed = [script.wait() for script in scripts]
    server.terminate()
    server.wait()
    sys.exit(max(failed))


def shared(policy: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """One policy: the fullest instant, retries, and what was predicted."""
    again = [sys.executable, __file__, "--inside", str(folder), "--steps", str(options.steps)]
    again += ["--apart", str(options.apart), *(["--given"] if options.given else []), policy]
    dry = [NEAP, "dry", "--device", DEVICE, "--no-second-run", "--json", "--", *again]
    done = subprocess.run(dry, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    fullest = json.loads(done.stdout)["devices"][0]["fullest_bytes"]
    retries, gave = 0, 0
    for model in MODELS:
        report = json.loads((folder / f"{policy}-{model}.json").read_text())[0]
        retries += report["allocator_retries"]
        gave += report["gave_back"]
    log = folder / f"{policy}.jsonl"
    replay = [NEAP, "share", str(log), "--policies", policy, "--json", "--csv"]
    csv = folder / f"{policy}.csv"
    both = json.loads(subprocess.check_output([*replay, str(csv)]))["policies"]
    rows = [line.split(",") for line in csv.read_text().splitlines()[1:]]
    names = pids(folder, policy)
    ends = [sorted(half, key=lambda row: float(row[7])) for half in (rows[:3], rows[3:])]
    expected, real = ([names[row[2]] for row in half] for half in ends)
    predicted, logged = both
    figures = [
        f"{logged[key]:.2f} ({predicted[key]:.2f})"
        for key in ("makespan_s", "mean_queuing_s", "mean_completion_s")
    ]
    same = "yes" if real == expected else f"{real}, not {expected}"
    return [policy, f"{fullest / 2**20:.0f}", str(retries), str(gave), *figures, same]


def pids(folder: Path, policy: str) -> dict[str, str]:
    """The models by the names that the log has for their processes."""
    found = {}
    for model in MODELS:
        report = json.loads((folder / f"{policy}-{model}.json").read_text())[0]
        found[f"train.py ({report['pid']})"] = model
    return found


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="*", default=["fifo", "srtf", "pack", "fair"])
    parser.add_argument("--given", action="store_true", help="scripts say their needs")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--apart", type=float, default=3)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        needs: dict[str, Any] = {"work": {}}
        for model in MODELS:
            report = alone(model, folder)
            needs[model] = (report["persistent_bytes"], report["ephemeral_bytes"])
            needs["work"][model] = {"resnet50": 30, "gpt2": 20, "vit": 10}[model]
            print(f"{model}: {needs[model][0] / 2**20:.0f} + {needs[model][1] / 2**20:.0f} MiB")
        least = sum(needs[m][0] for m in MODELS) + max(needs[m][1] for m in MODELS)
        needs["budget"] = least + least // 20
        (folder / "needs.json").write_text(json.dumps(needs))
        print(f"budget: {needs['budget'] / 2**20:.0f} MiB")
        heads = "policy|fullest, MiB|retries|gave back|makespan, s (predicted)|queuing|completion"
        print(f"| {heads.replace('|', ' | ')} | order as predicted |")
        for policy in options.policies:
            print(f"| {' | '.join(shared(policy, options, folder))} |", flush=True)


if __name__ == "__main__":
    main()
