"""Random requests to PyTorch's allocator, and the memory snapshot of them: SEED COUNT FILE [FRACTION].

Small, middle and large tensors on three streams; frees, some while another stream still uses the block; calls of
`empty_cache`, of `synchronize`; with FRACTION a limit on what the process may reserve.
"""

import random
import sys

import torch

MIB = 1 << 20


def size(draw):
    kind = draw.choices(("tiny", "small", "middle", "own", "huge"), (4, 3, 3, 2, 1))[0]
    low, high = {
        "tiny": (1, 4096),
        "small": (4096, MIB),
        "middle": (MIB + 1, 10 * MIB - 1),
        "own": (10 * MIB, 60 * MIB),
        "huge": (60 * MIB, 400 * MIB),
    }[kind]
    return draw.randint(low, high)


def main():
    seed, count, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    draw = random.Random(seed)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    if len(sys.argv) > 4:
        torch.cuda.set_per_process_memory_fraction(float(sys.argv[4]))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    held, failures = [], 0
    for _ in range(count):
        what = draw.random()
        if what < 0.5:
            with torch.cuda.stream(draw.choices(streams, (8, 1, 1))[0]):
                try:
                    held.append(torch.empty(size(draw), dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    failures += 1
        elif what < 0.95:
            if held:
                del held[draw.randrange(len(held))]
        elif what < 0.965:
            torch.cuda.empty_cache()
        elif what < 0.985:
            if held:
                draw.choice(held).record_stream(draw.choice(streams))
        else:
            torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(path)
    print(torch.cuda.max_memory_reserved(), failures)


if __name__ == "__main__":
    main()
