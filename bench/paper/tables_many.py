"""Tables of several jobs on one device."""

import statistics

import crowd
from cells import (
    COPIES,
    CROWD,
    MIXED,
    NETS,
    PART,
    PLANNERS,
    SEVERAL,
    find,
    mean,
    table,
    trio,
)


def below(rows, other):
    """neap's plan that is lower than another's where one is at least as quick, and the quicker
    where one is as low; None where there is none.
    """
    mine = [
        row
        for row in rows
        if row["planner"] == "neap"
        and row["fits"]
        and all(row[key] == other[key] for key in ["jobs", "copies", "device"])
    ]
    quick = [row for row in mine if row["round_ns"] <= other["round_ns"]]
    low = [row for row in mine if row["peak_bytes"] <= other["peak_bytes"]]
    return min(quick, key=lambda row: row["peak_bytes"], default=None), min(
        low, key=lambda row: row["round_ns"], default=None
    )


def several(rows, real):
    """Every planner at the same budgets for several jobs, which the papers do not show."""
    asked = [row for row in rows if row["rule"] == "budget"]
    labels = list(dict.fromkeys(row["jobs"] for row in asked))
    order = "; ".join(label for label in labels if label.startswith(MIXED))
    met = [row for row in rows if row["fits"]]
    overlaps = sum(row.get("overlapping_copies", 0) for row in met)
    together = sum("overlapping_copies" in row for row in met)
    yield (
        f"One to {COPIES} copies of each net, and {order}, batch 16, A6000, planned together at the"
        " real latencies within a share of the sum of their unplanned peaks and simulated side by"
        f" side (`neap compare A B ...`). {real} *Peak* is the sum of the jobs' own peaks, which no"
        " alignment of their iterations exceeds; *EOR* the time of a round (an iteration of the"
        " longest job and as many of the others as take about as long; the mean of starting all at"
        " once and evenly staggered) over the same jobs' unplanned round side by side."
    )
    yield (
        f"**In {overlaps} cases two copies overlapped in one direction of the link**, counted over"
        f" the timelines of all {together} plans of two or more jobs (`overlapping_copies` in"
        " several.csv); `tests/together.rs` holds it for random jobs."
    )
    for budget in SEVERAL:
        yield f"**Peak in GiB / EOR by copies, budget {budget}.** – : the planner doesn't meet it."
        body = []
        for label in labels:
            for planner in PLANNERS:
                cells = []
                for copies in range(1, COPIES + 1):
                    row = (
                        find(asked, jobs=label, copies=copies, planner=planner, budget=budget)
                        if not label.startswith(MIXED)
                        else (
                            find(asked, jobs=label, planner=planner, budget=budget)
                            if copies == 1
                            else None
                        )
                    )
                    cells.append(
                        ""
                        if row is None
                        else (
                            f"{row['peak_bytes'] / 2**30:.2f} / {row['eor']:.3f}"
                            if row["fits"]
                            else "–"
                        )
                    )
                body.append([MIXED if label.startswith(MIXED) else label, planner, *cells])
        yield table(
            ["jobs", "planner", *(f"{n} job{'s' * (n > 1)}" for n in range(1, COPIES + 1))], body
        ).replace("| ---: |", "| --- |", 1)
    yield (
        "**neap against each other planner's plans**, over both budgets. *As quick*: neap's lowest"
        " peak whose round takes no longer, as a share of the other's peak. *As low*: neap's"
        " shortest round whose peak is no higher, as a share of the other's."
    )
    body = []
    for planner in PLANNERS[:-1]:
        others = [row for row in asked if row["planner"] == planner and row["fits"]]
        pairs = [(other, *below(rows, other)) for other in others]
        quick = [row["peak_bytes"] / other["peak_bytes"] for other, row, _ in pairs if row]
        low = [row["round_ns"] / other["round_ns"] for other, _, row in pairs if row]
        beaten = sum(
            1
            for other, a, b in pairs
            if a
            and b
            and a["peak_bytes"] <= other["peak_bytes"]
            and b["round_ns"] <= other["round_ns"]
        )
        body.append(
            [
                planner,
                len(others),
                f"{beaten} of {len(others)}",
                f"{statistics.median(quick):.3f}",
                f"{max(quick):.3f}",
                f"{statistics.median(low):.3f}",
                f"{max(low):.3f}",
            ]
        )
    yield table(
        [
            "planner",
            "plans",
            "neap as good or better in both",
            "as quick: median",
            "worst",
            "as low: median",
            "worst",
        ],
        body,
    )
    yield f"![EOR by copies, at budgets of {' and '.join(SEVERAL)}](several.svg)"


def at_once(rows, known, real):
    """The paper's Fig. 6, and its Fig. 2 by the number of jobs."""
    part = PART
    nets = [net for net in NETS if find(rows, net=net, device="a6000")]

    def of(name, net, copies):
        return mean(rows, name, PART, net=net, device="a6000", copies=copies)

    cells = [(net, copies) for net in nets for copies in range(1, COPIES + 1)]
    saves = sum(of("TENSILEup", *cell)["msr"] >= of("TENSILEcs", *cell)["msr"] for cell in cells)
    grows = [of("Capuchin", net, COPIES)["eor"] / of("Capuchin", net, 1)["eor"] - 1 for net in nets]
    rises, steepest = sum(growth > 0 for growth in grows), max(grows)
    lines = [[of("vDNN", net, copies)["eor"] for copies in range(2, COPIES + 1)] for net in nets]
    falls = sum(all(x > y for x, y in zip(line, line[1:])) for line in lines)
    yield (
        f"**Fig. 6: one to {COPIES} copies of each net launched at once, MSR / EOR / CBR, mean of"
        f" {crowd.RUNS} runs at other real latencies. Physical accounting, saving against freeing"
        f" nothing. {real}** The paper has curves without numbers. In words: TENSILE has the best"
        " MSR and CBR in most workloads, and TENSILEup saves most; TENSILE's MSR falls slowly with"
        " the number of copies, VGG-16 excepted; Capuchin's EOR rises steeply with the number of"
        f" copies; vDNN's falls. Here TENSILEup saves at least as much as TENSILEcs in {saves} of"
        f" {len(cells)} cells, and Capuchin's EOR is higher with {COPIES} copies than with one on"
        f" {rises} of {len(nets)} nets, by {steepest:+.0%} at most: this Capuchin knows all"
        " latencies exactly and evicts nothing passively; the measured execution by number of"
        f" copies, above, does both. From two copies on vDNN's falls with each more on {falls} of"
        f" {len(nets)} nets."
    )
    yield "![MSR, EOR and CBR by number of copies](fig6.svg)"
    body = []
    for net in nets:
        for name in CROWD:
            cells = [
                trio(
                    mean(rows, name, part, net=net, device="a6000", copies=copies), "", "msr", "cbr"
                )
                for copies in range(1, COPIES + 1)
            ]
            body.append([net, name, *cells])
    yield table(
        ["net", "planner", *(f"{n} job{'s' * (n > 1)}" for n in range(1, COPIES + 1))], body
    ).replace("| ---: |", "| --- |", 1)
    yield (
        "**Fig. 2 by the number of jobs: extra time by cause, % of the unplanned time, mean over"
        f" nets and runs. {real}** *Contention* is what is left: copies that are slowed by others,"
        " and computation that comes later beside others'. It is below zero where waiting jobs"
        " leave the device to the others."
    )
    body = []
    for name in [name for name in CROWD if name != "TENSILE"]:
        for copies in range(1, COPIES + 1):
            mine = [
                row
                for row in rows
                if row["device"] == "a6000"
                and row["planner"] == name
                and row["copies"] == copies
                and "eor" in row
            ]
            if mine:
                of = lambda key: statistics.fmean(
                    row[key] / copies / row["unplanned_end_ns"] for row in mine
                )
                parts = [of(key) for key in crowd.LOST]
                total = statistics.fmean(row["eor"] - 1 for row in mine)
                body.append(
                    [
                        name,
                        copies,
                        *(
                            f"{round(p * 100, 1) + 0:.1f}"
                            for p in [*parts, total - sum(parts), total]
                        ),
                    ]
                )
    yield table(
        [
            "planner",
            "jobs",
            "wait for swap-in",
            "wait for swap-out",
            "copies after the end",
            "recomputation",
            "contention",
            "all",
        ],
        body,
    )


def one_by_one(rows, known, real):
    """The paper's Table IV."""
    part = PART
    orders = "; ".join(dict.fromkeys(row["order"] for row in rows))
    yield (
        "**Table IV: the five nets launched one by one in random order, batch 16, A6000, mean of"
        f" {crowd.RUNS} runs. Saving of the sub-arenas against freeing nothing; EOR is the ratio of"
        f" the jobs' times from launch to end. {real}** In brackets what is published. Orders:"
        f" {orders}. A job comes every {crowd.APART} s and runs {crowd.ITERATIONS_APART}"
        " iterations. At each launch and end all jobs are planned anew. *Wait* is the mean time"
        " from a job's launch to its first iteration, *last end* the time from the first launch to"
        " the last end over that of the unplanned run."
    )
    body = []
    for name in CROWD:
        row, theirs = mean(rows, name, part), find(known, table="mixed", planner=name)
        cells = [
            ("not met" if row is None else f"{row[key]:.4f}")
            + (f" ({theirs[key]:.4f})" if theirs else "")
            for key in ["msr", "eor", "cbr"]
        ]
        ran = row if row and "queuing_ns" in row else None
        late = (
            ["–", "–"]
            if ran is None
            else [
                f"{ran['queuing_ns'] / 1e6:.0f} ms",
                f"{ran['end_ns'] / ran['unplanned_end_ns']:.4f}",
            ]
        )
        body.append([name, *cells, *(late if name != "TENSILE" else ["", ""])])
    yield table(["planner", "MSR", "EOR", "CBR", "wait", "last end"], body)
    below = [(name, row) for name in CROWD if (row := mean(rows, name, part)) and row["eor"] < 1]
    timed = [(name, row) for name, row in below if "queuing_ns" in row and name != "TENSILE"]
    waits = all(row["queuing_ns"] > row["unplanned_queuing_ns"] for _, row in timed)
    # The cause holds where those below 1 wait longer and end later.
    if timed and waits and all(row["end_ns"] > row["unplanned_end_ns"] for _, row in timed):
        yield (
            f"Why the EOR of {', '.join(name for name, _ in below)} is below 1: the unplanned run"
            " pays for launches and moves as the planned ones do (a launch loads what persists, a"
            " move within the device costs its bytes; its jobs wait"
            f" {timed[0][1]['unplanned_queuing_ns'] / 1e6:.0f} ms). A planned launch waits longer,"
            " until the others have taken up their smaller parts at the ends of their iterations."
            " Meanwhile these have more of the device, and end sooner. The mean over jobs falls, as"
            " it does where jobs take turns instead of sharing, while the last job ends later."
        )
