"""Reading checkpoints from disk: Hugging Face directories and GGUF files behind one interface."""

from .checkpoint import Checkpoint, open_checkpoint
from .dummy import DummyCheckpoint

__all__ = ["Checkpoint", "DummyCheckpoint", "open_checkpoint"]
