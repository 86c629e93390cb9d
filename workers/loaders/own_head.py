"""Find out whether a checkpoint has an output projection of its own, whatever its config says."""

from __future__ import annotations

import numpy as np

from .checkpoint import Checkpoint
from .tensor_names import EMBEDDING, HEAD, TensorNames, translate_names


def has_own_head(checkpoint: Checkpoint, tensor_names: TensorNames) -> bool:
    """Return whether a checkpoint stores an output projection whose values differ from those of the embedding.

    transformers does not tie such a projection, even if the config says so. T5 v1.1 checkpoints have one.
    """
    stored = translate_names(checkpoint.names(), tensor_names)
    tables = [
        next((stored[name] for name in sorted(stored) if name.endswith(end)), None)
        for end in (EMBEDDING, HEAD)
    ]
    embedding, head = (None if name is None else checkpoint.floats(name) for name in tables)
    if embedding is None or head is None:
        return False
    return embedding.dtype == head.dtype and not np.array_equal(embedding.values, head.values)
