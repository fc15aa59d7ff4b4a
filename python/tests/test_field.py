"""Small cases from public reports, and what is right for each: scripts and files that are read
beside the repository, one test a file.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FIELD = Path(os.environ.get("NEAP_TRUTH", ROOT.parent / "shared" / "truth")) / "field"

pytestmark = [
    pytest.mark.skipif(not FIELD.is_dir(), reason=f"there is no {FIELD}"),
    pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch built for CUDA"),
]

Run = Callable[..., str]
"""Runs neap in the folder of the cases and gives all that it printed; ``rc`` is the exit code that
is right.
"""


@pytest.fixture
def run(neap: str) -> Run:
    def run(*arguments: str, rc: int = 0, **more: str) -> str:
        path = os.pathsep.join([str(FIELD), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "NEAP_TORCH_CACHE": "0", "DEV": "cuda", "NEAP": neap}
        environment |= {"PYTHONPATH": path, "PYTHONHASHSEED": "1", **more}
        done = subprocess.run(
            [neap, *arguments], cwd=FIELD, env=environment, capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        assert done.returncode == rc, said
        return said

    return run


def script(name: str, *arguments: str) -> list[str]:
    return ["--", sys.executable, name, *arguments]


def dry(device: str = "a6000") -> list[str]:
    return ["dry", "--no-second-run", "--device", device]


def planned(neap: str, budget: str, name: str) -> list[str]:
    """A script by `neap torch` on the dry device."""
    return [*dry(), "--", neap, "torch", "--budget", budget, *script(name)]


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def number(pattern: str, said: str) -> float:
    found = re.search(pattern, said)
    assert found is not None, said
    return float(found[1])


def share(category: str, said: str) -> float:
    """MiB of a category at the peak."""
    found = re.search(rf"^{category} +([\d,.]+) (KiB|MiB|GiB)", said, re.M)
    if found is None:
        return 0.0
    return float(found[1].replace(",", "")) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[found[2]]


# -- devices


@pytest.mark.parametrize("device", ["rtx4060", "rtx4090", "l4", "l40s"])
def test_dyn_bert_runs_on_ada_cards(run: Run, device: str) -> None:
    needs("transformers")
    said = run(*dry(device), *script("dyn_bert.py"), STEPS="3", L="2", H="192", B="4")
    assert "\nexact" in said, said


def test_verdicts_of_other_generations_are_not_known(run: Run) -> None:
    said = run(*dry("h100"), *script("sdpa.py"))
    unknown = re.search(r"^not known.*: (.*)$", said, re.M)
    assert unknown is not None and "a6000" in unknown[1] and "rtx2080ti" in unknown[1], said


def test_gradients_are_no_workspace(run: Run) -> None:
    said = run(*dry("h100"), *script("sdpa.py"))
    assert share("gradient", said) >= 96 and share("workspace", said) == 0, said


def test_vmaps_gradients_are_no_workspace(run: Run) -> None:
    needs("torchvision")
    said = run(*dry("h100"), *script("g_vmap.py", "0"))
    assert share("gradient", said) > 12_000 and share("workspace", said) < 100, said


def test_a_workspace_is_one_by_who_asked(run: Run) -> None:
    assert share("workspace", run(*dry(), *script("g_cycle.py"))) >= 16


# -- values


def test_a_number_of_graphs_is_known(run: Run) -> None:
    run(*dry(), *script("pyg_mean_pool.py"))


def test_trimming_to_the_longest_text_is_known(run: Run, tmp_path: Path) -> None:
    text = (FIELD / "trim_to_longest.py").read_text()
    text = text.replace("import torch\n", "import torch\ntorch.manual_seed(0)\n", 1)
    read = "int(mask.sum(1).max())"
    found = []
    for name, answer in (("device.py", read), ("host.py", "int(lengths.max())")):
        kept = text.replace(
            "torch.randint(128, 257, (16, 1))", "(lengths := torch.randint(128, 257, (16, 1)))"
        )
        (tmp_path / name).write_text(kept.replace(read, answer))
        said = run(*dry(), *script(str(tmp_path / name)))
        assert "\nexact: " in said, said
        found.append(re.findall(r"^longest.*$|^a6000 0: peak .*$", said, re.M))
    assert found[0] == found[1] and len(found[0]) == 2, found


# -- Python's garbage collector


def test_as_many_cycles_fill_the_device_as_on_a_gpu(run: Run) -> None:
    said = run(*dry(), "--device-bytes", "10.52GiB", *script("g_g50185.py"), rc=1)
    assert "made 26\n" in said, said


def test_as_many_cycles_are_alive_as_on_the_cpu(run: Run) -> None:
    pattern = r"alive at once (\d+)"
    alive = number(pattern, run(*dry(), *script("g_g50185b.py")))
    host = subprocess.run(
        [sys.executable, "g_g50185b.py"],
        cwd=FIELD,
        env={**os.environ, "DEV": "cpu", "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
    )
    # The first step's containers differ by a few, and each step of the script makes some.
    assert abs(alive - number(pattern, host.stdout)) <= 10, host.stdout


def test_a_step_leaves_few_containers(run: Run) -> None:
    assert number(r"a step ([\d.]+)", run(*dry(), *script("g_gctypes.py"))) <= 3


def test_a_budget_is_not_claimed_for_memory_in_cycles(run: Run, neap: str) -> None:
    said = run(*planned(neap, "60MiB", "a_ctxcycle2.py"))
    assert "the budget of 60.0 MiB is not met" in said and "in reference cycles" in said, said
    # Six of 4 MiB an iteration: they are collected at each end.
    assert number(r"alive at once (\d+)", said) < 40, said


# -- PyTorch's allocator


@pytest.mark.parametrize("file, mib", [("split1", 220), ("split21", 2980), ("split101", 14060)])
def test_splitting_blocks_up_to_a_size(run: Run, file: str, mib: int) -> None:
    conf = "max_split_size_mb:128,expandable_segments:True"
    assert f"{mib << 20} bytes" in run("replay", "--alloc-conf", conf, f"{file}.csv")


def test_private_pools_are_apart(run: Run) -> None:
    assert "peak reserved   80.0 MiB" in run("replay", "pool.pickle")


def test_an_out_of_memory_with_pending_events_is_replayed(run: Run, tmp_path: Path) -> None:
    snapshot = str(tmp_path / "oom.pickle")
    said = run(*dry(), "--late", "--device-bytes", "1GiB", "--snapshot", snapshot,
               *script("oomretry.py"))  # fmt: skip
    assert "try 0 OOM\ntry 1 ok\n" in said, said
    replayed = run("replay", "--device-bytes", "1GiB", snapshot, rc=1)
    assert "out of memory   1 times, first at event 5;" in replayed, replayed
    assert "failed when they were recorded" in run("replay", snapshot)


@pytest.mark.parametrize(
    "conf", ["", "expandable_segments:True", "max_split_size_mb:32",
             "garbage_collection_threshold:0.6"],
)  # fmt: skip
def test_every_row_of_a_snapshot_is_replayed(run: Run, tmp_path: Path, conf: str) -> None:
    dump = str(tmp_path / "rows.pickle")
    said = run(*dry(), *script("alloc_rand.py", "7", "500", dump), PYTORCH_CUDA_ALLOC_CONF=conf,
               FRAC="0.02")  # fmt: skip
    found = re.search(r"RES (\d+) (\d+) oom (\d+)", said)
    assert found is not None, said
    replayed = run("replay", "--check", dump)
    assert f"({found[1]} bytes)" in replayed and f"({found[2]} bytes)" in replayed, replayed


def test_exact_fractions_are_granted(run: Run) -> None:
    assert "refused: 0 of" in run(*dry(), *script("fraction.py"))


# -- reports


def test_one_peak_though_a_window_is_recorded(run: Run, tmp_path: Path) -> None:
    said = run(*dry(), "--record", str(tmp_path / "g.json"), *script("g_late.py"))
    assert "a6000 0: peak   4.0 GiB" in said and "offers 4.0 GiB" in said, said


def test_graphs_warn_of_nothing(run: Run) -> None:
    assert "CUDA Graph is empty" not in run(*dry(), *script("g_graph.py"))


def test_more_jobs_than_the_device_can_do_are_named(run: Run) -> None:
    assert "133 % of what the device can do" in run("share", "over.csv")


# -- plans


@pytest.mark.parametrize("name", ["enforced_eval.py", "enforced_hold.py"])
def test_what_no_plan_covers_runs_and_is_counted(run: Run, neap: str, name: str) -> None:
    said = run(*planned(neap, "60%", name))
    assert "DONE" in said, said
    counted = "what did not run by the plan reserved more" in said
    assert counted or "planned anew: the allocator reserved" in said, said


def test_what_selective_checkpointing_saves_is_named(run: Run, neap: str) -> None:
    said = run(*planned(neap, "70%", "ckptsac.py"))
    note = re.search(r"note: .* such as selective checkpointing, made by (.*)", said)
    assert note is not None and "aten::addmm in Blk" in note[1], said


def test_backward_twice_moves_what_it_saved(run: Run, neap: str) -> None:
    said = run(*planned(neap, "70%", "a_twice.py"))
    assert number(r"peak predicted ([\d.]+) MiB", said) < 70, said
    allocated = number(r"peak measured: allocated ([\d.]+) MiB", said)
    assert allocated <= number(r"peak predicted ([\d.]+) MiB", said), said
    assert number(r"(\d+) swap-outs", said) >= 50, said


def test_many_optimizers_make_one_step(run: Run, neap: str) -> None:
    said = run(*planned(neap, "70%", "per_parameter_optimizers.py"))
    assert said.count("neap: planning\n") == 1, said
    assert number(r"neap: (\d+) iterations ran by the plan", said) >= 5, said


def test_a_given_plan_is_held_to_its_budget(run: Run, neap: str, tmp_path: Path) -> None:
    plan, small = tmp_path / "plan.json", tmp_path / "small.py"
    text = (FIELD / "given_plan_over_budget.py").read_text()
    small.write_text(text.replace("8 + 8", "8"))
    first = [*dry(), "--", neap, "torch", "--budget", "60%", "--save-plan", str(plan)]
    run(*first, *script(str(small)))
    given = [*dry(), "--", neap, "torch", "--plan", str(plan)]
    said = run(*given, *script("given_plan_over_budget.py"))
    reserved = number(r"reserved ([\d.]+) MiB; \d+ allocator retries", said)
    within = reserved <= number(r"budget ([\d.]+) MiB", said)
    assert within == ("the budget is met" in said) != ("MiB is not met" in said), said
