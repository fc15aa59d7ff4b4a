"""Trains what record.py recorded with neap, planned and not, and compares losses with PyTorch's.

    python bench/idioms/check.py FOLDER [--neap FILE] [--budget 80%] [NAME …]

Prints one line for each job: the largest difference of a loss, or the first line of neap's refusal. Planned and
unplanned losses and checksums must be equal. Exit code 1 where a job is wrong or refused.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CLOSE = 1e-4
# A bf16 has three digits, and PyTorch's CPU rounds in other places.
CLOSE_IN_HALF = 1e-2


class Refused(Exception):
    """neap's own message."""


def neap(binary, *arguments):
    done = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{arguments[0]} ({done.returncode}): {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def check(binary, folder, name, budget, device="h100"):
    """The largest difference between a loss and PyTorch's. Raises where planned and unplanned runs differ."""
    recorded = json.loads((folder / f"{name}.json").read_text())["losses"]
    weights = folder / f"{name}.safetensors"
    with tempfile.TemporaryDirectory() as made:
        graph, plan = Path(made) / "job.graph.json", Path(made) / "job.plan.json"
        neap(binary, "import", folder / f"{name}.et.json.gz", "-o", graph)
        neap(binary, "plan", graph, "--device", device, "--budget", budget, "-o", plan)
        runs = []
        for subject in (graph, plan):
            given = ["--weights", weights] if weights.exists() else []
            answer = neap(binary, "run", subject, "--on", "host", *given, "--iterations", len(recorded) or 1, "--json")
            runs.append(json.loads(answer))
    if any(runs[0][key] != runs[1][key] for key in ("losses", "checksums") if key in runs[0]):
        raise Refused("the planned run differs from the unplanned one")
    return max((abs(ours - theirs) for ours, theirs in zip(runs[0]["losses"], recorded)), default=0.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--neap", default=str(Path(__file__).parents[2] / "target/release/neap"))
    parser.add_argument("--budget", default="80%")
    given = parser.parse_args()
    wrong = 0
    for name in given.names or sorted(p.name.removesuffix(".json") for p in given.folder.glob("*.json")):
        try:
            off = check(given.neap, given.folder, name, given.budget)
            far = off >= (CLOSE_IN_HALF if name.endswith("_bf16") else CLOSE)
            said = f"{off:.1e}" + (" too far" if far else "")
            wrong += far
        except Refused as refusal:
            said, wrong = str(refusal), wrong + 1
        print(f"{name}: {said}", flush=True)
    print(f"{wrong} wrong or refused", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
