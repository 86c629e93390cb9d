"""Imports the modules of a core, for a process from which cores are forked, and captures the state of a scheduler.

The first capture reads the bytecode of every class, which takes 7 ms. In a core, it would delay a step.
"""

from ..protocol.config import CacheConfig, SchedulerConfig
from . import engine_core  # noqa: F401
from .replay.frozen_state import FrozenState
from .replay.recorder import Setup

_SETUP = Setup(SchedulerConfig(), CacheConfig(), max_model_len=64, vocab_size=64, num_blocks=64)

FrozenState(_SETUP.make_scheduler())
