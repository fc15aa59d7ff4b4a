#!/usr/bin/env python3
"""Times ResNet-50's convolutions in PyTorch on a GPU: by cuDNN as it likes, by its deterministic
algorithms, and, where they have one element and stride 1, as matrix products.

    python bench/gpu/convolutions.py [--images 16] [--repeats 8]

Needs PyTorch with CUDA. Prints a Markdown table: medians of events in microseconds, f32 without
TF32. A product of gradients of weights includes the sum over images.
"""

import argparse
import statistics

import torch
from jobs import resnet50
from torch import nn
from torch.nn import functional as F


def shapes():
    """(channels in, extent, channels out, kernel, stride) of each kind of convolution."""
    found = {}

    def note(layer, inputs, _):
        found[
            layer.in_channels,
            inputs[0].shape[-1],
            layer.out_channels,
            layer.kernel_size[0],
            layer.stride[0],
        ] = None

    with torch.device("meta"):
        net = resnet50()
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_hook(note)
        net(torch.empty(1, 3, 224, 224))
    return list(found)


def measured(work, repeats):
    """The median of a call's time on the device, in microseconds."""
    for _ in range(2):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return 1000 * statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def passes(images, shape):
    """Of each pass: its name, the convolution, and the product or None."""
    inside, extent, outside, kernel, stride = shape
    x = torch.randn(images, inside, extent, extent, device="cuda")
    w = torch.randn(outside, inside, kernel, kernel, device="cuda")
    pad = kernel // 2
    gradient = torch.randn_like(F.conv2d(x, w, None, stride, pad))

    def back(mask):
        return torch.ops.aten.convolution_backward(
            gradient, x, w, None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, mask
        )

    products = [None] * 3
    if kernel == 1 and stride == 1:
        rows, matrix, g = x.flatten(2), w.flatten(1), gradient.flatten(2)
        products = [
            lambda: torch.matmul(matrix, rows),
            lambda: torch.matmul(matrix.t(), g),
            lambda: torch.bmm(g, rows.transpose(1, 2)).sum(0),
        ]
    convolutions = [
        lambda: F.conv2d(x, w, None, stride, pad),
        lambda: back([True, False, False]),
        lambda: back([False, True, False]),
    ]
    return zip(("forward", "to the input", "to the weights"), convolutions, products)


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=8)
    asked = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    print("| in x extent -> out, kernel / stride | pass | cuDNN | deterministic | product |")
    print("| --- | --- | ---: | ---: | ---: |")
    for shape in shapes():
        for name, convolution, product in passes(asked.images, shape):
            times = []
            for deterministic in (False, True):
                torch.backends.cudnn.deterministic = deterministic
                times.append(f"{measured(convolution, asked.repeats):.0f}")
            times.append(f"{measured(product, asked.repeats):.0f}" if product else "")
            inside, extent, outside, kernel, stride = shape
            row = f"{inside} x {extent} -> {outside}, {kernel} / {stride}"
            print(f"| {row} | {name} | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    main()
