"""Parts d (in part), e, h and i: `neap run` on the GPU."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from command import Failed, Impossible
from context import Check, median
from lines import Line, Saw

TOOLS = ("memcheck", "racecheck", "synccheck")
"""Accesses out of bounds, races in shared memory, barriers that threads miss."""
OFF = 1e-4
"""How far a loss may be off PyTorch's, as a share of it."""


def graph(check: Check, job: str) -> str:
    """The graph that came along."""
    path = check.root / "graphs" / f"{job}.graph.json"
    if not path.exists():
        raise Impossible(f"no graph of {job} came along")
    return str(path)


def repeats(check: Check) -> str:
    """Iterations of a run, and measurements of an operator."""
    return str(check.manifest["repeats"])


def profiled(job: str, check: Check) -> Saw:
    """The operators' times, and which of the libraries' algorithms all runs of it take."""
    out = check.path(f"{job}.latency.csv")
    device = ["--device", check.device, "--repeats", repeats(check), "-o", str(out)]
    answer = check.neap("profile", graph(check, job), *check.libraries(), *device, watched=True)
    total = sum(kind["total_ns"] for kind in answer["kinds"]) / 1e6
    text = f"{len(answer['kinds'])} kinds of operators, {total:.2f} ms together"
    return Saw(bool(answer["kinds"]), text)


def latencies(check: Check, job: str) -> list[str]:
    """The flags that name what was measured."""
    path = check.path(f"{job}.latency.csv")
    if not path.exists():
        # The line passed in an earlier call, on another machine.
        profiled(job, check)
    return ["--device", check.device, "--latencies", str(path)]


def ran(check: Check, *arguments: str) -> dict[str, Any]:
    """What `neap run` answers."""
    count = ["--iterations", repeats(check)]
    answer: dict[str, Any] = check.neap("run", *arguments, *check.libraries(), *count, watched=True)
    return answer


def costs(answer: dict[str, Any]) -> str:
    """What a run took besides its iterations."""
    text = f"the host submits in {median(answer['submits_ns']) / 1e6:.2f} ms; pinned in "
    text += f"{answer['pinning_ns'] / 1e9:.2f} s; {answer['fallbacks']} fallbacks; "
    text += f"{answer['scratch_bytes']} bytes beside the arena"
    products = answer.get("products", [])
    parts = sum(product["parts"] > 1 for product in products)
    text += f"; {parts} of {len(products)} shapes of products in parts" if products else ""
    plain = [note for note in answer["notes"] if "plain kernels" in note]
    return text + "".join(f"; {note}" for note in plain)


def unplanned(job: str, check: Check) -> Saw:
    """The job without a plan."""
    answer = ran(check, graph(check, job), *latencies(check, job))
    base, wall = median(answer["iterations_ns"]), median(answer["walls_ns"])
    kept = {key: answer.get(key) for key in ("losses", "checksum", "products")}
    kept |= {"ns": base, "wall_ns": wall}
    text = f"{base / 1e6:.2f} ms an iteration in {answer['arena_bytes']} bytes; {costs(answer)}"
    return Saw(answer["fallbacks"] == 0, text, {f"run {job}": kept})


def beside_eager(job: str, check: Check) -> Saw:
    """Both by the host's clock, with what passes between iterations."""
    ours = check.fact(f"run {job}", f"{job} unplanned")["wall_ns"]
    done = check.command(check.model(job, "--iterations", repeats(check)), watched=True)
    theirs = median(json.loads(done.out)["iterations_ns"])
    good = ours <= 1.25 * theirs or check.flags.quick
    return Saw(good, f"{ours / 1e6:.2f} ms, PyTorch {theirs / 1e6:.2f}: {ours / theirs:.2f} times")


def overlap(timeline: Path) -> str:
    """How much of the copies' time operators ran too."""
    events = json.loads(timeline.read_text("utf-8"))["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(tracks[e["tid"]], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    compute = [(a, b) for track, a, b in spans if track == "compute"]
    copies = [(a, b) for track, a, b in spans if track != "compute"]
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in copies for c, d in compute)
    whole = sum(b - a for a, b in copies)
    return f"operators ran in {100 * both / whole:.0f} % of the copies' time" if whole else "none"


def planned(job: str, share: str, check: Check) -> Saw:
    """The job by a plan from the times that were measured here."""
    plain = check.fact(f"run {job}", f"{job} unplanned")
    plan, timeline = (
        check.path(f"{job}.{share[:-1]}.{kind}.json") for kind in ("plan", "timeline")
    )
    times = latencies(check, job)
    try:
        budget = ["--budget", share, "-o", str(plan)]
        made = check.neap("plan", graph(check, job), *times, *budget)
    except Failed as failed:
        if "floor" in str(failed) or "budget" in str(failed):
            raise Impossible(f"there is no such plan: {failed}") from None
        raise
    answer = ran(check, str(plan), "--timeline", str(timeline))
    took, predicted, base = median(answer["iterations_ns"]), made["iteration_ns"], plain["ns"]
    off = abs(predicted - took) / took
    alike = all(answer.get(key) == plain[key] for key in ("losses", "checksum", "products"))
    bytes_ = (answer["peak_bytes"], made["arena_bytes"], answer["arena_bytes"])
    inside = list(bytes_) == sorted(bytes_) and bytes_[-1] <= made["budget_bytes"]
    good = inside and alike and answer["fallbacks"] == 0 and (off <= 0.10 or check.flags.quick)
    text = f"{answer['peak_bytes']} of {made['budget_bytes']} bytes; "
    text += f"{'the same bits' if alike else 'other bits'}; EOR {100 * (took / base - 1):.1f} %, "
    text += f"predicted {100 * (predicted / base - 1):.1f} %; simulated {predicted / 1e6:.2f} ms, "
    text += f"measured {took / 1e6:.2f} ({100 * off:.1f} % off); copies: {overlap(timeline)}; "
    text += f"{answer['late_copies']} late in {answer['timed_iterations']} iterations; "
    return Saw(good, text + costs(answer))


def model(letter: str, job: str, shares: list[str], eager: bool) -> list[Line]:
    """The lines of a larger job."""
    claim = "the plan's bits are the unplanned ones, within the budget, as simulated within 10 %"
    found = [
        Line(f"{letter} {job} operators", "each operator runs", partial(profiled, job), needs_s=20),
        Line(
            f"{letter} {job} unplanned",
            "no operator runs on the plain kernels",
            partial(unplanned, job),
            needs_s=20,
        ),
    ]
    if eager:
        limit = "at most 1.25 of PyTorch's eager time"
        found.append(Line(f"{letter} {job} eager ratio", limit, partial(beside_eager, job)))
    return found + [
        Line(f"{letter} {job} at {share}", claim, partial(planned, job, share), needs_s=20)
        for share in shares
    ]


def part_d(check: Check) -> list[Line]:
    """The two lines of `neap run` that failed on 2026-11-28."""
    return model("d", check.manifest["repaired"], [check.manifest["repaired_share"]], True)


def part_e(check: Check) -> list[Line]:
    """The models that have not run."""
    shares = check.manifest["run_shares"]
    return [line for job in check.manifest["runs"] for line in model("e", job, shares, False)]


# Small jobs


def traces(check: Check) -> list[Path]:
    """Recorded jobs that came along, with PyTorch's losses."""
    folders = (check.root / "fixtures", check.root / "fixtures" / "idioms")
    found = [trace for folder in folders for trace in sorted(folder.glob("*.et.json.gz"))]
    return [trace for trace in found if record_of(trace).exists()]


def record_of(trace: Path) -> Path:
    """PyTorch's losses beside a trace."""
    return trace.with_name(name_of(trace) + ".json")


def name_of(trace: Path) -> str:
    """The job's name."""
    return trace.name.removesuffix(".et.json.gz")


def smallest(check: Check, trace: Path) -> tuple[Path, Path]:
    """The graph of a trace and its smallest plan, made once."""
    name = name_of(trace)
    graph, plan = (check.path(f"{name}.{kind}.json") for kind in ("graph", "min.plan"))
    if not graph.exists():
        check.neap("import", str(trace), "-o", str(graph))
    if not plan.exists():
        device = ["--device", check.device, "--budget", "min", "-o", str(plan)]
        check.neap("plan", str(graph), *device)
    return graph, plan


def sanitized(trace: Path, tool: str, check: Check) -> Saw:
    """An iteration of the smallest plan, watched."""
    program = check.facts.get("sanitizer")
    if not program:
        raise Impossible("no compute-sanitizer")
    _, plan = smallest(check, trace)
    log = check.path(f"{name_of(trace)}.{tool}.log")
    log.unlink(missing_ok=True)
    watch = [program, "--tool", tool, "--error-exitcode", "9", "--log-file", str(log)]
    run = [str(check.neap_path), "--json", "run", str(plan), *check.libraries()]
    check.command([*watch, *run, "--iterations", "1"], fine=(0, 9))
    said = [line.strip("= \n") for line in log.read_text("utf-8", "replace").splitlines()]
    summary = ([line for line in said if "SUMMARY" in line] or ["it wrote no summary"])[-1]
    kinds = r"Error|Invalid|Race|Barrier|Divergent"
    first = next((line for line in said if re.match(kinds, line)), "")
    good = re.search(r"SUMMARY: 0 (errors|hazards)", summary) is not None
    return Saw(good, summary + (f"; {first}" if first and not good else ""))


def part_h(check: Check) -> list[Line]:
    """Two small jobs; times do not matter."""
    jobs = [trace for trace in traces(check) if name_of(trace) in check.manifest["sanitized"]]
    return [
        Line(
            f"h {name_of(trace)} {tool}",
            f"compute-sanitizer's {tool} finds nothing",
            partial(sanitized, trace, tool),
            beside=True,
            needs_s=15,
        )
        for trace in jobs
        for tool in TOOLS
    ]


def losses(trace: Path, check: Check) -> Saw:
    """A recorded loop, with PyTorch's weights where they came along."""
    record = json.loads(record_of(trace).read_text("utf-8"))["losses"]
    graph, plan = smallest(check, trace)
    more = ["--iterations", str(len(record)), *check.libraries()]
    weights = trace.with_name(name_of(trace) + ".safetensors")
    more += ["--weights", str(weights)] if weights.exists() else []
    plain, ours = (check.neap("run", str(job), *more) for job in (graph, plan))
    off = max(abs(a - b) / abs(b) for a, b in zip(plain["losses"], record))
    alike = all(ours[key] == plain[key] for key in ("losses", "checksum"))
    good = len(plain["losses"]) == len(record) and off <= OFF and alike
    return Saw(good, f"at most {off:.1e} off; {'the same' if alike else 'other'} bits when planned")


def part_i(check: Check) -> list[Line]:
    """What ran before, once more: kernels have changed since."""
    claim = f"losses within {OFF:g} of PyTorch's; the smallest plan's bits are the unplanned ones"
    return [
        Line(f"i {name_of(trace)}", claim, partial(losses, trace), beside=True, needs_s=5)
        for trace in traces(check)
    ]
