"""A page in a headless Chromium: what tests of pages do with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>document.title='hurt'</script><img src=x onerror=document.title='hurt'>"


class Opened:
    """A page in a tab, what its console said, and how long it took to be drawn."""

    def __init__(self, browser: Any, path: Path, dark: bool = False) -> None:
        self.said: list[str] = []
        self.page = browser.new_page(
            viewport={"width": 1280, "height": 900}, color_scheme="dark" if dark else "light"
        )
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url, path))
        began = time.monotonic()
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("section:not([hidden]) table, section:not([hidden]) canvas")
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(done))")
        self.seconds = time.monotonic() - began
        self.name = path.stem

    def _asked(self, url: str, path: Path) -> None:
        if url != path.as_uri():
            self.said.append(f"asked for {url}")

    def box(self) -> dict[str, float]:
        """The area of the first chart that is shown."""
        area = self.page.locator("section:not([hidden]) .u-over").first
        area.scroll_into_view_if_needed()
        found: dict[str, float] = area.bounding_box()
        return found

    def point(self, across: float, down: float) -> str:
        """Points at a place of the chart, by shares of it, and returns what is listed."""
        box = self.box()
        self.page.mouse.move(box["x"] + box["width"] * across, box["y"] + box["height"] * down)
        return self.listed()

    def listed(self) -> str:
        """What is said below the chart."""
        self.page.wait_for_timeout(80)
        return str(self.page.locator("section:not([hidden]) .panel").inner_text())

    def press(self, button: str) -> None:
        """Presses a button by its text."""
        self.page.locator(f"section:not([hidden]) button:text-matches('{button}')").first.click()

    def keys(self, *keys: str) -> None:
        """Presses keys on the first chart."""
        self.page.locator("section:not([hidden]) .chart").first.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def ticks(self) -> list[str]:
        """A picture of what the chart shows, to compare."""
        script = "() => document.querySelector('section:not([hidden]) canvas').toDataURL()"
        return [self.page.evaluate(script)]

    def keep(self, what: str) -> None:
        """Keeps a screenshot."""
        if folder := os.environ.get("NEAP_SCREENSHOTS"):
            self.page.screenshot(path=f"{folder}/{self.name}-{what}.png")

    def close(self) -> None:
        """Nothing may have gone wrong."""
        assert self.said == []
        self.page.close()


def run(neap: str, folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """What `neap --json` says."""
    done = subprocess.run([neap, "--json", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    form: dict[str, Any] = json.loads(done.stdout)
    return form


def exact(text: str) -> int:
    """The first number of bytes in a text such as `1.5 GiB (1,610,612,736 bytes)`."""
    found = re.search(r"\(([0-9,]+) bytes\)", text)
    assert found, text
    return int(found[1].replace(",", ""))
