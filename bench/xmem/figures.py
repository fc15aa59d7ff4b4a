"""The pictures that xMem's published drawing code makes, of our jobs, as SVG with matplotlib.

All are made from files of this repository: results.csv and results-xmem.csv, the requests of
recordings/ (made by `record`) and fixtures/allocator. The four quadrants are drawn by `neap score`.
"""

import csv
import gzip
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RULES = {"neap": "results.csv", "xmem": "results-xmem.csv"}
# Colours that stay apart for colour-blind readers, and markers.
LOOKS = {"neap": ("#d55e00", "o"), "xmem": ("#0072b2", "s")}
# Text stays text, and the same rows give the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "neap", "font.size": 9}
WIDTH = 9
# Errors above this, in percent, are drawn at the top.
MOST = 100
# As many points has a curve at most, about.
POINTS = 600
# The weights of the performance score in the paper's published drawing code.
FAILURE, ERROR = 0.7, 0.3
# Recorded with PyTorch 2.11 by `record`: nets, and where zero_grad stands.
NETS = {"ResNet-50": "resnet50-adam-16-224", "VGG-16": "vgg16-adam-16-224"}
PLACES = {"start": "at the iteration's start", "backward": "before backward"}
# PyTorch's own answers to random requests, with settings as in fixtures/allocator/index.json.
ANSWERS = ["default", "capped", "expandable"]


def read():
    """The rows of both rules."""
    found = {}
    for rules, name in RULES.items():
        with open(HERE / name, newline="") as file:
            found[rules] = list(csv.DictReader(file))
    return found


def plain(axes):
    """No frame but the lines at the left and below."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(color="#999999", labelcolor="#555555")


def grouped(rows, key):
    """The rows by a key, in the order of keys."""
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return dict(sorted(groups.items()))


def of_model(row):
    return row["model"]


def failure(rows):
    """The share of runs that fail."""
    return sum(int(r["failed"]) for r in rows) / sum(int(r["runs"]) for r in rows)


def error(rows):
    """The median of the relative errors."""
    return statistics.median(abs(float(row["reserved_error"])) for row in rows)


def errors(pyplot, found, transformers):
    """Relative errors of each model as boxes: CNNs above, transformers below."""
    kinds = [("CNNs", False), ("transformers", True)]
    figure, panels = pyplot.subplots(2, 1, figsize=(WIDTH, 6), layout="constrained")
    for axes, (kind, wanted) in zip(panels, kinds):
        names = [
            m for m in grouped(found["neap"], of_model) if m.startswith(transformers) == wanted
        ]
        for place, (rules, rows) in enumerate(found.items()):
            models = grouped(rows, of_model)
            values = [
                [min(abs(float(r["reserved_error"])) * 100, MOST) for r in models.get(name, [])]
                for name in names
            ]
            boxes = axes.boxplot(
                values,
                positions=[at + 0.36 * place - 0.18 for at in range(len(names))],
                widths=0.3,
                patch_artist=True,
                flierprops={"markersize": 3},
                medianprops={"color": "black"},
            )
            for box in boxes["boxes"]:
                box.set(facecolor=LOOKS[rules][0], edgecolor=LOOKS[rules][0])
            axes.plot([], [], color=LOOKS[rules][0], linewidth=6, label=rules)
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_ylabel(f"{kind}: error, %")
        axes.set_ylim(-2, MOST + 2)
        plain(axes)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def conserved(pyplot, found):
    """The memory that a model's runs conserve in the mean, on the paper's two devices."""
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    key = "conserved_on_the_papers_devices_bytes"
    for place, (rules, rows) in enumerate(found.items()):
        models = grouped(rows, of_model)
        heights = [statistics.fmean(float(r[key]) / 1e9 for r in of) for of in models.values()]
        spots = [at + 0.4 * place - 0.2 for at in range(len(models))]
        axes.bar(spots, heights, width=0.4, color=LOOKS[rules][0], label=rules)
        axes.set_xticks(range(len(models)), models, rotation=90)
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set_ylabel("GB a run")
    plain(axes)
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    return figure


def seconds(pyplot, found):
    """The time of an estimate against the share of runs that fail, a point for each model."""
    figure, axes = pyplot.subplots(figsize=(WIDTH / 2, 3.4), layout="constrained")
    for rules, rows in found.items():
        colour, marker = LOOKS[rules]
        models = grouped(rows, of_model).values()
        axes.scatter(
            [failure(of) * 100 for of in models],
            [statistics.fmean(int(r["elapsed_ns"]) / 1e9 for r in of) for of in models],
            color=colour,
            marker=marker,
            s=18,
            alpha=0.7,
            label=rules,
        )
    axes.set_yscale("log")
    axes.set_xlabel("runs that fail, %")
    axes.set_ylabel("mean time of an estimate, s")
    plain(axes)
    axes.legend(frameon=False)
    return figure


def scores(pyplot, found):
    """The share of models and optimizers whose score is at most so high: failures and errors,
    weighted as in the paper's published drawing code.
    """
    figure, axes = pyplot.subplots(figsize=(WIDTH / 2, 3.4), layout="constrained")
    for rules, rows in found.items():
        groups = grouped(rows, lambda row: (row["model"], row["job"].split("-")[-4]))
        values = sorted(FAILURE * failure(of) + ERROR * error(of) for of in groups.values())
        shares = [(number + 1) / len(values) for number in range(len(values))]
        axes.step([0, *values], [0, *shares], where="post", color=LOOKS[rules][0], label=rules)
    axes.set_xlabel(f"score: {FAILURE} · failures + {ERROR} · error")
    axes.set_ylabel("share of models and optimizers")
    axes.set_ylim(0, 1.02)
    plain(axes)
    axes.legend(frameon=False, loc="lower right")
    return figure


def replayed(neap, file, *more):
    """Bytes allocated and reserved after every request, as neap replays it."""
    with tempfile.TemporaryDirectory() as folder:
        curve = pathlib.Path(folder) / "curve.csv"
        command = [neap, "replay", file, "--curve", curve, *more]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        with open(curve, newline="") as rows:
            read = csv.DictReader(rows)
            return [(int(row["allocated_bytes"]), int(row["reserved_bytes"])) for row in read]


def over_requests(figure, panels, label):
    """The figure with what is common to curves of memory over requests."""
    for axes in panels:
        axes.set_xlabel("requests and frees")
        plain(axes)
    panels[0].set_ylabel(label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def zero_grad(pyplot, neap):
    """Memory over three iterations with zero_grad at either place."""
    figure, panels = pyplot.subplots(
        1, len(NETS), figsize=(WIDTH, 3), sharey=False, layout="constrained"
    )
    for axes, (net, name) in zip(panels, NETS.items()):
        for (place, words), colour in zip(PLACES.items(), ["#0072b2", "#d55e00"]):
            curve = replayed(neap, HERE / f"recordings/{name}-{place}.events.csv.gz")
            # The highest of each few requests, so that the file stays small.
            step = max(1, len(curve) // POINTS)
            at = range(0, len(curve), step)
            allocated, reserved = (
                [max(of[i : i + step]) / 2**30 for i in at] for of in zip(*curve)
            )
            axes.fill_between(at, allocated, color=colour, alpha=0.35, lw=0)
            axes.plot(at, reserved, color=colour, lw=1.4, label=f"zero_grad {words}")
        axes.set_title(net)
    return over_requests(figure, panels, "GiB")


def simulated(pyplot, neap):
    """Reserved bytes after every request: PyTorch's own allocator, and neap's replay of it."""
    figure, panels = pyplot.subplots(1, len(ANSWERS), figsize=(WIDTH, 2.8), layout="constrained")
    folder = ROOT / "fixtures/allocator"
    made = {of["file"]: of for of in json.loads((folder / "index.json").read_text())["vectors"]}
    for axes, name in zip(panels, ANSWERS):
        file = folder / f"{name}.csv.gz"
        under = made[file.name]
        with gzip.open(file, "rt", newline="") as rows:
            real = [int(row["reserved"]) / 2**20 for row in csv.DictReader(rows)]
        # --check: a row that differs is an error.
        asked = ["--check", "--device-bytes", str(under["device_bytes"])]
        asked += ["--alloc-conf", under["alloc_conf"]] if under["alloc_conf"] else []
        ours = [reserved / 2**20 for _, reserved in replayed(neap, file, *asked)]
        axes.plot(real, color="#56b4e9", lw=4, label="PyTorch's allocator")
        axes.plot(ours, color="black", lw=1, label="simulated")
        axes.set_title(name)
    return over_requests(figure, panels, "reserved, MiB")


def draw(neap, transformers):
    """Writes all pictures; false where matplotlib is not installed, and they stay as they are.
    `transformers` are the beginnings of the names of these models.
    """
    try:
        import matplotlib
        from matplotlib import pyplot
    except ImportError:
        print("the drawings stay as they are: pip install matplotlib", file=sys.stderr)
        return False
    matplotlib.use("svg")
    found = read()
    with pyplot.rc_context(STYLE):
        for name, drawn, rest in [
            ("errors", errors, (found, transformers)),
            ("conserved", conserved, (found,)),
            ("seconds", seconds, (found,)),
            ("scores", scores, (found,)),
            ("zero_grad", zero_grad, (neap,)),
            ("simulated", simulated, (neap,)),
        ]:
            figure = drawn(pyplot, *rest)
            figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
    return True
