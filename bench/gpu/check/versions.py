"""Which PyTorch this Python has, what came with it, and whether it sees a GPU. Prints JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path


def version(name: str) -> str:
    """A package's version, or why it can't be imported."""
    try:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))
    except Exception as problem:  # An import can raise anything.
        return f"not there ({type(problem).__name__})"


def main() -> int:
    """Prints it; exit code 1 without a PyTorch that sees a GPU."""
    found: dict[str, object] = {"python": sys.version.split()[0], "executable": sys.executable}
    found["torch"] = version("torch")
    if str(found["torch"]).startswith("not there"):
        print(json.dumps(found))
        return 1
    torch = importlib.import_module("torch")
    found |= {name: version(name) for name in ("torchvision", "triton", "numpy")}
    found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    folder = Path(str(torch.__file__)).resolve().parents[1] / "nvidia"
    found["libraries"] = str(folder.parent) if folder.is_dir() else None
    there = torch.cuda.is_available()
    found["sees"] = torch.cuda.get_device_name(0) if there else None
    if there:
        probe = torch.ones(3, device="cuda").sum().item()
        free, whole = torch.cuda.mem_get_info()
        found |= {"adds": probe == 3.0, "free_bytes": free, "total_bytes": whole}
    print(json.dumps(found))
    sys.stdout.flush()
    # What a broken installation does at its end is no matter.
    os._exit(0 if there else 1)


if __name__ == "__main__":
    sys.exit(main())
