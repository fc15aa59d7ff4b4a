"""Several jobs as the TENSILE papers launch them: copies of one net at once (Fig. 6, the older
paper's Table 2), and all nets one after the other (Table IV). Each planner plans all jobs, and the
plans run side by side at the real latencies.
"""

import csv
import json
import random

# Runs with other real latencies, and in Table IV in other orders.
RUNS = 3
# The iterations of each job, and in Table IV the seconds from one launch to the next.
ITERATIONS = 10
ITERATIONS_APART = 40
APART = 0.25

# The paper's TENSILE swaps in time alone: see TENSILE in `run`.
IN_TIME = ["--no-recompute", "--no-passive", "--no-duplex"]


# What a simulation says of each job: nanoseconds of waiting, and of running again.
LOST = ["swap_in_stall_ns", "swap_out_stall_ns", "tail_stall_ns", "recompute_ns"]


def lost(ran):
    """Nanoseconds that jobs wait for copies, and run again, in all."""
    return {key: sum(job[key] for job in ran["jobs"]) for key in LOST}


def at_once(job, copies):
    """Copies of a job launched at once: a row for each planner, all with the same peak to beat."""
    bench, graphs = job.bench, [job.graph] * copies
    made = 0

    def run(planner, budget, latencies, switches=()):
        nonlocal made
        made += 1
        file = bench.folder / f"{job.name}.{job.device}.{job.seed}.{copies}.{made}.plan.json"
        asked = [
            "plan",
            *graphs,
            "--device",
            job.device,
            "--planner",
            planner,
            *switches,
            *latencies,
            *(["--budget", budget] if budget else []),
        ]
        if bench.answer(*asked, "-o", file, no=True) is None:
            return None
        arena = json.loads(file.read_text())["figures"]["arena_bytes"]
        if copies > 1:
            ran = bench.answer("simulate", file, "--real", job.real, "--iterations", ITERATIONS)
        else:
            one = bench.answer("simulate", file, "--real", job.real)
            # What several jobs' simulation says of one.
            one["recompute_ns"] = one["extra"]["recompute_ns"]
            ran = {
                "peak_bytes": one["peak_bytes"],
                "end_ns": one["iteration_ns"] * ITERATIONS,
                "jobs": [{key: one[key] * ITERATIONS for key in LOST}],
            }
        file.unlink()
        return ran | {"arena_bytes": arena}

    cold, real = job.latencies(False), job.latencies(True)
    # Everything fits without a plan: the budget is the whole device.
    bare = run("neap", None, real)
    tensile = {
        "cs": run("tensile", "min", cold, IN_TIME),
        "up": run("tensile", "min", real, IN_TIME),
    }
    ours = run("neap", tensile["up"]["arena_bytes"], real)
    capuchin = run("capuchin", tensile["cs"]["arena_bytes"], real)
    rows = []
    for label, ran in [
        ("vDNN", run("vdnn-conv", None, real)),
        ("Capuchin", capuchin),
        ("TENSILEcs", tensile["cs"]),
        ("TENSILEup", tensile["up"]),
        ("neap", ours),
    ]:
        row = {
            "net": job.net,
            "device": job.device,
            "batch": job.batch,
            "copies": copies,
            "seed": job.seed,
            "planner": label,
        }
        if ran:
            no_free = copies * job.bare["no_free_bytes"]
            row |= {
                "peak_bytes": ran["peak_bytes"],
                "no_free_bytes": no_free,
                "liveness_bytes": bare["peak_bytes"],
                "end_ns": ran["end_ns"],
                "unplanned_end_ns": bare["end_ns"],
                "msr": 1 - ran["peak_bytes"] / no_free,
                "eor": ran["end_ns"] / bare["end_ns"],
                **lost(ran),
            }
            row["cbr"] = row["msr"] / row["eor"]
        rows.append(row)
    return rows


def merge(tables, into):
    """One table of latencies from several. Equal operators take equally long, in whichever net."""
    rows = {}
    for table in tables:
        with open(table, newline="") as file:
            head, *lines = csv.reader(file)
            rows = {line[head.index("key")]: line for line in lines} | rows
    with open(into, "w", newline="") as out:
        csv.writer(out).writerows([head, *rows.values()])


def one_by_one(bench, jobs, seed):
    """All nets launched one after the other in a random order: a row for each planner."""
    order = random.Random(seed).sample(jobs, len(jobs))
    table = bench.folder / f"arrivals.{seed}.csv"
    with open(table, "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["graph", "submit_s", "iterations"])
        for number, job in enumerate(order):
            writer.writerow([job.graph, number * APART, ITERATIONS_APART])
    real = bench.folder / f"arrivals.{seed}.real.csv"
    merge([job.real for job in jobs], real)
    device = jobs[0].device
    base = ["simulate", "--arrivals", table, "--device", device, "--real", real]
    # Each net's operators as those of the four others foretell them.
    predicted = bench.folder / f"arrivals.{seed}.predicted.csv"
    merge([job.predicted() for job in jobs], predicted)
    cold, known = ["--latencies", predicted], ["--latencies", real]

    def run(planner, budget, latencies):
        return bench.answer(
            *base,
            "--planner",
            planner,
            *latencies,
            *(["--budget", budget] if budget else []),
            no=True,
        )

    # TENSILE saves what it can with all five; the budget of the others follows from that.
    file = bench.folder / f"arrivals.{seed}.plan.json"
    graphs = [job.graph for job in order]
    budgets = []
    for latencies in [cold, known]:
        bench.answer(
            "plan",
            *graphs,
            "--device",
            device,
            "--planner",
            "tensile",
            *IN_TIME,
            *latencies,
            "--budget",
            "min",
            "-o",
            file,
        )
        budgets.append(json.loads(file.read_text())["figures"]["arena_bytes"])
    bare = run("neap", None, known)
    no_free = {job.name: job.bare["no_free_bytes"] for job in jobs}
    made = []
    for label, ran in [
        ("vDNN", run("vdnn-conv", None, known)),
        ("Capuchin", run("capuchin", budgets[0], known)),
        ("TENSILEcs", run("tensile", budgets[0], cold)),
        ("TENSILEup", run("tensile", budgets[1], known)),
        ("neap", run("neap", budgets[1], known)),
    ]:
        row = {"seed": seed, "planner": label, "order": ", ".join(job.net for job in order)}
        if ran and all(job["end_ns"] is not None for job in ran["jobs"]):
            together = peak(
                ran,
                lambda index, job: [
                    (arena["at_ns"], arena["arena_bytes"]) for arena in job["arenas"]
                ],
            )
            vanilla = peak(
                bare, lambda index, job: [(job["admitted_ns"], no_free[order[index].name])]
            )
            row |= {
                "peak_bytes": together,
                "no_free_bytes": vanilla,
                "end_ns": ran["end_ns"],
                "unplanned_end_ns": bare["end_ns"],
                "queuing_ns": ran["mean_queuing_ns"],
                "unplanned_queuing_ns": bare["mean_queuing_ns"],
                "msr": 1 - together / vanilla,
                "eor": completion(ran) / completion(bare),
            }
            row["cbr"] = row["msr"] / row["eor"]
        made.append(row)
    return made


def completion(ran):
    """The sum of all jobs' times from launch to end."""
    return sum(job["end_ns"] - job["submit_ns"] for job in ran["jobs"])


def peak(ran, levels):
    """The most bytes of all jobs at one time; `levels` gives a job's bytes and since when."""
    changes = []
    for index, job in enumerate(ran["jobs"]):
        now = 0
        for at, size in levels(index, job):
            changes.append((at, size - now))
            now = size
        changes.append((job["end_ns"], -now))
    most = level = 0
    # What leaves at an instant leaves before what comes.
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most
