#!/usr/bin/env python3
"""The planners' plans of three small nets, run on the host device over a throttled link: predicted
against measured EOR. Writes measured.csv; `bench/paper/run --tables` makes the table of it.

    bench/paper/measured.py [--neap FILE] [--rounds N] [--iterations N]

Wants a machine with two cores and nothing else to do: computing takes one, copies the other. The
link carries the net's unplanned peak once in an unplanned iteration. Operators' latencies are
measured in a run without a plan, all plans are made for these and that link. Each round runs the
job by each plan in turn, and without a plan before and after each, as a machine is not equally
quick at all times. A run's time is the least of its iterations but the first; EOR is the median
over the rounds of a planned run's time over the mean of the unplanned ones' beside it.
"""

import argparse
import csv
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
# The recorded jobs in jobs/.
NETS = {
    "ResNet-18": ("resnet18", 16, 64),
    "SqueezeNet 1.1": ("squeezenet1_1", 8, 96),
    "MobileNetV2": ("mobilenet_v2", 4, 64),
}
BUDGET = "80%"
# vDNN's policies know no budget; checkpoint and dtr don't reach it on all nets.
PLANNERS = {
    "vdnn-all": "200%",
    "vdnn-conv": "200%",
    "capuchin": BUDGET,
    "tensile": BUDGET,
    "neap": BUDGET,
    "checkpoint": "min",
    "dtr": "min",
}
TOLERANCE = 0.1


class Case:
    """A net on the host, with measured latencies and a link to match."""

    def __init__(self, flags, folder, net):
        model, batch, size = NETS[net]
        self.neap, self.folder, self.net, self.flags = flags.neap, folder, net, flags
        self.graph = HERE / f"jobs/{model}-adam-{batch}-{size}.graph.json.gz"
        self.latencies = folder / f"{model}.csv"
        self.run(self.graph, "--latencies-out", self.latencies)
        bare = self.answer("simulate", self.graph, "--latencies", self.latencies)
        self.peak, self.bare_ns = bare["unplanned_peak_bytes"], bare["iteration_ns"]
        profile = self.answer("device", "show", "host")
        self.rate = self.peak * 10**9 // self.bare_ns
        ways = ["h2d", "d2h", "h2d_contended", "d2h_contended"]
        profile["link"] |= dict.fromkeys(ways, self.rate)
        self.device = folder / f"{model}.device.json"
        self.device.write_text(json.dumps(profile))

    def answer(self, *arguments, no=False):
        """neap's answer; with `no`, None where the answer is no."""
        command = [self.neap, "--json", *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode == 1 and no:
            return None
        if done.returncode:
            sys.exit(f"{' '.join(command)}: {done.stderr}")
        return json.loads(done.stdout)

    def run(self, what, *more):
        """The times of a run's iterations but the first, in nanoseconds, and its checksum."""
        ran = self.answer(
            *("run", what, "--on", "host", "--iterations", self.flags.iterations, *more)
        )
        return ran["iterations_ns"][1:], ran["checksum"]

    def rows(self):
        """A row for each planner."""
        at = ("--device", self.device, "--latencies", self.latencies)
        rows, plans = [], {}
        for planner, budget in PLANNERS.items():
            file = self.folder / f"{self.net} {planner}.plan.json"
            row = {"net": self.net, "planner": planner, "link_mb_per_s": round(self.rate / 1e6)}
            asked = ("plan", self.graph, *at, "--planner", planner, "--budget", budget, "-o", file)
            if self.answer(*asked, no=True) is not None:
                plans[planner] = file
                said = self.answer("simulate", file)
                row |= {"msr": said["msr"], "predicted_eor": said["eor"]}
            rows.append(row)
        sums = set()

        def least(*what):
            ran, checksum = self.run(*what)
            sums.add(checksum)
            return min(ran)

        alone = [least(self.graph, "--device", self.device)]
        eors = {name: [] for name in plans}
        for _ in range(self.flags.rounds):
            for name, plan in plans.items():
                planned = least(plan)
                alone.append(least(self.graph, "--device", self.device))
                eors[name].append(planned / statistics.mean(alone[-2:]))
        if len(sums) > 1:
            sys.exit(f"{self.net}: a planned run computed something else than the unplanned one")
        bare = statistics.median(alone)
        for row in rows:
            row |= {
                "predicted_bare_ms": round(self.bare_ns / 1e6, 2),
                "measured_bare_ms": round(bare / 1e6, 2),
            }
            if row["planner"] in plans:
                eor = statistics.median(eors[row["planner"]])
                row |= {
                    "measured_eor": round(eor, 4),
                    "off": round(row["predicted_eor"] / eor - 1, 4),
                }
        return rows


def section(rows, table):
    """The part of the page about measured plans; `table` makes a table of a head and rows."""
    if not rows:
        yield (
            "Not measured yet. `bench/paper/measured.py` measures them, on a machine that has nothing "
            "else to do."
        )
        return
    sizes = ", ".join(f"{net} at {batch} × {size}²" for net, (_, batch, size) in NETS.items())
    yield (
        "**Plans of three small nets, run by `neap run --on host` over a throttled link: predicted "
        f"/ measured EOR.** Adam; {sizes}. The budget is {BUDGET} of the unplanned peak, but for "
        "vDNN's policies, which know none, and for checkpoint and dtr, which plan for the lowest "
        "arena that they reach. The link carries a net's unplanned peak once in an unplanned "
        "iteration. Operators' latencies were measured in an unplanned run. EOR is a planned "
        "run's quickest iteration over that of the unplanned ones before and after it, and of "
        "that the median over the rounds. Every planned run ended with the checksum of the "
        "unplanned one. `bench/paper/measured.py` makes this anew."
    )
    body = []
    for planner in PLANNERS:
        cells = []
        for net in NETS:
            row = next(r for r in rows if r["net"] == net and r["planner"] == planner)
            met = "measured_eor" in row
            cells.append(
                f"{row['predicted_eor']:.3f} / {row['measured_eor']:.3f}" if met else "not met"
            )
        body.append([planner, *cells])
    firsts = {row["net"]: row for row in reversed(rows)}
    body.append(
        [
            "without a plan, ms",
            *(
                f"{firsts[n]['predicted_bare_ms']:.1f} / {firsts[n]['measured_bare_ms']:.1f}"
                for n in NETS
            ),
        ]
    )
    yield table(["planner", *NETS], body)
    off = [row["off"] for row in rows if "off" in row]
    beyond = [row for row in rows if abs(row.get("off", 0)) > TOLERANCE]
    yield (
        f"{len(off) - len(beyond)} of {len(off)} predictions are within {TOLERANCE:.0%} of what was"
        f" measured; the median is off by {statistics.median(map(abs, off)):.1%}, the worst by"
        f" {max(map(abs, off)):.1%}. One-minute load of the machine before: {rows[0]['load']}."
    )


def main():
    """Measures all nets and writes measured.csv."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--neap", default="neap", metavar="FILE", help="the binary (neap)")
    flags.add_argument("--rounds", type=int, default=3, help="runs of each plan (3)")
    flags.add_argument("--iterations", type=int, default=6, help="iterations of a run (6)")
    flags = flags.parse_args()
    rows, load = [], round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as folder:
        for net in NETS:
            rows += Case(flags, pathlib.Path(folder), net).rows()
            print(f"{net}: done", file=sys.stderr)
    rows[0]["load"] = load
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(HERE / "measured.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(row["net"], row["planner"], row.get("predicted_eor"), row.get("measured_eor"))


if __name__ == "__main__":
    main()
