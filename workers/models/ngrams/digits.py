"""Token ids in tensors of hidden states, as digits of base 256, which every dtype of hidden states has exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import NUM_TOKEN_DIGITS


def to_digits(ids_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the digits of token ids."""
    shifts_X = torch.arange(NUM_TOKEN_DIGITS, device=ids_T.device) * 8
    return (ids_T.unsqueeze(1) >> shifts_X & 255).to(dtype)


def from_digits(digits: Tensor) -> Tensor:
    """Return the token ids with these digits, which are the last dimension."""
    shifts_X = torch.arange(NUM_TOKEN_DIGITS, device=digits.device) * 8
    return (digits.long() << shifts_X).sum(-1)
