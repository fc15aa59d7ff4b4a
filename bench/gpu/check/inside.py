"""Parts c, d (in part), f and g: `neap torch` around scripts of bench/gpu/models.py."""

from __future__ import annotations

import json
import statistics
from functools import partial
from typing import Any

from command import Done
from context import TIMED, Check
from lines import Line, Saw

COMPILED = "compiled offload"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""As `neap torch` sets it."""
SLACK = 0.10
"""How much slower an iteration may be than its plan says, as a share of the unplanned one."""
TIMES_RESERVED = 64 << 20
"""What the process pins beside neap: PyTorch's small transfers."""


def tail(answer: dict[str, Any]) -> float:
    """Milliseconds of an iteration at the end, where all has settled."""
    return float(statistics.median(answer["iterations_ns"][-TIMED:])) / 1e6


def mib(size: float) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:,.0f} MiB"


def clocks(done: Done) -> str:
    """The range of clocks meanwhile: a GPU that throttles explains a time."""
    return f"; SM clock {done.clocks[0]} to {done.clocks[1]} MHz" if done.clocks else ""


def iterations(check: Check, job: str) -> list[str]:
    """How long a job trains; longer where its plan is made here."""
    own = job == check.manifest["repaired_script"]
    count = check.manifest["script_iterations" if own else "iterations"]
    return ["--iterations", str(count), "--deterministic"]


def trained(check: Check, job: str, *more: str) -> tuple[dict[str, Any], Done]:
    """A job of as many iterations as part c compares, and what it printed."""
    script = check.model(job, *iterations(check, job), *more)
    done = check.command(script, watched=True, env=EXPANDABLE)
    return json.loads(done.out), done


def eager(job: str, check: Check) -> Saw:
    """The script as it is, twice from the same seed."""
    answer, done = trained(check, job, "--twice")
    text = f"{tail(answer):.2f} ms an iteration; peak {mib(answer['peak_bytes'])} allocated, "
    text += f"{mib(answer['peak_reserved_bytes'])} reserved; the losses of a second training are "
    text += "the same" if answer["repeats"] else "others"
    facts = {f"eager {job}": {key: answer[key] for key in ("losses", "repeats", "host_bytes")}}
    facts[f"eager {job}"]["ms"] = tail(answer)
    planned_for = check.manifest["reserved"].get(job)
    if planned_for:
        text += f"; `neap dry` says {mib(planned_for)} reserved"
    return Saw(answer["repeats"], text + clocks(done), facts)


def report_of(done: Done) -> dict[str, Any]:
    """neap's report, which it prints last on stdout."""
    reports = json.loads(done.out[done.out.rindex("\n[") if "\n[" in done.out else 0 :])
    report: dict[str, Any] = reports[0]
    return report


def summary(report: dict[str, Any], answer: dict[str, Any]) -> str:
    """What the report says, and when the plan began to act."""
    text = f"reserved {mib(report['peak_reserved_bytes'])} of {mib(report['budget_bytes'])}"
    without = sum(report["unplanned"].values())
    text += f"; {report['planned']} iterations by the plan, {without} without"
    watched = report["unplanned"].get("watching", 0)
    if report["planned"] and watched < len(answer["starts_s"]):
        text += f", the plan acts {answer['starts_s'][watched]:.1f} s after the process's start"
    for key in ("unplanned", "replans", "notes"):
        text += f"; {key}: {report[key]}" if report[key] else ""
    return text


def same(ours: list[float], theirs: list[float]) -> int:
    """How many losses are alike, to the last bit."""
    return sum(a == b for a, b in zip(ours, theirs))


def within(job: str, asked: str, packed: bool, check: Check) -> Saw:
    """neap around the script; by a plan that came along, or planned here."""
    plain = check.fact(f"eager {job}", f"{job} eager")
    file = check.path(f"{job}.{asked.replace('%', '')}.losses.json")
    script = check.model(job, *iterations(check, job), "--out", str(file))
    plan = check.manifest["plans"].get(f"{job} {asked}") if packed else None
    how = ["--plan", str(check.root / plan)] if plan else ["--budget", asked, "--no-cache"]
    neap = [str(check.neap_path), "torch", "--json", *how, "--"]
    done = check.command([*neap, *script], watched=True)
    report, answer = report_of(done), json.loads(file.read_text("utf-8"))
    alike, ms = same(answer["losses"], plain["losses"]), tail(answer)
    whole = len(answer["losses"])
    text = f"{alike} of {whole} losses the same bits; {summary(report, answer)}; "
    predicted, unplanned = (
        report[key] / 1e6 for key in ("predicted_iteration_ns", "unplanned_iteration_ns")
    )
    text += f"{ms:.2f} ms, {ms / plain['ms']:.3f} of eager's {plain['ms']:.2f}"
    text += f"; predicted {predicted:.2f} of {unplanned:.2f}" + clocks(done)
    quick = ms / plain["ms"] <= predicted / unplanned + SLACK if unplanned else False
    good = report["met"] and (quick or check.flags.quick)
    if plain["repeats"]:
        good = good and alike == whole
    else:
        text += "; PyTorch itself repeats no losses here, so that bits say nothing"
    if not packed:
        return Saw(good, text)
    pinned = {"reported": report["pinned_bytes"], "seen": done.pinned_bytes}
    pinned |= {"host": answer["host_bytes"] - plain["host_bytes"]}
    return Saw(good, text, {f"pinned {job} {asked}": pinned, f"ms {job} {asked}": ms})


def other(job: str, way: str, check: Check) -> Saw:
    """What users do otherwise; nothing is claimed of it."""
    plain = check.fact(f"eager {job}", f"{job} eager")
    answer, done = trained(check, job, "--way", way)
    ms = tail(answer)
    text = f"{ms:.2f} ms, {ms / plain['ms']:.3f} of eager's; peak {mib(answer['peak_bytes'])} "
    text += f"allocated, {mib(answer['peak_reserved_bytes'])} reserved" + clocks(done)
    return Saw(True, text, {f"ms {job} {way}": ms})


def part_c(check: Check) -> list[Line]:
    """Each job by itself, by its plans, and by the other ways."""
    found = []
    for job in check.manifest["inside"]:
        claim = "PyTorch gives the same losses again"
        found.append(Line(f"c {job} eager", claim, partial(eager, job), needs_s=20))
        for share in check.manifest["shares"]:
            claim = (
                f"the losses' bits, at most {share} of what eager reserves, and the predicted time"
            )
            work = partial(within, job, share, True)
            found.append(Line(f"c {job} at {share}", claim, work, needs_s=20))
    for job in check.manifest["inside"]:
        for way in [*check.manifest["ways"], *[COMPILED] * (job in check.manifest["compiled"])]:
            claim = "nothing: what users do without neap"
            found.append(Line(f"c {job} {way}", claim, partial(other, job, way), needs_s=20))
    return found


def part_d(check: Check) -> list[Line]:
    """The script that had not ended after two minutes; its plan is made here."""
    job, share = (check.manifest[key] for key in ("repaired_script", "repaired_script_share"))
    claim = f"within {share} of what the script allocates, planned here: ends, with the same bits"
    found = [Line(f"d {job} script", claim, partial(within, job, share, False), needs_s=30)]
    if job not in check.manifest["inside"]:
        first = "PyTorch gives the same losses again"
        found.insert(0, Line(f"d {job} eager", first, partial(eager, job)))
    return found


def served(check: Check) -> Saw:
    """Two scripts within one budget, at the same time."""
    jobs = check.manifest["served"]
    count = ["--iterations", str(check.manifest["served_iterations"]), "--deterministic"]
    socket, neap = check.path("served.socket"), [str(check.neap_path), "torch", "--json"]
    socket.unlink(missing_ok=True)
    files = [check.path(f"served-{number}.json") for number in range(2)]
    scripts = [check.model(job, *count, "--out", str(file)) for job, file in zip(jobs, files)]
    budget = str(check.manifest["served_budget"])
    first = [*neap, "--serve", str(socket), "--budget", budget, "--", *scripts[0]]
    second = [*neap, "--join", str(socket), "--", *scripts[1]]
    both = check.commands([first, second], watched=True, ready=socket)
    text, good = f"budget {mib(int(budget))}", True
    for job, file, done in zip(jobs, files, both):
        plain = check.fact(f"alone {job}", f"f {job} alone")
        report, answer = report_of(done), json.loads(file.read_text("utf-8"))
        alike = same(answer["losses"], plain["losses"])
        text += f"; {job}: {alike} of {len(answer['losses'])} losses the same bits, "
        text += f"{summary(report, answer)}, {tail(answer):.2f} ms, alone {plain['ms']:.2f}"
        good &= alike == len(plain["losses"]) or not plain["repeats"]
        # In a rehearsal a script may end before its last share's plan is final.
        good &= report["planned"] > 0 and (report["met"] or check.flags.quick)
    return Saw(good, text)


def alone(job: str, check: Check) -> Saw:
    """One of them without neap."""
    count = ["--iterations", str(check.manifest["served_iterations"]), "--deterministic"]
    answer = json.loads(check.command(check.model(job, *count, "--twice"), env=EXPANDABLE).out)
    kept = {key: answer[key] for key in ("losses", "repeats")} | {"ms": tail(answer)}
    text = f"{tail(answer):.2f} ms, {mib(answer['peak_reserved_bytes'])} reserved"
    return Saw(answer["repeats"], text, {f"alone {job}": kept})


def part_f(check: Check) -> list[Line]:
    """Two scripts on one GPU."""
    claims = "two scripts in lanes: each one's bits, and its share of one budget"
    first = "PyTorch gives the same losses again"
    found = [
        Line(f"f {job} alone", first, partial(alone, job), needs_s=20)
        for job in dict.fromkeys(check.manifest["served"])
    ]
    return [*found, Line("f served", claims, served, needs_s=40)]


def pinned(job: str, share: str, check: Check) -> Saw:
    """What neap says that it pins, and what the kernel counted during the line in part c."""
    found = check.fact(f"pinned {job} {share}", f"c {job} at {share}")
    text = f"reported {mib(found['reported'])}; "
    said, seen = found["reported"], found["seen"]
    if seen <= 0:
        # Nothing was pinned in the kernel's count: a driver that counts otherwise, or none.
        seen = found["host"]
        text += f"the kernel counts none; the process grew by {mib(seen)}"
        return Saw(abs(seen - said) <= 0.15 * said + 2 * TIMES_RESERVED or check.flags.quick, text)
    text += f"pinned {mib(seen)} by the kernel's count"
    return Saw(said <= seen <= 1.02 * said + TIMES_RESERVED, text)


def part_g(check: Check) -> list[Line]:
    """Of the lines of part c, those with a plan."""
    claim = "host memory is pinned as the report says"
    return [
        Line(f"g pinned {job} at {share}", claim, partial(pinned, job, share), needs_s=1)
        for job in check.manifest["inside"]
        for share in check.manifest["shares"]
    ]
