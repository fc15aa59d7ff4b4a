"""What users do for less memory without neap: the ways that neap is compared with."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

REPEATED = ("Attention", "Block", "Bottleneck", "Gated")
"""Modules that checkpointing runs again."""

CHECKPOINT, ON_CPU, OFFLOAD = "checkpoint every block", "save_on_cpu", "compiled offload"


def repeated(model: nn.Module) -> list[nn.Module]:
    """The modules that checkpointing runs again."""
    return [m for m in model.modules() if type(m).__name__ in REPEATED]


def checkpointed(blocks: list[nn.Module]) -> None:
    """Each block keeps its input only."""
    for block in blocks:
        plain = block.forward
        block.forward = lambda *given, plain=plain: checkpoint(plain, *given, use_reentrant=False)


def saved(way: str) -> AbstractContextManager[Any]:
    """The context of a forward pass: pinned memory takes what it saves, where the way is that."""
    return torch.autograd.graph.save_on_cpu(True) if way == ON_CPU else nullcontext()


def compiled(model: nn.Module, **settings: Any) -> None:
    """Compiles a model in place, with these settings of the partitioner.

    Args:
        model: what is compiled.
        settings: of ``torch._functorch.config``, such as ``activation_memory_budget``, the share
            of the activations that is kept.
    """
    config = importlib.import_module("torch._functorch.config")
    for name, value in settings.items():
        if not hasattr(config, name):
            raise RuntimeError(f"PyTorch {torch.__version__} has no setting {name}")
        setattr(config, name, value)
    model.compile()


def offloaded(model: nn.Module) -> None:
    """Compiles a model so that all that its backward reads goes to the host after forward and
    comes back before it is read.

    PyTorch 2.11 leaves it to the user to say which activations go, by a mark on their nodes: here
    all. It leaves views, outputs, parameters and what is not contiguous on the device. Copies are
    on the stream that computes: with ``activation_offload_separate_stream`` its compiler fails.
    """
    passes = importlib.import_module("torch._inductor.custom_graph_pass")

    class Mark(passes.CustomGraphPass):  # type: ignore[misc, name-defined]
        def __call__(self, graph: fx.Graph) -> None:
            for node in graph.nodes:
                if node.op == "call_function":
                    node.meta["should_offload"] = True

        def uuid(self) -> str:
            return "neap: every activation"

    importlib.import_module("torch._inductor.config").joint_custom_post_pass = Mark()
    compiled(model, enable_activation_offloading=True)
