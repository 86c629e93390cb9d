"""The indexer of compressed attention, which chooses the entries to which a token attends.

Shapes: T tokens of a step, M tokens of a tile, J heads of the indexer, I elements of an index key, E entries of a
sequence, C chosen entries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention.chosen_keys import highest
from ...attention.compressed import SequenceBatch
from ...layers.specs.latent import IndexerSpec

_MAX_SCORES = 1 << 23
"""The maximum number of scores of all heads that are computed at once."""

_UNIT = 64
"""The numbers of compared entries are multiples of this, so that a product depends little on what is in the step."""


def choose_entries(
    indexer: IndexerSpec,
    rate: int,
    queries_TJI: Tensor,
    weights_TJ: Tensor,
    keys: Tensor,
    batch: SequenceBatch,
) -> Tensor:
    """Return the numbers of the chosen entries, int64 [T, C], for tokens that may attend to more entries than C.

    The rows of other tokens are not set. `keys` are the rows of index keys in the cache.
    """
    chosen_TC = batch.positions_T.new_zeros((len(queries_TJI), indexer.num_chosen))
    counts_T = batch.num_entries(rate)
    weights_TJ = weights_TJ.float() * (indexer.head_dim * indexer.num_heads) ** -0.5
    for start, stop in zip(batch.query_start_loc[:-1], batch.query_start_loc[1:], strict=True):
        first = int(start) + int((counts_T[start:stop] <= indexer.num_chosen).sum())
        if first == stop:
            continue
        num_entries = -(-int(counts_T[stop - 1]) // _UNIT) * _UNIT
        number_E = torch.arange(num_entries, device=keys.device)
        # Entries after the last one are not chosen, so any existing row will do.
        end_E = number_E.clamp(max=int(counts_T[stop - 1]) - 1) * rate + rate - 1
        token = batch.requests_T.new_full((1,), first)
        keys_EI = keys[batch.places(token, end_E.unsqueeze(0), rate)].squeeze(0).float()
        step = max(1, _MAX_SCORES // (num_entries * indexer.num_heads))
        for begin in range(first, int(stop), step):
            tokens = slice(begin, min(begin + step, int(stop)))
            scores_ME = _scores(queries_TJI[tokens], weights_TJ[tokens], keys_EI)
            counts_M1 = ((batch.positions_T[tokens] + 1) // rate).unsqueeze(1)
            scores_ME = scores_ME.masked_fill(number_E >= counts_M1, -torch.inf)
            is_chosen_ME = highest(scores_ME, indexer.num_chosen)
            chosen_TC[tokens] = is_chosen_ME.nonzero()[:, 1].view(-1, indexer.num_chosen)
    return chosen_TC


def _scores(queries_MJI: Tensor, weights_MJ: Tensor, keys_EI: Tensor) -> Tensor:
    """Return the scores of entries, float32 [M, E]."""
    count, heads = queries_MJI.shape[:2]
    if count * heads == 1:
        # A product with a single row sums in another order, so double the row.
        queries_MJI = queries_MJI.expand(2, -1, -1)
    products = F.linear(queries_MJI.flatten(0, 1).float(), keys_EI).relu_()
    products_MJE = products[: count * heads].unflatten(0, (count, heads))
    return (products_MJE * weights_MJ.unsqueeze(2)).sum(1)
