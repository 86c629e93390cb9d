"""Open a checkpoint of either format."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from ...protocol.errors import CheckpointError
from .checkpoint import Checkpoint
from .gguf import GGUFCheckpoint
from .hf import HFCheckpoint


def open_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Open a Hugging Face directory (safetensors), or a GGUF file (any part of a split one).

    Raises:
        CheckpointError: It is missing, damaged, incomplete or not supported; the message ends with the remedy.
    """
    path = Path(path)
    if path.is_dir():
        return HFCheckpoint(path)
    if path.suffix in (".safetensors", ".bin", ".json"):
        raise CheckpointError(
            path, "pass the directory that contains the model, not one of its files"
        )
    return GGUFCheckpoint(path)
