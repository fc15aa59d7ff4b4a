"""neap inside PyTorch: record a training script, and run it in less memory."""

# Before all else: under `neap torch`, importing PyTorch begins a fit, which imports from here.
import torch as _torch  # noqa: F401

from neap.torch import callbacks
from neap.torch._begin import apply, fit
from neap.torch._fit import Fit
from neap.torch._record import record
from neap.torch._report import Report, report
from neap.torch._schedule import Schedule

__all__ = ["Fit", "Report", "Schedule", "apply", "callbacks", "fit", "record", "report"]
