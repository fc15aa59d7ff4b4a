"""What a report shows in a notebook."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from pathlib import Path

import neap.torch
import pytest
from neap.torch import Report
from neap.torch._tally import Kind

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture
def report() -> Report:
    """Of a script that kept to its budget."""
    return Report(
        budget_bytes=1 << 30,
        unplanned_peak_bytes=3 << 29,
        predicted_peak_bytes=1000 << 20,
        peak_reserved_bytes=1001 << 20,
        planned=5,
        unplanned={HOSTILE: 2},
        met=True,
        notes=[HOSTILE],
    )


def test_a_report_shows_itself_as_a_page(
    neap: str, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEAP", neap)
    page = report.html()
    assert page.count("<script") == 2
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    shown = {key: value for key, value in asdict(report).items() if key != "course"}
    assert data["report"] == json.loads(json.dumps(shown))
    # A plan acts of which nothing is drawn.
    assert data["notes"][0] == HOSTILE and "curves are not known" in data["notes"][1]
    peaks = {row[0]: row[1] for row in data["views"][0]["tables"][0]["rows"]}
    assert peaks["predicted without the plan"] == 3 << 29
    assert peaks["measured, reserved"] == 1001 << 20
    frame = report._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and html.unescape(frame).count(page) == 1
    # The page is one attribute: nothing of it is markup of the notebook.
    assert frame.count("<") == 2


def test_without_the_executable_it_is_text(
    report: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("neap.torch._planning.executable", lambda: str(tmp_path / "none"))
    assert report._repr_html_() == f"<pre>{html.escape(str(report))}</pre>"


def test_a_report_is_read_from_its_file(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "reports.json"
    report.kinds = [Kind(3, iterations=5, by_plan=5)]
    form = {**asdict(report), "of a later neap": 1}
    form["kinds"][0]["of a later neap"] = 2
    path.write_text(json.dumps([asdict(Report()), form]))
    assert neap.torch.report(path, 1) == report


@pytest.mark.parametrize(
    ("text", "why"), [("", "not the output"), ("{}", "no list"), ("[]", "holds 0 reports")]
)
def test_what_is_no_report_is_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "reports.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"reports.json: .*{why}"):
        neap.torch.report(path)
