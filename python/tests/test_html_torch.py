"""The pages of `neap torch`, looked at in a browser: one iteration without and with its plan, and
the scripts that share one GPU.

Needs what `test_html.py` needs, and in $NEAP_TORCH_PYTHON a CUDA build of PyTorch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opened import Opened, exact

NAME = "</script><img src=x onerror=hurt()>"
"""Of a module: it can have no point."""

TRAIN = f"""
import sys, torch
torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.add_module({NAME!r}, layer)
    def forward(self, x):
        return getattr(self, {NAME!r})(x)
model = torch.nn.Sequential(*(Block() for _ in range(6))).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(int(sys.argv[1])):
    model(torch.randn(32, 128, 256).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="session")
def python() -> str:
    """A Python that has a CUDA build of PyTorch."""
    found = os.environ.get("NEAP_TORCH_PYTHON", sys.executable)
    has = [found, "-c", "import torch; assert torch.version.cuda"]
    if subprocess.run(has, capture_output=True).returncode != 0 or sys.platform != "linux":
        pytest.skip("needs a CUDA build of PyTorch, on Linux")
    return found


def fitted(neap: str, folder: Path, python: str, *more: str, steps: int = 9) -> dict[str, Any]:
    """What a script reports that trains on the dry device by a plan."""
    (folder / "train.py").write_text(TRAIN)
    train = ["--", python, "train.py", str(steps)]
    command = [neap, "dry", "--", neap, "torch", "--json", "--html", "fit.html", *more, *train]
    where = {**os.environ, "NEAP": neap, "NEAP_CACHE": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=where)
    assert done.returncode == 0, done.stdout + done.stderr
    # The dry run's own report follows.
    reports, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("[") :])
    report: dict[str, Any] = reports[0]
    return report


def curves(opened: Opened) -> dict[str, Any]:
    """The chart of both curves."""
    data = json.loads(opened.page.locator("#data").text_content())
    chart: dict[str, Any] = data["views"][0]["charts"][0]
    return chart


def test_an_iteration_without_and_with_its_plan(
    browser: Any, neap: str, python: str, tmp_path: Path
) -> None:
    said = fitted(neap, tmp_path, python, "--budget", "60%", "--save-plan", "fit.plan")
    assert said["planned"] > 0
    opened = Opened(browser, tmp_path / "fit.html")
    chart = curves(opened)
    peaks = {peak["name"]: peak["value"] for peak in chart["peaks"]}
    assert peaks["without a plan"] == said["unplanned_peak_bytes"]
    assert peaks["with the plan"] == said["predicted_peak_bytes"]
    assert chart["limits"] == [{"name": "budget", "value": said["budget_bytes"]}]
    # Giving back free memory takes its own time.
    assert chart["end"] <= said["predicted_iteration_ns"]
    assert "course" not in json.loads(opened.page.locator("#data").text_content())["report"]
    # The peaks are one click away, and what the legend says then is the number of `--json`.
    opened.press("peak with the plan")
    legend = opened.page.locator("section:not([hidden]) .legend").first.inner_text()
    assert f"{said['predicted_peak_bytes'] / 2**20:.1f} MiB" in legend
    opened.keep("peak")
    opened.keys("Escape", "Home")
    # A row for each thing that moves; names of modules are texts.
    table = opened.page.locator("section:not([hidden]) table", has_text="if it stayed")
    module = table.locator("tbody tr", has_text=NAME).first
    assert re.match(r"\d\." + re.escape(NAME), module.locator("td").nth(1).inner_text())
    assert exact(f"({module.locator('td').nth(3).get_attribute('title')})") > 0
    assert "budget" in table.inner_text() or "allocator" in table.inner_text()
    assert opened.page.evaluate("() => document.querySelectorAll('img').length") == 0
    # The lanes say what is copied or runs again.
    kinds = {span["kind"] for lane in chart["lanes"] for span in lane["spans"]}
    assert kinds & {"out", "recompute"}, kinds
    lanes = opened.page.locator("canvas.lanes")
    lanes.scroll_into_view_if_needed()
    box = lanes.bounding_box()
    heard = set()
    for step in range(90):
        across = box["x"] + 90 + (box["width"] - 110) * step / 90
        opened.page.mouse.move(across, box["y"] + 12)
        heard.add(opened.listed())
    assert any("copy to the host" in text or "computed again" in text for text in heard), heard
    opened.keys("Home")
    whole = opened.ticks()
    opened.keys("+", "ArrowRight")
    assert opened.ticks() != whole
    opened.keys("Home")
    opened.keep("light")
    opened.page.click("#theme")
    opened.keep("dark")
    opened.close()
    # The plan in the cache has the curves too, and so has one in a file.
    again = fitted(neap, tmp_path, python, "--budget", "60%", steps=6)
    shown = Opened(browser, tmp_path / "fit.html")
    peaks = {peak["name"]: peak["value"] for peak in curves(shown)["peaks"]}
    assert peaks["with the plan"] == again["predicted_peak_bytes"]
    shown.close()
    assert json.loads((tmp_path / "fit.plan").read_text())["course"]


def test_scripts_that_share_a_gpu(browser: Any, neap: str, python: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    socket, page = str(tmp_path / "gpu"), tmp_path / "shared.html"
    command = [neap, "torch", "--serve", socket, "--budget", "2GiB", "--html", str(page)]
    where = {**os.environ, "NEAP": neap, "NEAP_CACHE": str(tmp_path / "cache")}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=where)
    assert server.stderr is not None and "waiting for scripts" in server.stderr.readline()
    try:
        train = [neap, "dry", "--", neap, "torch", "--join", socket, "--", python, "train.py", "6"]
        done = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True, env=where)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        server.terminate()
        server.wait(30)
    opened = Opened(browser, page)
    memory = curves(opened)
    assert memory["limits"] == [{"name": "budget", "value": 2 << 30}]
    assert memory["peaks"][0]["value"] == 2 << 30
    assert [span["kind"] for span in memory["lanes"][0]["spans"]][-1] == "running"
    assert "train.py" in opened.page.locator("section:not([hidden]) tbody tr").inner_text()
    opened.keep("shared")
    opened.close()
