"""Paged attention in plain torch operations, for any device; the reference for other backends.

The cache of a layer is [num_blocks, P, G, block_size, K] with P = 2 parts, keys and values, or P = 1 if one part is
both. If layers have different heads, a block may have additional pages after the layer's. An index key is the end of a
key with latent attention, otherwise of a row of the page after the layer's. A page is a head's part of a block and is
contiguous, so one `index_select` of pages gives keys and values of many requests in the shape of a batched matrix
product.

Indices and masks depend only on the step. `build` computes them once, and all layers with the same window share them.
Decoding requests are padded to the longest of their bucket and computed together. Prompts are computed one by one, in
tiles of queries.

Whole blocks of keys are computed, including masked ones. oneDNN's bfloat16 products then sum a query's values in one
order, independent of the other requests. Results have equal bits in a prompt, a chunk or a decode, for up to 1024 keys,
or more without a window. On CPUs without bfloat16 instructions, the order of long sums depends on the number of rows;
there only the native backend is batch-invariant for every model.

Shapes: T tokens, H query heads, G key/value heads, Q = H / G, K head dimension, V elements of a value, R rows (requests
of a bucket), B pages of a head, L = B * block_size keys, N = R * G, M = queries * Q.
"""

import math
import weakref
from collections.abc import Collection, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..batch import AttentionBatch
from ..layers.window import AfterPrompt, Window, first_visible
from .chosen_keys import choose_keys
from .interface import AttentionBackend, AttentionLayer, AttentionSpec, HeadBlocks, IndexQueries
from .torch_metadata import DecodeBucket, Masks, Prefill, TorchPagedMetadata
from .torch_tiles import LONGEST_SINGLE_SUM, QueryTiles

# Maximum size of the gathered keys and values of a bucket, so that they fit into the CPU cache.
_MAX_BUCKET_BYTES = 4 << 20


class TorchPagedAttention(AttentionBackend):
    """Gathers the pages that a step reads, then multiplies batches of matrices."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._tiles = QueryTiles(spec)
        self._num_parts = 1 if spec.latent_rank else 2
        own_pages = self._num_parts * self.num_kv_heads
        self._pages_per_block = spec.tensor_elements // self.head_dim or own_pages
        num_index_pages = 0 if spec.latent_rank else -(-spec.index_dim // self.head_dim)
        self._own_pages = range(own_pages)
        self._index_pages = range(own_pages, own_pages + num_index_pages)
        # The metadata of the last indexer's KV-cache group. Layers of other groups use its choice, too.
        self._chooser: weakref.ref[TorchPagedMetadata] | None = None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return [num_blocks, P, G, block_size, K], or [num_blocks, pages, block_size, K] if layers share a tensor."""
        if self.spec.tensor_elements:
            return (num_blocks, self._pages_per_block, self.block_size, self.head_dim)
        return (num_blocks, self._num_parts, self.num_kv_heads, self.block_size, self.head_dim)

    def build(
        self, batch: AttentionBatch, windows: Collection[Window | None]
    ) -> TorchPagedMetadata:
        """Return the cache rows that the step writes, and the pages and masks of its requests for each window."""
        query_lens_S = np.diff(batch.query_start_loc)
        decoding = np.flatnonzero(query_lens_S == 1)
        prefilling = np.flatnonzero(query_lens_S > 1)
        return TorchPagedMetadata(
            cache_rows=self._cache_rows(batch.slot_mapping, self._own_pages),
            index_rows=self._cache_rows(batch.slot_mapping, self._index_pages),
            decodes={w: list(self._decode_buckets(batch, decoding, w)) for w in windows},
            prefills={
                w: [self._prefill(batch, i, w) for i in prefilling.tolist()] for w in windows
            },
        )

    def _cache_rows(self, slot_mapping_T: NDArray[np.int32], pages: range) -> Tensor:
        block_T, offset_T = np.divmod(slot_mapping_T.astype(np.int64), self.block_size)
        page_TG = self._pages_of(block_T[:, None], np.array(pages, np.int64))
        return self._to_device((page_TG * self.block_size + offset_T[:, None]).ravel())

    def _pages_of(self, blocks: NDArray[np.int64], pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return page numbers.

        In a block, the pages of keys come before the pages of values, both in the order of the heads.
        """
        return blocks * self._pages_per_block + pages

    def _index_pages_of(self, blocks: NDArray[np.int64]) -> Tensor:
        index_pages = np.array(self._index_pages, np.int64)
        return self._to_device(self._pages_of(blocks[..., None], index_pages).ravel())

    def _decode_buckets(
        self, batch: AttentionBatch, requests: NDArray[np.int64], window: Window | None
    ) -> Iterator[DecodeBucket]:
        if not len(requests):
            return
        seq_lens = batch.seq_lens[requests].astype(np.int64)
        first_keys = np.array([first_visible(n - 1, window) for n in seq_lens.tolist()])
        first_blocks = first_keys // self.block_size
        num_blocks = -(-seq_lens // self.block_size) - first_blocks
        for bucket in self._buckets(num_blocks):
            rows = requests[bucket]
            first_R1, len_R1 = first_blocks[bucket, None], seq_lens[bucket, None]
            columns_RB = first_R1 + np.arange(num_blocks[bucket].max())
            # Columns past a row's own blocks are masked, so they may contain any existing block.
            columns_RB = np.minimum(columns_RB, (len_R1 - 1) // self.block_size)
            blocks_RB = batch.block_table[rows[:, None], columns_RB].astype(np.int64)
            own_pages = np.array(self._own_pages).reshape(self._num_parts, 1, -1, 1)
            pages = self._to_device(self._pages_of(blocks_RB[:, None], own_pages).ravel())
            keys_RL = first_R1 * self.block_size + np.arange(columns_RB.shape[1] * self.block_size)
            hidden_RL = keys_RL >= len_R1
            hidden_RL |= keys_RL < first_keys[bucket, None]
            if isinstance(window, AfterPrompt):
                prompt_R1 = _prompt_lengths(batch)[rows, None]
                hidden_RL |= (keys_RL >= prompt_R1) & (keys_RL < len_R1 - window.size)
            mask_RL = torch.zeros(hidden_RL.shape, dtype=self.dtype)
            mask_RL.masked_fill_(torch.from_numpy(hidden_RL), -math.inf)
            tokens = batch.query_start_loc[rows]
            is_whole_step = len(rows) == batch.query_start_loc[-1]
            origin_R1 = np.zeros_like(len_R1) if self.spec.rounds_alibi else len_R1 - 1
            yield DecodeBucket(
                tokens=None if is_whole_step else self._to_device(tokens.astype(np.int64)),
                pages=pages,
                index_pages=pages if self.spec.latent_rank else self._index_pages_of(blocks_RB),
                mask_N1L=self._of_kv_heads(mask_RL),
                distance_N1L=self._of_kv_heads(torch.from_numpy(origin_R1 - keys_RL).float())
                if self.spec.reads_distances
                else None,
            )

    def _of_kv_heads(self, x_RL: Tensor) -> Tensor:
        """Repeat each row for each key/value head: [R * G, 1, L] on the device."""
        return x_RL.repeat_interleave(self.num_kv_heads, 0).unsqueeze(1).to(self.device)

    def _prefill(self, batch: AttentionBatch, request: int, window: Window | None) -> Prefill:
        start, stop = (int(x) for x in batch.query_start_loc[request : request + 2])
        visible_T2 = batch.visible_in(window)
        seq_len = int(batch.seq_lens[request])
        if visible_T2 is not None and not self.spec.is_causal:
            seq_len, visible_T2 = int(visible_T2[start, 1]), None
            if isinstance(window, int):
                # Tokens whose window ends before the keys that they may see attend to nothing.
                stop = min(stop, start + seq_len + window - 1)
        position = seq_len - (stop - start)
        first_block = first_visible(position, window) // self.block_size
        if visible_T2 is not None:
            first_block = min(first_block, int(visible_T2[start, 0]) // self.block_size)
        first_key = first_block * self.block_size
        last_block = (seq_len - 1) // self.block_size
        blocks_B = batch.block_table[request, first_block : last_block + 1].astype(np.int64)
        own_pages = np.array(self._own_pages).reshape(-1, 1)
        pages = self._to_device(self._pages_of(blocks_B, own_pages).ravel())
        if visible_T2 is not None:
            tiles = self._tiles.in_spans(
                slice(start, stop), position, first_key, window, visible_T2[start:stop]
            )
        elif self.spec.is_causal:
            num_prompt_tokens = 0
            if isinstance(window, AfterPrompt):
                num_prompt_tokens = int(_prompt_lengths(batch)[request])
            tiles = self._tiles.causal(
                slice(start, stop), position, first_key, window, num_prompt_tokens
            )
        else:
            tiles = self._tiles.bidirectional(slice(start, stop), seq_len, window)
        return Prefill(
            pages=pages,
            index_pages=pages if self.spec.latent_rank else self._index_pages_of(blocks_B),
            tiles=list(tiles),
        )

    def _buckets(self, num_blocks: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Split rows into buckets of bounded size so that little padding is needed."""
        block_bytes = math.prod(self.kv_cache_shape(1)) * self.dtype.itemsize
        max_blocks = _MAX_BUCKET_BYTES // block_bytes
        is_long = num_blocks * self.block_size > LONGEST_SINGLE_SUM
        for rows in (np.flatnonzero(is_long), np.flatnonzero(~is_long)):
            rows = rows[np.argsort(-num_blocks[rows], kind="stable")]
            while len(rows):
                sizes = num_blocks[rows]
                total = sizes[0] * np.arange(1, len(rows) + 1)
                padding = total - np.cumsum(sizes)
                fits = (total <= max_blocks) & ((padding <= 32) | (4 * padding <= total))
                count = len(rows) if fits.all() else max(int(np.argmin(fits)), 1)
                yield np.sort(rows[:count])
                rows = rows[count:]

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def forward(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: TorchPagedMetadata,
        layer: AttentionLayer,
        index: IndexQueries | None = None,
    ) -> Tensor:
        """Store keys and values, choose keys if there is an `index`, and return the attention output [T, H, V]."""
        is_damaged_T = self._store(k_TGK, v_TGK, kv_cache, metadata, index)
        # The token's own output must remain NaN, so that the request fails.
        q_THK = q_THK.masked_fill(is_damaged_T[:, None, None], torch.nan)
        if index is not None:
            pages = kv_cache.view(-1, self.block_size * self.head_dim)
            metadata.chosen = choose_keys(index, pages, metadata, layer.window, self.spec)
            self._chooser = weakref.ref(metadata)
        return self.attend(q_THK, kv_cache, metadata, layer)

    def store(
        self,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: TorchPagedMetadata,
        layer: AttentionLayer,
    ) -> None:
        """Store keys and values."""
        self._store(k_TGK, v_TGK, kv_cache, metadata)

    def _store(
        self,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: TorchPagedMetadata,
        index: IndexQueries | None = None,
    ) -> Tensor:
        """Store keys, values and index keys. Return which tokens have numbers that are not finite, bool [T]."""
        if self.spec.latent_rank:
            kv_TGK = k_TGK if index is None else torch.cat((k_TGK, index.keys_T1I), -1)
        else:
            kv_TGK = torch.cat((k_TGK, v_TGK), 1)
        is_damaged_T = self._store_rows(self._filled(kv_TGK), kv_cache, metadata.cache_rows)
        if index is None or self.spec.latent_rank:
            return is_damaged_T
        index_T1K = F.pad(index.keys_T1I, (-self.spec.index_dim % self.head_dim, 0))
        return is_damaged_T | self._store_rows(index_T1K, kv_cache, metadata.index_rows)

    def _filled(self, x_THK: Tensor) -> Tensor:
        """Return queries or keys with zeros in the place of index keys that they do not have."""
        missing = self.head_dim - x_THK.shape[-1]
        return F.pad(x_THK, (0, missing)) if missing else x_THK

    def _store_rows(self, x_TGK: Tensor, kv_cache: Tensor, rows: Tensor) -> Tensor:
        # Masked keys still contribute 0 * value, and 0 * NaN is NaN. A value that is not finite must therefore not be
        # stored in a block, where it would affect the next request that uses the block.
        is_finite_TGK = x_TGK.isfinite()
        x_TGK = x_TGK.to(self.dtype).nan_to_num_().masked_fill_(~is_finite_TGK, 0.0)
        kv_cache.view(-1, self.head_dim).index_copy_(0, rows, x_TGK.view(-1, self.head_dim))
        return ~is_finite_TGK.flatten(1).all(1)

    def attend(
        self,
        q_THK: Tensor,
        kv_cache: Tensor,
        metadata: TorchPagedMetadata,
        layer: AttentionLayer,
    ) -> Tensor:
        """Return the attention output [T, H, K] with stored keys and values."""
        pages = kv_cache.view(-1, self.block_size * self.head_dim)
        filled_THK = self._filled(q_THK).to(self.dtype)
        attended_THK = self._attend_pages(filled_THK, pages, metadata, layer)
        return attended_THK[..., : self.value_dim].to(q_THK.dtype)

    def _last_choice(self) -> Masks:
        """Return the masks that leave only the keys that an indexer has chosen last in this step.

        Masks depend only on the positions of tokens, which are the same in all groups.
        """
        chooser = None if self._chooser is None else self._chooser()
        assert chooser is not None and chooser.chosen is not None, "an earlier layer has an indexer"
        return chooser.chosen

    def _attend_pages(
        self,
        q_THK: Tensor,
        pages: Tensor,
        metadata: TorchPagedMetadata,
        layer: AttentionLayer,
    ) -> Tensor:
        masks = self._last_choice() if layer.is_sparse else metadata.masks(layer)
        decodes, prefills = metadata.decodes[layer.window], metadata.prefills[layer.window]
        if len(decodes) == 1 and decodes[0].tokens is None:
            return self._decode(q_THK, pages, decodes[0], masks.decodes[0], layer)
        make = torch.empty_like if self.spec.is_causal else torch.zeros_like
        out_THK = make(q_THK, memory_format=torch.contiguous_format)
        for bucket, mask_N1L in zip(decodes, masks.decodes, strict=True):
            attended_RHK = self._decode(q_THK[bucket.tokens], pages, bucket, mask_N1L, layer)
            out_THK[bucket.tokens] = attended_RHK
        for prefill, masks_of_tiles in zip(prefills, masks.tiles, strict=True):
            kv = pages.index_select(0, prefill.pages)
            kv = kv.view(self._num_parts, self.num_kv_heads, -1, self.head_dim)
            k_GLK, v_GLK = kv[0], kv[-1]
            scores = layer.distance_scores
            of_keys_GLB = None if scores is None else scores.of_keys(k_GLK)
            for tile, mask_ML in zip(prefill.tiles, masks_of_tiles, strict=True):
                q_GMK = (
                    q_THK[tile.tokens]
                    .unflatten(1, (self.num_kv_heads, -1))
                    .transpose(0, 1)
                    .flatten(1, 2)
                )
                bias = self._bias(mask_ML, tile.distance_ML, layer, tile.tokens)
                if scores is not None and tile.distance_ML is not None:
                    bias = scores.add_to(bias, q_GMK, of_keys_GLB, tile.distance_ML)
                attended_GMK = _attend(
                    q_GMK,
                    k_GLK[:, tile.keys],
                    v_GLK[:, tile.keys],
                    bias,
                    layer,
                    self._sinks(layer, tile.tokens, q_GMK),
                )
                out_THK[tile.tokens].unflatten(1, (self.num_kv_heads, -1)).copy_(
                    attended_GMK.unflatten(1, (-1, self.num_heads // self.num_kv_heads)).transpose(
                        0, 1
                    )
                )
        return out_THK

    def _decode(
        self,
        q_RHK: Tensor,
        pages: Tensor,
        bucket: DecodeBucket,
        mask_N1L: Tensor,
        layer: AttentionLayer,
    ) -> Tensor:
        num_rows = q_RHK.shape[0]
        kv = pages.index_select(0, bucket.pages)
        kv = kv.view(self._num_parts, mask_N1L.shape[0], mask_N1L.shape[2], self.head_dim)
        keys, values = kv[0], kv[-1]
        q_NQK = q_RHK.reshape(mask_N1L.shape[0], -1, self.head_dim)
        mask = self._bias(mask_N1L, bucket.distance_N1L, layer, bucket.tokens)
        sinks = self._sinks(layer, bucket.tokens, q_NQK)
        return _attend(q_NQK, keys, values, mask, layer, sinks).reshape(
            num_rows, self.num_heads, self.head_dim
        )

    def _bias(
        self,
        mask: Tensor,
        distance: Tensor | None,
        layer: AttentionLayer,
        tokens: slice | Tensor | None,
    ) -> Tensor:
        """Return the terms that are added to the scores: the mask, and the biases by the distance to the key.

        `tokens` are those of the rows; None for all of the step.
        """
        if distance is None:
            return mask
        if layer.head_blocks is not None:
            return self._in_blocks(mask, distance, layer.head_blocks)
        if layer.query_biases_THE is not None:
            biases_THE = layer.query_biases_THE
            own_RHE = biases_THE if tokens is None else biases_THE[tokens]
            return (mask + self._query_biases(distance, own_RHE)).to(mask.dtype)
        if layer.distance_biases_HE is not None:
            return (mask + self._distance_biases(distance, layer.distance_biases_HE)).to(mask.dtype)
        if layer.alibi_slopes_H is None:
            return mask
        slopes = self._of_rows(layer.alibi_slopes_H, mask)
        if self.spec.rounds_alibi:
            rounded = slopes.bfloat16() * distance.bfloat16()
            return (mask - rounded.float() * layer.scale).to(mask.dtype)
        # Later keys, which only encoders see, have negative distances.
        distance = distance.abs()
        if self.spec.has_alibi_roots:
            distance = distance.float().sqrt()
        return (mask - slopes * distance).to(mask.dtype)

    def _of_rows(self, values_H: Tensor, mask: Tensor) -> Tensor:
        """Repeat one value per query head for all rows of scores, [N, M, 1], given their mask [M, L] or [N, 1, L]."""
        values_GQ = values_H.view(self.num_kv_heads, -1)
        if mask.dim() == 2:
            # Rows are queries times the heads that share a key.
            return values_GQ.repeat(1, mask.shape[0] // values_GQ.shape[1]).unsqueeze(2)
        return values_GQ.repeat(mask.shape[0] // self.num_kv_heads, 1).unsqueeze(2)

    def _in_blocks(self, mask: Tensor, distance: Tensor, blocks: HeadBlocks) -> Tensor:
        """Return the mask with -inf for keys to whose blocks a head does not attend. The first key has position 0."""
        pattern = blocks.pattern
        key_L = torch.arange(mask.shape[-1], device=mask.device)
        block_L = key_L // pattern.block_size
        own = (distance.long() + key_L) // pattern.block_size
        is_seen = (block_L + self._of_rows(blocks.offsets_H, mask)) % pattern.stride == 0
        is_seen = is_seen | (own - block_L < pattern.num_near)
        return mask.masked_fill(~is_seen, -math.inf)

    def _query_biases(self, distance: Tensor, biases_RHE: Tensor) -> Tensor:
        """Return each row's bias for each key [N, M, L], given the distances [M, L] or [N, 1, L]."""
        biases_RGQE = biases_RHE.unflatten(1, (self.num_kv_heads, -1))
        if distance.dim() == 2:
            # Rows are queries times the heads that share a key.
            biases_NME = biases_RGQE.transpose(0, 1).flatten(1, 2)
        else:
            biases_NME = biases_RGQE.flatten(0, 1)
        columns, count = distance.long(), biases_RHE.shape[-1]
        is_outside = (columns < 0) | (columns >= count)
        columns = columns.clamp(0, count - 1).expand(*biases_NME.shape[:2], -1)
        return biases_NME.gather(2, columns).masked_fill(is_outside, 0.0)

    def _distance_biases(self, distance: Tensor, biases_HE: Tensor) -> Tensor:
        """Return each row's bias for each key [N, M, L], given the distances [M, L] or [N, 1, L]."""
        furthest = biases_HE.shape[1] // 2
        columns = (furthest - distance.long()).clamp(0, 2 * furthest)
        biases_GQE = biases_HE.unflatten(0, (self.num_kv_heads, -1))
        repeats = biases_GQE.shape[1]
        if distance.dim() == 2:
            # Rows are queries times the heads that share a key.
            biases_GQML = biases_GQE[:, :, columns[::repeats]]
            return biases_GQML.transpose(1, 2).flatten(1, 2)
        kv_head_N = torch.arange(len(columns), device=columns.device) % self.num_kv_heads
        return biases_GQE[kv_head_N].gather(2, columns.expand(-1, repeats, -1))

    def _sinks(
        self, layer: AttentionLayer, tokens: slice | Tensor | None, q_NMK: Tensor
    ) -> Tensor | None:
        """Return the sink of each row of the queries of these tokens, [N, M, 1]; None if the layer has none."""
        if layer.sinks_TH is None:
            return None if layer.sinks_H is None else self._repeat_for_rows(layer.sinks_H, q_NMK)
        own_RH = layer.sinks_TH if tokens is None else layer.sinks_TH[tokens]
        sinks_RGQ = own_RH.to(q_NMK.dtype).unflatten(1, (self.num_kv_heads, -1))
        if len(q_NMK) == self.num_kv_heads and len(own_RH) > 1:
            # Rows are queries times the heads that share a key.
            return sinks_RGQ.transpose(0, 1).flatten(1, 2).unsqueeze(2)
        return sinks_RGQ.flatten(0, 1).unsqueeze(2)

    def _repeat_for_rows(self, values_H: Tensor, q_NMK: Tensor) -> Tensor:
        """Repeat one value per query head for all rows of its queries, [N, M, 1] in the dtype of the queries."""
        values_GQ = values_H.to(q_NMK.dtype).view(self.num_kv_heads, -1)
        num_heads, num_rows = q_NMK.shape[:2]
        repeats = (num_heads // self.num_kv_heads, num_rows // values_GQ.shape[1])
        return values_GQ.repeat(*repeats).unsqueeze(2)


def _prompt_lengths(batch: AttentionBatch) -> NDArray[np.int32]:
    assert batch.num_prompt_tokens is not None
    return batch.num_prompt_tokens


def _attend(
    q_NMK: Tensor,
    k_NLK: Tensor,
    v_NLK: Tensor,
    mask: Tensor,
    layer: AttentionLayer,
    sinks_NM1: Tensor | None,
) -> Tensor:
    """Return softmax(scores + mask) @ v for N independent heads; the mask broadcasts to [N, M, L]."""
    if q_NMK.shape[1] == 1:
        # A product with a single row sums in another order, so double the row.
        if sinks_NM1 is not None:
            sinks_NM1 = sinks_NM1.expand(-1, 2, -1)
        return _attend(q_NMK.expand(-1, 2, -1), k_NLK, v_NLK, mask, layer, sinks_NM1)[:, :1]
    keys_NKL = k_NLK.transpose(1, 2)
    if layer.softcap is None:
        scores_NML = torch.baddbmm(mask, q_NMK, keys_NKL, alpha=layer.scale)
    else:
        scores_NML = torch.bmm(q_NMK, keys_NKL).mul_(layer.scale / layer.softcap)
        scores_NML = scores_NML.tanh_().mul_(layer.softcap).add_(mask)
    if sinks_NM1 is None:
        return torch.bmm(torch.softmax(scores_NML, -1), v_NLK)
    # Put the sink first, so that a key's place in the sum does not depend on the number of keys.
    weights_NML = torch.softmax(torch.cat((sinks_NM1, scores_NML), -1), -1)[..., 1:]
    return torch.bmm(weights_NML.contiguous(), v_NLK)
