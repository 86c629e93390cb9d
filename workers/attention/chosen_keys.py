"""The choice of the keys that the tokens of a step attend to, by an indexer.

Shapes: T tokens of a step, G key/value heads, R decoding requests, M tokens of a sequence, N = R * G or G, L keys of a
sequence, J heads of an indexer, I elements of an index key, B blocks, P keys of a block.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers.window import Window
from .interface import AttentionSpec, IndexQueries
from .torch_metadata import Masks, TorchPagedMetadata


def choose_keys(
    index: IndexQueries,
    pages: Tensor,
    metadata: TorchPagedMetadata,
    window: Window | None,
    spec: AttentionSpec,
) -> Masks:
    """Return the masks of a step with -inf for the keys that its tokens do not choose, among all stored keys."""

    def keys_of(index_pages: Tensor, num_rows: int) -> Tensor:
        # Pages of a block hold the parts of index keys that are longer than the keys of a head.
        num_parts = 1 if spec.latent_rank else -(-spec.index_dim // spec.head_dim)
        keys = pages.index_select(0, index_pages)
        keys = keys.view(num_rows, -1, num_parts, spec.block_size, spec.head_dim)
        keys = keys.transpose(2, 3).reshape(num_rows, 1, -1, num_parts * spec.head_dim)
        keys = keys[..., -spec.index_dim :].expand(-1, spec.num_kv_heads, -1, -1)
        return keys.flatten(0, 1)

    weights_TGJ = index.weights_TGJ
    decodes, tiles = [], []
    for bucket in metadata.decodes[window]:
        tokens = slice(None) if bucket.tokens is None else bucket.tokens
        queries_RGJI = index.queries_TGJI[tokens]
        decodes.append(
            _choose(
                index,
                queries_RGJI.flatten(0, 1).unsqueeze(1),
                None if weights_TGJ is None else weights_TGJ[tokens].flatten(0, 1).unsqueeze(1),
                keys_of(bucket.index_pages, len(queries_RGJI)),
                bucket.mask_N1L,
            )
        )
    repeats = spec.num_heads // spec.num_kv_heads
    for prefill in metadata.prefills[window]:
        keys_NLI = keys_of(prefill.index_pages, 1)
        tiles.append(
            [
                _choose(
                    index,
                    index.queries_TGJI[tile.tokens].transpose(0, 1),
                    None if weights_TGJ is None else weights_TGJ[tile.tokens].transpose(0, 1),
                    keys_NLI[:, tile.keys],
                    # Rows are queries times the heads that share a key.
                    tile.mask_ML[::repeats].expand(spec.num_kv_heads, -1, -1),
                ).repeat_interleave(repeats, 1)
                for tile in prefill.tiles
            ]
        )
    return Masks(decodes, tiles)


def _choose(
    index: IndexQueries,
    queries_NMJI: Tensor,
    weights_NMJ: Tensor | None,
    keys_NLI: Tensor,
    mask_NML: Tensor,
) -> Tensor:
    """Return `mask_NML` with -inf for the keys outside the blocks with the highest scores.

    The mask is causal, and the first key is that of position 0. If scores are equal, the first blocks win.
    """
    if index.summarize is not None:
        return _choose_whole(index, index.summarize, queries_NMJI, weights_NMJ, keys_NLI, mask_NML)
    size, num_keys = index.block_size, keys_NLI.shape[1]
    if num_keys <= index.num_chosen * size:
        return mask_NML
    scores_NML = _scores(queries_NMJI, weights_NMJ, keys_NLI, mask_NML)
    padded_NML = F.pad(scores_NML, (0, -num_keys % size), value=-math.inf)
    scores_NMB = padded_NML.unflatten(-1, (-1, size)).amax(-1)
    own_NM1 = ((mask_NML == 0).sum(-1, keepdim=True) - 1) // size
    distance_NMB = own_NM1 - torch.arange(scores_NMB.shape[-1], device=scores_NMB.device)
    is_local_NMB = (distance_NMB >= 0) & (distance_NMB < index.num_local)
    scores_NMB = scores_NMB.masked_fill(is_local_NMB, math.inf)
    is_chosen_NMB = highest(scores_NMB, index.num_chosen)
    is_chosen_NML = is_chosen_NMB.repeat_interleave(size, -1)[..., :num_keys]
    return mask_NML.masked_fill(~is_chosen_NML, -math.inf)


def _choose_whole(
    index: IndexQueries,
    summarize: Callable[[Tensor], Tensor],
    queries_NMJI: Tensor,
    weights_NMJ: Tensor | None,
    keys_NLI: Tensor,
    mask_NML: Tensor,
) -> Tensor:
    """Return `mask_NML` with -inf for the keys of whole blocks that are not chosen; see `IndexQueries.summarize`."""
    size, num_keys = index.block_size, keys_NLI.shape[1]
    # A token chooses among the blocks whose last key it sees, or the key after it.
    own = int(index.keeps_own_block)
    last = size - 1 + own
    num_blocks = (num_keys - last + size - 1) // size
    if num_blocks <= index.num_chosen:
        return mask_NML
    end = num_blocks * size
    keys_NBI = summarize(keys_NLI[:, :end].unflatten(1, (-1, size)))
    scores_NMB = _scores(queries_NMJI, weights_NMJ, keys_NBI, mask_NML[..., last::size])
    is_chosen_NML = highest(scores_NMB, index.num_chosen).repeat_interleave(size, -1)
    num_whole_NM1 = ((mask_NML == 0).sum(-1, keepdim=True) - own) // size
    is_later_NML = torch.arange(num_keys, device=mask_NML.device) >= num_whole_NM1 * size
    is_chosen_NML = is_later_NML | F.pad(is_chosen_NML, (0, num_keys - end))
    return mask_NML.masked_fill(~is_chosen_NML, -math.inf)


def _scores(
    queries_NMJI: Tensor, weights_NMJ: Tensor | None, keys_NLI: Tensor, mask_NML: Tensor
) -> Tensor:
    """Return the scores of keys, float32 [N, M, L], -inf for masked ones.

    A score is summed head by head, so its bits do not depend on what else is computed with it.
    """
    if weights_NMJ is None:
        return _products(queries_NMJI[:, :, 0], keys_NLI) + mask_NML
    scores_NML = mask_NML.float()
    for head in range(queries_NMJI.shape[2]):
        products_NML = _products(queries_NMJI[:, :, head], keys_NLI).relu_()
        scores_NML = torch.addcmul(scores_NML, weights_NMJ[:, :, head, None].float(), products_NML)
    return scores_NML


def _products(queries_NMI: Tensor, keys_NLI: Tensor) -> Tensor:
    """Return the products of queries and keys, float32 [N, M, L]."""
    num_tokens = queries_NMI.shape[1]
    if num_tokens == 1:
        # A product with a single row sums in another order, so double the row.
        queries_NMI = queries_NMI.expand(-1, 2, -1)
    return torch.bmm(queries_NMI.float(), keys_NLI.float().transpose(1, 2))[:, :num_tokens]


def highest(scores_NMB: Tensor, count: int) -> Tensor:
    """Return which scores are the `count` highest of a row, the first ones of equal scores, bool [N, M, B]."""
    lowest_NM1 = scores_NMB.topk(count, -1).values[..., -1:]
    is_higher_NMB = scores_NMB > lowest_NM1
    is_equal_NMB = scores_NMB == lowest_NM1
    room_NM1 = count - is_higher_NMB.sum(-1, keepdim=True)
    return is_higher_NMB | (is_equal_NMB & (is_equal_NMB.cumsum(-1) <= room_NM1))
