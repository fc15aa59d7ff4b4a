"""Tables of one job that the newer paper does not have."""

import statistics

import crowd
from cells import NETS, PART, SHARES, extra, find, mean, ours, table, trio, whole


def equal(rows, budgets, real):
    """Fair comparisons, which the papers do not make: the same budget, the same time."""
    yield (
        "**The same budget, made and run at the real latencies: EOR (physical accounting), median"
        f" over the nets, batch 16. {real}** In brackets how many nets met it."
    )
    nets = [net for net in NETS if find(budgets, net=net)]
    order = list(dict.fromkeys(row["planner"] for row in budgets))
    body = []
    for planner in order:
        cells = []
        for asked in SHARES:
            met = [
                r["eor"]
                for r in budgets
                if r["planner"] == planner and r["budget"] == asked and r["fits"]
            ]
            cells.append(
                f"{statistics.median(met):.3f} ({len(met)}/{len(nets)})"
                if met
                else f"– (0/{len(nets)})"
            )
        body.append([planner, *cells])
    bound = [
        [
            r["bound_ns"] / r["unplanned_iteration_ns"]
            for r in budgets
            if r["planner"] == order[0] and r["budget"] == asked and "bound_ns" in r
        ]
        for asked in SHARES
    ]
    body.append(["no plan is below", *(f"{statistics.median(b):.3f}" if b else "–" for b in bound)])
    yield table(["planner", *(f"budget {s}" for s in SHARES)], body)
    yield (
        "**The same time: neap's peak where its iteration takes no longer than the other's, as a"
        f" share of the liveness peak (physical accounting), batch 16. {real}**"
    )
    body = []
    for net in NETS:
        of = lambda planner, rule=None: next(
            (
                r
                for r in rows
                if r["net"] == net
                and r["batch"] == 16
                and r["device"] == "a6000"
                and r["planner"] == planner
                and (rule is None or r["rule"] == rule)
            ),
            None,
        )
        if of("vdnn-all") is None:
            continue
        peak = lambda row: (
            "–"
            if row is None or "peak_bytes" not in row
            else f"{row['peak_bytes'] / row['unplanned_peak_bytes']:.3f}"
        )
        cells = []
        for other in ["vdnn-all", "capuchin", "tensile-updated"]:
            cells.append(f"{peak(of(other))} → {peak(of('neap-updated', f'time of {other}'))}")
        body.append([net, *cells, peak(of("neap-updated", "5 % added time"))])
    yield table(
        ["net", "vDNN-all → neap", "Capuchin → neap", "TENSILE → neap", "neap, 5 % added time"],
        body,
    )


def older(rows, crowded, known, real):
    """The older paper's Tables 1 and 2."""
    part = PART
    yield (
        "**The older paper's Table 1: VGG-16, batch 2, RTX 2080 Ti; its EOR is the extra time"
        " alone, and CBR is MSR by that. The papers' accounting, saving against freeing nothing."
        f" {real}** In brackets what is published."
    )
    of = {
        p: find(rows, batch=2, device="rtx2080ti", planner=p)
        for p in ["vdnn-all", "vdnn-conv", "capuchin", "tensile-cold", "tensile-updated", *ours()]
    }
    mine = {
        p: row and {"msr": row["paper_msr_no_free"], "eor": row["paper_eor"]}
        for p, row in of.items()
        if not row or "paper_eor" in row
    }
    both = whole(
        of["tensile-cold"], of["tensile-updated"], part, "paper_", "msr_no_free", "cbr_no_free"
    )
    mine["TENSILE"] = both and {"msr": both["paper_msr_no_free"], "eor": both["paper_eor"]}
    body = []
    for name, planner in [
        ("vDNN", "vdnn-conv"),
        ("Capuchin", "capuchin"),
        ("TENSILE", "TENSILE"),
        ("TENSILEcs", "tensile-cold"),
        ("TENSILEup", "tensile-updated"),
        ("vdnn-all", "vdnn-all"),
        *((label, label) for label in ours()),
    ]:
        row, theirs = mine.get(planner), find(known, table="older", net="VGG", planner=name)
        body.append(
            [
                name,
                *(
                    extra(row, key) + (f" ({theirs[key]:.4f})" if theirs else "")
                    for key in ["msr", "eor", "cbr"]
                ),
            ]
        )
    yield table(["planner", "MSR", "EOR (extra time)", "CBR"], body)
    yield (
        "**The older paper's Table 2: one to three VGG-16 launched at once, batch 2, RTX 2080 Ti,"
        f" mean of {crowd.RUNS} runs. Physical accounting, saving against freeing nothing. {real}**"
        " In brackets what is published."
    )
    body = []
    for name in ["vDNN", "Capuchin", "TENSILE", "TENSILEcs", "TENSILEup", "neap"]:
        for key in ["msr", "eor", "cbr"]:
            cells = []
            for copies in range(1, 4):
                theirs = find(known, table=f"older x{copies}", net="VGG", planner=name)
                cells.append(
                    extra(mean(crowded, name, part, device="rtx2080ti", copies=copies), key)
                    + (f" ({theirs[key]:.4f})" if theirs else "")
                )
            body.append([name, key.upper(), *cells])
    yield table(["planner", "", "×1", "×2", "×3"], body).replace(
        "| --- | ---: | ---: ", "| --- | --- | ---: ", 1
    )


def links(rows, real):
    """TENSILE with one timetable for both directions of the link, and with two."""

    def late(link, when):
        return max(r["paper_eor"] - 1 for r in rows if (r["link"], r["when"]) == (link, when))

    saves = {
        (row["net"], row["link"]): row["paper_msr_no_free"]
        for row in rows
        if row["when"] == "updated"
    }
    more = sum(saves[net, "one way"] > saves[net, "two ways"] for net in NETS)
    yield (
        "**TENSILE on one timetable (§IV-C: one tensor at a time on the link) and on two, MSR /"
        " EOR / CBR, batch 16, A6000: the papers' accounting, saving against freeing nothing."
        f" {real}** Planned for the link that the papers have, TENSILEup is late by at most"
        f" {late('one way', 'updated'):.1%} there and TENSILEcs by {late('one way', 'cold'):.1%};"
        f" planned for two directions, by {late('two ways', 'updated'):.1%} and"
        f" {late('two ways', 'cold'):.1%}. TENSILEup saves more by the first on {more} of"
        f" {len(NETS)} nets."
    )
    body = []
    for link in ["one way", "two ways"]:
        for name, when in [("TENSILEcs", "cold"), ("TENSILEup", "updated")]:
            cells = [trio(find(rows, net=net, link=link, when=when)) for net in NETS]
            body.append([f"{name}, {link}", *cells])
    yield table(["", *NETS], body)


def mlp(rows):
    """The MLP of the older paper's section 4.1."""
    if not rows:
        raise SystemExit("mlp.csv has no rows: run `bench/paper/run --only mlp`")
    bounds = " and ".join(
        f"{row['bound_msr']:.1%} on {'an' if row['device'][0] in 'ae' else 'a'} {row['device']}"
        for row in rows
        if "bound_msr" in row
    )
    low, high = (max(r[f"paper_{key}"] for r in rows) for key in ["msr", "msr_no_free"])
    lie = "lie between" if low < 0.335 < high else "don't lie between"
    yield (
        "**An MLP, swapped in time alone: MSR against liveness / against freeing nothing / EOR.**"
        " The older paper's §4.1 tells of an MLP whose peak falls by 33.5 % without added time. It"
        " does not say how large its layers are or how long its operators take, so this is another"
        " net, [fixtures/mlp.graph.json](../../fixtures/mlp.graph.json), whose peak no plan without"
        f" added time lowers by more than {bounds} (operators ×1; physical accounting, `neap"
        " compare`). How much of it the link can carry in time depends on how long operators take;"
        f" by the papers' accounting at most {low:.1%} against liveness and {high:.1%} against"
        f" freeing nothing. The 33.5 % {lie} the two readings."
    )
    yield "![The MLP's memory over an iteration, without and with the plan](mlp.svg)"
    body = []
    for row in rows:
        cells = [
            " / ".join(f"{row[side + key]:.3f}" for key in ["msr", "msr_no_free", "eor"])
            for side in ["paper_", ""]
        ]
        body.append(
            [
                f"{row['device']}, operators ×{row['slower']}, {row['link']}",
                f"{row['iteration_ns'] / 1e6:.0f} ms",
                *cells,
            ]
        )
    yield table(
        ["link planned", "iteration", "the papers' accounting", "physical accounting"], body
    )
