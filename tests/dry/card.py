"""Uses the device in every way that could reach a real one: PyTorch, workers, the driver by name."""

import ctypes
import subprocess
import sys

import torch

INNER = "import torch; print(torch.cuda.get_device_name(0), torch.ones(3, device='cuda').shape)"


def main():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert "neap dry" in torch.cuda.get_device_name(0)
    torch.nn.Linear(64, 64).cuda()(torch.randn(8, 64, device="cuda")).sum().backward()
    for name in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"):
        library = ctypes.CDLL(name)
        start = library.nvmlInit_v2 if "nvidia" in name else library.cuInit
        assert start(0) == 0, name
    inner = subprocess.check_output([sys.executable, "-c", INNER], text=True)
    assert "neap dry" in inner, inner
    batches = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="spawn")
    assert len([batch.cuda() for batch in batches]) == 4


if __name__ == "__main__":
    main()
