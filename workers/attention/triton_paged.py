"""Paged attention in Triton kernels, for CUDA.

The cache of a layer is [num_blocks, 2 (keys, values), G, block_size, K], or with latent attention [num_blocks, 1, 1,
block_size, K], as in `torch_paged`.

A step launches three kinds of kernels. One norms and rotates queries and keys and writes the cache. One computes
requests with several queries. One, with a second that sums its splits, computes requests with a single query. The last
two read from a list on the device what each program computes, so a captured graph is valid for any requests.

The choice between the last two and the order of a prompt's sums depend only on the request. The splits of a single
query also depend on the lengths of the step's other sequences; `BatchInvariantAttention` never splits keys.

Torch's own `varlen_attn` cannot replace these kernels: in torch 2.11 it has no block table, later kernels need pages of
256 tokens or more, and none supports a soft cap or an FP8 cache.

Shapes: T tokens, S requests, N tiles, B blocks in a row of the block table, H query heads, G key/value heads, K head
dimension, V elements of a value.
"""

from collections.abc import Collection
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.arrays import offsets_in_runs
from ...protocol.errors import ConfigError
from ..batch import AttentionBatch
from ..layers.layers import HeadNorm
from ..layers.rope import RotaryTables
from ..layers.window import AfterPrompt, Chunk, SpanLayers, Window
from .interface import AttentionLayer, AttentionSpec, CapturableAttention, DeviceBatch, IndexQueries
from .kernels.decode import combine_kernel, decode_kernel
from .kernels.prefill import prefill_kernel
from .kernels.rotary_store import rotary_store_kernel
from .kernels.tiles import (
    PROGRAMS_OF_STEP,
    SPLIT_KEYS,
    decode_tile,
    heads_of_latent_tile,
    latent_decode_tile,
    latent_prefill_tile,
    max_splits,
    power_of_2,
    prefill_tile,
)
from .kernels.work_list import HEADER
from .work_lists import WorkList, list_splits, list_tiles

MAX_HEAD_DIM = 256
MAX_LATENT_RANK = 512
# Alignment in int32 elements, so that Triton may load any of the arrays in words of 16 bytes.
_ALIGNMENT = 4


_LARGE_BATCH = 32
"""Minimum number of requests in a batch for which one program sums the splits of several heads."""


class TritonPagedMetadata(msgspec.Struct, frozen=True):
    """The kernels' inputs for a step: int32 tensors on the device.

    Launches depend only on shapes and on the lists' capacities. So a captured step stays valid when the tensors'
    contents change. `splits` has the splits for each window size.
    """

    query_start_loc: Tensor  # [S + 1]
    seq_lens: Tensor  # [S]
    block_table: Tensor  # [S, B]
    slot_mapping: Tensor  # [T]
    splits: dict[Window | None, WorkList]
    prefill_tiles: WorkList | None = None
    visible: Tensor | None = None  # [T, 2], as in `AttentionBatch`
    span_layers: SpanLayers = SpanLayers.ALL


class TritonPagedAttention(CapturableAttention):
    """Attention in Triton kernels.

    Raises:
        ConfigError: The kernels do not support the head dimension, block size or cache dtype.
    """

    fewest_tiled_queries: ClassVar[int] = 2
    """Requests with fewer queries than this use the kernel for a single query."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        if spec.latent_rank > MAX_LATENT_RANK:
            raise ConfigError(
                f"kv_lora_rank {spec.latent_rank} exceeds the {MAX_LATENT_RANK} that triton_paged supports"
            )
        if spec.head_dim - spec.latent_rank > MAX_HEAD_DIM:
            raise ConfigError(
                f"head_dim {spec.head_dim} exceeds the {MAX_HEAD_DIM} that triton_paged supports"
            )
        if spec.tensor_elements:
            raise ConfigError(
                "heads that differ between layers are not supported by triton_paged; use another model"
            )
        if power_of_2(spec.block_size) != spec.block_size:
            raise ConfigError(
                f"--block-size {spec.block_size}: triton_paged supports only powers of two, such as "
                f"{power_of_2(spec.block_size)}"
            )
        if spec.dtype.itemsize == 1 and spec.dtype != torch.float8_e4m3fn:
            raise ConfigError(
                f"a KV cache of {spec.dtype} is not supported by triton_paged; use fp8_e4m3 or auto"
            )
        self._padded_value_dim = max(16, power_of_2(self.value_dim))
        rest = spec.head_dim - self.value_dim
        self._padded_rotary_dim = max(16, power_of_2(rest)) if spec.latent_rank else 0
        if spec.latent_rank:
            # All heads share one key, and are too many for one program.
            self._heads_per_group = heads_of_latent_tile(spec.num_heads, self.dtype)
            self._num_groups = spec.num_heads // self._heads_per_group
            self.prefill_tile = latent_prefill_tile(self.dtype)
            self.decode_tile = latent_decode_tile(self._heads_per_group, self.dtype)
        else:
            self._heads_per_group = spec.num_heads // spec.num_kv_heads
            self._num_groups = spec.num_kv_heads
            self.prefill_tile = prefill_tile(spec.head_dim, self._heads_per_group, self.dtype)
            self.decode_tile = decode_tile(spec.head_dim, self._heads_per_group, self.dtype)
        self.split_keys = SPLIT_KEYS
        self.max_splits = max_splits(self._num_groups)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return [num_blocks, 2, G, block_size, K], or [num_blocks, 1, G, block_size, K] with latent attention."""
        num_parts = 1 if self.spec.latent_rank else 2
        return (num_blocks, num_parts, self.num_kv_heads, self.block_size, self.head_dim)

    def build(
        self, batch: AttentionBatch, windows: Collection[Window | None]
    ) -> TritonPagedMetadata:
        """Return the metadata of a step, copied to the device in one copy."""
        query_lens_S = np.diff(batch.query_start_loc)
        tiles = self._prefill_tiles(query_lens_S, batch.seq_lens)
        visible = np.zeros((0, 2), np.int32) if batch.visible is None else batch.visible
        query_start_loc, seq_lens, block_table, slot_mapping, prefill_tiles, visible_T2 = (
            _to_device(
                self.device,
                batch.query_start_loc,
                batch.seq_lens,
                batch.block_table,
                batch.slot_mapping,
                tiles,
                visible,
            )
        )
        device_batch = DeviceBatch(query_start_loc, seq_lens, block_table, slot_mapping)
        has_decodes = bool((query_lens_S < self.fewest_tiled_queries).any())
        num_tiles = int(tiles[0])
        return TritonPagedMetadata(
            query_start_loc,
            seq_lens,
            block_table,
            slot_mapping,
            self._list_splits(device_batch, int(batch.seq_lens.max()), windows)
            if has_decodes
            else {},
            prefill_tiles=WorkList(prefill_tiles, num_tiles) if num_tiles else None,
            visible=visible_T2 if len(visible) else None,
            span_layers=batch.span_layers,
        )

    def build_captured(
        self, batch: DeviceBatch, windows: Collection[Window | None], max_queries: int
    ) -> TritonPagedMetadata:
        """Return metadata with enough programs for the maximum work that the shapes of the batch allow."""
        has_tiles = max_queries >= self.fewest_tiled_queries
        has_decodes = self.fewest_tiled_queries > 1
        max_seq_len = batch.block_table.shape[1] * self.block_size
        return TritonPagedMetadata(
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            batch.slot_mapping,
            self._list_splits(batch, max_seq_len, windows) if has_decodes else {},
            prefill_tiles=list_tiles(batch, self.fewest_tiled_queries, self._tile_queries)
            if has_tiles
            else None,
        )

    @property
    def _tile_queries(self) -> int:
        return self.prefill_tile.rows // self._heads_per_group

    def _prefill_tiles(
        self, query_lens_S: NDArray[np.int32], seq_lens_S: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Return the list of tiles, beginning with the ones that have the most keys, so that no long tile runs last."""
        requests = np.flatnonzero(query_lens_S >= self.fewest_tiled_queries)
        num_tiles = -(-query_lens_S[requests] // self._tile_queries)
        request_N = np.repeat(requests, num_tiles)
        query_N = offsets_in_runs(num_tiles) * self._tile_queries
        position_N = (seq_lens_S - query_lens_S)[request_N] + query_N
        order_N = np.argsort(-position_N, kind="stable")
        header = np.zeros(HEADER.value, np.int64)
        header[0] = len(request_N)
        tiles_N2 = np.stack((request_N, query_N), 1)[order_N]
        return np.concatenate((header, tiles_N2.ravel())).astype(np.int32)

    def _list_splits(
        self, batch: DeviceBatch, max_seq_len: int, windows: Collection[Window | None]
    ) -> dict[Window | None, WorkList]:
        """Return, for each window of the layers, the splits of sequences of up to `max_seq_len` tokens."""
        num_shares = -(-PROGRAMS_OF_STEP // self._num_groups)
        return {
            window: list_splits(
                batch,
                num_shares,
                self.split_keys,
                self._num_splits(max_seq_len, window),
                self._splitting(window),
            )
            for window in windows
        }

    def _splitting(self, window: Window | None) -> dict[str, Any]:
        """Return the constants by which all kernels divide the keys of a sequence."""
        return {
            "WINDOW": _window_size(window),
            "NUM_CHUNKS": _num_chunks(window),
            "TILE_KEYS": self.decode_tile.keys,
            "MAX_SPLITS": self.max_splits,
        }

    def forward(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: TritonPagedMetadata,
        layer: AttentionLayer,
        index: IndexQueries | None = None,
    ) -> Tensor:
        """Store keys and values, and return the attention output [T, H, V]."""
        assert index is None, "the kernels do not support indexers"
        self._store(q_THK, k_TGK, v_TGK, kv_cache, metadata, layer)
        return self.attend(q_THK, kv_cache, metadata, layer)

    def store(
        self,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: TritonPagedMetadata,
        layer: AttentionLayer,
    ) -> None:
        """Store keys and values."""
        # Without norms and rotation, the kernel does not read queries.
        self._store(k_TGK, k_TGK, v_TGK, kv_cache, metadata, layer)

    def forward_projected(
        self,
        qk_THK: Tensor,
        v_TGK: Tensor,
        head_norm: HeadNorm | None,
        tables: RotaryTables | None,
        kv_cache: Tensor,
        metadata: TritonPagedMetadata,
        layer: AttentionLayer,
        index: IndexQueries | None = None,
    ) -> Tensor:
        """Norm, rotate, store and attend. One kernel does everything before the attention."""
        assert index is None, "the kernels do not support indexers"
        q_THK = self.rotate_and_store(qk_THK, v_TGK, head_norm, tables, kv_cache, metadata, layer)
        return self.attend(q_THK, kv_cache, metadata, layer)

    def rotate_and_store(
        self,
        qk_THK: Tensor,
        v_TGK: Tensor,
        head_norm: HeadNorm | None,
        tables: RotaryTables | None,
        kv_cache: Tensor,
        metadata: TritonPagedMetadata,
        layer: AttentionLayer,
    ) -> Tensor:
        """Fill the cache, and return the normed and rotated queries [T, H, K]; `attend` can follow."""
        q_THK, k_TGK = qk_THK.split((self.num_heads, self.num_kv_heads), 1)
        out_THK = None
        if head_norm is not None or tables is not None:
            out_THK = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
        self._store(q_THK, k_TGK, v_TGK, kv_cache, metadata, layer, out_THK, head_norm, tables)
        return q_THK if out_THK is None else out_THK

    def _store(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: TritonPagedMetadata,
        layer: AttentionLayer,
        q_out_THK: Tensor | None = None,
        head_norm: HeadNorm | None = None,
        tables: RotaryTables | None = None,
    ) -> None:
        rotary_store_kernel[(len(q_THK), self.num_kv_heads)](
            q_THK,
            k_TGK,
            v_TGK,
            q_out_THK,
            kv_cache,
            metadata.slot_mapping,
            None if head_norm is None else head_norm.weight_HK,
            None if tables is None else tables.cos_TPR,
            None if tables is None else tables.sin_TPR,
            layer.kv_scales_2G,
            0.0 if head_norm is None else head_norm.eps,
            q_THK.stride(0),
            k_TGK.stride(0),
            v_TGK.stride(0),
            NUM_KV_HEADS=self.num_kv_heads,
            HEADS_PER_KV_HEAD=self.num_heads // self.num_kv_heads,
            HEAD_DIM=self.head_dim,
            ROTARY_DIM=0 if tables is None else tables.cos_TPR.shape[-1],
            BLOCK_SIZE=self.block_size,
            BLOCK_K=max(16, power_of_2(self.head_dim)),
            BLOCK_HEADS=power_of_2(self.num_heads // self.num_kv_heads),
            HAS_VALUES=not self.spec.latent_rank,
            num_warps=1 if self._heads_per_group <= 4 else 2,
        )

    def attend(
        self, q_THK: Tensor, kv_cache: Tensor, metadata: TritonPagedMetadata, layer: AttentionLayer
    ) -> Tensor:
        """Return the attention output [T, H, V] from the cache: the second part of `forward`."""
        out_THV = q_THK.new_empty((*q_THK.shape[:2], self.value_dim))
        self._attend(q_THK, out_THV, kv_cache, metadata, metadata.prefill_tiles, layer)
        return out_THV

    def _attend(
        self,
        q_THK: Tensor,
        out_THV: Tensor,
        kv_cache: Tensor,
        metadata: TritonPagedMetadata,
        tiles: WorkList | None,
        layer: AttentionLayer,
    ) -> None:
        """Write the output of the requests in `tiles`, and of the requests with a single query."""
        if tiles is not None:
            self._prefill(q_THK, out_THV, kv_cache, metadata, tiles, layer)
        if metadata.splits:
            splits = metadata.splits[layer.window]
            self._decode(q_THK, out_THV, kv_cache, metadata, splits, layer)

    def _prefill(
        self,
        q_THK: Tensor,
        out_THV: Tensor,
        kv_cache: Tensor,
        metadata: TritonPagedMetadata,
        tiles: WorkList,
        layer: AttentionLayer,
    ) -> None:
        tile = self.prefill_tile
        prefill_kernel[(tiles.capacity * self._num_groups,)](
            q_THK,
            out_THV,
            kv_cache,
            tiles.entries,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            layer.kv_scales_2G,
            layer.alibi_slopes_H,
            layer.sinks_H,
            metadata.visible if metadata.span_layers.include(layer.window) else None,
            layer.scale,
            layer.scale if self.spec.rounds_alibi else None,
            q_THK.stride(0),
            metadata.block_table.stride(0),
            SOFTCAP=layer.softcap,
            WINDOW=_window_size(layer.window),
            NUM_CHUNKS=_num_chunks(layer.window),
            IS_CAUSAL=self.spec.is_causal,
            NUM_KV_HEADS=self._num_groups,
            HEADS_PER_KV_HEAD=self._heads_per_group,
            HEAD_DIM=self.head_dim,
            VALUE_DIM=self.value_dim,
            BLOCK_K=self._padded_value_dim,
            BLOCK_R=self._padded_rotary_dim,
            BLOCK_SIZE=self.block_size,
            TILE_ROWS=tile.rows,
            TILE_KEYS=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _decode(
        self,
        q_THK: Tensor,
        out_THV: Tensor,
        kv_cache: Tensor,
        metadata: TritonPagedMetadata,
        splits: WorkList,
        layer: AttentionLayer,
    ) -> None:
        tile = self.decode_tile
        num_requests = len(metadata.seq_lens)
        is_split = splits.capacity > num_requests
        partial_shape = (splits.capacity, self.num_heads) if is_split else (0,)
        log_sums = q_THK.new_empty(partial_shape, dtype=torch.float32)
        partial = q_THK.new_empty((*partial_shape, self.value_dim), dtype=torch.float32)
        splitting = self._splitting(layer.window)
        decode_kernel[(self._num_groups, splits.capacity)](
            q_THK,
            out_THV,
            partial,
            log_sums,
            kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            splits.entries,
            layer.kv_scales_2G,
            layer.alibi_slopes_H,
            layer.sinks_H,
            layer.scale,
            layer.scale if self.spec.rounds_alibi else None,
            q_THK.stride(0),
            metadata.block_table.stride(0),
            SOFTCAP=layer.softcap,
            NUM_KV_HEADS=self._num_groups,
            HEADS_PER_KV_HEAD=self._heads_per_group,
            HEAD_DIM=self.head_dim,
            VALUE_DIM=self.value_dim,
            BLOCK_K=self._padded_value_dim,
            BLOCK_R=self._padded_rotary_dim,
            BLOCK_SIZE=self.block_size,
            TILE_ROWS=tile.rows,
            **splitting,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if is_split:
            heads_each = 1 if num_requests < _LARGE_BATCH else self._heads_per_group
            combine_kernel[(self.num_heads // heads_each, num_requests)](
                out_THV,
                partial,
                log_sums,
                metadata.query_start_loc,
                metadata.seq_lens,
                splits.entries,
                splits.starts,
                NUM_HEADS=self.num_heads,
                HEAD_DIM=self.value_dim,
                BLOCK_K=self._padded_value_dim,
                NUM_HEADS_EACH=heads_each,
                **splitting,
                num_warps=max(2, self.max_splits // 16) * max(1, self._padded_value_dim // 256),
            )

    def _num_splits(self, max_seq_len: int, window: Window | None) -> int:
        """Return the maximum number of splits of a sequence of up to `max_seq_len` tokens."""
        num_keys = max_seq_len
        if window is not None:
            # The first tile may begin before the window.
            longest = window.longest if isinstance(window, Chunk) else _window_size(window) or 0
            num_keys = min(max_seq_len, longest + self.decode_tile.keys - 1)
        return min(self.max_splits, -(-num_keys // self.split_keys))


def _window_size(window: Window | None) -> int | None:
    assert not isinstance(window, AfterPrompt), "the registry chooses torch for such windows"
    return window.size if isinstance(window, Chunk) else window


def _to_device(device: torch.device, *arrays: NDArray[np.int32]) -> list[Tensor]:
    """Copy arrays to the device in one copy, and return them as int32 tensors."""
    sizes = [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    starts = np.cumsum([0, *sizes]).tolist()
    for array, start in zip(arrays, starts, strict=False):
        host[start : start + array.size].numpy().reshape(array.shape)[...] = array
    packed = host.to(device, non_blocking=True)
    return [
        packed[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def _num_chunks(window: Window | None) -> int:
    """Return the number of chunks to which a token attends; 0 for a window."""
    return window.num_chunks if isinstance(window, Chunk) else 0
