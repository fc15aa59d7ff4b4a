"""What bench/paper/run makes, as tables beside what the papers print."""

import capuchin
import crowd
import measured
import salus
from cells import (
    BATCHES,
    COPIES,
    CROWD,
    MIXED,
    NAMES,
    NETS,
    PLANNERS,
    SEVERAL,
    SHARES,
    ours,
    table,
)
from tables_many import at_once, one_by_one, several
from tables_more import equal, links, mlp, older
from tables_one import batches, causes, first, single


# neap is planned to be as quick as these.
EQUAL = ["vdnn-all", "capuchin", "tensile-updated"]
# Published rows: of Table II, and of the other tables with the planners in all of them.
FIRST = ["TENSILE", "prediction", "Capuchin"]
OTHERS = [("mixed", "all five"), *((f"older{x}", "VGG") for x in ["", " x1", " x2", " x3"])]
PUBLISHED = ["vDNN", "Capuchin", "TENSILE"]


def is_mixed(row):
    return row["jobs"].startswith(MIXED)


def salus_cases():
    """The figures of the Salus paper, and their rows."""
    yield from (("table 2", f"{p}, {mode}") for p in salus.PUBLISHED for mode in salus.MODES)
    yield from (("fig 1", f"{model}-adam-16-{size}") for model, size in NETS.values())
    for start in range(0, 4 * salus.APART, salus.APART):
        yield "fig 11", f"{start} to {start + salus.APART} s"
    yield from (("fig 12", workload) for workload in salus.GAINS)
    yield from (("fig 13", f"42 models, {kind}") for kind in ("static", "mps", "lanes"))


def missing(data):
    """The rows that a table needs and no file has, in words."""

    def lacks(name, wanted):
        there = {tuple(row.get(key) for key in wanted[0]) for row in data[name]} if wanted else ()
        return [
            f"{name}.csv: {' '.join(map(str, row.values()))}"
            for row in wanted
            if tuple(row.values()) not in there
        ]

    planners = [
        "vdnn-all",
        "vdnn-conv",
        "tensile-cold",
        "tensile-updated",
        "capuchin",
        "capuchin-first",
        *ours(),
    ]
    jobs = [
        *((net, batch, "a6000") for net in NETS for batch in BATCHES),
        ("VGG-16", 2, "rtx2080ti"),
    ]
    crowds = [
        *((net, "a6000", copies) for net in NETS for copies in range(1, COPIES + 1)),
        *(("VGG-16", "rtx2080ti", copies) for copies in range(1, 4)),
    ]
    runs = [name for name in CROWD if name != "TENSILE"]
    first_seed = min((row["seed"] for row in data["crowd"]), default=1)
    seeds = range(first_seed, first_seed + crowd.RUNS)
    return [
        *lacks(
            "results",
            [
                {"net": net, "batch": batch, "device": device, "planner": planner}
                for net, batch, device in jobs
                for planner in planners
            ],
        ),
        *lacks(
            "budgets",
            [
                {"net": net, "planner": planner, "budget": budget}
                for net in NETS
                for planner in [*PLANNERS, "offload-optimizer", "dtr"]
                for budget in SHARES
            ],
        ),
        *lacks(
            "results",
            [
                {"net": net, "batch": 16, "device": "a6000", "rule": rule}
                for net in NETS
                for rule in ["5 % added time", *(f"time of {planner}" for planner in EQUAL)]
            ],
        ),
        *lacks(
            "results",
            [
                {"net": net, "batch": batch, "device": device, "planner": planner, "rule": rule}
                for net, batch, device in jobs
                for planner, rule in [("neap-updated", "TENSILE's arena (updated)")]
            ],
        ),
        *lacks("prediction", [{"net": net} for net in NETS]),
        *lacks(
            "crowd",
            [
                {"net": net, "device": device, "copies": copies, "planner": planner, "seed": seed}
                for net, device, copies in crowds
                for planner in runs
                for seed in seeds
            ],
        ),
        *lacks(
            "arrivals",
            [{"planner": planner, "seed": seed} for planner in runs for seed in seeds],
        ),
        *lacks(
            "several",
            [
                {"jobs": net, "copies": copies, "planner": planner, "budget": budget}
                for net in NETS
                for copies in range(1, COPIES + 1)
                for planner in PLANNERS
                for budget in SEVERAL
            ],
        ),
        *lacks(
            "several",
            [
                {"jobs": mixed, "planner": planner, "budget": budget}
                for mixed in {row["jobs"] for row in data["several"] if is_mixed(row)} or [MIXED]
                for planner in PLANNERS
                for budget in SEVERAL
            ],
        ),
        *lacks(
            "published",
            [
                *({"table": "single", "net": n, "planner": p} for n in NETS for p, _ in NAMES),
                *({"table": "first", "net": n, "planner": p} for n in NETS for p in FIRST),
                *({"table": t, "net": n, "planner": p} for t, n in OTHERS for p in PUBLISHED),
            ],
        ),
        *lacks(
            "links",
            [
                {"net": net, "link": link, "when": when}
                for net in NETS
                for link in ["two ways", "one way"]
                for when in ["cold", "updated"]
            ],
        ),
        *lacks(
            "mlp",
            [
                {"device": device, "link": link, "slower": slower}
                for device in ["rtx2080ti", "a6000"]
                for link in ["two ways", "one way"]
                for slower in [1, 2, 4, 8]
            ],
        ),
        *lacks("salus", [{"figure": figure, "case": case} for figure, case in salus_cases()]),
        *lacks(
            "capuchin",
            [
                {"net": net, "slower": slower, "copies": copies, "memory": memory}
                for net in NETS
                for slower in [1, 8]
                for copies in range(1, COPIES + 1)
                for memory in (capuchin.KINDS if copies > 1 else ["parts"])
            ],
        ),
        *lacks(
            "measured",
            [{"net": net, "planner": p} for net in measured.NETS for p in measured.PLANNERS]
            if data["measured"]
            else [],
        ),
    ]


# What goes into README.md, in this order.
SECTIONS = [
    (
        "Tables I and III: one job, batch 16, A6000",
        lambda d: single(d["results"], d["prediction"], d["published"], d["real"]),
    ),
    (
        "Table II: the first iteration",
        lambda d: first(d["results"], d["prediction"], d["published"], d["real"]),
    ),
    (
        "Capuchin's measured execution",
        lambda d: capuchin.section(d["capuchin"], d["published"], d["real"], table),
    ),
    ("Plans measured on the host", lambda d: measured.section(d["measured"], table)),
    (
        "Table IV: jobs launched one by one",
        lambda d: one_by_one(d["arrivals"], d["published"], d["real"]),
    ),
    ("Fig. 2: where the extra time comes from", lambda d: causes(d["results"], d["real"])),
    (
        "Fig. 6, and Fig. 2 by number of jobs",
        lambda d: at_once(d["crowd"], d["published"], d["real"]),
    ),
    ("Fig. 7: batch sizes", lambda d: batches(d["results"], d["real"])),
    (
        "The older paper's Tables 1 and 2",
        lambda d: older(d["results"], d["crowd"], d["published"], d["real"]),
    ),
    ("TENSILE on one shared timetable", lambda d: links(d["links"], d["real"])),
    ("The older paper's MLP", lambda d: mlp(d["mlp"])),
    (
        "One job: the same budget, the same time",
        lambda d: equal(d["results"], d["budgets"], d["real"]),
    ),
    ("Several jobs: the same budget", lambda d: several(d["several"], d["real"])),
    ("The Salus paper: Table 2 and figures", salus.section),
]
