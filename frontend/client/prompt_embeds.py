"""Prompts that clients send as embeddings instead of tokens. Workers treat them like the outputs of an encoder.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import numpy as np

from ...protocol.config import EngineConfig
from ...protocol.messages import EncoderInput

DTYPES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Dtype -> bytes per number."""

MAX_INPUT_TOKENS: Final = 256
"""Maximum tokens of one encoder input. Several inputs let a step compute a part of the prompt."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A tensor of one of `DTYPES`: its little-endian numbers in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def are_finite(self) -> bool:
        """Return whether all numbers are finite."""
        if self.dtype == "bfloat16":
            bits = np.frombuffer(self.data, "<u2")
            return bool(((bits & 0x7F80) != 0x7F80).all())
        numbers = np.frombuffer(self.data, "<f4" if self.dtype == "float32" else "<f2")
        return bool(np.isfinite(numbers).all())


def encoder_inputs_of(embeddings: Embeddings, config: EngineConfig) -> list[EncoderInput]:
    """Return embeddings [T, D] as encoder inputs of at most `MAX_INPUT_TOKENS` tokens, with content hashes."""
    scheduler = config.scheduler
    num_tokens, width = embeddings.shape
    most = min(MAX_INPUT_TOKENS, scheduler.encoder_budget, scheduler.encoder_cache_capacity)
    row_bytes = width * DTYPES[embeddings.dtype]
    inputs = []
    for start in range(0, num_tokens, most):
        count = min(most, num_tokens - start)
        data = embeddings.data[start * row_bytes : (start + count) * row_bytes]
        digest = sha256(f"{embeddings.dtype} {width} ".encode() + data).digest()
        inputs.append(EncoderInput(start, count, digest, count, data, embeddings=embeddings.dtype))
    return inputs
