"""Runs the training loops of this folder inside PyTorch, without neap and fitted into 70 and 50 % by `neap.torch.fit`.

    python bench/idioms/fitted.py [--iterations 8] [NAME …]

Needs PyTorch, and the executable in $NEAP or on the PATH; runs on the CPU. After all iterations every loss, parameter,
buffer, optimizer state and the state of random numbers must be those without neap, bit for bit. Prints a line for each
loop and budget. Exit code 1 where a number differs or a loop fails.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))
import neap.torch  # noqa: E402
from neap.torch import _states  # noqa: E402
from record import ALL, IDIOMS  # noqa: E402

BUDGETS = ("70%", "50%")


def run(name, budget, iterations):
    """All numbers after the iterations, and the report of the fit, if there is a budget."""
    torch.manual_seed(5)
    model, optimizers, iteration = ALL[name]("cpu")
    optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    fit = neap.torch.fit(model, optimizers, budget, device="host", verbose=False) if budget else None
    try:
        numbers = [iteration().detach().clone() for _ in range(iterations)]
    finally:
        report = fit.close() if fit else None
    kept = [getattr(model, more, None) for more in ("average", "lasting")]
    kept += [optimizer.state_dict()["state"] for optimizer in optimizers]
    numbers += [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    return numbers + [x for x in tree_leaves(kept) if isinstance(x, torch.Tensor)], report


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(ours, theirs)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--iterations", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    # The loops' tensors are small; so that plans have something to do, all of them may move, in small pieces.
    _states.SMALLEST, _states.PIECE = 1, 8
    wrong = 0
    for name in given.names or sorted(IDIOMS):
        expected, _ = run(name, None, given.iterations)
        for budget in BUDGETS:
            try:
                found, report = run(name, budget, given.iterations)
            except Exception as error:  # The next loops still run.
                wrong += 1
                print(f"{name} {budget}: {type(error).__name__}: {error}", flush=True)
                continue
            equal = same(expected, found)
            wrong += not equal
            print(
                f"{name} {budget}: {'same' if equal else 'DIFFERS'}, {report.planned} planned, {report.swapped_out} swapped, "
                f"{report.recomputed} run again, {report.state_bytes >> 10} KiB of states moved",
                flush=True,
            )
    print(f"{wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
