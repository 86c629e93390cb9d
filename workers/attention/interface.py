"""The interface between the model, the worker and the attention backends.

Shapes: S scheduled requests, T their tokens in this step, B blocks in a row of the block table, H query heads, G
key/value heads, K head dimension, V elements of a value (K, or fewer with latent attention), J heads of an indexer, I
elements of an index key. With latent attention, the K elements do not include an index key.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Self

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from ..batch import AttentionBatch
from ..device.dtypes import HostDevice, HostDtype
from ..layers.layers import HeadNorm
from ..layers.parallel.shard import ModelShard
from ..layers.rope import RotaryTables, apply_rotary
from ..layers.spec import ModelSpec
from ..layers.window import AfterPrompt, BlockPattern, Window
from .distance_scores import DistanceScores


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The heads and the KV cache of one worker's attention, for layers with equal heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype | HostDtype
    """The dtype of the KV cache. Queries, keys and values may have another."""
    device: torch.device | HostDevice
    reads_distances: bool = False
    """True if layers have `alibi_slopes_H` or other biases by distance."""
    rounds_alibi: bool = False
    """True if the slopes are for the positions of keys; see `ModelSpec`."""
    has_alibi_roots: bool = False
    """True if the slopes are for the square roots of distances."""
    has_distance_biases: bool = False
    """True if layers have a token's own sinks, blocks of heads, or biases by distance other than slopes."""
    latent_rank: int = 0
    """If not 0, the cache has only keys, and their first `latent_rank` elements are the values."""
    is_causal: bool = True
    """If false, every token attends to its whole sequence, and a step has all tokens of a sequence or none."""
    index_dim: int = 0
    """The number of elements of an index key: the last ones of a key, or without `latent_rank` after all heads."""
    has_prompt_windows: bool = False
    """True if a layer's window is `AfterPrompt`."""
    is_compressed: bool = False
    """True if layers have compressed attention."""
    tensor_elements: int = 0
    """The elements of a token in a cache tensor; 0 if a tensor has only the keys and values of one layer."""
    heads_of_layers: frozenset[tuple[int, int]] = frozenset()
    """The pairs (number of key/value heads, head dimension) of layers that share a cache tensor."""

    @classmethod
    def from_model(
        cls,
        model: ModelSpec,
        shard: ModelShard,
        *,
        block_size: int,
        dtype: torch.dtype | HostDtype,
        device: torch.device | HostDevice,
    ) -> Self:
        """Return the spec for the shard's heads of the model. `model` may come from `for_layer`, for a single layer."""
        ranks = shard.tensor_parallel.size
        of_layers = [model.for_layer(layer) for layer in model.layers if layer.attends]
        heads = frozenset((len(shard.kv_heads(each)), each.head_dim) for each in of_layers)
        is_shared = len({(each.num_kv_heads, each.head_dim) for each in of_layers}) > 1
        # All layers may differ from the model's defaults, as in a Gemma 4 with only full attention.
        common = of_layers[0] if of_layers and not is_shared else model
        has_biases = bool(model.num_distance_buckets or model.relative_biases or model.disentangled)
        has_biases |= model.has_alibi_roots or model.num_sink_keys > 0
        has_biases |= model.predicted_stream is not None
        has_biases |= any(layer.block_pattern for layer in model.layers)
        return cls(
            num_heads=len(shard.heads(common)),
            num_kv_heads=len(shard.kv_heads(common)),
            head_dim=common.head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
            reads_distances=bool(model.alibi_slopes) or has_biases,
            rounds_alibi=model.rounds_alibi,
            has_alibi_roots=model.has_alibi_roots,
            has_distance_biases=has_biases,
            latent_rank=0 if model.latent is None else model.latent.kv_rank,
            index_dim=model.index_dim,
            is_causal=model.is_causal,
            has_prompt_windows=any(isinstance(x.window, AfterPrompt) for x in model.layers),
            is_compressed=model.compressed is not None,
            tensor_elements=model.tensor_elements(ranks)
            if is_shared or model.block_indexer is not None or model.compressed is not None
            else 0,
            heads_of_layers=heads if is_shared else frozenset(),
        )


class HeadBlocks(msgspec.Struct, frozen=True):
    """A `BlockPattern` for the query heads of a rank.

    Head h attends to each block i for which i + `offsets_H[h]` is a multiple of the stride.
    """

    pattern: BlockPattern
    offsets_H: Tensor


class AttentionLayer(msgspec.Struct, frozen=True):
    """The attention parameters that differ between layers. All tensors are float32 on the device."""

    scale: float
    """The factor of the products of queries and keys."""
    window: Window | None = None
    """Limits a token at position p to the keys p - window + 1 .. p, or to those of its chunk; None for 0 .. p."""
    softcap: float | None = None
    """The limit of scores, which become softcap * tanh(score / softcap)."""
    kv_scales_2G: Tensor | None = None
    """The divisors of keys and values in an FP8 cache."""
    alibi_slopes_H: Tensor | None = None
    """Factors by which the distance to the key lowers a score."""
    sinks_H: Tensor | None = None
    """Additional scores in each head's softmax, without values."""
    sinks_TH: Tensor | None = None
    """The same, if each token has its own."""
    query_biases_THE: Tensor | None = None
    """Biases of the step's tokens for keys at the distances 0 to E - 1."""
    distance_biases_HE: Tensor | None = None
    """Biases with 2E + 1 columns: column e is for keys at position p + e - E, the first and the last also beyond."""
    head_blocks: HeadBlocks | None = None
    """The blocks of keys to which each head attends; None for all."""
    distance_scores: DistanceScores | None = None
    """Scores of the distances to keys. Only in attention that is not causal."""
    is_sparse: bool = False
    """True if tokens attend only to the keys that an indexer last chose in the step."""


class HeadRegion(msgspec.Struct, frozen=True):
    """Heads in a layer's part of a block: an array [`count`, heads, `unit_elements`], from `first_element` on.

    Ranks divide `num_heads` heads. Index keys are one head, which all ranks have. If the elements are integers, the
    last `num_scale_bytes` of every `period` bytes of a head are scales in float32.
    """

    first_element: int
    count: int
    stride_elements: int
    num_heads: int
    unit_elements: int
    period: int = 0
    num_scale_bytes: int = 0


class IndexQueries(msgspec.Struct, frozen=True):
    """The index keys of a step's tokens, and the index queries by which these choose keys for each key/value head.

    The score of a key is the product of an index query and its index key. With weights, it is a sum over the heads of
    the indexer: the head's weight times the positive part of its product. The keys are divided into blocks of
    `block_size`, and the score of a block is the largest one of its keys. A token attends to `num_chosen` blocks: to
    its own and those just before it, `num_local` in all, and to the blocks with the highest scores.

    With `summarize`, a block has one index key instead, which this function computes from those of the P tokens of each
    block [N, B, P, I]. A token attends to `num_chosen` of the blocks that end at or before it, and to all keys after
    the last of these. If `keeps_own_block`, it attends to all of its own block, and chooses among those before it.
    """

    keys_T1I: Tensor
    queries_TGJI: Tensor
    weights_TGJ: Tensor | None
    num_chosen: int
    block_size: int = 1
    num_local: int = 0
    summarize: Callable[[Tensor], Tensor] | None = None
    keeps_own_block: bool = False


class DeviceBatch(msgspec.Struct, frozen=True):
    """The requests of a step as in `AttentionBatch`, but as int32 tensors on the device at fixed addresses.

    Padding requests have no tokens and a `seq_lens` of 0; the `slot_mapping` of padding tokens is -1.
    """

    query_start_loc: Tensor  # [S + 1]
    seq_lens: Tensor  # [S]
    block_table: Tensor  # [S, B]
    slot_mapping: Tensor  # [T]


class PagedAttention(ABC):
    """The base class of attention implementations: the shape of the KV cache, and the metadata of a step.

    All layers that use an instance share `spec`, and differ only in their `AttentionLayer`.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.value_dim = spec.latent_rank or spec.head_dim
        self.block_size = spec.block_size
        self.dtype = spec.dtype
        self.device = spec.device

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache: contiguous, in `dtype`, its first dimension the block.

        It must be allocated with zeros.
        """

    def head_regions(self, num_kv_heads: int) -> list[HeadRegion]:
        """Return the heads in a layer's part of a block, and its index keys.

        Args:
            num_kv_heads: The key/value heads of all ranks.
        """
        num_parts = 1 if self.spec.latent_rank else 2
        head_elements = self.block_size * self.head_dim
        own_elements = self.num_kv_heads * head_elements
        regions = [HeadRegion(0, num_parts, own_elements, num_kv_heads, head_elements)]
        if self.spec.index_dim and not self.spec.latent_rank:
            first, count = num_parts * own_elements, -(-self.spec.index_dim // self.head_dim)
            regions.append(HeadRegion(first, count, head_elements, 1, head_elements))
        return regions

    @property
    def elements_of_layer(self) -> int:
        """Number of elements of a block in the cache of one layer."""
        num_parts = 1 if self.spec.latent_rank else 2
        return num_parts * self.num_kv_heads * self.head_dim * self.block_size

    def for_layer(self, layer: ModelSpec, shard: ModelShard) -> Self:
        """Return this attention with the heads of a layer, given the spec that `ModelSpec.for_layer` returned."""
        own = replace(
            self.spec,
            num_heads=len(shard.heads(layer)),
            num_kv_heads=len(shard.kv_heads(layer)),
            head_dim=layer.head_dim,
            latent_rank=0 if layer.latent is None else layer.latent.kv_rank,
            index_dim=layer.index_dim,
        )
        return self if own == self.spec else self.with_spec(own)

    def as_bidirectional(self) -> Self:
        """Return attention in which every token attends to all keys of its sequence, or to all encoder outputs."""
        return (
            self
            if not self.spec.is_causal
            else self.with_spec(replace(self.spec, is_causal=False, reads_distances=False))
        )

    def with_spec(self, spec: AttentionSpec) -> Self:
        """Return attention of this kind with another spec."""
        return type(self)(spec)

    @abstractmethod
    def build(self, batch: AttentionBatch, windows: Collection[Window | None]) -> Any:
        """Return the metadata of one step, for a KV-cache group whose layers have these windows."""


class DeviceAttention(PagedAttention):
    """The cache of a model in torch."""

    dtype: torch.dtype
    device: torch.device


class AttentionBackend(DeviceAttention):
    """Attention that a model calls layer by layer. Native programs have their own attention."""

    @abstractmethod
    def forward(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        layer: AttentionLayer,
        index: IndexQueries | None = None,
    ) -> Tensor:
        """Store the keys and values of the step's tokens, and return the attention output [T, H, V].

        With `index`, first store the index keys, and choose keys among all in the cache, for this layer and the next
        ones without an `index`.
        """

    @abstractmethod
    def store(
        self,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        layer: AttentionLayer,
    ) -> None:
        """Store keys and values, without any queries."""

    @abstractmethod
    def attend(
        self, q_THK: Tensor, kv_cache: Tensor, metadata: Any, layer: AttentionLayer
    ) -> Tensor:
        """Return the attention output [T, H, K] with the keys and values that an earlier layer stored."""

    def forward_projected(
        self,
        qk_THK: Tensor,
        v_TGK: Tensor,
        head_norm: HeadNorm | None,
        tables: RotaryTables | None,
        kv_cache: Tensor,
        metadata: Any,
        layer: AttentionLayer,
        index: IndexQueries | None = None,
    ) -> Tensor:
        """Norm and rotate queries and keys, which are in one tensor [T, H + G, K], then compute `forward`."""
        if head_norm is not None:
            qk_THK = head_norm(qk_THK)
        if tables is not None:
            qk_THK = apply_rotary(qk_THK, tables)
        q_THK, k_TGK = qk_THK.split((self.num_heads, self.num_kv_heads), 1)
        return self.forward(q_THK, k_TGK, v_TGK, kv_cache, metadata, layer, index)


def as_backend(attention: DeviceAttention) -> AttentionBackend:
    """Return the attention of a model whose layers call it."""
    assert isinstance(attention, AttentionBackend)
    return attention


class CapturableAttention(AttentionBackend):
    """Attention that can be captured in a graph."""

    @abstractmethod
    def build_captured(
        self, batch: DeviceBatch, windows: Collection[Window | None], max_queries: int
    ) -> Any:
        """Return metadata for any step that `batch` describes in which each request has at most `max_queries` tokens.

        With this metadata, `forward` depends only on the contents of the device tensors in `batch`, not on numbers on
        the host.
        """
