"""What `neap dry` says of other devices, of categories, and of lines that read the device."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not (Path(torch.__file__).parent / "lib" / "libtorch_cuda.so").exists(),
    reason="this PyTorch is built for the CPU",
)

ATTENTION = """
    import torch
    import torch.nn.functional as F

    def tensor():
        shape = (2, 8, 2048, 64)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = tensor(), tensor(), tensor()
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    print("said once")
    """
"""In bfloat16, for which PyTorch takes other kernels before Ampere."""


def dry(neap: str, folder: Path, script: str, *flags: str) -> dict[str, Any]:
    """The report of a script that ends well."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [neap, "dry", "--json", *flags, "--", sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("said once") == script.count("said once")
    form: dict[str, Any] = json.loads(done.stdout)
    return form


def by_device(form: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["device"]: row for row in form["verdicts"]}


def test_a_run_says_nothing_of_other_generations(neap: str, tmp_path: Path) -> None:
    form = dry(neap, tmp_path, ATTENTION)
    rows = by_device(form)
    known = {name for name, row in rows.items() if row["fits"] is not None}
    assert known == {"h100", "h200", "gh200"}
    assert rows["h100"]["peak_reserved_bytes"] == form["peak_reserved_bytes"]
    assert rows["rtx2080ti"]["peak_reserved_bytes"] is None


def test_all_devices_are_what_a_run_on_each_is(neap: str, tmp_path: Path) -> None:
    script = ATTENTION + '\n    open("written", "a").write("x")\n'
    record = tmp_path / "events.csv"
    form = dry(neap, tmp_path, script, "--all-devices", "--events", str(record))
    rows = by_device(form)
    assert not [row for row in rows.values() if row["fits"] is None and row["fails"] is None]
    for name in ("rtx2080ti", "rtx3090", "a100-40g"):
        alone = dry(neap, tmp_path, ATTENTION, "--device", name)
        assert rows[name]["peak_reserved_bytes"] == alone["peak_reserved_bytes"], name
    assert rows["rtx2080ti"]["peak_reserved_bytes"] > 1.5 * form["peak_reserved_bytes"]


def test_a_device_without_kernels_is_said_to_have_none(neap: str, tmp_path: Path) -> None:
    rows = by_device(dry(neap, tmp_path, ATTENTION, "--all-devices"))
    supported = {int(name[3:]) for name in torch.cuda.get_arch_list() if name.startswith("sm_")}
    for name, capability in (("p100", 60), ("v100", 70)):
        if not [c for c in supported if c // 10 == capability // 10 and c <= capability]:
            assert "no kernels" in rows[name]["fails"], name


def test_a_gradient_of_32_mib_is_no_workspace(neap: str, tmp_path: Path) -> None:
    product = """
    import torch

    y = torch.ones(64, 64, device="cuda")
    y @ y
    """
    backward = """
    import torch

    a, b, c = (torch.randn(2048, 4096, device="cuda", requires_grad=True) for _ in range(3))
    (a * b * c).sum().backward()
    """
    for script, workspaces in ((backward, 0), (product + backward, 32 << 20)):
        form = dry(neap, tmp_path, script)
        categories = form["processes"][0]["peak"]["categories"]
        assert categories["gradient"] >= 32 << 20
        assert categories["workspace"] == workspaces


def test_a_line_that_reads_a_result_is_listed(neap: str, tmp_path: Path) -> None:
    script = """
    import torch

    x = torch.ones(4, 4, device="cuda")
    if (x @ x).sin().sum().item() < 1:
        print("taken")
    """
    form = dry(neap, tmp_path, script)
    assert [read["line"] for read in form["processes"][0]["reads"]] == [5]
    assert "if no line listed" in form["certainty"]


def test_categories_that_are_not_there_at_the_peak_are_listed(neap: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch

            model = torch.nn.Linear(64, 64).cuda()
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(65536, 64, device="cuda")).sin().sum().backward()
            optimizer.step()
            """
        )
    )
    command = [neap, "dry", "--", sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("optimizer state")]
    assert rows and rows[0][2:4] == ["0", "B"], done.stdout
