"""neap: less GPU memory for deep-learning training.

The executable ``neap`` estimates, plans and simulates; :mod:`neap.torch` records and runs inside
PyTorch. Importing this package imports nothing else, so that it works where PyTorch is not
installed.
"""

__version__ = "0.1.0"
