"""Replace the embeddings of tokens with encoder outputs, or add the outputs to them.

Shapes: T tokens of a step, D hidden size, E elements of an output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.arrays import Int32Array


class Placed:
    """The encoder outputs that the tokens of a step read.

    Args:
        rows_T: The row of `encoded` for each token, int32, or -1 for tokens that use their own embedding.
        encoded: The outputs, float [rows, E]. The first D elements are the embedding, which is all if E = D. Otherwise
            the next D are added after one of the decoder's layers, and so on.
        are_added: True if outputs are added to embeddings, which they replace otherwise.
    """

    def __init__(self, rows_T: Int32Array, encoded: Tensor, *, are_added: bool = False) -> None:
        self.rows_T = rows_T
        self.encoded = encoded
        self._are_added = are_added

    def put_into(self, hidden_TD: Tensor) -> Tensor:
        """Return the hidden states, with outputs in the rows of these tokens, or added to them."""
        tokens, part = self._part(hidden_TD, 0)
        if self._are_added:
            part += hidden_TD[tokens]
        return hidden_TD.index_copy(0, tokens, part)

    def add_to(self, hidden_TD: Tensor, number: int) -> None:
        """Add part `number` of the outputs, counted from 0 after the embedding, to the hidden states, in place."""
        tokens, part = self._part(hidden_TD, number + 1)
        # Every token occurs at most once.
        hidden_TD[tokens] += part

    def _part(self, hidden_TD: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return the indices of tokens with outputs, and part number `index` of these outputs, [tokens, D]."""
        rows_T = torch.from_numpy(self.rows_T).to(hidden_TD.device)
        tokens = (rows_T >= 0).nonzero().flatten()
        size = hidden_TD.shape[1]
        part = self.encoded[rows_T[tokens], index * size : (index + 1) * size]
        return tokens, part.to(hidden_TD.dtype)

    def replace_ids(self, ids_T: Tensor, token_id: int) -> Tensor:
        """Return the token ids, with tokens that have outputs replaced by `token_id`."""
        places_T = torch.from_numpy(self.rows_T).to(ids_T.device) >= 0
        return ids_T.masked_fill(places_T, token_id)
