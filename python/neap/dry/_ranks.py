"""The first of several ranks, alone: a process group whose collectives do not talk to anyone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

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

        import torch.distributed as distributed

        for place in (module, distributed):
            place.init_process_group = init_process_group  # type: ignore[attr-defined]
            place.new_group = new_group  # type: ignore[attr-defined]

        def mesh(found: ModuleType) -> None:
            if hasattr(found, "init_process_group"):
                found.init_process_group = init_process_group  # type: ignore[attr-defined]
            if hasattr(found, "new_group"):
                found.new_group = new_group  # type: ignore[attr-defined]

        when_imported("torch.distributed.device_mesh", mesh)

    when_imported("torch.distributed.distributed_c10d", patch)
