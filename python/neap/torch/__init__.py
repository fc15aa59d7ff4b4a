"""neap inside PyTorch: record a training script, and run it in less memory."""

from neap.torch._fit import Fit, Report, fit
from neap.torch._record import record

__all__ = ["Fit", "Report", "fit", "record"]
