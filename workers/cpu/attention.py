"""The KV cache of native programs, and the attention metadata of their steps.

Attention itself is an operation of the native program.
"""

from collections.abc import Collection

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..attention.interface import AttentionSpec, HeadRegion, PagedAttention
from ..batch import AttentionBatch
from ..device.dtypes import dtype_name
from ..layers.window import SpanLayers, Window
from .library import NotSupportedNatively

KV_FORMATS = {"bfloat16": 0, "float16": 1, "float32": 2, "int8": 3}
"""The values of the native enum `KVFormat` by names of dtypes."""

_LANES = 16
_SCALE_BYTES = 4


class NativeAttentionMetadata(msgspec.Struct, frozen=True):
    """One KV-cache group's arrays in a step, contiguous int32; see `AttentionBatch`."""

    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    slot_mapping: NDArray[np.int32]
    visible: NDArray[np.int32] | None
    span_layers: SpanLayers


class NativeAttention(PagedAttention):
    """The KV cache and metadata of native programs.

    Raises:
        NotSupportedNatively: The kernels do not support the cache dtype, block size or head dimension.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        if spec.device.type != "cpu":
            raise NotSupportedNatively(f"the native backend runs on the CPU, not on {spec.device}")
        if dtype_name(spec.dtype) not in KV_FORMATS:
            raise NotSupportedNatively(f"a KV cache of {spec.dtype} is not supported natively")
        if spec.is_compressed and dtype_name(spec.dtype) == "int8":
            raise NotSupportedNatively("compressed attention does not support an int8 KV cache")
        if spec.block_size % _LANES:
            raise NotSupportedNatively(
                f"blocks of {spec.block_size} tokens are not supported natively; use a multiple of {_LANES}"
            )
        of_layers = (dim for _, dim in spec.heads_of_layers)
        for head_dim in {spec.head_dim, spec.index_dim, *of_layers}:
            if head_dim % (4 if dtype_name(spec.dtype) == "int8" else 2):
                raise NotSupportedNatively(f"a head_dim of {head_dim} is not supported natively")

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache, in the block layout of `csrc/attention/kv_cache.h`.

        Head dimensions are padded to whole vectors. In int8, each token has a scale. If layers share a tensor, a block
        has space for as many layers as fit into `tensor_elements` elements. Otherwise, with `tensor_elements`, it has
        space for index keys behind the keys and values of all heads. In compressed attention, layers address a block
        themselves.
        """
        spec = self.spec
        if spec.is_compressed:
            return (num_blocks, spec.tensor_elements * self.block_size)
        if spec.heads_of_layers:
            return (
                num_blocks,
                max(
                    spec.tensor_elements
                    // (self._num_parts * num_kv_heads * head_dim)
                    * self._elements(num_kv_heads, head_dim)
                    for num_kv_heads, head_dim in spec.heads_of_layers
                ),
            )
        if spec.tensor_elements:
            index_elements = self.block_size * self._padded(spec.index_dim)
            return (num_blocks, self.elements_of_layer + index_elements)
        padded = self._padded(self.head_dim)
        return (num_blocks, self._num_parts, self.num_kv_heads, self.block_size, padded)

    def head_regions(self, num_kv_heads: int) -> list[HeadRegion]:
        """See `PagedAttention.head_regions`. The keys and values of a head follow each other."""
        spec = self.spec
        head_elements = self._elements(1, self.head_dim)
        own_elements = self.elements_of_layer
        scales = self._scales(self.head_dim)
        regions = [HeadRegion(0, 1, own_elements, num_kv_heads, head_elements, *scales)]
        if spec.index_dim and not spec.latent_rank:
            index_elements = self.block_size * self._padded(spec.index_dim)
            scales = self._scales(spec.index_dim)
            regions.append(HeadRegion(own_elements, 1, index_elements, 1, index_elements, *scales))
        return regions

    def _scales(self, head_dim: int) -> tuple[int, int]:
        """Return the size of a head's keys, or of its values, and that of the scales at their end, in int8."""
        if dtype_name(self.dtype) != "int8":
            return 0, 0
        return self.block_size * self._padded(head_dim), self.block_size * _SCALE_BYTES

    @property
    def elements_of_layer(self) -> int:
        """Number of elements of a block in the cache of one layer."""
        return self._elements(self.num_kv_heads, self.head_dim)

    def _elements(self, num_kv_heads: int, head_dim: int) -> int:
        return self._num_parts * num_kv_heads * self.block_size * self._padded(head_dim)

    @property
    def _num_parts(self) -> int:
        """Number of vectors that a head has for a token: a key, and a value unless attention is latent."""
        return 1 if self.spec.latent_rank else 2

    def _padded(self, head_dim: int) -> int:
        padded = -(-head_dim // _LANES) * _LANES
        return padded + _SCALE_BYTES if dtype_name(self.dtype) == "int8" else padded

    def build(
        self, batch: AttentionBatch, windows: Collection[Window | None]
    ) -> NativeAttentionMetadata:
        """Return the batch's arrays as contiguous int32."""
        return NativeAttentionMetadata(
            np.ascontiguousarray(batch.query_start_loc, np.int32),
            np.ascontiguousarray(batch.seq_lens, np.int32),
            np.ascontiguousarray(batch.block_table, np.int32),
            np.ascontiguousarray(batch.slot_mapping, np.int32),
            None if batch.visible is None else np.ascontiguousarray(batch.visible, np.int32),
            batch.span_layers,
        )
