"""The keys that the tokens of a step attend to, if an indexer chooses them.

Shapes: N sequences, M tokens of each, L keys of each, J heads of an indexer, I elements of an index key, B blocks.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers.block_indexer_spec import BlockIndexerSpec
from ..layers.spec import Window
from .interface import AttentionSpec, BlockQueries, IndexQueries
from .torch_metadata import ChosenKeys, TorchPagedMetadata


def choose_keys(
    index: IndexQueries,
    pages: Tensor,
    metadata: TorchPagedMetadata,
    window: Window | None,
    spec: AttentionSpec,
) -> ChosenKeys:
    """Return the keys that an indexer of latent attention chooses for the tokens of a step, among stored keys."""
    decodes, tiles = [], []
    for bucket in metadata.decodes[window]:
        tokens = slice(None) if bucket.tokens is None else bucket.tokens
        keys = pages.index_select(0, bucket.pages).view(len(bucket.mask_N1L), -1, spec.head_dim)
        decodes.append(
            _choose_keys(
                index.queries_TJI[tokens].unsqueeze(1),
                index.weights_TJ[tokens].unsqueeze(1),
                keys[..., -spec.index_dim :],
                bucket.mask_N1L,
                index.num_chosen,
            )
        )
    for prefill in metadata.prefills[window]:
        keys = pages.index_select(0, prefill.pages).view(1, -1, spec.head_dim)
        tiles.append(
            [
                _choose_keys(
                    index.queries_TJI[tile.tokens].unsqueeze(0),
                    index.weights_TJ[tile.tokens].unsqueeze(0),
                    keys[:, tile.keys, -spec.index_dim :],
                    # All heads of a token share one mask.
                    tile.mask_ML[:: spec.num_heads].unsqueeze(0),
                    index.num_chosen,
                )[0].repeat_interleave(spec.num_heads, 0)
                for tile in prefill.tiles
            ]
        )
    return ChosenKeys(decodes, tiles)


def choose_blocks(
    index: BlockQueries,
    pages: Tensor,
    metadata: TorchPagedMetadata,
    window: Window | None,
    spec: AttentionSpec,
) -> ChosenKeys:
    """Return the keys in the blocks that an indexer chooses for the tokens of a step, among stored keys."""

    def keys_of(index_pages: Tensor, num_rows: int) -> Tensor:
        keys = pages.index_select(0, index_pages).view(num_rows, 1, -1, spec.head_dim)
        keys = keys[..., : spec.index_dim].expand(-1, spec.num_kv_heads, -1, -1)
        return keys.flatten(0, 1)

    decodes, tiles = [], []
    for bucket in metadata.decodes[window]:
        queries = index.queries_TGI if bucket.tokens is None else index.queries_TGI[bucket.tokens]
        decodes.append(
            _choose_blocks(
                queries.flatten(0, 1).unsqueeze(1),
                keys_of(bucket.index_pages, len(queries)),
                bucket.mask_N1L,
                index.indexer,
            )
        )
    repeats = spec.num_heads // spec.num_kv_heads
    for prefill in metadata.prefills[window]:
        keys = keys_of(prefill.index_pages, 1)
        tiles.append(
            [
                _choose_blocks(
                    index.queries_TGI[tile.tokens].transpose(0, 1),
                    keys[:, tile.keys],
                    # Rows are queries times the heads that share a key.
                    tile.mask_ML[::repeats].expand(spec.num_kv_heads, -1, -1),
                    index.indexer,
                ).repeat_interleave(repeats, 1)
                for tile in prefill.tiles
            ]
        )
    return ChosenKeys(decodes, tiles)


def _choose_keys(
    queries_NMJI: Tensor, weights_NMJ: Tensor, keys_NLI: Tensor, mask_NML: Tensor, num_chosen: int
) -> Tensor:
    """Return `mask_NML` with -inf for all but the `num_chosen` keys with the highest scores.

    Of equal scores, the first ones win.

    A score is summed head by head, so its bits do not depend on what else is computed with it.
    """
    if keys_NLI.shape[1] <= num_chosen:
        return mask_NML
    scores_NML = mask_NML.float()
    for head in range(queries_NMJI.shape[2]):
        products_NML = _products(queries_NMJI[:, :, head], keys_NLI).relu_()
        scores_NML = torch.addcmul(scores_NML, weights_NMJ[:, :, head, None].float(), products_NML)
    return mask_NML.masked_fill(~_highest(scores_NML, num_chosen), -math.inf)


def _choose_blocks(
    queries_NMI: Tensor, keys_NLI: Tensor, mask_NML: Tensor, indexer: BlockIndexerSpec
) -> Tensor:
    """Return `mask_NML` with -inf for the keys outside the blocks that the indexer chooses.

    The mask is causal, and the first key is that of position 0. Of equal scores, the first ones win.
    """
    size, num_keys = indexer.block_size, keys_NLI.shape[1]
    if num_keys <= indexer.num_tokens:
        return mask_NML
    scores_NML = _products(queries_NMI, keys_NLI) + mask_NML
    padded_NML = F.pad(scores_NML, (0, -num_keys % size), value=-math.inf)
    scores_NMB = padded_NML.unflatten(-1, (-1, size)).amax(-1)
    own_NM1 = ((mask_NML == 0).sum(-1, keepdim=True) - 1) // size
    distance_NMB = own_NM1 - torch.arange(scores_NMB.shape[-1], device=scores_NMB.device)
    is_local_NMB = (distance_NMB >= 0) & (distance_NMB < indexer.num_local)
    scores_NMB = scores_NMB.masked_fill(is_local_NMB, math.inf)
    is_chosen_NMB = _highest(scores_NMB, indexer.num_chosen)
    is_chosen_NML = is_chosen_NMB.repeat_interleave(size, -1)[..., :num_keys]
    return mask_NML.masked_fill(~is_chosen_NML, -math.inf)


def _products(queries_NMI: Tensor, keys_NLI: Tensor) -> Tensor:
    """Return the products of queries and keys, float32 [N, M, L]."""
    num_tokens = queries_NMI.shape[1]
    if num_tokens == 1:
        # A product with a single row sums in another order, so double the row.
        queries_NMI = queries_NMI.expand(-1, 2, -1)
    return torch.bmm(queries_NMI.float(), keys_NLI.float().transpose(1, 2))[:, :num_tokens]


def _highest(scores_NMB: Tensor, count: int) -> Tensor:
    """Return which scores are the `count` highest of a row, the first ones of equal scores, bool [N, M, B]."""
    lowest_NM1 = scores_NMB.topk(count, -1).values[..., -1:]
    is_higher_NMB = scores_NMB > lowest_NM1
    is_equal_NMB = scores_NMB == lowest_NM1
    room_NM1 = count - is_higher_NMB.sum(-1, keepdim=True)
    return is_higher_NMB | (is_equal_NMB & (is_equal_NMB.cumsum(-1) <= room_NM1))
