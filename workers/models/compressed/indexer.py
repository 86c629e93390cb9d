"""The indexer of compressed attention, which chooses the entries to which a token attends.

Shapes: T tokens of a step, M tokens of a tile, J heads of the indexer, I elements of an index key, E entries of a
sequence, C chosen entries, B blocks of entries, N blocks of candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention.chosen_keys import highest
from ...attention.compressed import Choice, SequenceBatch
from ...layers.specs.compressed import Candidates, CompressedSpec, Compression

_MAX_SCORES = 1 << 23
"""The maximum number of scores of all heads that are computed at once."""

_NO_ENTRY = 1 << 62

_UNIT = 64
"""The numbers of compared entries are multiples of this, so that a product depends little on what is in the step."""


def choose_entries(
    compressed: CompressedSpec,
    compression: Compression,
    queries_TJI: Tensor,
    weights_TJ: Tensor,
    keys: Tensor,
    batch: SequenceBatch,
    choice: Choice,
) -> None:
    """Store the numbers of the chosen entries in `choice`, int64 [T, C], for tokens that may attend to more than C.

    The rows of other tokens are not set. A number may be that of no entry, if there are too few candidates. `keys` are
    the rows of index keys in the cache.
    """
    indexer, rate, candidates = compressed.indexer, compression.rate, compressed.candidates
    chosen_TC = batch.positions_T.new_zeros((len(queries_TJI), indexer.num_chosen))
    choice.chosen_TC = chosen_TC
    if candidates is not None and compression.keeps_candidates:
        shape = len(queries_TJI), candidates.num_blocks
        choice.candidates_TN = batch.positions_T.new_zeros(shape)
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
            if candidates is not None and compression.keeps_candidates:
                best_MN = _best_blocks(scores_ME, counts_M1, candidates)
                choice.candidates_TN[tokens, : best_MN.shape[1]] = best_MN
            if candidates is not None and compression.candidate_source is not None:
                blocks_MN = choice.candidates_TN[tokens]
                scores_ME = _among_blocks(scores_ME, blocks_MN, candidates.block_size)
            is_chosen_ME = highest(scores_ME, indexer.num_chosen)
            chosen_MC = is_chosen_ME.nonzero()[:, 1].view(-1, indexer.num_chosen)
            is_missing_MC = scores_ME.gather(1, chosen_MC) == -torch.inf
            chosen_TC[tokens] = chosen_MC.masked_fill(is_missing_MC, _NO_ENTRY)


def _best_blocks(scores_ME: Tensor, counts_M1: Tensor, candidates: Candidates) -> Tensor:
    """Return the numbers [M, N] of the blocks with the highest scores, and of that with the last entry."""
    size = candidates.block_size
    padded_ME = F.pad(scores_ME, (0, -scores_ME.shape[1] % size), value=-torch.inf)
    best_MB = padded_ME.unflatten(-1, (-1, size)).amax(-1)
    best_MB.scatter_(1, (counts_M1 - 1) // size, torch.inf)
    count = min(candidates.num_blocks, best_MB.shape[1])
    return highest(best_MB, count).nonzero()[:, 1].view(-1, count)


def _among_blocks(scores_ME: Tensor, blocks_MN: Tensor, size: int) -> Tensor:
    """Return the scores with -inf for entries outside of these blocks."""
    count, num_entries = scores_ME.shape
    shape = count, -(-num_entries // size)
    is_candidate_MB = torch.zeros(shape, dtype=torch.bool, device=scores_ME.device)
    is_candidate_MB.scatter_(1, blocks_MN, True)
    is_candidate_ME = is_candidate_MB.repeat_interleave(size, 1)[:, :num_entries]
    return scores_ME.masked_fill(~is_candidate_ME, -torch.inf)


def _scores(queries_MJI: Tensor, weights_MJ: Tensor, keys_EI: Tensor) -> Tensor:
    """Return the scores of entries, float32 [M, E]."""
    count, heads = queries_MJI.shape[:2]
    if count * heads == 1:
        # A product with a single row sums in another order, so double the row.
        queries_MJI = queries_MJI.expand(2, -1, -1)
    products = F.linear(queries_MJI.flatten(0, 1).float(), keys_EI).relu_()
    products_MJE = products[: count * heads].unflatten(0, (count, heads))
    return (products_MJE * weights_MJ.unsqueeze(2)).sum(1)
