"""The table of `run.py` as one picture: peak reserved and time of each way, model by model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MEMORY, TIME = "#0072b2", "#e69f00"
LINE = 0.24
"""Inches of a row."""


@dataclass
class Bar:
    """One way to train one model; without a time where none is known."""

    model: str
    way: str
    reserved: int
    ms: float | None


def library() -> Any:
    """What draws.

    Raises:
        SystemExit: if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib import pyplot
    except ImportError:
        raise SystemExit("--plot draws with matplotlib: pip install matplotlib") from None
    matplotlib.use("svg")
    return pyplot


def drawn(bars: Sequence[Bar], kind: str, path: str) -> None:
    """Draws two columns of bars, each scaled to the model's largest, as an SVG.

    Raises:
        SystemExit: if matplotlib is not installed.
    """
    pyplot = library()
    models = list(dict.fromkeys(bar.model for bar in bars))
    rows = {model: [bar for bar in bars if bar.model == model] for model in models}
    heights = [len(rows[model]) + 1 for model in models]
    # Text stays text, and the same table gives the same file.
    style = {"svg.fonttype": "none", "svg.hashsalt": "neap", "font.size": 9}
    with pyplot.rc_context(style):
        figure, places = pyplot.subplots(
            len(models),
            2,
            figsize=(9, sum(heights) * LINE + 0.4),
            squeeze=False,
            height_ratios=heights,
            layout="constrained",
        )
        for model, (left, right) in zip(models, places):
            ways = [bar.way for bar in rows[model]]
            _column(left, ways, [bar.reserved / 2**20 for bar in rows[model]], MEMORY, "{:,.0f}")
            _column(right, ways, [bar.ms for bar in rows[model]], TIME, "{:,.1f}")
            left.set_yticks(range(len(ways)), ways)
            left.set_title(model, loc="left", x=-0.9, fontweight="bold", fontsize=9)
            right.set_yticks([])
        places[0][0].set_title("peak reserved, MiB", fontsize=9)
        places[0][1].set_title(f"{kind} ms an iteration", fontsize=9)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _column(axes: Any, ways: list[str], values: list[float | None], color: str, form: str) -> None:
    """Bars from top to bottom, each with its number."""
    known = [value or 0.0 for value in values]
    bars = axes.barh(range(len(ways)), known, color=color, height=0.7)
    words = ["not known" if value is None else form.format(value) for value in values]
    axes.bar_label(bars, words, padding=3)
    # Room for the numbers.
    axes.set_xlim(0, (max(known, default=0.0) or 1.0) * 1.25)
    axes.set_ylim(len(ways) - 0.4, -0.6)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
