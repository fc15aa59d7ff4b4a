"""Checks a machine's GPU with what tools/gpu-pack packed: the script ``run`` of the pack.

    python3 bench/gpu/check --pack FOLDER [--seconds 350] [--only REGEX] [--python PYTHON] ...

A call ends after the given seconds with exit code 3; the same command goes on where it stopped.
Exit code 1: a line failed. Needs Python 3.9 and nothing beside it; without PyTorch the lines that
need it say so.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys

import inside
import machine
import planned
import snapshots
from command import OutOfTime
from context import Check
from lines import FAIL, NOT, PASS, Line

DONE, FAILED, MORE = 0, 1, 3


def sequence(check: Check) -> list[Line]:
    """All lines in their order."""
    found = machine.lines(check) + snapshots.lines(check) + inside.part_c(check)
    found += planned.part_d(check) + inside.part_d(check) + planned.part_e(check)
    found += inside.part_f(check) + inside.part_g(check)
    found += planned.part_h(check) + planned.part_i(check)
    return [line for line in found if check.flags.only.search(line.name)]


def main() -> int:
    """One call."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pack", required=True, help="what tools/gpu-pack made")
    parser.add_argument("--out", help="where the results go; if not given, out/ in the pack")
    parser.add_argument("--seconds", type=float, default=350.0, help="after which the call ends")
    parser.add_argument("--only", default="", type=re.compile, help="lines with a match alone")
    parser.add_argument("--python", help="a Python with PyTorch, if not the one that is found")
    parser.add_argument("--cuda-libs", help="CUDA's libraries, if not those beside PyTorch")
    parser.add_argument("--device", help="the built-in device that it is, if not the pack's")
    parser.add_argument("--beside", type=int, default=6, help="how many lines at once, untimed")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a rehearsal without a GPU: measure small sizes, and fail no line for its times",
    )
    flags = parser.parse_args()
    flags.out = flags.out or f"{flags.pack}/out"
    flags.own_python = sys.executable
    check = Check(flags)
    lines = sequence(check)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, check.stop)
    try:
        check.all(lines)
    except OutOfTime:
        print(f"{flags.seconds:g} s have passed: the same command goes on", file=sys.stderr)
        return MORE
    finally:
        check.lines.write()
        counts = ", ".join(f"{check.lines.count(kind)} {kind}" for kind in (PASS, FAIL, NOT))
        print(f"{counts}; {check.lines.table}", file=sys.stderr)
    return FAILED if check.lines.count(FAIL) else DONE


if __name__ == "__main__":
    sys.exit(main())
