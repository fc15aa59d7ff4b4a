"""What bench/paper/run makes, as tables beside what the papers print."""
import statistics
import sys

import crowd
import salus

NETS = {"VGG-16": ("vgg16", 224), "Inception V3": ("inception_v3", 299), "Inception V4": ("inception_v4", 299),
        "ResNet-50": ("resnet50", 224), "DenseNet": ("densenet121", 224)}
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


def table(head, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] + ["---:"] * (len(head) - 1), *rows])


def share(value, digits=3):
    return "–" if value is None else f"{value:.{digits}f}"


def find(rows, **wanted):
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


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


# TENSILE's whole process: iterations by the plan of the cold start, then iterations by the updated one.
COLD, UPDATED = 10, 90
PART = COLD / (COLD + UPDATED)


def whole(cold, updated, part, side, msr, cbr):
    """TENSILE's whole process: the saving of the cold start, and a time between both."""
    if not cold or not updated or side + "eor" not in cold or side + "eor" not in updated:
        return None
    eor = part * cold[side + "eor"] + (1 - part) * updated[side + "eor"]
    return {side + msr: cold[side + msr], side + "eor": eor, side + cbr: cold[side + msr] / eor}


# The paper's names, and how each plans here. Rows without a name of the paper's stand below.
NAMES = [("TENSILE", None), ("TENSILEcs", "tensile-cold"), ("TENSILEup", "tensile-updated"), ("vDNN", "vdnn-conv"), ("Capuchin", "capuchin")]


def single(rows, predictions, known, real):
    """The paper's Tables I and III: one job, batch 16."""
    nets = [net for net in NETS if find(rows, net=net, batch=16, device="a6000")]
    yield f"**Without a plan, batch 16 (physical accounting). {real}**"
    body = []
    for net in nets:
        row = find(rows, net=net, batch=16, device="a6000")
        body.append([net, *(f"{row[key] / 2**30:.2f} GiB" for key in ["no_free_bytes", "unplanned_peak_bytes"]),
                     f"{1 - row['unplanned_peak_bytes'] / row['no_free_bytes']:.3f}", f"{row['unplanned_iteration_ns'] / 1e6:.1f} ms"])
    yield table(["net", "nothing freed", "liveness", "liveness saves", "iteration"], body)
    part = PART

    def row_of(net, planner):
        return next((r for r in rows if r["net"] == net and r["batch"] == 16 and r["device"] == "a6000" and r["planner"] == planner
                     and not r["rule"].startswith(("time", "5 %"))), None)

    for title, side, msr, cbr in [("the papers' accounting, saving against freeing nothing (their baseline)", "paper_", "msr_no_free", "cbr_no_free"),
                                  ("the papers' accounting, saving against liveness", "paper_", "msr", "cbr"),
                                  ("physical accounting, saving against liveness", "", "msr", "cbr")]:
        theirs = side and msr == "msr_no_free"
        yield f"**Tables I and III, MSR / EOR / CBR: {title}. {real}**" + (" In brackets what is published." if theirs else "")
        body = []
        for name, planner in [*NAMES, ("vdnn-all", "vdnn-all"), *((label, label) for label in ours())]:
            cells = []
            for net in nets:
                mine = row_of(net, planner) if planner else whole(row_of(net, "tensile-cold"), row_of(net, "tensile-updated"), part, side, msr, cbr)
                cell = trio(mine, side, msr, cbr)
                cells.append(f"{cell} ({published(known, 'single', net, name)})" if theirs and find(known, table="single", net=net, planner=name) else cell)
            body.append([name, *cells])
        yield table(["planner", *nets], body)
    yield (f"*TENSILE* is the whole process: the saving of the cold start, and the time of {COLD} iterations by its plan and {UPDATED} by the updated one. The paper does "
           "not print how many there were; its own times of TENSILE lie 8.5 % of the way from TENSILEup to TENSILEcs in the median.")
    yield (f"**The prediction's own time counted, EOR (physical accounting). {real}** *TENSILEcs* over {COLD} iterations, *TENSILE* over {COLD + UPDATED}, with the seconds of "
           "Table II before the first one. By the paper's Table II an iteration took it 4 to 9 s, about a hundred times as long as "
           "here, and a prediction about four times: so a prediction weighs more here.")
    body = []
    for name, cold, updated in [("TENSILEcs", COLD, 0), ("TENSILE", COLD, UPDATED)]:
        cells = []
        for net in nets:
            of, said = {when: row_of(net, f"tensile-{when}") for when in ["cold", "updated"]}, find(predictions, net=net)
            extra_ns = said["seconds"] * 1e9 if said else 0
            times = [row["eor"] * row["unplanned_iteration_ns"] if row and "eor" in row else None for row in of.values()]
            known_all = said and None not in times
            eor = (extra_ns + cold * times[0] + updated * times[1]) / ((cold + updated) * of["cold"]["unplanned_iteration_ns"]) if known_all else None
            theirs = find(known, table="single", net=net, planner=name)
            cells.append(share(eor, 2) + (f" ({theirs['eor']:.2f})" if theirs else ""))
        body.append([name, *cells])
    yield table(["", *nets], body)


def first(rows, predictions, known, real):
    """The paper's Table II. The first iteration: passive for Capuchin, planned at predicted latencies for TENSILE and neap."""
    yield (f"**Table II: the first iteration, EOR (physical accounting), the budget that it keeps to, and the prediction. {real}** vDNN, TENSILE and neap run their "
           "plan from the first iteration on. In brackets what is published.")

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
            theirs, ours_first = find(known, table="first", net=net, planner="Capuchin"), of["capuchin-first"].get("eor")
            if theirs and ours_first and ours_first > 1:
                slower.append((theirs["eor"] - 1) / (ours_first - 1))
            body.append([net, f"{budget / 2**30:.2f} GiB" if budget else "–", eor("tensile-cold") + beside(net, "TENSILE"),
                         f"{said['seconds']:.3f}" + beside(net, "prediction", "seconds"),
                         f"{said['seconds'] * 1e9 / said['unplanned_iteration_ns']:.2f}" + beside(net, "prediction"),
                         f"{said['predicted']} of {said['operators']}",
                         eor("capuchin-first") + beside(net, "Capuchin"), eor("vdnn-conv"), *(eor(f"{o}-cold") for o in OURS)])
    yield table(["net", "budget (not vDNN's)", "TENSILE", "prediction, s", "prediction, EOR", "operators predicted", "Capuchin", "vDNN", *(f"{o}, cold" for o in OURS)], body)
    if slower:
        yield (f"Capuchin's passive iteration is all copies for which computing stops, so that its extra time follows the link. The published extra time is {min(slower):.0f} to "
               f"{max(slower):.0f} times ours: a link of {25.4 / max(slower):.1f} to {25.4 / min(slower):.1f} GB/s, the rate of copies to pageable host memory, in place of the 25.4 GB/s "
               "of pinned memory that the device's profile has. A simulation with an eighth of the link (`h2d` and `d2h` of the device's file) gives 5.0 to 7.7.")
    if predictions:
        one = predictions[0]
        yield (f"The predictor has {one['models']} networks with {one['weights']:,} numbers, {4 * one['weights'] / 1e6:.1f} MB at four bytes each and {one['bytes'] / 1e6:.1f} MB as a "
               f"file (published: 40 networks, 321 MB). On shapes kept out of training its R² is {one['r2_per_mille'] / 1e3:.3f} and its mean squared error "
               f"{one['mse_millionths'] / 1e6:.4f}, both of the natural logarithm of the time (published: an MSE of 4.269 in a unit that is not given; in the older paper "
               "R² 0.582 for a linear model and 0.805 for an MLP). The seconds are those of the machine that ran this, reading the predictor included; the paper's iteration is far longer than the one here, "
               "so the prediction's EOR is not the paper's.")


def causes(rows, real):
    """The paper's Fig. 2 for one job: where extra time comes from."""
    for title, side in [("the papers' accounting (one link)", "paper_"), ("physical accounting", "")]:
        yield f"**Extra time by cause, % of the unplanned iteration, mean over the nets, batch 16: {title}. {real}**"
        body = []
        for planner in ["vdnn-all", "vdnn-conv", "capuchin-first", "capuchin", "tensile-cold", "tensile-updated", *ours()]:
            mine = [r for r in rows if r["batch"] == 16 and r["device"] == "a6000" and r["planner"] == planner and side + "eor" in r and not r["rule"].startswith(("time", "5 %"))]
            if mine:
                parts = [statistics.fmean(r[side + c] / r["unplanned_iteration_ns"] for r in mine) for c in CAUSES]
                # Adding zero takes the sign off a rounded zero.
                body.append([planner, *(f"{round(p * 100, 1) + 0:.1f}" for p in [*parts, sum(parts)])])
        yield table(["planner", "passive eviction", "wait for swap-in", "wait for swap-out", "copies after the end", "contention on the link", "recomputation", "all"], body)


def batches(rows, real):
    """The paper's Fig. 7: batch sizes."""
    yield ("**Fig. 7** has curves without numbers. In words: MSR and CBR rise with the batch, DenseNet at 32 and 64 excepted; only VGG-16's EOR falls.")
    for net in NETS:
        sizes = [b for b in BATCHES if find(rows, net=net, batch=b, device="a6000")]
        if len(sizes) < 2:
            continue
        yield f"**Fig. 7, {net} by batch size, MSR / EOR / CBR: the papers' accounting, saving against freeing nothing. {real}**"
        body = []
        for name, planner in [*NAMES[1:], *((label, label) for label in ours())]:
            body.append([name, *(trio(find(rows, net=net, batch=b, device="a6000", planner=planner)) for b in sizes)])
        yield table(["planner", *(f"batch {b}" for b in sizes)], body)


def equal(rows, budgets, real):
    """Fair comparisons, which the papers do not make: the same budget, the same time."""
    yield f"**The same budget, made and run at the real latencies: EOR (physical accounting), median over the nets, batch 16. {real}** In brackets how many nets met it."
    nets = [net for net in NETS if find(budgets, net=net)]
    order = list(dict.fromkeys(row["planner"] for row in budgets))
    body = []
    for planner in order:
        cells = []
        for asked in SHARES:
            met = [r["eor"] for r in budgets if r["planner"] == planner and r["budget"] == asked and r["fits"]]
            cells.append(f"{statistics.median(met):.3f} ({len(met)}/{len(nets)})" if met else f"– (0/{len(nets)})")
        body.append([planner, *cells])
    bound = [[r["bound_ns"] / r["unplanned_iteration_ns"] for r in budgets if r["planner"] == order[0] and r["budget"] == asked and "bound_ns" in r] for asked in SHARES]
    body.append(["no plan is below", *(f"{statistics.median(b):.3f}" if b else "–" for b in bound)])
    yield table(["planner", *(f"budget {s}" for s in SHARES)], body)
    yield f"**The same time: neap's peak where its iteration takes no longer than the other's, as a share of the liveness peak (physical accounting), batch 16. {real}**"
    body = []
    for net in NETS:
        of = lambda planner, rule=None: next((r for r in rows if r["net"] == net and r["batch"] == 16 and r["device"] == "a6000" and r["planner"] == planner
                                              and (rule is None or r["rule"] == rule)), None)
        if of("vdnn-all") is None:
            continue
        peak = lambda row: "–" if row is None or "peak_bytes" not in row else f"{row['peak_bytes'] / row['unplanned_peak_bytes']:.3f}"
        cells = []
        for other in ["vdnn-all", "capuchin", "tensile-updated"]:
            cells.append(f"{peak(of(other))} → {peak(of('neap-updated', f'time of {other}'))}")
        body.append([net, *cells, peak(of("neap-updated", "5 % added time"))])
    yield table(["net", "vDNN-all → neap", "Capuchin → neap", "TENSILE → neap", "neap, 5 % added time"], body)


def below(rows, other):
    """neap's plan that is lower than another's where one is at least as quick, and the quicker where one is as low; None where there is none."""
    mine = [row for row in rows if row["planner"] == "neap" and row["fits"] and all(row[key] == other[key] for key in ["jobs", "copies", "device"])]
    quick = [row for row in mine if row["round_ns"] <= other["round_ns"]]
    low = [row for row in mine if row["peak_bytes"] <= other["peak_bytes"]]
    return min(quick, key=lambda row: row["peak_bytes"], default=None), min(low, key=lambda row: row["round_ns"], default=None)


def several(rows, real):
    """Every planner at the same budgets for several jobs, which the papers do not show."""
    asked = [row for row in rows if row["rule"] == "budget"]
    labels = list(dict.fromkeys(row["jobs"] for row in asked))
    order = "; ".join(label for label in labels if label.startswith(MIXED))
    met = [row for row in rows if row["fits"]]
    overlaps = sum(row.get("overlapping_copies", 0) for row in met)
    together = sum("overlapping_copies" in row for row in met)
    yield (f"One to {COPIES} copies of each net, and {order}, batch 16, A6000, planned together at the real latencies within a share of the sum of their unplanned peaks "
           f"and simulated side by side (`neap compare A B ...`). {real} "
           "*Peak* is the sum of the jobs' own peaks, which no alignment of their iterations exceeds; *EOR* the time of a round (an iteration of the longest job and as many "
           "of the others as take about as long; the mean of starting all at once and evenly staggered) over the same jobs' unplanned round side by side.")
    yield (f"**In {overlaps} cases two copies overlapped in one direction of the link**, counted over the timelines of all {together} plans of two or more jobs "
           "(`overlapping_copies` in several.csv); `tests/together.rs` holds it for random jobs.")
    for budget in SEVERAL:
        yield f"**Peak in GiB / EOR by copies, budget {budget}.** – : the planner doesn't meet it."
        body = []
        for label in labels:
            for planner in PLANNERS:
                cells = []
                for copies in range(1, COPIES + 1):
                    row = find(asked, jobs=label, copies=copies, planner=planner, budget=budget) if not label.startswith(MIXED) else \
                        find(asked, jobs=label, planner=planner, budget=budget) if copies == 1 else None
                    cells.append("" if row is None else f"{row['peak_bytes'] / 2**30:.2f} / {row['eor']:.3f}" if row["fits"] else "–")
                body.append([MIXED if label.startswith(MIXED) else label, planner, *cells])
        yield table(["jobs", "planner", *(f"{n} job{'s' * (n > 1)}" for n in range(1, COPIES + 1))], body).replace("| ---: |", "| --- |", 1)
    yield ("**neap against each other planner's plans**, over both budgets. *As quick*: neap's lowest peak whose round takes no longer, as a share of the other's peak. "
           "*As low*: neap's shortest round whose peak is no higher, as a share of the other's.")
    body = []
    for planner in PLANNERS[:-1]:
        others = [row for row in asked if row["planner"] == planner and row["fits"]]
        pairs = [(other, *below(rows, other)) for other in others]
        quick = [row["peak_bytes"] / other["peak_bytes"] for other, row, _ in pairs if row]
        low = [row["round_ns"] / other["round_ns"] for other, _, row in pairs if row]
        beaten = sum(1 for other, a, b in pairs if a and b and a["peak_bytes"] <= other["peak_bytes"] and b["round_ns"] <= other["round_ns"])
        body.append([planner, len(others), f"{beaten} of {len(others)}", f"{statistics.median(quick):.3f}", f"{max(quick):.3f}", f"{statistics.median(low):.3f}", f"{max(low):.3f}"])
    yield table(["planner", "plans", "neap as good or better in both", "as quick: median", "worst", "as low: median", "worst"], body)
    yield f"![EOR by copies, at budgets of {' and '.join(SEVERAL)}](several.svg)"


def drawing(rows, path):
    """EOR by copies for each net and budget, as an SVG that matplotlib draws; without it the file stays as it is."""
    try:
        import matplotlib
        from matplotlib import pyplot
    except ImportError:
        print(f"{path.name} stays as it is: it is drawn with matplotlib (pip install matplotlib)", file=sys.stderr)
        return
    matplotlib.use("svg")
    labels = list(dict.fromkeys(row["jobs"] for row in rows if not row["jobs"].startswith(MIXED)))
    colours = dict(zip(PLANNERS, ["#999999", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#d55e00"]))
    top = 2.5
    # Text stays text, and the same rows give the same file.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "neap", "font.size": 8}):
        figure, places = pyplot.subplots(len(SEVERAL), len(labels), figsize=(2 * len(labels), 1.6 * len(SEVERAL) + 0.6), sharex=True, sharey=True, squeeze=False,
                                         layout="constrained")
        for budget, line in zip(SEVERAL, places):
            for label, axes in zip(labels, line):
                for planner in PLANNERS:
                    points = [(r["copies"], r["eor"]) for r in rows
                              if r["jobs"] == label and r["planner"] == planner and r["budget"] == budget and r["fits"] and r["rule"] == "budget"]
                    # What is off the scale is left out.
                    points = sorted(point for point in points if point[1] <= top)
                    axes.plot([copies for copies, _ in points], [eor for _, eor in points], marker="o", markersize=3, color=colours[planner], label=planner)
                axes.set_title(label, fontsize=8)
                axes.set_xticks(range(1, COPIES + 1))
                axes.set_ylim(1, top)
                axes.grid(axis="y", color="#dddddd")
                axes.spines[["top", "right"]].set_visible(False)
            line[0].set_ylabel(f"EOR at {budget}")
        figure.supxlabel(f"copies; an EOR above {top} is not drawn", fontsize=8)
        figure.legend(*places[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(PLANNERS), frameon=False)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def older(rows, crowded, known, real):
    """The older paper's Tables 1 and 2."""
    part = PART
    yield (f"**The older paper's Table 1: VGG-16, batch 2, RTX 2080 Ti; its EOR is the extra time alone, and CBR is MSR by that. The papers' accounting, saving against "
           f"freeing nothing. {real}** In brackets what is published.")
    of = {p: find(rows, batch=2, device="rtx2080ti", planner=p) for p in ["vdnn-all", "vdnn-conv", "capuchin", "tensile-cold", "tensile-updated", *ours()]}
    mine = {p: row and {"msr": row["paper_msr_no_free"], "eor": row["paper_eor"]} for p, row in of.items() if not row or "paper_eor" in row}
    both = whole(of["tensile-cold"], of["tensile-updated"], part, "paper_", "msr_no_free", "cbr_no_free")
    mine["TENSILE"] = both and {"msr": both["paper_msr_no_free"], "eor": both["paper_eor"]}
    body = []
    for name, planner in [("vDNN", "vdnn-conv"), ("Capuchin", "capuchin"), ("TENSILE", "TENSILE"), ("TENSILEcs", "tensile-cold"), ("TENSILEup", "tensile-updated"),
                          ("vdnn-all", "vdnn-all"), *((label, label) for label in ours())]:
        row, theirs = mine.get(planner), find(known, table="older", net="VGG", planner=name)
        body.append([name, *(extra(row, key) + (f" ({theirs[key]:.4f})" if theirs else "") for key in ["msr", "eor", "cbr"])])
    yield table(["planner", "MSR", "EOR (extra time)", "CBR"], body)
    yield (f"**The older paper's Table 2: one to three VGG-16 launched at once, batch 2, RTX 2080 Ti, mean of {crowd.RUNS} runs. Physical accounting, saving against freeing "
           f"nothing. {real}** In brackets what is published.")
    body = []
    for name in ["vDNN", "Capuchin", "TENSILE", "TENSILEcs", "TENSILEup", "neap"]:
        for key in ["msr", "eor", "cbr"]:
            cells = []
            for copies in range(1, 4):
                theirs = find(known, table=f"older x{copies}", net="VGG", planner=name)
                cells.append(extra(mean(crowded, name, part, device="rtx2080ti", copies=copies), key) + (f" ({theirs[key]:.4f})" if theirs else ""))
            body.append([name, key.upper(), *cells])
    yield table(["planner", "", "×1", "×2", "×3"], body).replace("| --- | ---: | ---: ", "| --- | --- | ---: ", 1)


def links(rows, real):
    """TENSILE with one timetable for both directions of the link, and with two."""
    yield (f"**TENSILE on one timetable (§IV-C: one tensor at a time on the link) and on two, MSR / EOR / CBR, batch 16, A6000: the papers' accounting, saving against freeing nothing. {real}** "
           "Made of the recordings in jobs/; the predictor of a cold start learned the four other nets. Planned for the link that the papers have, an updated plan is in time there, and "
           "saves more than one for two directions, since no copy slows another. A cold start saves about as much, and is late by up to 6 %.")
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
    yield ("**An MLP, swapped in time alone: MSR against liveness / against freeing nothing / EOR.** The older paper's §4.1 tells of an MLP whose peak falls by 33.5 % without added time. "
           "It does not say how large its layers are or how long its operators take, so this is another net, [fixtures/mlp.graph.json](../../fixtures/mlp.graph.json), whose "
           "peak no plan without added time lowers by more than 32.6 % on an A6000 and 23.1 % on an RTX 2080 Ti (physical accounting, `neap compare`). How much of it the link can carry in time depends on how long operators take; where they take long enough for all, "
           "the papers' accounting has 29 % against liveness and 59 % against freeing nothing: the 33.5 % lie between the two readings.")
    body = []
    for row in rows:
        cells = [" / ".join(f"{row[side + key]:.3f}" for key in ["msr", "msr_no_free", "eor"]) for side in ["paper_", ""]]
        body.append([f"{row['device']}, operators ×{row['slower']}, {row['link']}", f"{row['iteration_ns'] / 1e6:.0f} ms", *cells])
    yield table(["link planned", "iteration", "the papers' accounting", "physical accounting"], body)


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
    found = [row for row in rows if row["planner"] == planner and all(row[key] == value for key, value in wanted.items())]
    if not found or any("eor" not in row for row in found):
        return None
    keys = [key for key, value in found[0].items() if isinstance(value, (int, float))]
    return {key: statistics.fmean(row[key] for row in found) for key in keys}


CROWD = ["vDNN", "Capuchin", "TENSILE", "TENSILEcs", "TENSILEup", "neap"]


def at_once(rows, known, real):
    """The paper's Fig. 6, and its Fig. 2 by the number of jobs."""
    part = PART
    yield (f"**Fig. 6: one to {COPIES} copies of each net launched at once, MSR / EOR / CBR, mean of {crowd.RUNS} runs at other real latencies. Physical accounting, saving "
           f"against freeing nothing. {real}** The paper has curves without numbers. In words: TENSILE has the best MSR and CBR in most workloads, and TENSILEup saves most; "
           "TENSILE's MSR falls slowly with the number of copies, VGG-16 excepted; "
           "Capuchin's EOR rises steeply with the number of copies; vDNN's falls. Here two "
           "of these do not hold: Capuchin's EOR falls with the number of copies (VGG-16) or"
           " stays below 1.2 (the paper's Capuchin measures and evicts passively, this one "
           "knows all latencies exactly); and TENSILEcs saves as much as TENSILEup or more "
           "in most cells (its predictor knows operators like the nets' own).")
    body = []
    for net in [net for net in NETS if find(rows, net=net, device="a6000")]:
        for name in CROWD:
            cells = [trio(mean(rows, name, part, net=net, device="a6000", copies=copies), "", "msr", "cbr") for copies in range(1, COPIES + 1)]
            body.append([net, name, *cells])
    yield table(["net", "planner", *(f"{n} job{'s' * (n > 1)}" for n in range(1, COPIES + 1))], body).replace("| ---: |", "| --- |", 1)
    yield (f"**Fig. 2 by the number of jobs: extra time by cause, % of the unplanned time, mean over nets and runs. {real}** *Contention* is what is left: copies that are slowed "
           "by others, and computation that comes later beside others'. It is below zero where waiting jobs leave the device to the others.")
    body = []
    for name in [name for name in CROWD if name != "TENSILE"]:
        for copies in range(1, COPIES + 1):
            mine = [row for row in rows if row["device"] == "a6000" and row["planner"] == name and row["copies"] == copies and "eor" in row]
            if mine:
                of = lambda key: statistics.fmean(row[key] / copies / row["unplanned_end_ns"] for row in mine)
                parts = [of(key) for key in crowd.LOST]
                total = statistics.fmean(row["eor"] - 1 for row in mine)
                body.append([name, copies, *(f"{round(p * 100, 1) + 0:.1f}" for p in [*parts, total - sum(parts), total])])
    yield table(["planner", "jobs", "wait for swap-in", "wait for swap-out", "copies after the end", "recomputation", "contention", "all"], body)


def one_by_one(rows, known, real):
    """The paper's Table IV."""
    part = PART
    orders = "; ".join(dict.fromkeys(row["order"] for row in rows))
    yield (f"**Table IV: the five nets launched one by one in random order, batch 16, A6000, mean of {crowd.RUNS} runs. Saving of the sub-arenas against freeing nothing; EOR is the "
           f"ratio of the jobs' times from launch to end. {real}** In brackets what is published. Orders: {orders}. A job comes every {crowd.APART} s and runs {crowd.ITERATIONS_APART} iterations. "
           "At each launch and end all jobs are planned anew. *Wait* is the mean time from a job's launch to its first iteration, *last end* the time from the first launch "
           "to the last end over that of the unplanned run.")
    body = []
    for name in CROWD:
        row, theirs = mean(rows, name, part), find(known, table="mixed", planner=name)
        cells = [("not met" if row is None else f"{row[key]:.4f}") + (f" ({theirs[key]:.4f})" if theirs else "") for key in ["msr", "eor", "cbr"]]
        ran = row if row and "queuing_ns" in row else None
        late = ["–", "–"] if ran is None else [f"{ran['queuing_ns'] / 1e6:.0f} ms", f"{ran['end_ns'] / ran['unplanned_end_ns']:.4f}"]
        body.append([name, *cells, *(late if name != "TENSILE" else ["", ""])])
    yield table(["planner", "MSR", "EOR", "CBR", "wait", "last end"], body)
    bare = mean(rows, "neap", part)
    if bare and "unplanned_queuing_ns" in bare:
        yield (f"Why an EOR is below 1: the unplanned run pays for launches and moves as the planned ones do (a launch loads what persists, a move within the device costs its "
               f"bytes; its jobs wait {bare['unplanned_queuing_ns'] / 1e6:.0f} ms). A planned launch waits longer, until the others have taken up their smaller parts at the ends of "
               "their iterations. Meanwhile these have more of the device, so that the mean over jobs falls while the last job ends later.")


def missing(data):
    """The rows that a table needs and no file has, in words."""
    def lacks(name, wanted):
        there = {tuple(row.get(key) for key in wanted[0]) for row in data[name]}
        return [f"{name}.csv: {' '.join(map(str, row.values()))}" for row in wanted if tuple(row.values()) not in there]

    planners = ["vdnn-all", "vdnn-conv", "tensile-cold", "tensile-updated", "capuchin", "capuchin-first", *ours()]
    jobs = [*((net, batch, "a6000") for net in NETS for batch in BATCHES), ("VGG-16", 2, "rtx2080ti")]
    crowds = [*((net, "a6000", copies) for net in NETS for copies in range(1, COPIES + 1)), *(("VGG-16", "rtx2080ti", copies) for copies in range(1, 4))]
    runs = [name for name in CROWD if name != "TENSILE"]
    return [
        *lacks("results", [{"net": net, "batch": batch, "device": device, "planner": planner} for net, batch, device in jobs for planner in planners]),
        *lacks("budgets", [{"net": net, "planner": planner} for net in NETS for planner in ["vdnn-all", "vdnn-conv", "capuchin", "tensile", "neap"]]),
        *lacks("prediction", [{"net": net} for net in NETS]),
        *lacks("crowd", [{"net": net, "device": device, "copies": copies, "planner": planner} for net, device, copies in crowds for planner in runs]),
        *lacks("arrivals", [{"planner": planner} for planner in runs]),
        *lacks("several", [{"jobs": net, "copies": copies, "planner": planner} for net in NETS for copies in range(1, COPIES + 1) for planner in PLANNERS]),
        *lacks("links", [{"net": net, "link": link, "when": when} for net in NETS for link in ["two ways", "one way"] for when in ["cold", "updated"]]),
        *lacks("mlp", [{"device": device, "link": link} for device in ["rtx2080ti", "a6000"] for link in ["two ways", "one way"]]),
        *lacks("salus", [{"figure": figure} for figure in ["table 2", "fig 1", "fig 11", "fig 12", "fig 13"]]),
    ]


# What goes into README.md, in this order.
SECTIONS = [("Tables I and III: one job, batch 16, A6000", lambda d: single(d["results"], d["prediction"], d["published"], d["real"])),
            ("Table II: the first iteration", lambda d: first(d["results"], d["prediction"], d["published"], d["real"])),
            ("Table IV: jobs launched one by one", lambda d: one_by_one(d["arrivals"], d["published"], d["real"])),
            ("Fig. 2: where the extra time comes from", lambda d: causes(d["results"], d["real"])),
            ("Fig. 6, and Fig. 2 by number of jobs", lambda d: at_once(d["crowd"], d["published"], d["real"])),
            ("Fig. 7: batch sizes", lambda d: batches(d["results"], d["real"])),
            ("The older paper's Tables 1 and 2", lambda d: older(d["results"], d["crowd"], d["published"], d["real"])),
            ("TENSILE on one shared timetable", lambda d: links(d["links"], d["real"])),
            ("The older paper's MLP", lambda d: mlp(d["mlp"])),
            ("One job: the same budget, the same time", lambda d: equal(d["results"], d["budgets"], d["real"])),
            ("Several jobs: the same budget", lambda d: several(d["several"], d["real"])),
            ("The Salus paper: Table 2 and figures", salus.section)]
