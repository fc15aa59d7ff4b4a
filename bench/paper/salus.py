"""The pictures and tables of the Salus paper that a simulator can make, with `neap share`: Table 2,
Fig. 1, 8, 11, 12, 13 and 16.

Needs the memory of the workloads that Salus's authors published, TRUTH/salus/memory.csv. It is not
a file of this repository.
"""

import csv
import json
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
FIXTURE = HERE.parent.parent / "fixtures/share/table2.csv"
# Minutes: makespan, mean queuing, mean completion, 95th percentile of completion.
PUBLISHED = {
    "fifo": (303.4, 167.6, 170.6, 251.1),
    "srtf": (306.0, 28.6, 53.4, 217.0),
    "pack": (287.4, 129.9, 145.5, 266.1),
    "fair": (301.6, 58.5, 96.6, 281.2),
}
KEYS = ("makespan_s", "mean_admission_s", "mean_completion_s", "p95_completion_s")
MODES = ("as-released", "paper", "neap")
# Fig. 12: what 300 jobs of a workload at once gain over one after the other.
GAINS = {"superres_128": 2.38, "resnet50_50": 1.07}
# Fig. 11: seconds from one launch to the next, and the length of each job.
APART, LONG = 15, 60
DEVICE = ("--device", "p100", "--memory-bytes", "16GiB")


def share(bench, memory, jobs, *more):
    """The answer of `neap share` on a P100 of 16 GiB."""
    return bench.answer("share", jobs, "--memory", memory, *DEVICE, *more, no=True)


def trace(bench, name, head, rows):
    """A file of jobs."""
    file = bench.folder / f"salus-{name}.csv"
    with open(file, "w", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([head, *rows])
    return file


def make(bench, truth):
    """All figures, as rows of salus.csv; also draws salus-iteration.svg, salus-ends.svg and
    salus-trace.svg.
    """
    memory = truth / "salus/memory.csv"
    if not memory.is_file():
        raise SystemExit(
            f"{memory}: not there; set NEAP_TRUTH to a folder with Salus's published memory.csv in"
            " its folder salus"
        )
    rows = []

    def row(figure, case, **figures):
        rows.append({"figure": figure, "case": case, **figures})

    drawn = bench.folder / "fig8.svg"
    for mode in MODES:
        more = ["--plot", drawn] if mode == "as-released" else []
        for policy in share(
            bench, memory, FIXTURE, "--mode", mode, "--policies", ",".join(PUBLISHED), *more
        )["policies"]:
            minutes = {key.removesuffix("_s") + "_min": round(policy[key] / 60, 1) for key in KEYS}
            row(
                "table 2",
                f"{policy['policy']}, {mode}",
                **minutes,
                mean_memory_bytes=policy["mean_memory_bytes"],
                peak_memory_bytes=policy["peak_memory_bytes"],
            )
    (HERE / "salus-ends.svg").write_text(drawn.read_text())
    (HERE / "salus-trace.svg").write_text(drawn.with_suffix(".pack.svg").read_text())

    head = ["job", "workload", "submit_s", "duration_s"]
    for workload in GAINS:
        jobs = trace(bench, workload, head, [[number, workload, 0, 60] for number in range(300)])
        took = {
            policy["policy"]: policy["makespan_s"]
            for policy in share(bench, memory, jobs, "--policies", "fifo,pack")["policies"]
        }
        row(
            "fig 12",
            workload,
            makespan_min=round(took["fifo"] / 60, 1),
            packed_min=round(took["pack"] / 60, 1),
            gain=round(took["fifo"] / took["pack"], 3),
        )

    with open(memory, newline="") as file:
        models = [
            line["Network"] for line in csv.DictReader(file) if line["Network"].endswith("eval_5")
        ]
    jobs = trace(
        bench,
        "inference",
        [*head, "rate_per_s", "iteration_s"],
        [[f"{model}-{copy}", model, 0, 60, 0.5, 0.01] for model in models for copy in range(3)],
    )
    for mechanism in ("static", "mps", "lanes"):
        [policy] = share(bench, memory, jobs, "--policies", "pack", "--mechanism", mechanism)[
            "policies"
        ]
        inference = policy["inference"]
        row(
            "fig 13",
            f"{3 * len(models)} models, {mechanism}",
            devices=inference["devices"],
            mean_ms=round(inference["mean_s"] * 1e3, 2),
            worst_p99_ms=round(inference["worst_p99_s"] * 1e3, 2),
        )

    # What each job was served in each stretch: all are ended at its end.
    def served(until):
        file = bench.folder / "served.csv"
        jobs = trace(
            bench,
            "three",
            [*head, "kill_s"],
            [
                [name, "inception3_50", number * APART, LONG, max(until - number * APART, 0)]
                for number, name in enumerate("abc")
                if until > number * APART
            ],
        )
        share(bench, memory, jobs, "--policies", "fair", "--csv", file)
        with open(file, newline="") as lines:
            return {line["job"]: float(line["served_s"]) for line in csv.DictReader(lines)}

    before = {}
    for until in range(APART, 4 * APART + 1, APART):
        now = served(until)
        shares = {
            f"share_{name}": round((now[name] - before.get(name, 0)) / APART, 3) for name in now
        }
        row("fig 11", f"{until - APART} to {until} s", **shares)
        before = now

    for name in [
        "vgg16-adam-16-224",
        "inception_v3-adam-16-299",
        "inception_v4-adam-16-299",
        "resnet50-adam-16-224",
        "densenet121-adam-16-224",
    ]:
        graph = bench.graph(name)
        timeline = bench.folder / "memory.json"
        drawing = ["--plot", HERE / "salus-iteration.svg"] if name.startswith("resnet50") else []
        bench.answer("simulate", graph, "--device", "p100", "--timeline", timeline, *drawing)
        held = [
            (event["ts"], event["args"]["resident_bytes"])
            for event in json.loads(timeline.read_text())["traceEvents"]
            if event["ph"] == "C"
        ]
        ends = [
            event["ts"] + event["dur"]
            for event in json.loads(timeline.read_text())["traceEvents"]
            if event["ph"] == "X"
        ]
        until = [at for at, _ in held[1:]] + [max(ends)]
        area = sum(bytes_ * (to - at) for (at, bytes_), to in zip(held, until))
        row(
            "fig 1",
            name,
            mean_memory_bytes=round(area / (max(ends) - held[0][0])),
            peak_memory_bytes=max(b for _, b in held),
        )
    return rows


def table(head, rows):
    return "\n".join(
        "| " + " | ".join(map(str, row)) + " |"
        for row in [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    )


def gib(count):
    return f"{count / 2**30:.2f} GiB"


def section(data):
    """The part of the page about Salus."""
    rows = data["salus"]
    of = {
        figure: [row for row in rows if row["figure"] == figure]
        for figure in ["table 2", "fig 12", "fig 13", "fig 11", "fig 1"]
    }
    missing = [figure for figure, found in of.items() if not found]
    if missing:
        raise SystemExit(
            f"salus.csv has no rows of {', '.join(missing)}: run `bench/paper/run --only salus`"
        )
    yield (
        "A P100 of 16 GiB. The published trace is not public: ours was fitted to the sixteen"
        " published cells under `--mode as-released` (see [bench/share](../share/README.md)), so"
        " its agreement reproduces nothing; the other modes show what the paper's own algorithm and"
        " neap's policies do with the same jobs. Queuing ends when a job is admitted."
    )
    yield (
        "**Table 2: 100 jobs, minutes: makespan / mean queuing / mean completion / 95 %"
        " completion.**"
    )
    cases = {row["case"]: row for row in of["table 2"]}
    figures = [f"{key.removesuffix('_s')}_min" for key in KEYS]

    def cell(row):
        return " / ".join(f"{row[key]:.1f}" for key in figures)

    yield table(
        ["policy", "published", *MODES],
        [
            [
                policy,
                " / ".join(f"{value:.1f}" for value in published),
                *(cell(cases[f"{policy}, {mode}"]) for mode in MODES),
            ]
            for policy, published in PUBLISHED.items()
        ],
    )
    yield "**Fig. 8: the share of jobs that have ended by each time, `as-released`.**"
    yield "![How long jobs take under four policies](salus-ends.svg)"
    yield (
        "**Memory over the same trace** under `pack`, `as-released`. `neap share --policies POLICY"
        " --curve FILE.csv --timeline FILE.json` writes it with the number of running and waiting"
        " jobs, and a timeline of each job, for any policy."
    )
    yield "![Persistent memory and lanes over time](salus-trace.svg)"
    unused = 1 - cases["fifo, paper"]["mean_memory_bytes"] / 2**34
    yield (
        "**Mean / highest memory in use (persistent and lanes) over the trace** (Fig. 16 is of mean"
        f" memory). With one job at a time {unused:.0%} of the device are unused. (In the released"
        " code one lane is the whole device, under all policies but `pack`.)"
    )
    yield table(
        ["policy", *MODES[1:]],
        [
            [
                policy,
                *(
                    f"{gib(cases[f'{policy}, {mode}']['mean_memory_bytes'])} / "
                    f"{gib(cases[f'{policy}, {mode}']['peak_memory_bytes'])}"
                    for mode in MODES[1:]
                ),
            ]
            for policy in PUBLISHED
        ],
    )
    yield (
        "**Fig. 1: mean and highest memory of one job over its iteration**, of nets recorded with"
        " PyTorch at a batch of 16 (the paper's are TensorFlow's). ResNet-50's over an iteration:"
        " ![ResNet-50's memory over an iteration](salus-iteration.svg)"
    )
    yield table(
        ["net", "mean", "peak", "mean / peak"],
        [
            [
                row["case"],
                gib(row["mean_memory_bytes"]),
                gib(row["peak_memory_bytes"]),
                f"{row['mean_memory_bytes'] / row['peak_memory_bytes']:.2f}",
            ]
            for row in of["fig 1"]
        ],
    )
    names = ["a", "b", "c"]
    totals = [sum(row.get(f"share_{n}", 0) for n in names) for row in of["fig 11"]]
    yield (
        f"**Fig. 11: three inception3_50 that come every {APART} s share a lane under `fair`**"
        f" (mode `neap`: one lane), as shares of the device. The total is {min(totals):.3f} to"
        f" {max(totals):.3f}."
    )
    yield table(
        ["from", *names, "all"],
        [
            [
                row["case"],
                *(f"{row[f'share_{n}']:.3f}" if f"share_{n}" in row else "–" for n in names),
                f"{sum(row.get(f'share_{n}', 0) for n in names):.3f}",
            ]
            for row in of["fig 11"]
        ],
    )
    yield (
        "**Fig. 12: 300 jobs of hyper-parameter exploration**, one minute each, one after the other"
        " and packed. The contention model was calibrated to these two gains."
    )
    yield table(
        ["workload", "one by one, min", "packed, min", "gain", "published"],
        [
            [
                row["case"],
                row["makespan_min"],
                row["packed_min"],
                f"×{row['gain']:.2f}",
                f"×{GAINS[row['case']]:.2f}",
            ]
            for row in of["fig 12"]
        ],
    )
    yield (
        "**Fig. 13: models for inference**, all at once: the GPUs that hold them, and the latency"
        " of requests on one GPU, where partitions and processes serve only as many models as fit."
        " Its input: the fourteen `*eval_5` of the published table three times, a request every 2 s"
        " each, 10 ms a request. Published: 42 GPUs without sharing, 6 with MPS, 1 with lanes."
    )
    yield table(
        ["", "GPUs", "mean, ms", "99 %, ms"],
        [
            [row["case"], row["devices"], row["mean_ms"], row["worst_p99_ms"]]
            for row in of["fig 13"]
        ],
    )
