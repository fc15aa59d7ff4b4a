"""Three steps of DDP, as a launcher starts each rank."""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda()
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 256, device="cuda")).sum().backward()
    optimizer.step()
dist.destroy_process_group()
