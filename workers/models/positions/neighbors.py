"""The rows of tokens that are near each token of a text, in an encoder, whose steps have whole texts.

Shapes: T tokens of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def neighbor_rows(x_TX: Tensor, positions_T: Tensor, offset: int) -> Tensor:
    """Return for each token the row of the token `offset` positions after it; 0 outside of the text.

    A step has whole texts, each with positions from 0 on. A token that is n rows away belongs to the same text if it is
    n positions away, because positions before the end of one text are larger than those of the next.
    """
    rows_T = torch.arange(len(x_TX), device=x_TX.device)
    others_T = (rows_T + offset).clamp(0, len(x_TX) - 1)
    is_near_T = positions_T[others_T] == positions_T + offset
    return x_TX[others_T] * is_near_T.view(-1, *[1] * (x_TX.dim() - 1))
