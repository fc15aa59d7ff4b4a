"""What neap costs the host: processor time of an iteration without neap and by a plan that swaps.

    neap dry -- python bench/torch/host.py [--budget 70% 60%] [--device a6000]

On the dry device kernels take no time, so the process's time is Python's, PyTorch's and neap's.
Iterations without neap and by the plan are measured in turn, in rounds, in the same process; the
table has the lower quartiles.
"""

from __future__ import annotations

import argparse
import itertools
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
    of = "parts of the unplanned peak, such as 60%%"
    parser.add_argument("--budget", nargs="+", default=["70%", "60%"], help=of)
    parser.add_argument("--device", default="a6000", help="whose times the plans are made by")
    parser.add_argument("--count", type=int, default=10, help="iterations of each measurement")
    parser.add_argument("--rounds", type=int, default=4, help="measurements with and without neap")
    asked = parser.parse_args()
    columns = ("job", "budget", "ms without", "ms by the plan", "ratio", "copies", "MiB copied")
    table = Table(columns, ("job",))
    for name, budget in itertools.product(MODELS, asked.budget):
        clear()
        job = JOBS[name]()
        iterate(job, 3)
        with neap.torch.fit(
            job[0], job[2], budget, asked.device, verbose=False, recompute=False
        ) as fitted:
            while not fitted.settled:
                iterate(job, 1)
            schedule = fitted.schedule
        if schedule is None:
            sys.exit(f"{name}: no plan: {fitted.report().notes}")
        plain: list[float] = []
        planned: list[float] = []
        for _ in range(asked.rounds):
            plain += seconds(job, asked.count)
            with neap.torch.apply(job[0], job[2], schedule, verbose=False) as fitted:
                while not fitted.settled:
                    iterate(job, 1)
                copies, size, acted = moved(fitted.report())
                planned += seconds(job, asked.count)
                after = moved(fitted.report())
                if after[2] - acted != asked.count:
                    sys.exit(f"{name}: not all iterations ran by the plan")
        copies, size = ((new - old) / asked.count for new, old in zip(after, (copies, size)))
        # Whatever else the machine does only adds to the time.
        without, by = (statistics.quantiles(found, n=4)[0] for found in (plain, planned))
        times = f"{without * 1e3:.1f}", f"{by * 1e3:.1f}", f"{by / without:.2f}"
        table.row(name, budget, *times, f"{copies:.0f}", mib(int(size)))
        del job, fitted


def moved(report: neap.torch.Report) -> tuple[int, int, int]:
    """Copies of activations so far, the bytes of all copies, and iterations by the plan."""
    size = 2 * report.swapped_bytes + report.state_bytes
    return report.swapped_out + report.swapped_in, size, report.planned


if __name__ == "__main__":
    sys.exit(main())
