"""The table of `run.py` as one picture: peak reserved and time of each way, model by model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

LEFT, WIDTH, GAP, LINE = 270, 250, 40, 20
MEMORY, TIME = "#4878a8", "#d08a40"


@dataclass
class Bar:
    """One way to train one model; without a time where none is known."""

    model: str
    way: str
    reserved: int
    ms: float | None


def drawn(bars: Sequence[Bar], kind: str) -> str:
    """An SVG of two columns of bars, each scaled to the model's largest."""
    parts: list[str] = []
    y = 30

    def text(x: float, y: float, words: str, more: str = "") -> None:
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}"{more}>{escape(words)}</text>')

    def bar(x: float, share: float, color: str, words: str) -> None:
        width = share * (WIDTH - 70)
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 11}" width="{width:.1f}" height="13" fill="{color}"/>'
        )
        text(x + width + 5, y, words)

    text(LEFT, 18, "peak reserved, MiB", ' font-weight="bold"')
    text(LEFT + WIDTH + GAP, 18, f"{kind} ms an iteration", ' font-weight="bold"')
    for model in dict.fromkeys(bar.model for bar in bars):
        mine = [bar for bar in bars if bar.model == model]
        most = max(bar.reserved for bar in mine)
        slowest = max((bar.ms or 0.0 for bar in mine), default=0.0) or 1.0
        y += LINE
        text(10, y, model, ' font-weight="bold"')
        for one in mine:
            y += LINE
            text(20, y, one.way)
            bar(LEFT, one.reserved / most, MEMORY, f"{one.reserved / 2**20:,.0f}")
            if one.ms is None:
                text(LEFT + WIDTH + GAP, y, "not known")
            else:
                bar(LEFT + WIDTH + GAP, one.ms / slowest, TIME, f"{one.ms:,.1f}")
    width, height = LEFT + 2 * WIDTH + GAP + 10, y + LINE
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{inside}\n</svg>\n'
    )
