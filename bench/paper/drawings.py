"""The pictures of several jobs and of the paper's Fig. 2, 6 and 7, as SVG with matplotlib."""

import statistics
import sys

from cells import (
    BATCHES,
    CAUSES,
    COPIES,
    CROWD,
    MIXED,
    NETS,
    PART,
    PLANNERS,
    SEVERAL,
    find,
    mean,
    ours,
)

# Colours that stay apart for colour-blind readers. A planner has the same in each picture, and a
# marker of its own.
LOOKS = {
    "vdnn-all": ("#cc79a7", "v"),
    "vdnn-conv": ("#999999", "s"),
    "checkpoint": ("#56b4e9", "P"),
    "capuchin": ("#e69f00", "^"),
    "tensile": ("#0072b2", "D"),
    "tensile-cold": ("#56b4e9", "<"),
    "tensile-updated": ("#009e73", ">"),
    "neap": ("#d55e00", "o"),
}
PAPER = {
    "vDNN": "vdnn-conv",
    "Capuchin": "capuchin",
    "TENSILE": "tensile",
    "TENSILEcs": "tensile-cold",
    "TENSILEup": "tensile-updated",
}
SHADES = ["#999999", "#0072b2", "#56b4e9", "#cc79a7", "#e69f00", "#d55e00"]
"""Of the causes of extra time."""
WIDTH, HEIGHT, LEGEND = 9, 1.5, 0.7
"""Inches of a picture, of a line of panels, and of what stands above and below."""
# Text stays text, and the same rows give the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "neap", "font.size": 9}


def library():
    """What draws; None where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib import pyplot
    except ImportError:
        return None
    matplotlib.use("svg")
    return pyplot


def draw(data, folder):
    """Writes all pictures into the folder; false where matplotlib is not installed, and the files
    stay as they are.
    """
    pyplot = library()
    if pyplot is None:
        print("the drawings stay as they are: pip install matplotlib", file=sys.stderr)
        return False
    for name, drawn, rows in [
        ("several", several, "several"),
        ("fig2", causes, "results"),
        ("fig6", copies, "crowd"),
        ("fig7", batches, "results"),
    ]:
        with pyplot.rc_context(STYLE):
            figure = drawn(pyplot, data[rows])
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
    return True


def plain(axes):
    """No frame but the lines at the left and below."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(color="#999999", labelcolor="#555555")


def curves(pyplot, lines, columns, names, xs, value, foot):
    """A panel for each line and column, a curve in it for each name. `lines` are keys, labels, and
    the values at the scale's marks; what is off the scale is left out, and the curve is broken
    there.
    """
    figure, places = pyplot.subplots(
        len(lines),
        len(columns),
        figsize=(WIDTH, HEIGHT * len(lines) + LEGEND),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for (key, label, marks), panels in zip(lines, places):
        for column, axes in zip(columns, panels):
            for order, name in enumerate(names):
                found = [value(key, column, name, x) for x in xs]
                heights = [
                    number
                    if number is not None and marks[0] <= number <= marks[-1]
                    else float("nan")
                    for number in found
                ]
                colour, marker = LOOKS[PAPER.get(name, name)]
                axes.plot(
                    range(len(xs)),
                    heights,
                    color=colour,
                    marker=marker,
                    # Where curves coincide, the lower are wider and still seen.
                    markersize=6 - 0.6 * order,
                    linewidth=2.4 - 0.25 * order,
                    label=name,
                    # A marker at the scale's end is drawn whole, before the axis.
                    clip_on=False,
                    zorder=3,
                )
            axes.set_ylim(marks[0], marks[-1])
            axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
            axes.set_xlim(-0.2, len(xs) - 0.8)
            axes.set_xticks(range(len(xs)), xs)
            axes.grid(axis="y", color="#dddddd")
            plain(axes)
        panels[0].set_ylabel(label)
    for column, axes in zip(columns, places[0]):
        axes.set_title(column, fontsize=9)
    handles, labels = places[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(names), frameon=False)
    figure.supxlabel(foot, fontsize=9)
    figure.align_ylabels()
    return figure


def several(pyplot, rows):
    """EOR of every planner by copies, for each net and budget."""
    nets = list(dict.fromkeys(row["jobs"] for row in rows if not row["jobs"].startswith(MIXED)))

    def value(budget, net, planner, copies):
        of = {"jobs": net, "planner": planner, "budget": budget, "copies": copies}
        row = find(rows, rule="budget", **of)
        return row["eor"] if row and row["fits"] else None

    lines = [(budget, f"budget {budget}", [1, 1.5, 2, 2.5]) for budget in SEVERAL]
    foot = "EOR by number of copies; above 2.5, or where the budget is not met, not drawn"
    return curves(pyplot, lines, nets, PLANNERS, range(1, COPIES + 1), value, foot)


SCALES = [
    ("msr", "MSR", [0, 0.25, 0.5, 0.75, 1]),
    ("eor", "EOR", [1, 2, 3, 4]),
    ("cbr", "CBR", [0, 0.25, 0.5, 0.75, 1]),
]


def copies(pyplot, rows):
    """The paper's Fig. 6."""

    def value(figure, net, planner, number):
        row = mean(rows, planner, PART, net=net, device="a6000", copies=number)
        # A ratio just below 1 is drawn at 1.
        return row and max(row[figure], 1 if figure == "eor" else 0)

    foot = "by number of copies launched at once; off the scale not drawn"
    return curves(pyplot, SCALES, list(NETS), CROWD, range(1, COPIES + 1), value, foot)


BY_BATCH = {
    "vDNN": "vdnn-conv",
    "Capuchin": "capuchin",
    "TENSILEcs": "tensile-cold",
    "TENSILEup": "tensile-updated",
    "neap": "neap-updated",
}


def batches(pyplot, rows):
    """The paper's Fig. 7."""
    keys = {"msr": "paper_msr_no_free", "eor": "paper_eor", "cbr": "paper_cbr_no_free"}

    def value(figure, net, planner, batch):
        of = {"net": net, "batch": batch, "device": "a6000", "planner": BY_BATCH[planner]}
        return (find(rows, **of) or {}).get(keys[figure])

    foot = "by batch; off the scale not drawn"
    return curves(pyplot, SCALES, list(NETS), list(BY_BATCH), BATCHES, value, foot)


WORDS = ["passive eviction", "swap-in", "swap-out", "after the end", "contention", "recomputation"]


def causes(pyplot, rows):
    """The paper's Fig. 2: what a planner's extra time is spent on, as shares of it."""
    planners = [
        "vdnn-conv",
        "capuchin-first",
        "capuchin",
        "tensile-cold",
        "tensile-updated",
        *ours(),
    ]
    parts = []
    for planner in planners:
        mine = [
            row
            for row in rows
            if (row["batch"], row["device"], row["planner"]) == (16, "a6000", planner)
            and "paper_eor" in row
            and not row["rule"].startswith(("time", "5 %"))
        ]
        parts.append(
            [
                statistics.fmean(
                    max(row[f"paper_{cause}"], 0) / row["unplanned_iteration_ns"] for row in mine
                )
                for cause in CAUSES
            ]
        )
    figure, axes = pyplot.subplots(
        figsize=(WIDTH, 0.26 * len(planners) + LEGEND), layout="constrained"
    )
    ends = [0.0] * len(planners)
    for word, shade, shares in zip(WORDS, SHADES, zip(*parts)):
        bars = axes.barh(planners, shares, left=ends, height=0.7, color=shade, label=word)
        ends = [end + share for end, share in zip(ends, shares)]
    axes.bar_label(bars, [f"{end:.1%}" for end in ends], padding=3)
    axes.invert_yaxis()
    # Room for the numbers.
    axes.set_xlim(0, max(ends) * 1.08)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("extra time, mean over the nets, as a share of the unplanned iteration")
    plain(axes)
    axes.tick_params(axis="y", length=0, labelcolor="black")
    figure.legend(loc="outside upper left", ncols=len(WORDS), frameon=False)
    return figure
