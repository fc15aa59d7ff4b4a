"""Records one training iteration of a small network for `neap import`, with the optional neap.* names.

    python docs/record.py small.et.json.gz          needs PyTorch and a CUDA device
"""

import gzip
import os
import sys
import tempfile

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ExecutionTraceObserver, record_function


class Scalars(TorchFunctionMode):
    """Marks calls that combine a tensor with a Python number: a trace does not record the number.

    Modules make such calls too: batch norm counts its batches by `add_(1)`.
    """

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        numbers = [a for a in arguments if isinstance(a, (int, float)) and not isinstance(a, bool)]
        if len(arguments) == 2 and len(numbers) == 1 and any(torch.is_tensor(a) for a in arguments):
            with record_function(f"neap.scalar:{numbers[0]!r}"):
                return function(*arguments, **(keywords or {}))
        return function(*arguments, **(keywords or {}))


def mark(model, optimizer):
    """Names long-lived tensors and the optimizer, so that plans and weights files speak of them by name."""

    def name(text, tensor):
        if tensor.is_cuda:
            with record_function(text):
                tensor.detach()

    names = {parameter: key for key, parameter in model.named_parameters()}
    for parameter, key in names.items():
        name(f"neap.parameter:{key}", parameter)
    for key, buffer in model.named_buffers():
        name(f"neap.buffer:{key}", buffer)
    for parameter, states in optimizer.state.items():
        for key, state in states.items():
            if torch.is_tensor(state):
                name(f"neap.optimizer_state:{key}:{names[parameter]}", state)

    def text(value):
        return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)

    settings = ",".join(f"{key}={text(value)}" for key, value in optimizer.defaults.items())
    with record_function(f"neap.optimizer:{type(optimizer).__name__}:{settings}"):
        pass


def record(path, model, optimizer, iteration):
    """Writes a trace of one `iteration()`; the one before it makes the optimizer's states."""
    iteration()
    raw = tempfile.NamedTemporaryFile(suffix=".json", delete=False).name
    observer = ExecutionTraceObserver().register_callback(raw)
    observer.start()
    mark(model, optimizer)
    with record_function("neap.iteration"), Scalars():
        iteration()
    observer.stop()
    observer.unregister_callback()
    with open(raw, "rb") as plain, gzip.open(path, "wb") as packed:
        packed.write(plain.read())
    os.unlink(raw)


def main(path):
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))

    def iteration():
        optimizer.zero_grad()
        # The batch crosses to the GPU inside the iteration: that makes it the job's input.
        loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()

    record(path, model, optimizer, iteration)


if __name__ == "__main__":
    main(sys.argv[1])
