"""Three steps of a small network; `crash` raises after the first, `wider` makes the fourth layer wider."""

import sys

import torch

sizes = [1024] * 9
if "wider" in sys.argv:
    sizes[4] = 2048
model = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(512, 1024, device="cuda")).sum().backward()
    optimizer.step()
    if "crash" in sys.argv:
        raise ValueError("the script's own mistake")
