"""neap inside PyTorch: record a training script, and run it in less memory."""

from neap.torch._begin import apply, fit
from neap.torch._fit import Fit
from neap.torch._record import record
from neap.torch._report import Report
from neap.torch._schedule import Schedule

__all__ = ["Fit", "Report", "Schedule", "apply", "fit", "record"]
