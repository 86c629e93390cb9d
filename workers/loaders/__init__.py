"""Reading checkpoints from disk: Hugging Face directories and GGUF files behind one interface."""

from .checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
