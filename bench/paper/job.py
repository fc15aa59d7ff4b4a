"""Jobs as bench/paper plans and simulates them."""

import csv
import hashlib
import json
import pathlib
import subprocess
import sys
import threading
import time

from cells import CAUSES, FIGURES, LEVELS, NETS, OURS, SHARES

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


# The paper's planner swaps in time as long as its stop rule lets it, over a link that carries one
# tensor at a time, and recomputes only when
# the device is full, which it never is here.
TENSILE = ["--planner", "tensile", "--no-recompute", "--no-passive", "--no-duplex"]


# Shapes of each kind of operator and net from which the predictor learns.
SHAPES = 60


def factor(seed, key):
    """How much longer than by the roofline an operator really takes, in thousandths: a factor of
    0.70 to 1.30 for its kind times one of 0.80 to 1.20 for its kind and shapes, each uniform and
    drawn from a hash, so that equal operators take equally long.
    """

    def draw(what, low, high):
        digest = hashlib.sha256(f"{seed}:{what}".encode()).digest()
        return low + int.from_bytes(digest[:8], "big") % (high - low + 1)

    return draw("kind " + key.split("(")[0], 700, 1300) * draw("key " + key, 800, 1200) // 1000


def perturb(roofline, real, seed):
    """The roofline's table with the times that operators really take."""
    with open(roofline, newline="") as file, open(real, "w", newline="") as out:
        reader = csv.DictReader(file)
        writer = csv.DictWriter(out, reader.fieldnames, lineterminator="\n")
        writer.writeheader()
        for row in reader:
            writer.writerow(row | {"ns": max(1, int(row["ns"]) * factor(seed, row["key"]) // 1000)})


class Job:
    """A net at a batch size on a device, with the latencies that operators really have."""

    def __init__(self, bench, net, batch, device, seed=None):
        self.bench, self.net, self.batch, self.device = bench, net, batch, device
        self.seed = bench.seed if seed is None else seed
        model, size = NETS[net]
        self.name = f"{model}-adam-{batch}-{size}"
        self.graph = bench.graph(self.name)
        if self.graph is None:
            return
        self.real = bench.folder / f"{self.name}.{device}.{self.seed}.real.csv"
        measured = bench.measured and bench.measured / f"{self.name}.{device}.latency.csv"
        self.measured = bool(measured and measured.is_file())
        if self.measured:
            self.real.write_bytes(measured.read_bytes())
        else:
            roofline = self.real.with_suffix(".roofline.csv")
            self.neap("simulate", self.graph, "--device", device, "--latencies-out", roofline)
            perturb(roofline, self.real, self.seed)
        self.levels = {}
        self.bare = self.neap(
            "simulate",
            self.graph,
            "--device",
            device,
            "--latencies",
            self.real,
            "--accounting",
            "paper",
        )

    def neap(self, *arguments, no=False):
        return self.bench.answer(*arguments, no=no)

    def plan(self, label, budget, planner, updated):
        """A plan made at predicted latencies, or at the real ones, as it runs at the real ones;
        None where there is none.
        """
        file = self.bench.folder / f"{self.name}.{self.device}.{label}.plan.json"
        latencies = self.latencies(updated)
        if (
            self.neap(
                "plan",
                self.graph,
                "--device",
                self.device,
                "--budget",
                budget,
                *planner,
                *latencies,
                "-o",
                file,
                no=True,
            )
            is None
        ):
            return None
        ran = self.neap("simulate", file, "--real", self.real, "--accounting", "paper")
        file.unlink()
        return ran

    def latencies(self, updated):
        """Where a plan's latencies come from."""
        return (
            ["--latencies", self.real]
            if updated
            else ["--predictor", self.bench.predictor(self.device, self.seed, self.net)]
        )

    def predicted(self):
        """A table of the job's latencies as they are predicted."""
        file = self.bench.folder / f"{self.name}.{self.device}.{self.seed}.predicted.csv"
        if not file.is_file():
            self.neap(
                "simulate",
                self.graph,
                "--device",
                self.device,
                *self.latencies(False),
                "--latencies-out",
                file,
            )
        return file

    def row(self, label, rule, ran):
        row = {
            "net": self.net,
            "batch": self.batch,
            "device": self.device,
            "real": "measured" if self.measured else f"perturbed, seed {self.seed}",
            "planner": label,
            "rule": rule,
            "unplanned_iteration_ns": self.bare["unplanned_iteration_ns"],
            "unplanned_peak_bytes": self.bare["unplanned_peak_bytes"],
            "no_free_bytes": self.bare["no_free_bytes"],
        }
        if ran:
            row["budget_bytes"] = ran["budget_bytes"]
            for side, of in [("", ran), ("paper_", ran["paper"])]:
                row |= {side + key: of[key] for key in FIGURES if key in of} | {
                    side + key: of["extra"].get(key, 0) for key in CAUSES
                }
        return row

    def passive(self, budget):
        """The passive iteration within a budget, as a row's figures. It copies one tensor at a
        time, so both accountings give it the same time.
        """
        ran = self.neap(
            "simulate",
            self.graph,
            "--device",
            self.device,
            "--latencies",
            self.real,
            "--passive",
            budget,
            no=True,
        )
        if ran is None:
            return None
        passive = ran["passive"]
        figures = {
            "iteration_ns": passive["iteration_ns"],
            "eor": passive["eor"],
            "extra": {"passive_ns": passive["iteration_ns"] - self.bare["unplanned_iteration_ns"]},
        }
        return {
            "budget_bytes": passive["budget_bytes"],
            **figures,
            "peak_bytes": passive["peak_bytes"],
            "paper": figures,
        }

    def as_fast(self, limit):
        """neap's plan with the lowest peak that was found whose iteration takes at most `limit`: by
        halving over LEVELS budgets from the floor to the unplanned peak, then of all that were made
        for the job.
        """
        low, high = 0, LEVELS
        while high - low > 1:
            middle = (low + high) // 2
            ran = self.level(middle)
            if ran and ran["iteration_ns"] <= limit:
                high = middle
            else:
                low = middle
        self.level(high)
        made = [ran for ran in self.levels.values() if ran and ran["iteration_ns"] <= limit]
        return min(made, key=lambda ran: ran["peak_bytes"], default=None)

    def level(self, level):
        if level not in self.levels:
            floor, peak = self.bare["floor_bytes"], self.bare["unplanned_peak_bytes"]
            # A little above the peak: without any event it still has to be placed.
            budget = floor + (peak - floor) * level // LEVELS if level < LEVELS else peak * 21 // 20
            self.levels[level] = self.plan("level", budget, OURS["neap"], True)
        return self.levels[level]

    def rows(self, full):
        """All plans of the job. `full`: with the searches for neap's peak at the others' times."""
        own, equal = "its own way", "TENSILE's arena"
        vdnn = {
            policy: self.plan(policy, "200%", ["--planner", policy], False)
            for policy in ["vdnn-all", "vdnn-conv"]
        }
        rows = [self.row(policy, own, ran) for policy, ran in vdnn.items()]
        for updated in [False, True]:
            when = "updated" if updated else "cold"
            tensile = self.plan("tensile", "min", TENSILE, updated)
            rows.append(self.row(f"tensile-{when}", own, tensile))
            budget = tensile["arena_bytes"] if tensile else self.bare["unplanned_peak_bytes"]
            if not updated:
                # What passive mode measured is what operators really take.
                capuchin = self.plan("capuchin", budget, ["--planner", "capuchin"], True)
                rows += [
                    self.row("capuchin", equal + " (cold)", capuchin),
                    self.row("capuchin-first", equal + " (cold)", self.passive(budget)),
                ]
            for label, planner in OURS.items():
                ran = self.plan(label, budget, planner, updated)
                rows.append(self.row(f"{label}-{when}", f"{equal} ({when})", ran))
                if updated:
                    self.levels[label] = ran
        if full:
            for label, ran in [
                ("vdnn-all", vdnn["vdnn-all"]),
                ("capuchin", capuchin),
                ("tensile-updated", tensile),
            ]:
                if ran:
                    rows.append(
                        self.row(
                            "neap-updated", f"time of {label}", self.as_fast(ran["iteration_ns"])
                        )
                    )
            rows.append(
                self.row(
                    "neap-updated",
                    "5 % added time",
                    self.as_fast(self.bare["unplanned_iteration_ns"] * 105 // 100),
                )
            )
        return rows

    def budgets(self):
        """Every planner at every budget."""
        arguments = [
            self.graph,
            "--device",
            self.device,
            "--latencies",
            self.real,
            "--budget",
            ",".join(SHARES),
            "--accounting",
            "paper",
        ]
        rows = self.bench.compare(*arguments)
        return [{"net": self.net, "batch": self.batch, **row} for row in rows]


def numbers(form):
    """How many numbers a value of JSON holds."""
    if isinstance(form, dict):
        return sum(map(numbers, form.values()))
    if isinstance(form, list):
        return sum(map(numbers, form))
    return isinstance(form, (int, float)) and not isinstance(form, bool)


class Bench:
    def __init__(self, flags, folder):
        self.folder, self.seed, self.measured = folder, flags.seed, flags.measured
        self.neap = str(pathlib.Path(flags.neap).resolve()) if flags.neap else None
        self.lock, self.learned = threading.RLock(), {}
        self.places = [*(p.resolve() for p in flags.traces or []), HERE / "jobs"]
        if not self.neap:
            subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=ROOT, check=True)
            self.neap = str(ROOT / "target/release/neap")

    def asked(self, arguments):
        """What neap said, as JSON where it has an answer."""
        command = [self.neap, "--json", *map(str, arguments)]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def compare(self, *arguments):
        """The rows of `neap compare`; its answer is no where a budget is met by none."""
        done = self.asked(["compare", *arguments])
        if done.returncode > 1:
            sys.exit(done.stderr)
        return json.loads(done.stdout)["rows"]

    def answer(self, *arguments, no=False):
        """neap's answer; with `no`, None where the answer is no."""
        done = self.asked(arguments)
        if done.returncode == 1 and no:
            return None
        if done.returncode:
            sys.exit(f"neap {' '.join(map(str, arguments))}: {done.stderr}")
        return json.loads(done.stdout)

    def predictor(self, device, seed, left_out):
        """What learned the device's operators, of all nets but one at batch 16, at SHAPES other
        shapes of each kind and net.
        """
        with self.lock:
            file = self.folder / f"{device}.{seed}.without-{NETS[left_out][0]}.predictor.json"
            if (device, seed, left_out) not in self.learned:
                tables = []
                for net, (model, size) in NETS.items():
                    graph = self.graph(f"{model}-adam-16-{size}")
                    if net != left_out:
                        roofline, real = (
                            self.folder / f"{model}.{device}.{seed}.{what}.csv"
                            for what in ["varied", "measured"]
                        )
                        self.answer(
                            "profile",
                            graph,
                            "--vary",
                            SHAPES,
                            "--by-roofline",
                            "--device",
                            device,
                            "-o",
                            roofline,
                        )
                        perturb(roofline, real, seed)
                        tables.append(real)
                self.learned[device, seed, left_out] = self.answer("train", *tables, "-o", file)
            return file

    def prediction(self, job):
        """Seconds that predicting a net's latencies takes, the least of nine, and how large the
        predictor is.
        """
        file = self.predictor(job.device, job.seed, job.net)
        fit = self.learned[job.device, job.seed, job.net]["fit"]
        simulate = ["simulate", job.graph, "--device", job.device]

        def seconds(arguments):
            taken = []
            for _ in range(9):
                begun = time.perf_counter()
                self.answer(*arguments)
                taken.append(time.perf_counter() - begun)
            return min(taken)

        form = json.loads(file.read_text())
        weights = sum(numbers(layer) for model in form["models"] for layer in model["layers"])
        sources = self.answer(
            "plan",
            job.graph,
            "--device",
            job.device,
            "--predictor",
            file,
            "--planner",
            "vdnn-conv",
            "--budget",
            "200%",
            "-o",
            self.folder / f"{job.name}.covered.plan.json",
        )["latency_sources"]
        return {
            "net": job.net,
            "seconds": round(
                max(seconds([*simulate, "--predictor", file]) - seconds(simulate), 0.0), 4
            ),
            "unplanned_iteration_ns": job.bare["unplanned_iteration_ns"],
            "predicted": sources["predicted"],
            "operators": sum(sources.values()),
            "models": len(form["models"]),
            "weights": weights,
            "bytes": file.stat().st_size,
            "r2_per_mille": fit["r2_per_mille"],
            "mse_millionths": fit["mse_millionths"],
            "h2d_bytes_per_s": self.answer("device", "show", job.device)["link"]["h2d"],
        }

    def graph(self, name):
        for place in self.places:
            for ending in [".graph.json", ".graph.json.gz"]:
                if (graph := place / f"{name}{ending}").is_file():
                    return graph
            if (trace := place / f"{name}-start.et.json.gz").is_file():
                graph = self.folder / f"{name}.graph.json"
                if not graph.is_file():
                    subprocess.run(
                        [self.neap, "import", trace, "-o", graph],
                        check=True,
                        stdout=subprocess.DEVNULL,
                    )
                return graph
        sys.exit(
            f"{name}: in none of the folders {', '.join(map(str, self.places))};"
            " `bench/paper/record` makes it"
        )
