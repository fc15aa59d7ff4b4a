"""The device library of `neap dry`, asked from inside scripts that run on it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import cubins
import pytest
import torch

LIBRARIES = Path(torch.__file__).parent / "lib"

pytestmark = pytest.mark.skipif(
    not (LIBRARIES / "libtorch_cuda.so").exists(), reason="this PyTorch is built for the CPU"
)


TESTS = Path(__file__).parent
readable = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("zstandard", "lz4")),
    reason="reading kernels needs zstandard and lz4",
)


def dry(neap: str, folder: Path, script: str, device: str) -> subprocess.CompletedProcess[str]:
    """Runs a script on a device."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return subprocess.run(
        [neap, "dry", "--device", device, "--", sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )


def printed(neap: str, folder: Path, script: str, device: str) -> list[str]:
    """What a script prints before the report."""
    done = dry(neap, folder, script, device)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(" reserved  allocated")[0].splitlines()[:-1]


def test_a_workspace_is_what_cublas_was_given(neap: str, tmp_path: Path) -> None:
    script = """
    import torch
    from neap.dry._library import Library

    library = Library.found()
    a = torch.ones(64, 64, device="cuda")
    like_one = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    print(len(library.workspace_allocations()))
    first = library.allocations()
    product = a @ a
    found = library.workspace_allocations()
    print(len(found), min(found) >= first, library.allocation_at(product.data_ptr()) in found)
    """
    lines = printed(neap, tmp_path, script, "h100")
    assert lines == ["0", "1 True False"]


@readable
@pytest.mark.parametrize(("device", "capability"), [("rtx4090", 89), ("h100", 90)])
def test_kernels_are_what_the_installed_files_say(neap: str, device: str, capability: int) -> None:
    command = [neap, "dry", "--device", device, "--", sys.executable, str(TESTS / "asked.py")]
    done = subprocess.run([*command, "300", "12"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 300
    assert any(row["attributes"][0] for row in rows), "some have shared memory of their own"
    assert cubins.differences(rows, capability) == []


@readable
def test_an_object_that_is_loaded_is_read(neap: str, tmp_path: Path) -> None:
    library = cubins.Library(LIBRARIES / "libtorch_cuda.so")
    entries = (cubins.chosen(entries, 90) for _, entries in library.binaries())
    image = next(e.image() for e in entries if e and e.size < 1 << 19)
    (tmp_path / "kernels.cubin").write_bytes(image)
    name, kernel = max(cubins.kernels(image).items(), key=lambda item: item[1].registers)
    script = f"""
    import ctypes, sys
    import torch

    torch.cuda.init()
    device = ctypes.CDLL(None)
    image = open({str(tmp_path / "kernels.cubin")!r}, "rb").read()
    module, function, value = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    assert device.cuModuleLoadData(ctypes.byref(module), image) == 0
    assert device.cuModuleGetFunction(ctypes.byref(function), module, b"absent") == 500
    assert device.cuModuleGetFunction(ctypes.byref(function), module, {name.encode()!r}) == 0
    for which in (1, 4, 5, 6):
        assert device.cuFuncGetAttribute(ctypes.byref(value), which, function) == 0
        print(value.value)
    """
    expected = [kernel.shared, kernel.registers, kernel.ptx, kernel.binary]
    assert printed(neap, tmp_path, script, "h100") == [str(number) for number in expected]
    script += "\n" + "    print('not reached')"
    done = dry(neap, tmp_path, script, "a6000")
    assert done.returncode == 3, "an object for another generation is refused"
    assert "not reached" not in done.stdout


SORTS = """
import torch

for n in (100, 3000, 100_000):
    values, keys = torch.randn(n, device="cuda"), torch.randint(50, (n,), device="cuda")
    values.sort(), keys.argsort(stable=True), values.topk(20), values.cumsum(0), keys.bincount()
    weight = torch.ones(50, 4, device="cuda", requires_grad=True)
    torch.nn.functional.embedding(keys, weight).sum().backward()
    torch.zeros(50, device="cuda").index_put_((keys,), values, accumulate=True)
"""


@pytest.mark.parametrize("device", ["rtx4090", "rtx2080ti", "b200"])
def test_sorting_and_embedding_run_on_every_generation(
    neap: str, tmp_path: Path, device: str
) -> None:
    done = dry(neap, tmp_path, SORTS, device)
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stderr, done.stderr


def test_a_device_without_kernels_fails_as_on_a_gpu(neap: str, tmp_path: Path) -> None:
    if "sm_70" in torch.cuda.get_arch_list() or int(torch.version.cuda.split(".")[0]) < 13:
        pytest.skip("this PyTorch has kernels for every built-in device")
    script = """
    import torch

    torch.empty(4, device="cuda")
    torch.ones(4, device="cuda")
    """
    done = dry(neap, tmp_path, script, "v100")
    assert done.returncode == 3
    assert "no kernel image is available for execution on the device" in done.stderr
    assert "has no kernels for this device's compute capability, 7.0" in done.stderr
    assert "it has them for t4, rtx2080ti" in done.stderr.replace("\n", " ")


def test_what_a_launch_pushes_is_popped(neap: str, tmp_path: Path) -> None:
    script = """
    import ctypes
    import torch

    torch.cuda.init()

    class Dimensions(ctypes.Structure):
        _fields_ = [("all", ctypes.c_uint * 3)]

    device = ctypes.CDLL(None)
    some = Dimensions((2, 3, 4)), Dimensions((5, 6, 7))
    word = ctypes.c_size_t
    assert device.__cudaPushCallConfiguration(*some, word(88), word(99)) == 0
    grid, block, shared, stream = Dimensions(), Dimensions(), word(), word()
    out = [ctypes.byref(value) for value in (grid, block, shared, stream)]
    assert device.__cudaPopCallConfiguration(*out) == 0
    print(list(grid.all), list(block.all), shared.value, stream.value)
    print(device.__cudaPopCallConfiguration(*out))
    """
    lines = printed(neap, tmp_path, script, "h100")
    assert lines == ["[2, 3, 4] [5, 6, 7] 88 99", "52"]


def test_only_a_graph_without_work_is_called_empty(neap: str, tmp_path: Path) -> None:
    script = """
    import torch

    a = torch.ones(8, 8, device="cuda")
    a @ a
    for work in (lambda: a @ a, lambda: a + a):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            work()
    """
    done = dry(neap, tmp_path, script, "h100")
    assert done.returncode == 0, done.stderr
    assert "CUDA Graph is empty" not in done.stderr
    script = """
    import torch

    torch.ones(8, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass
    """
    assert "CUDA Graph is empty" in dry(neap, tmp_path, script, "h100").stderr


def test_operators_that_look_at_results_run(neap: str, tmp_path: Path) -> None:
    script = """
    import warnings
    import torch

    warnings.simplefilter("error")

    def values(*shape):
        return torch.rand(*shape, device="cuda", requires_grad=True)

    torch.normal(0.0, values(4)), torch.normal(values(4), values(4))
    torch.distributions.Normal(values(3), values(3)).sample((2,))
    weights = torch.ones(5, dtype=torch.int64, device="cuda")
    values(4, 5).cov(fweights=weights, aweights=values(5)).sum().backward()
    torch.corrcoef(values(4, 5)).sum().backward()
    values(5000).mode(), torch.mode(values(2, 5000, 3), dim=1)
    for _ in range(5):
        torch.geqrf(values(3, 20, 10).detach())
        torch.linalg.lstsq(values(3, 20, 10), values(3, 20, 2)).solution.sum().backward()
        torch.linalg.pinv(values(3, 6, 4)).sum().backward()
        torch.svd_lowrank(values(3, 20, 10), q=3), torch.pca_lowrank(values(20, 10), q=3)
    print(float(values(1).detach()), bool((values(4) > 2).all()) in (True, False))
    """
    assert printed(neap, tmp_path, script, "h100") == ["0.0 True"]
