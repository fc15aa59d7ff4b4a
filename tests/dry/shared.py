"""Sends a tensor on the device to another process, which gives its sum back."""

import torch
import torch.multiprocessing as multiprocessing


def add_up(tensors, sums):
    tensor = tensors.get()
    sums.put((tensor.is_cuda, tuple(tensor.shape), tensor.sum().item()))
    del tensor


def main():
    context = multiprocessing.get_context("spawn")
    tensors, sums = context.Queue(), context.Queue()
    other = context.Process(target=add_up, args=(tensors, sums), daemon=True)
    other.start()
    tensor = torch.ones(1000, 1000, device="cuda")
    tensors.put(tensor)
    assert sums.get(timeout=240) == (True, (1000, 1000), 0.0)
    other.join()
    assert other.exitcode == 0


if __name__ == "__main__":
    main()
