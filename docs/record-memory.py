"""Records what a training job asks PyTorch's allocator for, for `neap replay snapshot.pickle`.

    python docs/record-memory.py snapshot.pickle          needs PyTorch and a CUDA device

In a script of your own: `start()` before the model is built, so that the whole job is in the recording, and
`finish(path)` after some iterations. A `.gz` of the file is read too.
"""

import sys

import torch
from torch import nn


def start():
    # Python stacks tell empty_cache from an allocation that was tried again. They cost a snapshot some 20 bytes an event.
    torch.cuda.memory._record_memory_history(max_entries=10_000_000, stacks="python")


def finish(path):
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)


def main(path):
    start()
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        images, labels = torch.randn(16, 3, 32, 32, device="cuda"), torch.arange(16, device="cuda") % 10
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass  # A failed request is in the recording too.
    torch.cuda.empty_cache()
    finish(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
