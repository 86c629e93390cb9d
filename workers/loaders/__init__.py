"""Read checkpoints from disk: Hugging Face directories and GGUF files, behind one interface."""

from .checkpoint import Checkpoint
from .dummy import DummyCheckpoint
from .open_checkpoint import open_checkpoint

__all__ = ["Checkpoint", "DummyCheckpoint", "open_checkpoint"]
