"""The first of several ranks, alone: a process group whose collectives do not talk to anyone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from neap.dry import when_imported


def pretend(ranks: int) -> None:
    """Makes ``init_process_group`` give a fake group of this many ranks, whatever backend the
    script asks for.
    """

    def patch(module: ModuleType) -> None:
        initialise = module.init_process_group
        group = module.new_group

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            return initialise(backend="fake", store=FakeStore(), rank=0, world_size=ranks)

        def new_group(
            ranks: Any = None, timeout: Any = None, backend: Any = None, **more: Any
        ) -> Any:
            return group(
                ranks, timeout, "fake", **{k: v for k, v in more.items() if k != "device_id"}
            )

        def gather_object(
            obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any
        ) -> None:
            if object_gather_list is not None:
                object_gather_list[:] = [obj] * len(object_gather_list)

        def scatter_object_list(
            scatter_object_output_list: list[Any],
            scatter_object_input_list: list[Any] | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            if scatter_object_input_list:
                scatter_object_output_list[0] = scatter_object_input_list[0]

        import torch.distributed as distributed

        for place in (module, distributed):
            place.init_process_group = init_process_group  # type: ignore[attr-defined]
            place.new_group = new_group  # type: ignore[attr-defined]
            place.gather_object = gather_object  # type: ignore[attr-defined]
            place.scatter_object_list = scatter_object_list  # type: ignore[attr-defined]

        def mesh(found: ModuleType) -> None:
            if hasattr(found, "init_process_group"):
                found.init_process_group = init_process_group  # type: ignore[attr-defined]
            if hasattr(found, "new_group"):
                found.new_group = new_group  # type: ignore[attr-defined]

        when_imported("torch.distributed.device_mesh", mesh)

    def planner(found: ModuleType) -> None:
        # The other ranks' plans are this rank's own, so that a checkpoint's chunks overlap.
        if hasattr(found, "_validate_global_plan"):
            found._validate_global_plan = lambda *_: True  # type: ignore[attr-defined]

    when_imported("torch.distributed.distributed_c10d", patch)
    when_imported("torch.distributed.checkpoint.default_planner", planner)
    when_imported("torch.nn.parallel.distributed", _buckets)


_second_buckets = 0


def watch_buckets() -> None:
    """Notes the size of the buckets that DDP makes anew in its second iteration."""
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 8):
        return

    def patch(module: ModuleType) -> None:
        parallel = module.DistributedDataParallel
        initialise = parallel.__init__

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            global _second_buckets
            initialise(self, *args, **kwargs)
            _second_buckets += sum(
                p.numel() * p.element_size() for p in self.parameters() if p.requires_grad
            )

        parallel.__init__ = __init__

    when_imported("torch.nn.parallel.distributed", patch)


def late_bucket_bytes() -> int:
    """What PyTorch 2.8 and later may take beyond the answer, in bytes: DDP's first buckets, when
    its NCCL watchdog has not yet seen that their reduction is done as DDP makes new ones.
    """
    return _second_buckets


def _buckets(module: ModuleType) -> None:
    """Lets DDP take its own buckets for reduced ones: the fake group's reductions return none."""
    parallel = module.DistributedDataParallel
    initialise, register = parallel.__init__, parallel.register_comm_hook

    def reduced(bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        # PyTorch looks at the hook's annotations; a lambda has none.
        register(self, None, lambda state, bucket: reduced(bucket))

    parallel.__init__ = __init__
    # A hook of the script's would reduce in the group too.
    parallel.register_comm_hook = lambda self, state, hook: None
