"""Outputs of encoders in place of tokens' embeddings.

Shapes: T tokens of a step, D hidden size, E elements of an output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.arrays import Int32Array


class Placed:
    """The encoder outputs that the tokens of a step read: `rows_T` int32 are rows of `encoded`, or -1.

    Args:
        rows_T: The row of each token, or -1 for tokens with an embedding of their own.
        encoded: The outputs, float [rows, E]. The first D elements are embeddings, and so are all with E = D.
            Otherwise the next D are added after the first layer, and so on.
    """

    def __init__(self, rows_T: Int32Array, encoded: Tensor) -> None:
        self.rows_T = rows_T
        self.encoded = encoded

    def put_into(self, hidden_TD: Tensor) -> Tensor:
        """Return the hidden states with these rows replaced."""
        tokens, part = self._part(hidden_TD, 0)
        return hidden_TD.index_copy(0, tokens, part)

    def add_to(self, hidden_TD: Tensor, layer: int) -> None:
        """Add the part that belongs after this layer to the hidden states, in place."""
        tokens, part = self._part(hidden_TD, layer + 1)
        # No token occurs twice.
        hidden_TD[tokens] += part

    def _part(self, hidden_TD: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return the tokens with outputs, and this part of these, [tokens, D]."""
        rows_T = torch.from_numpy(self.rows_T).to(hidden_TD.device)
        tokens = (rows_T >= 0).nonzero().flatten()
        size = hidden_TD.shape[1]
        part = self.encoded[rows_T[tokens], index * size : (index + 1) * size]
        return tokens, part.to(hidden_TD.dtype)

    def replace_ids(self, ids_T: Tensor, token_id: int) -> Tensor:
        """Return the token ids with `token_id` for the replaced ones."""
        places_T = torch.from_numpy(self.rows_T).to(ids_T.device) >= 0
        return ids_T.masked_fill(places_T, token_id)
