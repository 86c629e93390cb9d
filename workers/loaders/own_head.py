"""Find out whether a checkpoint has an output projection of its own, whatever its config says."""

from __future__ import annotations

from typing import Final

import numpy as np

from .checkpoint import Checkpoint
from .tensor_names import EMBEDDING, HEAD, TensorNames, translate_names

_NUM_ROWS: Final = 256
"""Number of rows that are compared, because reading two large tables whole would delay the start."""


def has_own_head(checkpoint: Checkpoint, tensor_names: TensorNames, vocab_size: int) -> bool:
    """Return whether a checkpoint stores an output projection whose first rows differ from those of the embedding.

    transformers does not tie such a projection, even if the config says so. T5 v1.1 checkpoints have one, and tools
    quantize a copy of the embedding as one.
    """
    stored = translate_names(checkpoint.names(), tensor_names)
    found = [
        next((stored[name] for name in sorted(stored) if name.endswith(end)), None)
        for end in (EMBEDDING, HEAD)
    ]
    names = [name for name in found if name is not None]
    if len(names) < len(found):
        return False
    rows = range(min(_NUM_ROWS, vocab_size))
    embedding, head = (checkpoint.floats(name, part=rows) for name in names)
    if embedding is None or head is None:
        # At least one of them is quantized.
        values = [checkpoint.tensor(name, part=rows).float() for name in names]
        return not values[0].equal(values[1])
    return embedding.dtype == head.dtype and not np.array_equal(embedding.values, head.values)
