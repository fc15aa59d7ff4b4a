"""Records the training loops of this folder, and what PyTorch's losses are.

    python bench/idioms/record.py FOLDER [--device cuda] [NAME …]

For each it writes NAME.et.json.gz (a trace by docs/record.py), NAME.safetensors (the state before the first
iteration and the batch) and NAME.json (six losses, computed on the CPU).
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path[:0] = [str(Path(__file__).parents[2] / "docs"), str(Path(__file__).parent)]
import record  # noqa: E402
import idioms  # noqa: E402
from layers import LAYERS  # noqa: E402
from further import FURTHER  # noqa: E402
from models import MODELS  # noqa: E402
from steps import STEPS as MORE  # noqa: E402

IDIOMS = idioms.IDIOMS | MORE | LAYERS | FURTHER
# Recorded only by name: transformers and timm build them.
ALL = IDIOMS | MODELS

STEPS = 6


def initial(model, inputs):
    """A weights file for `neap run --weights`: what lives across iterations, and the batch."""
    state = {f"parameter:{k}": p.detach().clone() for k, p in model.named_parameters()}
    state |= {f"buffer:{k}": b.clone() for k, b in model.named_buffers()}
    averages = getattr(model, "average", [])
    state |= {f"buffer:average.{k}": a.clone() for k, a in enumerate(averages)}
    state |= {f"buffer:{k}": c.clone() for k, c in getattr(model, "lasting", {}).items()}
    return state | {f"input:{k}": t.clone() for k, t in inputs.items()}


class Inputs(torch.overrides.TorchFunctionMode):
    """Collects the batch under the names that the trace has for it."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        tensor = arguments[0] if getattr(function, "__name__", "") == "to" else None
        new = tensor is not None and tensor.dim() > 0 and not any(tensor is f for f in self.found.values())
        called = record.name_of(tensor) if new else None
        if called:
            again = sum(key.split("~")[0] == called for key in self.found)
            self.found[f"{called}~{again + 1}" if again else called] = tensor
        return function(*arguments, **(keywords or {}))


def one(name, folder, device):
    model, _, iteration = ALL[name]("cpu")
    with Inputs() as inputs:
        state = initial(model, {})
        losses = [iteration().item()]
    state |= {f"input:{k}": t.clone() for k, t in inputs.found.items()}
    losses += [iteration().item() for _ in range(STEPS - 1)]
    save_file({k: t.contiguous() for k, t in state.items()}, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps({"torch": torch.__version__, "losses": losses}) + "\n")
    model, optimizers, iteration = ALL[name](device)
    averages = {f"average.{k}": a for k, a in enumerate(getattr(model, "average", []))}
    averages |= {k: t for k, t in getattr(model, "lasting", {}).items() if "scaler" not in k}
    on_device = inputs.found if device == "cpu" else {}
    record.record(folder / f"{name}.et.json.gz", model, optimizers, iteration, on_device, STEPS, averages)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(False)
    for name in given.names or IDIOMS:
        one(name, given.folder, given.device)
        print(name, flush=True)


if __name__ == "__main__":
    main()
