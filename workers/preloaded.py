"""Imports the modules of a native worker without torch, for a process from which workers are forked."""

from . import worker  # noqa: F401 - it does not need torch
from .device.lazy_torch import preloading

with preloading():
    from . import loaders  # noqa: F401
    from .cpu import decoder  # noqa: F401
    from .device import device, memory  # noqa: F401
    from .execution import model_runner, parallel_state  # noqa: F401
