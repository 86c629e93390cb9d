"""The attention block of a decoder layer with compressed attention; see `CompressedSpec`.

Shapes: T tokens of a step, D hidden size, H heads of this shard, K elements of a key, J heads of an indexer, I elements
of an index key, N tokens that are computed together or entries, W tokens of a window or of an entry, C entries that a
token attends to, L = W + C, Q elements of the queries' vector, F elements of a token's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....protocol.errors import ConfigError
from ...attention.compressed import CompressedCache, SequenceBatch, TokensWithEntries, store
from ...layers.layer_spec import LayerSpec
from ...layers.layers import RMSNorm
from ...layers.parallel.shard import ModelShard
from ...layers.parallel.tensor_parallel import elements
from ...layers.rope import RotaryEmbedding, RotaryTables
from ...layers.spec import ModelSpec
from ...layers.specs.compressed import CompressedSpec
from ..layer_source import LayerSource
from ..weights import Rows
from .compressor import Compressor, DerivedIndexKeys
from .indexer import choose_entries
from .rotation import rotate_last

_MAX_TILE_BYTES = 32 << 20
"""The maximum size of the keys that are gathered at once, unless a single token has more."""


class CompressedAttention:
    """Attention to the last tokens and to entries that summarize earlier ones."""

    qkv = None
    """None, so that a norm before the attention does not round its output: several products read it."""

    def __init__(
        self,
        compressed: CompressedSpec,
        layer: LayerSpec,
        source: LayerSource,
        cache: CompressedCache,
    ) -> None:
        spec, weights, prefix, shard, _ = source
        self._spec, self._compressed, self._cache = spec, compressed, cache
        self._compression = compression = layer.compression
        self._key_row = compressed.token_elements(spec.head_dim, compression)[0]
        heads = shard.heads(spec)
        self._num_heads = len(heads)
        rank, size = compressed.query_rank, spec.head_dim
        rows = [
            Rows(f"{prefix}q_a_proj", rank, range(rank)),
            Rows(f"{prefix}kv_proj", size, range(size)),
        ]
        self._first = source.read_rows(rows, spec.hidden_size, is_adapted=True)
        self._query_norm, self._key_norm = (
            RMSNorm(weights.read_vector(f"{prefix}{name}.weight", count), spec.norm_eps)
            for name, count in (("q_a_norm", rank), ("kv_norm", size))
        )
        part = elements(heads, size)
        queries = [Rows(f"{prefix}q_b_proj", spec.num_heads * size, part)]
        self._sinks_H = weights.read_vector(f"{prefix}sinks", spec.num_heads, heads)
        self._compressors: list[Compressor] = []
        self._index_keys: DerivedIndexKeys | None = None
        self._indexer = None
        inputs: list[Rows] = []
        if compression is not None and compression.has_indexer:
            self._indexer = compressed.indexer
        self._chooses = (
            self._indexer is not None and compression is not None and compression.chooses
        )
        if compression is not None and compression.source is None:
            assert layer.rope is not None
            # No scaling that this family supports depends on the length.
            self._rotary = RotaryEmbedding(
                layer.rope,
                max_model_len=spec.max_position_embeddings,
                dtype=weights.dtype,
                device=weights.device,
            )
            sizes = [(size, f"{prefix}compressor.")]
            of_index = source.at("compressor.indexer.")
            if self._indexer is not None and compression.derives_index_keys:
                self._index_keys = DerivedIndexKeys(compressed, of_index)
            elif self._indexer is not None:
                sizes.append((self._indexer.head_dim, of_index.prefix))
            self._compressors = [
                Compressor(compression, entry_dim, spec.norm_eps, weights, name)
                for entry_dim, name in sizes
            ]
            inputs += [rows for each in self._compressors for rows in each.rows]
        if self._chooses:
            count, of_head = compressed.indexer.num_heads, compressed.indexer.head_dim
            name = f"{prefix}compressor.indexer."
            inputs.append(Rows(f"{name}weights_proj", count, range(count)))
            queries.append(Rows(f"{name}q_b_proj", count * of_head, range(count * of_head)))
        self._inputs = None
        if inputs:
            self._inputs = source.read_rows(inputs, spec.hidden_size, is_adapted=True)
        self._queries = source.read_rows(queries, rank, is_adapted=True)
        shape = compressed.num_groups * compressed.output_rank, group_columns(spec, compressed)
        self._groups = [
            source.read_linear("o_a_proj", *shape, part) for part in group_rows(compressed, shard)
        ]
        outputs = compressed.num_groups * compressed.output_rank
        own = shard.tensor_parallel.part(outputs)
        self._output = source.read_columns(
            "o_b_proj", spec.hidden_size, outputs, own, is_adapted=True
        )

    def forward(
        self,
        x_TD: Tensor,
        tables: RotaryTables | None,
        caches: Sequence[tuple[Tensor, Any]],
    ) -> Tensor:
        """Return the attention output [T, D] of a layer.

        `caches` are those of keys and of entries, with their batches.
        """
        assert tables is not None
        spec, size = self._spec, self._spec.head_dim
        vector_TQ, k_TK = self._first(x_TD).split((self._compressed.query_rank, size), -1)
        queries = self._queries(self._query_norm(vector_TQ))
        q_THK = queries[:, : self._num_heads * size].unflatten(-1, (self._num_heads, size))
        if self._compressed.norms_queries:
            q_THK = torch.rms_norm(q_THK.float(), (size,), None, spec.norm_eps).to(q_THK.dtype)
        q_THK = rotate_last(q_THK, tables)
        kv_cache, batch = caches[0]
        keys = self._cache.rows(kv_cache, self._key_row, self._key_row * batch.block_size)
        stored, weights_TJ = [self._keys(k_TK, tables)], None
        if self._inputs is not None:
            sizes = [each.size for each in self._compressors]
            inputs_TF, weights_TJ = self._inputs(x_TD).tensor_split((sum(sizes),), -1)
            stored.append(inputs_TF)
        every_T = torch.arange(len(x_TD), device=x_TD.device)
        is_damaged_T = store(keys, batch.places(every_T, batch.positions_T), torch.cat(stored, 1))
        # The token's own output must remain NaN, so that the request fails.
        q_THK = q_THK.masked_fill(is_damaged_T[:, None, None], torch.nan)
        entries = chosen_TC = None
        entries_batch = batch
        if self._compression is not None:
            entries_cache, entries_batch = caches[1]
            entries = self._entries(entries_cache, batch.block_size)
            if self._compressors:
                self._store_entries(keys, batch, entries, entries_batch)
            if self._chooses:
                assert self._indexer is not None and weights_TJ is not None
                q_TJI = queries[:, self._num_heads * size :].unflatten(
                    -1, (self._indexer.num_heads, self._indexer.head_dim)
                )
                choose_entries(
                    self._compressed,
                    self._compression,
                    rotate_last(q_TJI, tables),
                    weights_TJ,
                    entries[..., size:],
                    entries_batch,
                    self._cache.choice,
                )
            if self._indexer is not None:
                chosen_TC = self._cache.choice.chosen_TC
        attended_THK = self._attend(q_THK, keys, batch, entries, entries_batch, chosen_TC)
        attended_THK = rotate_last(attended_THK, tables, is_back=True)
        groups = attended_THK.unflatten(1, (len(self._groups), -1)).flatten(2).unbind(1)
        return self._output(
            torch.cat([multiply(x) for multiply, x in zip(self._groups, groups, strict=True)], -1)
        )

    def store_keys(
        self, x_TD: Tensor, tables: RotaryTables | None, kv_cache: Tensor, batch: SequenceBatch
    ) -> None:
        """Store the keys of `x_TD`, in a layer without entries."""
        assert tables is not None
        _, k_TK = self._first(x_TD).split((self._compressed.query_rank, self._spec.head_dim), -1)
        keys = self._cache.rows(kv_cache, self._key_row, self._key_row * batch.block_size)
        every_T = torch.arange(len(x_TD), device=x_TD.device)
        store(keys, batch.places(every_T, batch.positions_T), self._keys(k_TK, tables))

    def _keys(self, k_TK: Tensor, tables: RotaryTables) -> Tensor:
        """Return the normed and rotated keys."""
        return rotate_last(self._key_norm(k_TK).unsqueeze(1), tables).squeeze(1)

    def _entries(self, cache: Tensor, block_size: int) -> Tensor:
        """Return a view of the cache with one row per entry: the entry, then its index key if there is an indexer."""
        assert self._compression is not None
        row = self._spec.head_dim + (self._indexer.head_dim if self._indexer is not None else 0)
        rows_of_block = -(-block_size // self._compression.rate)
        return self._cache.rows(cache, row, row * rows_of_block)

    def _store_entries(
        self, keys: Tensor, batch: SequenceBatch, entries: Tensor, entries_batch: SequenceBatch
    ) -> None:
        """Compute and store the entries whose last token is in the step."""
        assert self._compression is not None
        rate, span = self._compression.rate, self._compression.span
        tokens_N = entries_batch.ends_of_entries(rate)
        if not len(tokens_N):
            return
        end_N = batch.positions_T[tokens_N]
        first_N = end_N + 1 - rate
        tables = self._rotary.tables(first_N)
        position_NW = end_N[:, None] + torch.arange(1 - span, 1, device=end_N.device)
        places = batch.places(tokens_N, position_NW.clamp(min=0))
        inputs_NWF = keys[..., self._spec.head_dim :][places]
        parts = inputs_NWF.split([each.size for each in self._compressors], -1)
        found = [
            compressor.entries(part, first_N == 0)
            for compressor, part in zip(self._compressors, parts, strict=True)
        ]
        if self._index_keys is not None:
            found.append(self._index_keys(found[0]))
        rotated = [rotate_last(each.unsqueeze(1), tables).squeeze(1) for each in found]
        store(entries, entries_batch.places(tokens_N, end_N, rate), torch.cat(rotated, -1))

    def _attend(
        self,
        q_THK: Tensor,
        keys: Tensor,
        batch: SequenceBatch,
        entries: Tensor | None,
        entries_batch: SequenceBatch,
        chosen_TC: Tensor | None,
    ) -> Tensor:
        """Return the attention output [T, H, K]."""
        size = self._spec.head_dim
        rate = 0 if self._compression is None else self._compression.rate
        most = (1 << 62) if self._indexer is None else self._indexer.num_chosen
        out_THK = torch.empty_like(q_THK)
        for group in entries_batch.groups(rate, most):
            num_keys = self._compressed.window + group.num_entries
            step = max(1, _MAX_TILE_BYTES // (num_keys * size * keys.element_size()))
            for tokens_N in group.tokens_N.split(step):
                keys_NLK, mask_NL = self._window_keys(keys[..., :size], batch, tokens_N)
                if entries is not None and group.num_entries:
                    more_NCK, more_NC = self._entry_keys(
                        entries[..., :size], entries_batch, tokens_N, group, chosen_TC
                    )
                    keys_NLK = torch.cat((keys_NLK, more_NCK), 1)
                    mask_NL = torch.cat((mask_NL, more_NC), 1)
                out_THK[tokens_N] = self._attend_to(q_THK[tokens_N], keys_NLK, mask_NL)
        return out_THK

    def _window_keys(
        self, keys: Tensor, batch: SequenceBatch, tokens_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the keys [N, W, K] of the last tokens or of a range, and which of these do not exist."""
        own_N1 = batch.positions_T[tokens_N, None]
        if batch.visible_T2 is None:
            offset_W = torch.arange(1 - self._compressed.window, 1, device=keys.device)
            position_NW = own_N1 + offset_W
            is_missing_NW = position_NW < 0
        else:
            first_N1, end_N1 = batch.visible_T2[tokens_N].split(1, 1)
            position_NW = end_N1 - torch.arange(batch.num_visible, 0, -1, device=keys.device)
            is_missing_NW = position_NW < first_N1
        position_NW = torch.where(is_missing_NW, own_N1, position_NW)
        return keys[batch.places(tokens_N, position_NW)], is_missing_NW

    def _entry_keys(
        self,
        entries: Tensor,
        batch: SequenceBatch,
        tokens_N: Tensor,
        group: TokensWithEntries,
        chosen_TC: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the entries [N, C, K] of tokens, and which of these they do not attend to."""
        assert self._compression is not None
        rate = self._compression.rate
        count_N1 = ((batch.positions_T[tokens_N] + 1) // rate).unsqueeze(1)
        number_NC = torch.arange(group.num_entries, device=entries.device).expand(len(tokens_N), -1)
        if chosen_TC is not None and group.num_entries == chosen_TC.shape[1]:
            number_NC = torch.where(count_N1 > group.num_entries, chosen_TC[tokens_N], number_NC)
        is_hidden_NC = number_NC >= count_N1
        number_NC = number_NC.masked_fill(is_hidden_NC, 0)
        end_NC = number_NC * rate + rate - 1
        return entries[batch.places(tokens_N, end_NC, rate)], is_hidden_NC

    def _attend_to(self, q_NHK: Tensor, keys_NLK: Tensor, mask_NL: Tensor) -> Tensor:
        """Return the attention output [N, H, K] with these keys, which are the values, too."""
        keys_NLK = keys_NLK.to(q_NHK.dtype)
        scores_NHL = torch.bmm(q_NHK, keys_NLK.transpose(1, 2)) * self._spec.attention_scale
        scores_NHL = scores_NHL.masked_fill(mask_NL.unsqueeze(1), -torch.inf)
        # Put the sink first, so that a key's place in the sum does not depend on the number of keys.
        sinks_NH1 = self._sinks_H.to(q_NHK.dtype).view(1, -1, 1).expand(len(q_NHK), -1, -1)
        weights_NHL = torch.softmax(torch.cat((sinks_NH1, scores_NHL), -1), -1)[..., 1:]
        return torch.bmm(weights_NHL.contiguous(), keys_NLK)


def group_columns(spec: ModelSpec, compressed: CompressedSpec) -> int:
    """Return the number of elements of the outputs of a group's heads."""
    return spec.num_heads * spec.head_dim // compressed.num_groups


def group_rows(compressed: CompressedSpec, shard: ModelShard) -> list[range]:
    """Return the rows of the matrix of each of this rank's groups of heads in that of all groups.

    Raises:
        ConfigError: Ranks cannot divide the groups equally.
    """
    ranks, count, rank = shard.tensor_parallel.size, compressed.num_groups, compressed.output_rank
    if count % ranks:
        raise ConfigError(
            f"--tensor-parallel-size {ranks}: the model's {count} groups of attention heads (o_groups) cannot be "
            f"divided equally; use a divisor of {count}"
        )
    return [range(i * rank, (i + 1) * rank) for i in shard.tensor_parallel.part(count)]
