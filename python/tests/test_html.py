"""The pages that `--html` writes, looked at in a browser; those of `neap torch` in
`test_html_torch.py`.

Needs Playwright and a Chromium: $NEAP_CHROMIUM, one on the PATH, or Playwright's own. Without them
the tests are skipped; $NEAP_REQUIRE_BROWSER makes that a failure. Screenshots stay in
$NEAP_SCREENSHOTS, if that names a folder.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opened import HOSTILE, Opened, exact, run

ROOT = Path(__file__).parents[2]

ZOOM = """async () => {
    const began = performance.now();
    const key = new KeyboardEvent("keydown", { key: "+", bubbles: true });
    document.querySelector("section:not([hidden]) .chart").dispatchEvent(key);
    await new Promise((done) => requestAnimationFrame(done));
    return performance.now() - began;
}"""
"""Milliseconds until a chart shows half of what it showed."""


SIZES = [mib << 20 for mib in (12, 16, 20, 40)]
"""Bytes of the blocks on each stream. The allocator has a pool for each, and takes for each such
block that no free one serves a segment of its size: which addresses it gives out is plain.
"""


def snapshot(path: Path, events: int) -> None:
    """Writes a memory snapshot as PyTorch pickles it, of a script that keeps about 4,000 blocks."""
    draw = random.Random(1)
    stacks = [
        [
            {"name": "forward", "filename": "/lib/torch/nn/modules/linear.py", "line": 1},
            {"name": f"step_{line}", "filename": "/home/me/train.py", "line": line},
        ]
        for line in range(50)
    ]
    free: list[list[int]] = [[] for _ in SIZES]
    trace: list[dict[str, Any]] = []
    living: list[tuple[int, int, list[dict[str, Any]]]] = []
    segments: dict[int, int] = {}

    def event(action: str, addr: int, stream: int, frames: list[dict[str, Any]]) -> None:
        about = {"addr": addr, "size": SIZES[stream], "stream": stream}
        trace.append({"action": action, **about, "time_us": len(trace), "frames": frames})

    while len(trace) < events:
        if living and draw.random() < len(living) / 4000:
            one = draw.randrange(len(living))
            living[one], living[-1] = living[-1], living[one]
            addr, stream, frames = living.pop()
            event("free_requested", addr, stream, frames)
            event("free_completed", addr, stream, frames)
            heapq.heappush(free[stream], addr)
            continue
        stream, frames = draw.randrange(len(SIZES)), draw.choice(stacks)
        if free[stream]:
            addr = heapq.heappop(free[stream])
        else:
            addr = (len(segments) + 1) << 26
            segments[addr] = stream
            event("segment_alloc", addr, stream, frames)
        event("alloc", addr, stream, frames)
        living.append((addr, stream, frames))
    there = {addr: frames for addr, _, frames in living}
    form = {
        "segments": [segment(addr, stream, there.get(addr)) for addr, stream in segments.items()],
        "device_traces": [trace],
        "allocator_settings": {},
    }
    path.write_bytes(pickle.dumps(form))


def segment(addr: int, stream: int, frames: list[dict[str, Any]] | None) -> dict[str, Any]:
    """A segment at the snapshot, with its one block; without frames that is free."""
    size = SIZES[stream]
    taken = 0 if frames is None else size
    block = {
        "address": addr,
        "size": size,
        "requested_size": size,
        "state": "inactive" if frames is None else "active_allocated",
        "frames": frames or [],
    }
    return {
        "device": 0,
        "address": addr,
        "total_size": size,
        "allocated_size": taken,
        "active_size": taken,
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }


def test_a_snapshot_of_half_a_million_events(browser: Any, neap: str, tmp_path: Path) -> None:
    snapshot(tmp_path / "many.pickle", 500_000)
    said = run(neap, tmp_path, "replay", "many.pickle", "--check", "--html", "many.html")
    # It is what PyTorch's allocator would have done, to the byte.
    assert said["matches"] is True
    opened = Opened(browser, tmp_path / "many.html")
    before = opened.point(0.5, 0.8)
    assert "request 1" in before and "blocks live here" in before
    opened.page.mouse.wheel(0, -400)
    zooms = sorted(opened.page.evaluate(ZOOM) for _ in range(9))
    print(f"loaded in {opened.seconds:.2f} s, zoomed in {zooms[4]:.0f} ms (median of 9)")
    # So near that each request has its own step: pointing finds a block.
    opened.press("peak allocated")
    opened.keys("+", "+", "+", "+", "+", "+", "+", "+", "+", "+")
    opened.press("peak allocated")
    at_peak = opened.listed()
    data = json.loads(opened.page.locator("#data").text_content())
    peak = data["views"][0]["charts"][0]["peaks"][0]
    assert peak["value"] == said["peak_allocated_bytes"]
    assert f"request {peak['at']:,}" in at_peak
    opened.keep("peak")
    opened.keys("Escape")
    assert "whole life" not in opened.point(0.5, 0.5)
    assert exact(opened.listed()) in SIZES
    # By the line that the stacks name.
    opened.page.locator("input[type=search]").fill("train.py:7")
    found = opened.listed()
    assert "blocks match" in found and "train.py:7" in found
    opened.press("life")
    assert exact(opened.listed()) in SIZES
    opened.keep("search")
    opened.close()


def test_names_stay_texts_and_the_theme_changes(browser: Any, neap: str, tmp_path: Path) -> None:
    graph = json.loads(
        gzip.decompress((ROOT / "fixtures/models/gpt2-4x512.graph.json.gz").read_bytes())
    )
    name = max(graph["tensors"], key=lambda t: math.prod(t["shape"]))["name"]
    text = json.dumps(graph).replace(json.dumps(name), json.dumps(HOSTILE))
    graph = {**json.loads(text), "name": HOSTILE}
    (tmp_path / "gpt2.graph.json").write_text(json.dumps(graph))
    run(
        neap,
        tmp_path,
        "plan",
        "gpt2.graph.json",
        "--device",
        "a6000",
        "--budget",
        "60%",
        "-o",
        "gpt2.plan.json",
    )
    said = run(neap, tmp_path, "explain", "gpt2.plan.json", "--top", "100", "--html", "gpt2.html")
    opened = Opened(browser, tmp_path / "gpt2.html")
    assert opened.page.locator("h1").inner_text().startswith(HOSTILE)
    assert opened.page.evaluate("() => document.querySelectorAll('img').length") == 0
    assert opened.page.evaluate("() => document.title").startswith(HOSTILE)
    table = opened.page.locator("section:not([hidden]) table").last
    rows = table.locator("tbody tr")
    opened.press("all 100 rows")
    assert rows.count() == len(said["tensors"]) == 100
    for row, tensor in zip(rows.all()[:20], said["tensors"]):
        cells = row.locator("td")
        assert cells.nth(0).inner_text() == tensor["tensor"]
        assert cells.nth(2).get_attribute("title") == f"{tensor['bytes']:,} bytes"
    # The lanes say what is copied.
    lanes = opened.page.locator("canvas.lanes")
    lanes.scroll_into_view_if_needed()
    box = lanes.bounding_box()
    said_of = set()
    for step in range(60):
        opened.page.mouse.move(box["x"] + 90 + (box["width"] - 110) * step / 60, box["y"] + 28)
        said_of.add(opened.listed())
    assert any("copy to the host" in text and "MiB" in text for text in said_of), said_of
    opened.keep("light")
    light = opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    opened.page.click("#theme")
    dark = opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(22, 24, 28)")
    opened.keep("dark")
    opened.close()
    by_system = Opened(browser, tmp_path / "gpt2.html", dark=True)
    assert by_system.page.evaluate("() => getComputedStyle(document.body).backgroundColor") == dark
    by_system.close()


def test_a_thousand_jobs(browser: Any, neap: str, tmp_path: Path) -> None:
    draw = random.Random(2)
    rows = ["job,persistent_bytes,ephemeral_bytes,submit_s,duration_s"]
    for job in range(1000):
        size = draw.choice([1, 2, 3])
        rows.append(f"job-{job},{size}GiB,{size}GiB,{job * 20},{draw.randrange(20, 400)}")
    (tmp_path / "jobs.csv").write_text("\n".join(rows) + "\n")
    said = run(
        neap, tmp_path, "share", "jobs.csv", "--policies", "fifo,neap", "--html", "jobs.html"
    )
    opened = Opened(browser, tmp_path / "jobs.html")
    opened.page.locator("[role=tab]", has_text="neap").click()
    assert "waiting" in opened.page.locator("section:not([hidden])").inner_text()
    opened.press("all 1,000 rows")
    table = opened.page.locator("section:not([hidden]) table").last
    assert table.locator("tbody tr").count() == 1000
    table.locator("th button", has_text="waited").click()
    waited = json.loads(opened.page.locator("#data").text_content())
    longest = max(row[4] for row in waited["views"][2]["tables"][0]["rows"])
    first = table.locator("tbody tr").first.locator("td").nth(4).inner_text()
    assert first == f"{longest / 1e9:.2f} s"
    assert said["policies"][1]["done"] == 1000
    # Both charts move together.
    whole = opened.ticks()
    opened.keys("+", "ArrowRight")
    assert opened.ticks() != whole
    opened.keys("Home")
    opened.page.wait_for_timeout(80)
    assert opened.ticks() == whole
    opened.keep("jobs")
    opened.close()


RESNET = """
import torch, torchvision
model = torchvision.models.resnet50().cuda()
optimizer = torch.optim.AdamW(model.parameters())
data, target = torch.randn(8, 3, 224, 224).cuda(), torch.zeros(8, dtype=torch.long).cuda()
for _ in range(3):
    torch.nn.functional.cross_entropy(model(data), target).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_three_steps_of_resnet_50(browser: Any, neap: str, tmp_path: Path) -> None:
    python = os.environ.get("NEAP_TORCH_PYTHON", sys.executable)
    has = "import torch, torchvision; assert torch.version.cuda"
    found = subprocess.run([python, "-c", has], capture_output=True)
    if found.returncode != 0 or sys.platform != "linux":
        pytest.skip("needs a CUDA build of PyTorch and torchvision, on Linux")
    (tmp_path / "train.py").write_text(RESNET)
    said = run(neap, tmp_path, "dry", "--html", "resnet50.html", "--", python, "train.py")
    path = tmp_path / "resnet50.html"
    assert path.stat().st_size < 2_000_000
    opened = Opened(browser, path)
    data = json.loads(opened.page.locator("#data").text_content())
    assert data["report"] == said
    peaks = {p["name"]: p["value"] for p in data["views"][0]["charts"][0]["peaks"]}
    assert peaks["allocated"] == said["peak_allocated_bytes"]
    assert peaks["reserved"] == said["peak_reserved_bytes"]
    opened.press("peak allocated")
    text = opened.listed()
    assert f"step {said['processes'][0]['peak']['step']}" in text and "train.py:7" in text
    opened.keep("peak")
    # A block's life: its name and line, from where to where.
    opened.keys("Escape", "Home")
    field = opened.page.locator("input[type=search]")
    field.fill("layer4.2.conv3.weight")
    found = opened.listed()
    assert "blocks match" in found and "layer4.2.conv3.weight" in found
    opened.press("life")
    life = opened.listed()
    # The allocator gives out a little more where the rest of a block is small.
    assert "layer4.2.conv3.weight" in life and exact(life) >= 512 * 2048 * 4
    opened.keep("life")
    opened.page.locator("[role=tab]", has_text="where it fits").click()
    rows = opened.page.locator("section:not([hidden]) tbody tr")
    assert rows.count() == len(said["verdicts"])
    opened.keep("fits")
    opened.close()


def test_a_page_prints_and_can_be_read_without_a_mouse(
    browser: Any, neap: str, tmp_path: Path
) -> None:
    rows = [
        "op,id,bytes,stream",
        *(f"a,{i},{i + 1}MiB,0".replace("MiB", "000000") for i in range(50)),
    ]
    (tmp_path / "few.csv").write_text("\n".join(rows) + "\n")
    said = run(neap, tmp_path, "replay", "few.csv", "--html", "few.html")
    opened = Opened(browser, tmp_path / "few.html")
    opened.keys("p")
    assert "request 49" in opened.listed()
    opened.page.keyboard.press("Escape")
    opened.page.locator("summary").click()
    figures = opened.page.locator("table.figures").inner_text()
    assert f"{said['peak_reserved_bytes']:,} bytes" in figures
    label = opened.page.locator(".chart").get_attribute("aria-label")
    assert "peak of reserved" in label and "request 49" in label
    opened.page.emulate_media(media="print")
    assert not opened.page.locator("#theme").is_visible()
    opened.close()
