"""Part b: what PyTorch's allocator and kernels do on this GPU, against the device of `neap dry`.

Times do not matter here, so that lines run beside each other; so do the compilations of what part c
times.
"""

from __future__ import annotations

import json
from functools import partial

from context import Check
from lines import Line, Saw

STEPS = "4"


def snapshot(job: str, check: Check) -> Saw:
    """Each request to the allocator, in order.

    Peaks decide: the order in which autocast lets go of its copies depends on addresses, so that
    two runs on one GPU differ there.
    """
    real = check.path(f"{job}.pickle")
    script = check.model(job, "--iterations", STEPS)
    check.command([*script, "--snapshot", str(real)])
    dry = [str(check.neap_path), "--json", "dry", "--device", check.flags.device]
    done = check.command([*dry, "--check-against", str(real), "--", *script], fine=(0, 1))
    answer = json.loads(done.out)["against"]
    agree, recorded = answer["agreeing_requests"], answer["recorded_requests"]
    text, good = f"{agree} of {recorded} requests agree; ", recorded > 0
    for key in ("allocated", "reserved"):
        ours, theirs = answer[f"run_peak_{key}_bytes"], answer[f"recorded_peak_{key}_bytes"]
        text += f"{key} peak {ours} bytes, on the GPU {theirs}"
        text += f" ({100 * (ours / theirs - 1):+.2f} %); " if theirs else "; "
        good &= ours == theirs
    text += f"first difference: {answer['first_difference'] or 'none'}"
    real.unlink(missing_ok=True)
    return Saw(good, text, {f"snapshot {job}": answer})


def kernels(check: Check) -> Saw:
    """The same questions of the driver and of the dry device."""
    here, dry = check.path("kernels.json"), check.path("kernels-dry.json")
    script = check.script("bench/gpu/check/kernels.py")
    check.command([*script, str(here), "--count", str(check.manifest["kernels"])])
    neap = [str(check.neap_path), "dry", "--device", check.flags.device, "--"]
    check.command([*neap, *script, str(dry), "--like", str(here)])
    on_gpu, on_dry = (json.loads(file.read_text("utf-8")) for file in (here, dry))
    pairs = [
        (name, said, on_dry.get(at, {}).get(name))
        for at, names in on_gpu.items()
        for name, said in names.items()
    ]
    other = [(name, said, ours) for name, said, ours in pairs if said != ours]
    text = f"{len(pairs) - len(other)} of {len(pairs)} kernels alike"
    if other:
        name, said, ours = other[0]
        keys = [key for key in said if not ours or said[key] != ours.get(key)]
        shown = ", ".join(f"{k} {said[k]}, dry {ours.get(k) if ours else 'unknown'}" for k in keys)
        text += f"; first: {name[:100]}: {shown}"
    facts = {"kernels differ": [[name, said, ours] for name, said, ours in other[:50]]}
    return Saw(bool(pairs) and not other, text, facts)


def compiled(job: str, check: Check) -> Saw:
    """Fills the compiler's cache."""
    way = ["--way", "compiled offload", "--iterations", "2", "--deterministic"]
    answer = json.loads(check.command(check.model(job, *way)).out)
    seconds = answer["iterations_ns"][0] / 1e9
    return Saw(True, f"the first iteration took {seconds:.1f} s", {f"compiled {job}": seconds})


def lines(check: Check) -> list[Line]:
    """All of part b."""
    jobs = check.manifest
    found = [
        Line(
            f"b snapshot {job}",
            "both peaks are those of `neap dry`; requests are compared one by one",
            partial(snapshot, job),
            beside=True,
            needs_s=30,
        )
        for job in jobs["snapshots"]
    ]
    kinds = "registers, shared and local memory and blocks a multiprocessor are the dry device's"
    found.append(Line("b kernels", kinds, kernels, beside=True, needs_s=30))
    found += [
        Line(
            f"b compiler {job}",
            "PyTorch compiles the job with its activations on the host, for part c",
            partial(compiled, job),
            beside=True,
            needs_s=30,
        )
        for job in jobs["compiled"]
    ]
    return found
