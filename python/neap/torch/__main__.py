"""``python -m neap.torch --budget 12GiB [--device NAME] SCRIPT …``: runs a script, unchanged,
within a budget.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from neap.torch._report import parse_budget
from neap.torch._script import install


def main() -> None:
    """Runs the script as ``python SCRIPT …`` would; its exit code is the script's."""
    parser = argparse.ArgumentParser(
        prog="python -m neap.torch",
        description="Run a PyTorch training script, unchanged, within a budget of device memory.",
    )
    parser.add_argument("--budget", required=True, help="bytes (12GiB), or a share (60%%)")
    parser.add_argument("--device", default="", help="whose times count, if not the card's")
    parser.add_argument(
        "--strict", action="store_true", help="let the budget bind, and raise neap's own errors"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    asked = parser.parse_args()
    try:
        parse_budget(asked.budget)
    except ValueError as error:
        parser.error(str(error))
    if not asked.module and not os.path.exists(asked.script):
        parser.error(f"there is no script {asked.script}")
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(os.environ):
        # Without it the allocator keeps pieces that fit nothing, and reserves more than it gives
        # out.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    sys.argv = [asked.script, *asked.arguments]

    os.environ["NEAP_TORCH_BUDGET"] = asked.budget
    os.environ["NEAP_TORCH_DEVICE"] = asked.device
    if asked.strict:
        os.environ["NEAP_TORCH_STRICT"] = "1"
    install()
    if asked.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(asked.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(asked.script))
        runpy.run_path(asked.script, run_name="__main__")


if __name__ == "__main__":
    main()
