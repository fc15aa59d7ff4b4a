"""Pictures as SVG of a fixed layout."""

import statistics

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

COLOURS = ["#999999", "#9467bd", "#2ca02c", "#8c564b", "#ff7f0e", "#1f77b4", "#d62728"]
WIDE, HIGH, LEFT, HEAD, GAP = 150, 110, 60, 40, 40


def page(columns, lines, names, body, foot):
    """A picture of panels with a legend above and a line of words below."""
    width, height = LEFT + WIDE * columns + 20, HEAD + (HIGH + GAP) * lines + 10
    legend = [
        f'<text x="{LEFT + index * 110}" y="16" fill="{COLOURS[index]}" font-weight="bold">'
        f"{name}</text>"
        for index, name in enumerate(names)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            *legend,
            *body,
            f'<text x="{LEFT}" y="{height - 6}" fill="#777777">{foot}</text></svg>',
            "",
        ]
    )


def curves(lines, columns, names, xs, value, foot):
    """A panel for each line and column, a curve in it for each name. `lines` are labels with the
    values at the scale's marks; what is off the scale is left out.
    """
    body = []
    for line, (label, marks) in enumerate(lines):
        base = HEAD + (HIGH + GAP) * line + HIGH
        body.append(f'<text x="6" y="{base - HIGH // 2}">{label}</text>')
        for column, head in enumerate(columns):
            at = [
                LEFT + WIDE * column + i * (WIDE - 40) / max(len(xs) - 1, 1) for i in range(len(xs))
            ]
            body.append(f'<text x="{at[0]:.0f}" y="{base - HIGH + 2}">{head}</text>')

            def height(number, base=base, marks=marks):
                return base - (number - marks[0]) / (marks[-1] - marks[0]) * (HIGH - 10)

            for mark in marks:
                body.append(
                    f'<path d="M{at[0]:.0f} {height(mark):.1f}H{at[-1]:.0f}" stroke="#dddddd"/>'
                    f'<text x="{at[0] - 24:.0f}" y="{height(mark) + 4:.1f}" fill="#777777">'
                    f"{mark}</text>"
                )
            for x, name in zip(at, xs):
                body.append(f'<text x="{x - 3:.0f}" y="{base + 16}" fill="#777777">{name}</text>')
            for name, colour in zip(names, COLOURS):
                found = [(x, value(label, head, name, which)) for x, which in zip(at, xs)]
                points = [
                    (x, height(number))
                    for x, number in found
                    if number is not None and marks[0] <= number <= marks[-1]
                ]
                if points:
                    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                    body.append(
                        f'<polyline points="{path}" fill="none" stroke="{colour}" '
                        'stroke-width="2"/>'
                    )
                    body += [
                        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
                        for x, y in points
                    ]
    return page(len(columns), len(lines), names, body, foot)


def several(rows):
    """EOR of every planner by copies, for each net and budget."""
    nets = list(dict.fromkeys(row["jobs"] for row in rows if not row["jobs"].startswith(MIXED)))

    def value(budget, net, planner, copies):
        of = {"jobs": net, "planner": planner, "budget": budget, "copies": copies}
        row = find(rows, rule="budget", **of)
        return row["eor"] if row and row["fits"] else None

    lines = [(budget, [1, 1.5, 2, 2.5]) for budget in SEVERAL]
    foot = "EOR by number of copies; above 2.5 not drawn"
    return curves(lines, nets, PLANNERS, range(1, COPIES + 1), value, foot)


SCALES = [
    ("MSR", [0, 0.25, 0.5, 0.75, 1]),
    ("EOR", [1, 2, 3, 4]),
    ("CBR", [0, 0.25, 0.5, 0.75, 1]),
]


def copies(rows):
    """The paper's Fig. 6."""

    def value(figure, net, planner, number):
        row = mean(rows, planner, PART, net=net, device="a6000", copies=number)
        # A ratio just below 1 is drawn at 1.
        return row and max(row[figure.lower()], 1 if figure == "EOR" else 0)

    foot = "by number of copies launched at once; off the scale not drawn"
    return curves(SCALES, list(NETS), CROWD, range(1, COPIES + 1), value, foot)


BY_BATCH = {
    "vDNN": "vdnn-conv",
    "Capuchin": "capuchin",
    "TENSILEcs": "tensile-cold",
    "TENSILEup": "tensile-updated",
    "neap": "neap-updated",
}


def batches(rows):
    """The paper's Fig. 7."""
    keys = {"MSR": "paper_msr_no_free", "EOR": "paper_eor", "CBR": "paper_cbr_no_free"}

    def value(figure, net, planner, batch):
        of = {"net": net, "batch": batch, "device": "a6000", "planner": BY_BATCH[planner]}
        return (find(rows, **of) or {}).get(keys[figure])

    foot = "by batch; off the scale not drawn"
    return curves(SCALES, list(NETS), list(BY_BATCH), BATCHES, value, foot)


WORDS = ["passive eviction", "swap-in", "swap-out", "after the end", "contention", "recomputation"]


def causes(rows):
    """The paper's Fig. 2: what a planner's extra time is spent on, as shares of it."""
    planners = [
        "vdnn-conv",
        "capuchin-first",
        "capuchin",
        "tensile-cold",
        "tensile-updated",
        *ours(),
    ]
    body = []
    for index, planner in enumerate(planners):
        mine = [
            row
            for row in rows
            if (row["batch"], row["device"], row["planner"]) == (16, "a6000", planner)
            and "paper_eor" in row
            and not row["rule"].startswith(("time", "5 %"))
        ]
        parts = [
            statistics.fmean(max(r[f"paper_{c}"], 0) / r["unplanned_iteration_ns"] for r in mine)
            for c in CAUSES
        ]
        y, x = HEAD + index * 24, LEFT + 60
        body.append(f'<text x="6" y="{y + 13}">{planner}</text>')
        for part, colour in zip(parts, COLOURS):
            wide = 500 * part
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="16" fill="{colour}"/>'
            )
            x += wide
        body.append(f'<text x="{x + 4:.1f}" y="{y + 13}">{sum(parts):.1%}</text>')
    foot = "extra time, mean over the nets, as a share of the unplanned iteration"
    return page(5, 1, WORDS, body, foot)
