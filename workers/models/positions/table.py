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
from ...layers.specs.positions import Sinusoids
from ..weights import WeightReader


def check_num_positions(spec: ModelSpec, max_model_len: int) -> None:
    """Raise ConfigError if a sequence may be longer than the table."""
    if max_model_len > spec.num_positions:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model has only {spec.num_positions} positions"
        )


def read_positions(spec: ModelSpec, weights: WeightReader, max_model_len: int) -> Tensor:
    """Return the table [P, D]. Raise ConfigError if a sequence may be longer than the table."""
    check_num_positions(spec, max_model_len)
    num_rows = spec.num_positions + spec.position_offset
    if spec.sinusoids is not None:
        table = sinusoids(spec.sinusoids, num_rows, spec.hidden_size)
        return table.to(weights.device, weights.dtype)
    first = spec.num_unplaced
    table = weights.read("embed_positions.weight", num_rows - first, spec.hidden_size)
    return F.pad(table, (0, 0, first, 0)) if first else table


def sinusoids(kind: Sinusoids, num_rows: int, size: int) -> Tensor:
    """Return float32 [num_rows, size]: the sines of each position's angles, then their cosines."""
    half, dtype = size // 2, torch.float32
    last = float(half - 1)
    if kind != "by last":
        last, dtype = size / 2, torch.float64
    frequencies = torch.exp(torch.arange(half, dtype=dtype) * -(math.log(10_000) / last))
    angles = torch.arange(num_rows, dtype=dtype)[:, None] * frequencies
    table = torch.cat((angles.sin(), angles.cos()), 1)
    if kind == "by size, scaled":
        table /= math.sqrt(size)
    return F.pad(table.float(), (0, size % 2))
