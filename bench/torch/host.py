"""What neap costs the host: processor time of an iteration without neap and by a plan that swaps.

    neap dry -- python bench/torch/host.py [--budget 60] [--device a6000]

On the dry device kernels take no time, so the process's time is Python's, PyTorch's and neap's.
Iterations without neap are measured before the plan acts and after it, in the same process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import neap.torch
from memory import JOBS, Job, clear, iterate
from table import Table, mib

MODELS = ("resnet50", "gpt2", "bert")


def seconds(job: Job, count: int) -> list[float]:
    """Processor seconds of each iteration."""
    found = []
    for _ in range(count):
        began = time.process_time()
        iterate(job, 1)
        found.append(time.process_time() - began)
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="60%", help="of the unplanned peak")
    parser.add_argument("--device", default="a6000", help="whose times the plans are made by")
    parser.add_argument("--count", type=int, default=10, help="iterations of each measurement")
    asked = parser.parse_args()
    table = Table(
        ("job", "ms without", "ms by the plan", "ratio", "copies", "MiB copied"), ("job",)
    )
    for name in MODELS:
        clear()
        job = JOBS[name]()
        iterate(job, 3)
        plain = seconds(job, asked.count)
        with neap.torch.fit(
            job[0], job[2], asked.budget, asked.device, verbose=False, recompute=False
        ) as fitted:
            while not fitted.settled:
                iterate(job, 1)
            iterate(job, 2)
            before = fitted.report()
            copies = before.swapped_out + before.swapped_in
            size = 2 * before.swapped_bytes + before.state_bytes
            planned = seconds(job, asked.count)
            after = fitted.report()
            copies = (after.swapped_out + after.swapped_in - copies) / asked.count
            size = (2 * after.swapped_bytes + after.state_bytes - size) / asked.count
        iterate(job, 2)
        plain += seconds(job, asked.count)
        without, by = statistics.median(plain), statistics.median(planned)
        times = f"{without * 1e3:.1f}", f"{by * 1e3:.1f}", f"{by / without:.2f}"
        table.row(name, *times, f"{copies:.0f}", mib(int(size)))
        del job, fitted


if __name__ == "__main__":
    sys.exit(main())
