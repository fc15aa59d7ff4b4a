"""The settings of a run, from its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """What ``neap dry`` asks of a process.

    Attributes:
        folder: the run's scratch folder.
        steps: after how many optimizer steps the script ends, or nothing.
        record: where to write the graph of one iteration, or nothing.
        snapshot: where to write PyTorch's memory snapshot, or nothing.
        data_dependent: what operators whose result's size depends on values give: ``max`` or
            ``zero`` rows.
        allow_writes: whether files that the script saves go where it says.
        detail: whether to write what each allocation is.
        ranks: of how many ranks this process plays the first, or nothing.
    """

    folder: Path
    steps: int | None
    record: str | None
    snapshot: str | None
    data_dependent: str
    allow_writes: bool
    detail: bool
    ranks: int | None


def settings() -> Settings:
    """Reads the environment, which ``neap dry`` has checked."""

    def number(name: str) -> int | None:
        text = os.environ.get(name, "")
        return int(text) if text.isdigit() and int(text) > 0 else None

    return Settings(
        folder=Path(os.environ["NEAP_DRY_DIR"]),
        steps=number("NEAP_DRY_STEPS"),
        record=os.environ.get("NEAP_DRY_RECORD") or None,
        snapshot=os.environ.get("NEAP_DRY_SNAPSHOT") or None,
        data_dependent=os.environ.get("NEAP_DRY_DATA_DEPENDENT") or "max",
        allow_writes=os.environ.get("NEAP_DRY_ALLOW_WRITES") == "1",
        detail=os.environ.get("NEAP_DRY_DETAIL") == "1",
        ranks=number("NEAP_DRY_RANKS"),
    )


def distributed_environment() -> None:
    """What launchers tell a rank, for scripts that ask before a process group exists."""
    if os.environ.get("NEAP_DRY_LATE") != "1":
        # Without it a thread of PyTorch's looks every 100 ms which collectives have finished, and
        # the next collective frees their tensors: the memory depends on the host's speed.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    ranks = os.environ.get("NEAP_DRY_RANKS", "")
    if not ranks.isdigit() or int(ranks) < 1:
        return
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        os.environ.setdefault(name, value)
