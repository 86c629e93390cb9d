"""Outputs of encoders in place of tokens' embeddings.

Shapes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.arrays import Int32Array


class Placed:
    """The encoder outputs that the tokens of a step read: `rows_T` int32 are rows of `encoded`, or -1.

    Args:
        rows_T: The row of each token, or -1 for tokens with an embedding of their own.
        encoded: The outputs, float [rows, D].
    """

    def __init__(self, rows_T: Int32Array, encoded: Tensor) -> None:
        self.rows_T = rows_T
        self.encoded = encoded

    def put_into(self, hidden_TD: Tensor) -> Tensor:
        """Return the hidden states with these rows replaced."""
        rows_T = torch.from_numpy(self.rows_T).to(hidden_TD.device)
        tokens = (rows_T >= 0).nonzero().flatten()
        return hidden_TD.index_copy(0, tokens, self.encoded[rows_T[tokens]].to(hidden_TD.dtype))
