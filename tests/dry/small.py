"""Three steps of a small network; with `crash` as the argument an exception after the first."""

import sys

import torch

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(512, 1024, device="cuda")).sum().backward()
    optimizer.step()
    if "crash" in sys.argv:
        raise ValueError("the script's own mistake")
