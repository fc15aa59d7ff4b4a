"""Trains one projection through bf16 attention, for which PyTorch takes cuDNN's on a GPU.

Without arguments on the GPU. With a folder on the CPU, where PyTorch has other kernels: puts the initial values there, as
before.safetensors, and the weight after six steps, as after.bin.
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn import functional

device = "cpu" if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
# Small, so that the shares of keys are smooth and six steps amplify no rounding.
initial = torch.randn(64, 192) / 8
images = torch.randn(2, 70, 64)
if device == "cpu":
    tensors = {"parameter:group0.0": initial, "buffer:tensor": images}
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    Path(sys.argv[1], "before.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
images = images.to(device)
weight = initial.to(device).requires_grad_()
optimizer = torch.optim.SGD([weight], lr=1.0)
for _ in range(6):
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        parts = (part.view(2, 70, 2, 32).transpose(1, 2) for part in (images @ weight).split(64, -1))
        loss = functional.scaled_dot_product_attention(*parts, is_causal=True).float().pow(2).mean()
    loss.backward()
    optimizer.step()
if device == "cpu":
    Path(sys.argv[1], "after.bin").write_bytes(weight.detach().numpy().tobytes())
