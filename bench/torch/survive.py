"""Whether scripts that run without neap run with it, whatever the budget.

    python bench/torch/survive.py [--budgets 20,50,80] [--device a6000] [SCRIPT.py ...]

Each script runs under ``neap dry`` on a device with room: alone, and as ``neap torch --budget``
with each of the budgets, shares in percent of what it needs. The scripts are those named, or
the five of scripts.py, each also with an evaluation of twice the batch, and with memory that it
keeps from its fifteenth step on. One line a script; exits 1 if one ends otherwise than alone. The
executable is $NEAP, or ``neap`` on the PATH.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts import SCRIPTS
from table import Table

EVALUATION = """
with torch.no_grad():
    model.eval()
    model(torch.cat([x, x]))
"""
"""After training, for scripts with a model and a batch ``x``."""

KEEPING = """
from torch.optim.optimizer import register_optimizer_step_post_hook
steps, kept = [0], []
def keep(*_):
    steps[0] += 1
    if steps[0] == 15:
        kept.append(torch.zeros(300 << 20, dtype=torch.uint8, device="cuda"))
register_optimizer_step_post_hook(keep)
"""
"""Before training: 300 MiB more from the fifteenth step on."""

IMPORTS = "import torch\nfrom torch import nn\n"


def scripts() -> dict[str, str]:
    """The built-in ones."""
    found = {}
    for name, script in SCRIPTS.items():
        found[name] = IMPORTS + script
        found[f"{name}, keeping"] = IMPORTS + KEEPING + script
        if "\nx, y =" in script:
            found[f"{name}, evaluation"] = IMPORTS + script + EVALUATION
    return found


def ends(path: Path, device: str, budget: str | None) -> tuple[int, str]:
    """A script's exit code, and the last line of its messages."""
    neap = os.environ.get("NEAP", "neap")
    inner = [sys.executable, str(path)]
    if budget is not None:
        inner = [neap, "torch", "--budget", f"{budget}%", "--", *inner]
    # The shell's exit code is the script's own, whatever the dry run says of it.
    keep = ["sh", "-c", '"$@"; echo $? > "$0"', str(path.parent / "code"), *inner]
    dry = [neap, "dry", "--device", device, "--no-second-run", "--", *keep]
    done = subprocess.run(dry, cwd=path.parent, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "Error" in line]
    return int((path.parent / "code").read_text()), said[-1] if said else ""


def main() -> int:
    """Prints the table; 1 if a script ends otherwise with neap than without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", default="20,50,80", help="shares in percent")
    parser.add_argument("--device", default="a6000")
    parser.add_argument("scripts", nargs="*", type=Path)
    asked = parser.parse_args()
    texts = {path.name: path.read_text() for path in asked.scripts} or scripts()
    budgets = asked.budgets.split(",")
    table = Table(("script", "alone", *(f"{one} %" for one in budgets)), ("script",))
    ended = 0
    for name, text in texts.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "train.py"
            path.write_text(text)
            alone, why = ends(path, asked.device, None)
            if alone != 0:
                table.row(name, f"exit {alone}: {why[:80]}")
                continue
            codes = [ends(path, asked.device, budget) for budget in budgets]
        ended += sum(code != alone for code, _ in codes)
        table.row(name, alone, *(f"{code} {why[:60]}".strip() for code, why in codes))
    return int(ended > 0)


if __name__ == "__main__":
    sys.exit(main())
