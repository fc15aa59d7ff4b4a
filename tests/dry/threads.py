"""Threads that allocate while others hold Python's lock and ask the allocator for its figures."""

import threading

import torch

stop = False


def ask():
    while not stop:
        torch.cuda.memory_allocated()


def allocate():
    while not stop:
        torch.empty(100_000, device="cuda")


torch.cuda.init()
threads = [threading.Thread(target=work, daemon=True) for work in (ask, allocate, allocate)]
for thread in threads:
    thread.start()
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20))).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.memory_allocated()
stop = True
for thread in threads:
    thread.join()
