"""neap inside PyTorch: record a training script, and run it in less memory."""

from neap.torch._record import record

__all__ = ["record"]
