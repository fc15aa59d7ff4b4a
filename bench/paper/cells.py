"""Which cases bench/paper has, and how figures become cells of tables."""

import statistics

NETS = {
    "VGG-16": ("vgg16", 224),
    "Inception V3": ("inception_v3", 299),
    "Inception V4": ("inception_v4", 299),
    "ResNet-50": ("resnet50", 224),
    "DenseNet": ("densenet121", 224),
}
BATCHES = [4, 8, 16, 32, 64]
# neap's own rows, each cold and updated: what it is called and how it plans.
OURS = {"neap": ["--planner", "neap"]}
# Budgets between floor and unplanned peak that neap is tried at to be as fast as another.
LEVELS = 32
SHARES = ["80%", "70%", "60%", "50%", "40%"]
# Several jobs: up to so many copies of each net, and all nets once; at these budgets.
COPIES = 4
SEVERAL = ["70%", "50%"]
MIXED = "the mixed five"
PLANNERS = ["vdnn-all", "vdnn-conv", "checkpoint", "capuchin", "tensile", "neap"]
FIGURES = ["peak_bytes", "iteration_ns", "msr", "msr_no_free", "eor", "cbr", "cbr_no_free"]
CAUSES = ["passive_ns", "swap_in_ns", "swap_out_ns", "tail_ns", "contention_ns", "recompute_ns"]
# TENSILE's whole process: iterations by the plan of the cold start, then iterations by the updated
# one.
COLD = 10
UPDATED = 90
PART = COLD / (COLD + UPDATED)
# The paper's names, and how each plans here. Rows without a name of the paper's stand below.
NAMES = [
    ("TENSILE", None),
    ("TENSILEcs", "tensile-cold"),
    ("TENSILEup", "tensile-updated"),
    ("vDNN", "vdnn-conv"),
    ("Capuchin", "capuchin"),
]
CROWD = ["vDNN", "Capuchin", "TENSILE", "TENSILEcs", "TENSILEup", "neap"]


def table(head, rows):
    return "\n".join(
        "| " + " | ".join(map(str, row)) + " |"
        for row in [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    )


def share(value, digits=3):
    return "–" if value is None else f"{value:.{digits}f}"


def find(rows, **wanted):
    return next(
        (row for row in rows if all(row[key] == value for key, value in wanted.items())), None
    )


def trio(row, side="paper_", msr="msr_no_free", cbr="cbr_no_free"):
    """MSR, EOR and CBR in one cell."""
    if row is None or side + "eor" not in row:
        return "not met"
    return f"{row[side + msr]:.3f} / {row[side + 'eor']:.2f} / {row[side + cbr]:.3f}"


def published(rows, table, net, planner):
    """What the paper prints, its rounding kept to three, two and three decimals."""
    row = find(rows, table=table, net=net, planner=planner)
    return "–" if row is None else f"{row['msr']:.3f} / {row['eor']:.2f} / {row['cbr']:.3f}"


def ours():
    return [f"{label}-{when}" for when in ["cold", "updated"] for label in OURS]


def whole(cold, updated, part, side, msr, cbr):
    """TENSILE's whole process: the saving of the cold start, and a time between both."""
    if not cold or not updated or side + "eor" not in cold or side + "eor" not in updated:
        return None
    eor = part * cold[side + "eor"] + (1 - part) * updated[side + "eor"]
    return {side + msr: cold[side + msr], side + "eor": eor, side + cbr: cold[side + msr] / eor}


def extra(row, key):
    """A figure of the older paper's: extra time in place of a ratio."""
    if row is None:
        return "not met"
    late = row["eor"] - 1
    if key == "cbr":
        return f"{row['msr'] / late:.2f}" if late >= 0.0005 else "no extra time"
    return f"{row['msr'] if key == 'msr' else late + 0:.3f}"


def mean(rows, planner, part, **wanted):
    """The mean of a planner's runs; TENSILE's whole process is made of its two."""
    if planner == "TENSILE":
        cold, updated = (mean(rows, name, part, **wanted) for name in ["TENSILEcs", "TENSILEup"])
        both = cold and updated and whole(cold, updated, part, "", "msr", "cbr")
        return both or None
    found = [
        row
        for row in rows
        if row["planner"] == planner and all(row[key] == value for key, value in wanted.items())
    ]
    if not found or any("eor" not in row for row in found):
        return None
    keys = [key for key, value in found[0].items() if isinstance(value, (int, float))]
    return {key: statistics.fmean(row[key] for row in found) for key in keys}
