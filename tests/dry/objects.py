"""Ranks that exchange Python objects of different sizes."""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
alone = "NEAP_DRY_RANKS" in os.environ
sizes = [10 if alone else 10 + 100 * r for r in range(ranks)]
mine = "x" * sizes[rank]

everyone = [None] * ranks
dist.all_gather_object(everyone, mine)
assert [len(one) for one in everyone] == sizes, everyone
gathered = [None] * ranks if rank == 0 else None
dist.gather_object(mine, gathered, 0)
assert rank > 0 or [len(one) for one in gathered] == sizes, gathered
announced = [{"a": 1}, "two"] if rank == 0 else [None, None]
dist.broadcast_object_list(announced, 0)
assert announced == [{"a": 1}, "two"], announced
given = [None]
dist.scatter_object_list(given, ["y" * (5 + 50 * r) for r in range(ranks)] if rank == 0 else [], 0)
assert len(given[0]) == 5 + 50 * rank, given
dist.destroy_process_group()
