"""Part a: what the machine is, what it has, and how quick its link is."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from command import PATIENCE_S, Impossible, smi
from context import Check, where
from lines import Line, Saw

PYTHONS = ("python3", "python", "/opt/torch/.venv/bin/python3", "/opt/conda/bin/python")
GPU = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,compute_mode"


def said(*command: str) -> str:
    """The last line that a program prints; nothing if it is not there."""
    program = where(command[0])
    if not program:
        return ""
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ([line for line in done.stdout.splitlines() if line.strip()] or [""])[-1].strip()


def machine(check: Check) -> Saw:
    """The GPU, its driver, the processor's side."""
    done = check.command(
        [check.flags.own_python, str(check.root / "bench/gpu/check/probe.py")], fine=(0, 1)
    )
    answer = json.loads(done.out)
    memory = re.search(r"MemTotal: *(\d+)", Path("/proc/meminfo").read_text())
    gib = int(memory[1]) >> 20 if memory else 0
    gpu = smi(f"--query-gpu={GPU}").splitlines()
    text = f"{answer.get('error') or answer['name']}; CUDA {answer.get('driver', 'unknown')}; "
    text += f"nvidia-smi ({GPU.replace(',', ', ')}): {gpu[0] if gpu else 'no answer'}; "
    text += f"{os.cpu_count()} cores, {gib} GiB, Linux {platform.release()}, {platform.machine()}"
    facts = {"machine": text, "answers": done.code == 0}
    # Such a GPU takes one process at a time.
    facts["beside"] = 1 if gpu and "Exclusive" in gpu[0] else check.flags.beside
    return Saw(done.code == 0, text, facts)


def tools(check: Check) -> Saw:
    """Compilers and the sanitizer; none of them has to be there."""
    programs = {name: where(name) for name in ("nvcc", "compute-sanitizer")}
    found = {
        **{
            name: path and f"{path} {said(path, '--version')}".strip()
            for name, path in programs.items()
        },
        "C compiler": where("cc") or where("gcc") or "",
        "python3": platform.python_version(),
    }
    text = "; ".join(f"{name}: {what or 'not there'}" for name, what in found.items())
    return Saw(True, text, {"sanitizer": programs["compute-sanitizer"] or ""})


def pytorch(check: Check) -> Saw:
    """The first Python whose PyTorch sees the GPU."""
    asked = [check.flags.python] if check.flags.python else [*PYTHONS, sys.executable]
    script = str(check.root / "bench/gpu/check/versions.py")
    seen: list[str] = []
    for python in dict.fromkeys(p for name in asked if (p := where(name))):
        done = check.command([python, script], fine=range(-128, 256))
        try:
            answer = json.loads(done.out.splitlines()[-1])
        except (IndexError, ValueError):
            seen.append(f"{python}: exit code {done.code}")
            continue
        if done.code == 0:
            # What it calls itself may lie in front of another one.
            facts = {"python": python, "cuda_libs": answer["libraries"], "torch": answer["torch"]}
            return Saw(True, ", ".join(f"{k} {v}" for k, v in answer.items()), facts)
        torch = str(answer.get("torch", "not there"))
        seen.append(f"{python}: PyTorch {torch}" + ", sees no GPU" * ("not there" not in torch))
    raise Impossible(f"no PyTorch: {'; '.join(seen) or 'no Python'}")


def link(check: Check) -> Saw:
    """Copies of all sizes, products, additions; all later plans are for what is measured here."""
    out = check.out / "measured.device.json"
    quick = ["--quick"] if check.flags.quick else []
    base = ["--name", "measured", "--device", check.flags.device, *quick, "-o", str(out)]
    answer = check.neap("device", "measure", *check.libraries(), *base, watched=True)
    alone = [row for row in answer["link"] if row["beside"] == "nothing"]
    large = max(alone, key=lambda row: row["bytes"])
    rates = [large[f"{key}_bytes_per_s"] / 1e9 for key in ("h2d", "d2h", "h2d_both", "d2h_both")]
    text = f"{large['bytes'] >> 20} MiB: to the device {rates[0]:.1f} GB/s, from it {rates[1]:.1f}"
    text += f", both at once {rates[2]:.1f} and {rates[3]:.1f}"
    for row in answer["link"]:
        if row["bytes"] == large["bytes"] and row["beside"] != "nothing":
            there, back = row["h2d_bytes_per_s"] / 1e9, row["d2h_bytes_per_s"] / 1e9
            text += f"; beside {row['beside']} {there:.1f} and {back:.1f}"
    flops = max(row["flops_per_s"] for row in answer["products"]) / 1e12
    text += f"; products {flops:.1f} Tflop/s"
    shown = check.neap("device", "show", check.flags.device)["link"]
    claimed = shown["h2d"] / 1e9, shown["d2h"] / 1e9
    near = all(abs(seen / said - 1) <= 0.10 for seen, said in zip(rates, claimed))
    text += f"; {check.flags.device}'s are {claimed[0]:.1f} and {claimed[1]:.1f}"
    return Saw(near or check.flags.quick, text)


def cached(check: Check) -> Saw:
    """A small job, and whether its kernels came along."""
    folder = check.root / "kernels"
    before = {file.name for file in folder.rglob("*.cubin")}
    job = check.root / "fixtures" / "tiny_cnn-adam.et.json.gz"
    graph = check.path("first.graph.json")
    check.neap("import", str(job), "-o", str(graph))
    ran = check.neap("run", str(graph), *check.libraries(), "--iterations", "2")
    fresh = {file.name for file in folder.rglob("*.cubin")} - before
    on = "; ".join(note for note in ran["notes"] if note.startswith("on "))
    text = f"{on}; {len(before)} families of kernels came along, {len(fresh)} were compiled here"
    text += f"; the first iteration took {ran['walls_ns'][0] / 1e6:.0f} ms"
    return Saw(bool(before) and not fresh, text)


def lines(check: Check) -> list[Line]:
    """All of part a."""
    return [
        Line("a machine", "the driver answers, and memory keeps what is written", machine),
        Line("a tools", "says which are there", tools),
        Line("a PyTorch", "a Python has a PyTorch that sees the GPU", pytorch),
        Line("a kernels", "neap's kernels came along compiled", cached),
        Line("a link", "copies within 10 % of the built-in device's figures", link, needs_s=30),
    ]
