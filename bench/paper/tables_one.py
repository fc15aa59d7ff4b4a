"""TENSILE's tables of one job beside what its paper prints."""

import statistics

from cells import (
    BATCHES,
    CAUSES,
    COLD,
    NAMES,
    NETS,
    OURS,
    PART,
    UPDATED,
    find,
    ours,
    published,
    share,
    table,
    trio,
    whole,
)


def alone(rows, net):
    """A row of a net's job at batch 16; all have the same unplanned figures."""
    return find(rows, net=net, batch=16, device="a6000")


def single(rows, predictions, known, real):
    """The paper's Tables I and III: one job, batch 16."""
    nets = [net for net in NETS if find(rows, net=net, batch=16, device="a6000")]
    yield f"**Without a plan, batch 16 (physical accounting). {real}**"
    body = []
    for net in nets:
        row = find(rows, net=net, batch=16, device="a6000")
        body.append(
            [
                net,
                *(
                    f"{row[key] / 2**30:.2f} GiB"
                    for key in ["no_free_bytes", "unplanned_peak_bytes"]
                ),
                f"{1 - row['unplanned_peak_bytes'] / row['no_free_bytes']:.3f}",
                f"{row['unplanned_iteration_ns'] / 1e6:.1f} ms",
            ]
        )
    yield table(["net", "nothing freed", "liveness", "liveness saves", "iteration"], body)
    part = PART
    least = {
        net: 1 - (row := alone(rows, net))["unplanned_peak_bytes"] / row["no_free_bytes"]
        for net in nets
    }
    most = {
        net: max(r["msr"] for r in known if (r["table"], r["net"]) == ("single", net))
        for net in nets
    }
    yield (
        f"On {sum(least[net] > most[net] for net in nets)} of {len(nets)} nets liveness alone saves"
        " more of what nothing freed takes than any planner is published to save."
    )

    def row_of(net, planner):
        return next(
            (
                r
                for r in rows
                if r["net"] == net
                and r["batch"] == 16
                and r["device"] == "a6000"
                and r["planner"] == planner
                and not r["rule"].startswith(("time", "5 %"))
            ),
            None,
        )

    for title, side, msr, cbr in [
        (
            "the papers' accounting, saving against freeing nothing (their baseline)",
            "paper_",
            "msr_no_free",
            "cbr_no_free",
        ),
        ("the papers' accounting, saving against liveness", "paper_", "msr", "cbr"),
        ("physical accounting, saving against liveness", "", "msr", "cbr"),
    ]:
        theirs = side and msr == "msr_no_free"
        yield f"**Tables I and III, MSR / EOR / CBR: {title}. {real}**" + (
            " In brackets what is published." if theirs else ""
        )
        body = []
        for name, planner in [
            *NAMES,
            ("vdnn-all", "vdnn-all"),
            *((label, label) for label in ours()),
        ]:
            cells = []
            for net in nets:
                mine = (
                    row_of(net, planner)
                    if planner
                    else whole(
                        row_of(net, "tensile-cold"),
                        row_of(net, "tensile-updated"),
                        part,
                        side,
                        msr,
                        cbr,
                    )
                )
                cell = trio(mine, side, msr, cbr)
                cells.append(
                    f"{cell} ({published(known, 'single', net, name)})"
                    if theirs and find(known, table="single", net=net, planner=name)
                    else cell
                )
            body.append([name, *cells])
        yield table(["planner", *nets], body)
    between = []
    for net in nets:
        of = {name: find(known, table="single", net=net, planner=name) for name, _ in NAMES[:3]}
        cold, updated = of["TENSILEcs"]["eor"], of["TENSILEup"]["eor"]
        between.append((of["TENSILE"]["eor"] - updated) / (cold - updated))
    yield (
        f"*TENSILE* is the whole process: the saving of the cold start, and the time of {COLD}"
        f" iterations by its plan and {UPDATED} by the updated one. The paper does not print how"
        f" many there were; its own times of TENSILE lie {statistics.median(between):.1%} of the"
        " way from TENSILEup to TENSILEcs in the median."
    )
    said = {net: find(known, table="first", net=net, planner="prediction") for net in nets}
    theirs = {net: row["seconds"] / row["eor"] for net, row in said.items()}
    longer = [theirs[net] * 1e9 / alone(rows, net)["unplanned_iteration_ns"] for net in nets]
    ours_s = [row["seconds"] for row in predictions]
    yield (
        f"**The prediction's own time counted, EOR (physical accounting). {real}** *TENSILEcs* over"
        f" {COLD} iterations, *TENSILE* over {COLD + UPDATED}, with the seconds of Table II before"
        " the first one. By the paper's Table II an iteration took it"
        f" {min(theirs.values()):.1f} to {max(theirs.values()):.1f} s,"
        f" {statistics.median(longer):.0f} times as long as here in"
        f" the median, and predictions {statistics.median(r['seconds'] for r in said.values()):.2f}"
        f" s in the median, where here they take {statistics.median(ours_s):.3f} s."
    )
    body = []
    for name, cold, updated in [("TENSILEcs", COLD, 0), ("TENSILE", COLD, UPDATED)]:
        cells = []
        for net in nets:
            of, said = (
                {when: row_of(net, f"tensile-{when}") for when in ["cold", "updated"]},
                find(predictions, net=net),
            )
            extra_ns = said["seconds"] * 1e9 if said else 0
            times = [
                row["eor"] * row["unplanned_iteration_ns"] if row and "eor" in row else None
                for row in of.values()
            ]
            known_all = said and None not in times
            eor = (
                (extra_ns + cold * times[0] + updated * times[1])
                / ((cold + updated) * of["cold"]["unplanned_iteration_ns"])
                if known_all
                else None
            )
            theirs = find(known, table="single", net=net, planner=name)
            cells.append(share(eor, 2) + (f" ({theirs['eor']:.2f})" if theirs else ""))
        body.append([name, *cells])
    yield table(["", *nets], body)


def first(rows, predictions, known, real):
    """The paper's Table II. The first iteration: passive for Capuchin, planned at predicted
    latencies for TENSILE and neap.
    """
    yield (
        "**Table II: the first iteration, EOR (physical accounting), the budget that it keeps to,"
        f" and the prediction. {real}** vDNN, TENSILE and neap run their plan from the first"
        " iteration on. In brackets what is published."
    )

    def beside(net, planner, key="eor"):
        row = find(known, table="first", net=net, planner=planner)
        return f" ({row[key]:.2f})" if row and key in row else ""

    body, slower = [], []
    planners = ["tensile-cold", "capuchin-first", "vdnn-conv", *(f"{o}-cold" for o in OURS)]
    for net in NETS:
        of = {p: find(rows, net=net, batch=16, device="a6000", planner=p) for p in planners}
        said = find(predictions, net=net)
        if all(of.values()) and said:
            budget = of["tensile-cold"].get("budget_bytes")
            eor = lambda planner: share(of[planner].get("eor"), 2)
            theirs, ours_first = (
                find(known, table="first", net=net, planner="Capuchin"),
                of["capuchin-first"].get("eor"),
            )
            if theirs and ours_first and ours_first > 1:
                slower.append((theirs["eor"] - 1) / (ours_first - 1))
            body.append(
                [
                    net,
                    f"{budget / 2**30:.2f} GiB" if budget else "–",
                    eor("tensile-cold") + beside(net, "TENSILE"),
                    f"{said['seconds']:.3f}" + beside(net, "prediction", "seconds"),
                    f"{said['seconds'] * 1e9 / said['unplanned_iteration_ns']:.2f}"
                    + beside(net, "prediction"),
                    f"{said['predicted']} of {said['operators']}",
                    eor("capuchin-first") + beside(net, "Capuchin"),
                    eor("vdnn-conv"),
                    *(eor(f"{o}-cold") for o in OURS),
                ]
            )
    yield table(
        [
            "net",
            "budget (not vDNN's)",
            "TENSILE",
            "prediction, s",
            "prediction, EOR",
            "operators predicted",
            "Capuchin",
            "vDNN",
            *(f"{o}, cold" for o in OURS),
        ],
        body,
    )
    link = predictions[0]["h2d_bytes_per_s"] / 1e9 if predictions else 0
    if slower and link:
        yield (
            "Capuchin's passive iteration is all copies for which computing stops, so that its"
            f" extra time follows the link. The published extra time is {min(slower):.1f} to"
            f" {max(slower):.1f} times ours: a link of {link / max(slower):.1f} to"
            f" {link / min(slower):.1f} GB/s in place of the {link:.1f} GB/s of pinned memory that"
            " the device's profile has. The next table has an eighth of the link too."
        )
    if predictions:
        one = predictions[0]
        yield (
            f"The predictor has {one['models']} networks with {one['weights']:,} numbers,"
            f" {4 * one['weights'] / 1e6:.1f} MB at four bytes each and {one['bytes'] / 1e6:.1f} MB"
            " as a file (published: 40 networks, 321 MB). On shapes kept out of training its R² is"
            f" {one['r2_per_mille'] / 1e3:.3f} and its mean squared error"
            f" {one['mse_millionths'] / 1e6:.4f}, both of the natural logarithm of the time"
            " (published: an MSE of 4.269 in a unit that is not given; in the older paper R² 0.582"
            " for a linear model and 0.805 for an MLP). The seconds are those of the machine that"
            " ran this, reading the predictor included. The prediction's EOR is over an iteration"
            " of another length than the paper's."
        )


def causes(rows, real):
    """The paper's Fig. 2 for one job: where extra time comes from."""
    yield "![Extra time by cause, the papers' accounting](fig2.svg)"
    for title, side in [
        ("the papers' accounting (one link)", "paper_"),
        ("physical accounting", ""),
    ]:
        yield (
            "**Extra time by cause, % of the unplanned iteration, mean over the nets, batch 16:"
            f" {title}. {real}**"
        )
        body = []
        for planner in [
            "vdnn-all",
            "vdnn-conv",
            "capuchin-first",
            "capuchin",
            "tensile-cold",
            "tensile-updated",
            *ours(),
        ]:
            mine = [
                r
                for r in rows
                if r["batch"] == 16
                and r["device"] == "a6000"
                and r["planner"] == planner
                and side + "eor" in r
                and not r["rule"].startswith(("time", "5 %"))
            ]
            if mine:
                parts = [
                    statistics.fmean(r[side + c] / r["unplanned_iteration_ns"] for r in mine)
                    for c in CAUSES
                ]
                # Adding zero takes the sign off a rounded zero.
                body.append(
                    [planner, *(f"{round(p * 100, 1) + 0:.1f}" for p in [*parts, sum(parts)])]
                )
        yield table(
            [
                "planner",
                "passive eviction",
                "wait for swap-in",
                "wait for swap-out",
                "copies after the end",
                "contention on the link",
                "recomputation",
                "all",
            ],
            body,
        )


def rising(rows):
    """On how many nets TENSILEup's figures rise from each batch to the next, in words."""
    words = []
    for label, key, better in [
        ("MSR rises", "paper_msr_no_free", 1),
        ("CBR rises", "paper_cbr_no_free", 1),
        ("EOR falls", "paper_eor", -1),
    ]:
        found = []
        for net in NETS:
            of = {"net": net, "device": "a6000", "planner": "tensile-updated"}
            line = [row.get(key) for b in BATCHES if (row := find(rows, batch=b, **of))]
            steps = zip(line, line[1:]) if None not in line else ()
            if line and all(better * (y - x) > 0 for x, y in steps):
                found.append(net)
        words.append(f"{label} from each batch to the next on {', '.join(found) or 'no net'}")
    return "; ".join(words)


def batches(rows, real):
    """The paper's Fig. 7: batch sizes."""
    yield (
        "**Fig. 7** has curves without numbers. In words: MSR and CBR rise with the batch, DenseNet"
        " at 32 and 64 excepted; only VGG-16's EOR falls."
    )
    yield f"Here, for TENSILEup: {rising(rows)}."
    yield "![MSR, EOR and CBR by batch](fig7.svg)"
    for net in NETS:
        sizes = [b for b in BATCHES if find(rows, net=net, batch=b, device="a6000")]
        if len(sizes) < 2:
            continue
        yield (
            f"**Fig. 7, {net} by batch size, MSR / EOR / CBR: the papers' accounting, saving"
            f" against freeing nothing. {real}**"
        )
        body = []
        for name, planner in [*NAMES[1:], *((label, label) for label in ours())]:
            body.append(
                [
                    name,
                    *(
                        trio(find(rows, net=net, batch=b, device="a6000", planner=planner))
                        for b in sizes
                    ),
                ]
            )
        yield table(["planner", *(f"batch {b}" for b in sizes)], body)
