"""The table of position embeddings.

Shapes: P positions, D hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.errors import ConfigError
from ...layers.spec import ModelSpec
from ..weights import WeightReader


def check_num_positions(spec: ModelSpec, max_model_len: int) -> None:
    """Raise ConfigError if a sequence may be longer than the table."""
    if max_model_len > spec.num_positions:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model has only {spec.num_positions} positions"
        )


def read_positions(spec: ModelSpec, weights: WeightReader, max_model_len: int) -> Tensor:
    """Return the table [P, D].

    Raises:
        ConfigError: A sequence may be longer than the table.
    """
    check_num_positions(spec, max_model_len)
    num_rows = spec.num_positions + spec.position_offset
    if spec.has_sinusoids:
        return sinusoids(num_rows, spec.hidden_size).to(weights.device, weights.dtype)
    return weights.read("embed_positions.weight", num_rows, spec.hidden_size)


def sinusoids(num_rows: int, size: int) -> Tensor:
    """Return float32 [num_rows, size]: the sines of each position's angles, then their cosines (tensor2tensor)."""
    half = size // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10_000) / (half - 1)))
    angles = torch.arange(num_rows).float()[:, None] * frequencies
    return F.pad(torch.cat((angles.sin(), angles.cos()), 1), (0, size % 2))
