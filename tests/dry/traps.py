"""What once broke under the device: sparse gradients, sizes that depend on values in autograd's thread, and
exceptions on their way while memory is freed; checks of values, which are all 0."""

import gc
import weakref

import torch
from torch.utils.checkpoint import checkpoint

table = torch.nn.Embedding(1000, 64, sparse=True).cuda()
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda() for _ in range(4)]
sparse = torch.optim.SparseAdam(list(table.parameters()))
dense = torch.optim.AdamW([p for layer in layers for p in layer.parameters()])
for _ in range(3):
    x = table(torch.arange(10).cuda())
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    x.sum().backward()
    for optimizer in (sparse, dense):
        optimizer.step()
        optimizer.zero_grad()

# Sizes that depend on values, inside autograd's own thread.
mask = torch.ones(64, device="cuda", requires_grad=True)
(mask[torch.ones(64, dtype=torch.bool, device="cuda")] * mask[0]).sum().backward()

# Guards that a value of 0 would trip: everything is valid.
loss = mask.sum()
assert torch.isfinite(loss) and torch.isfinite(mask).all() and torch.equal(mask, mask)
torch.distributions.Categorical(logits=torch.zeros(4, 3, device="cuda")).sample()
torch.linalg.eigvals(torch.eye(3, device="cuda"))
assert torch.isin(mask, mask).shape == mask.shape
assert torch.ones(4, device="cuda").repeat_interleave(torch.arange(1, 5).cuda()).shape == (10,)

# Lengths that were computed on the device are 0, and do not add up to the targets.
labels = torch.ones(2, 3, dtype=torch.long, device="cuda")
logs = torch.zeros(9, 2, 5, device="cuda", requires_grad=True)
for targets in (labels, labels[labels >= 0]):
    lengths = torch.full((2,), 9, device="cuda") + 0, (labels >= 0).sum(1)
    torch.nn.functional.ctc_loss(logs.log_softmax(2), targets, *lengths).backward()
assert torch.ctc_loss.__name__ == "ctc_loss"  # `torch.compile` asks for names.

# What a script deletes is gone: the session does not keep the first optimizer and its states.
gone = weakref.ref(sparse)
del sparse, dense, optimizer
gc.collect()
assert gone() is None
