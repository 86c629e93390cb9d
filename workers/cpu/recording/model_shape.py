"""Compute the sizes of a rank's part of a model, for a native program."""

from __future__ import annotations

import math

from ....protocol.checkpoint.recurrent_layers import (
    NUM_TOKEN_DIGITS,
    GatedDeltaNet,
    HeadConvolutions,
    InnerConvolutions,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    RecurrentLayer,
    ShortConvolution,
)
from ....protocol.checkpoint.state_spaces.rg_lru import RgLru
from ...device.dtypes import dtype_name
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.shard import ModelShard
from ...layers.parallel.tensor_parallel import TensorParallel
from ...layers.shared_block import SharedBlock
from ...layers.spec import ModelSpec
from ...layers.specs.latent import LatentSpec
from ...models.latent.attention import gates_of_head
from ..abi.structs import LatentShape, ModelShape, activation_number
from ..attention import KV_FORMATS, NativeAttention
from ..packing import GROUP_SIZE
from ..weights import intermediate_shares
from .compressed import extra_columns


def model_shape(
    spec: ModelSpec, shard: ModelShard, attention: NativeAttention, num_threads: int
) -> ModelShape:
    """Return the sizes of this shard, for a program with `num_threads` threads."""
    layers = [(layer, spec.for_layer(layer)) for layer in spec.layers]
    kv_heads = min(len(shard.kv_heads(of_layer)) for _, of_layer in layers)
    sizes = [_projection_and_mixed_size(layer, of_layer, shard) for layer, of_layer in layers]
    inputs = spec.stage_width(shard.layers.start) - spec.stage_width(len(spec.layers))
    projections = [*(projection for projection, _ in sizes), inputs, _streams_size(spec)]
    latent_indexer = None if spec.latent is None else spec.latent.indexer
    indexer = spec.block_indexer if spec.latent is None else latent_indexer
    index_dim = 0 if indexer is None else indexer.head_dim
    if spec.compressed is not None:
        has_indexer = any(x.compression and x.compression.has_indexer for x in spec.layers)
        index_dim = spec.compressed.indexer.head_dim if has_indexer else 0
    return ModelShape(
        spec.hidden_size,
        _intermediate_size(spec, shard.tensor_parallel),
        max(len(shard.heads(of_layer)) for _, of_layer in layers),
        kv_heads,
        max(attended_dim(of_layer) for _, of_layer in layers),
        spec.num_token_ids,
        attention.block_size,
        math.prod(attention.kv_cache_shape(1)) * attention.dtype.itemsize,
        KV_FORMATS[dtype_name(attention.dtype)],
        activation_number(spec.activation),
        activation_number(spec.output_gate),
        0.0 if spec.soft_caps is None else spec.soft_caps.gate,
        0.0 if spec.soft_caps is None else spec.soft_caps.up,
        spec.norm_kind == "layer",
        spec.norm_groups,
        not spec.is_causal,
        spec.is_parallel
        or spec.norms.attention_sum is not None
        or any(
            x.shared_block or (x.experts and (x.experts.has_own_norms or x.experts.num_identities))
            for x in spec.layers
        ),
        max(map(_router_size, spec.layers)),
        max(projections),
        max(_low_rank_inputs(spec), *(mixed for _, mixed in sizes)),
        spec.num_streams,
        inputs,
        spec.latent is not None,
        index_dim,
        0 if spec.compressed is not None else spec.index_dim - index_dim,
        0.0 if latent_indexer is None else latent_indexer.norm_eps,
        spec.compressed is not None,
        num_threads,
    )


def attended_dim(spec: ModelSpec) -> int:
    """Return the number of elements of a key, not counting its index key and logits."""
    indexer = None if spec.latent is None else spec.latent.indexer
    return spec.head_dim - (0 if indexer is None else indexer.key_elements)


def _projection_and_mixed_size(
    layer: LayerSpec, spec: ModelSpec, shard: ModelShard
) -> tuple[int, int]:
    """Return how many numbers a layer's first products compute, and the most that a product reads, on this rank."""
    projection = mixed = 0
    if layer.attends and spec.compressed is not None:
        compressed, size, num_heads = spec.compressed, spec.head_dim, len(shard.heads(spec))
        extra = sum(extra_columns(layer, compressed, size))
        projection = (num_heads + 1) * size + extra + compressed.query_rank
        outputs = compressed.num_groups * compressed.output_rank // shard.tensor_parallel.size
        mixed = max(num_heads * size, compressed.query_rank, outputs)
    elif layer.attends and spec.latent is not None:
        latent = latent_shape(spec, spec.latent, len(shard.heads(spec)))
        results = latent.num_heads * max(latent.kv_rank, latent.value_dim)
        projection, mixed = latent.size, max(latent.query_inputs, results)
    elif layer.attends:
        heads, kv_heads = len(shard.heads(spec)), len(shard.kv_heads(spec))
        columns = heads * (1 + spec.gates_attention) + 2 * kv_heads
        projection, mixed = columns * spec.head_dim, heads * spec.head_dim
        if spec.block_indexer is not None and layer.chooses_keys:
            num_queries = spec.block_indexer.num_heads or kv_heads
            projection += num_queries * spec.block_indexer.head_dim + spec.index_dim
        if spec.relative_biases is not None:
            projection += heads * (spec.relative_biases.rank + spec.projects_sinks)
        if isinstance(layer.recurrent, InnerConvolutions) and layer.recurrent.is_dynamic:
            projection += 2 * kv_heads * layer.recurrent.kernel
        if spec.attention_residuals is not None and spec.attention_residuals.passes is not None:
            # Messages are combined with inputs in the columns behind.
            projection += 2 * spec.hidden_size
            mixed = max(mixed, 2 * spec.hidden_size, spec.attention_residuals.passes.rank)
    if spec.altup is not None:
        projection += spec.altup.laurel_rank
        mixed = max(mixed, spec.altup.laurel_rank)
    others = [0]
    if spec.ngrams is not None and layer.ngram_table is not None:
        columns = (1 + spec.num_streams) * spec.hidden_size + NUM_TOKEN_DIGITS
        others.append(max(columns, spec.ngrams.size))
        mixed = max(mixed, spec.ngrams.size)
    if layer.recurrent is not None:
        recurrent_projection, recurrent_mixed = _mixer_sizes(
            layer.recurrent, shard.tensor_parallel.size
        )
        others.append(recurrent_projection)
        mixed = max(mixed, recurrent_mixed)
    if layer.shared_block is not None:
        others.append(_shared_projection_size(spec, layer.shared_block, shard))
        # The second factor of the low-rank products reads the results of the first.
        mixed = max(mixed, 2 * spec.hidden_size, padded_rank(3 * layer.shared_block.rank))
    if layer.experts is not None:
        others.append(
            spec.hidden_size if layer.experts.has_own_norms else layer.experts.latent_size
        )
        if layer.experts.router is not None:
            others.append(layer.experts.router.size)
            mixed = max(mixed, layer.experts.router.size)
    if layer.activation_sparsity:
        shares = intermediate_shares(spec.intermediate_size, shard.tensor_parallel)
        others.append(2 * len(shares[shard.tensor_parallel.rank]))
    if spec.per_layer_inputs is not None:
        others.append(spec.per_layer_inputs.size)
        mixed = max(mixed, spec.per_layer_inputs.size)
    return max(projection, *others), max(mixed, layer.input_size)


def _mixer_sizes(layer: RecurrentLayer, ranks: int) -> tuple[int, int]:
    """Return the outputs of a mixer's first matrix, and the inputs of its last one, in one of `ranks` workers."""
    channels = layer.state_parts.size(ranks).channels
    match layer:
        case ShortConvolution():
            return 3 * channels, channels
        case InnerConvolutions():
            # The inputs are those of attention.
            return 0, 0
        case HeadConvolutions():
            # The means of queries and keys follow the queries, keys and values.
            values = max(1, layer.num_kv_heads // ranks) * layer.head_dim
            return 2 * channels - values, 0
        case Mamba1():
            heads = max(1, layer.num_heads // ranks)
            selected = layer.step_rank + 2 * layer.state_size_per_channel
            return 3 * channels + heads * selected, channels
        case Mamba2():
            inner = layer.num_heads // ranks * layer.head_dim
        case GatedDeltaNet():
            inner = layer.num_heads // ranks * layer.value_dim
        case KimiDeltaAttention() | LightningAttention():
            inner = layer.num_heads // ranks * layer.head_dim
        case RgLru():
            inner = channels
    return channels + inner, inner


def padded_rank(rank: int) -> int:
    """Return the number of rows of a first factor of low-rank products, padded to whole groups of activations."""
    return -(-rank // GROUP_SIZE) * GROUP_SIZE


def _shared_projection_size(spec: ModelSpec, use: SharedBlock, shard: ModelShard) -> int:
    """Return how many numbers a rank computes, and keeps in the projection, for the use of a shared block."""
    heads, kv_heads = len(shard.heads(spec)), len(shard.kv_heads(spec))
    qkv = (heads + 2 * kv_heads) * spec.head_dim + padded_rank(3 * use.rank)
    ranks = shard.tensor_parallel
    gates = len(intermediate_shares(spec.intermediate_size, ranks)[ranks.rank])
    return max(2 * spec.hidden_size, qkv, 2 * gates + padded_rank(2 * use.rank))


def _streams_size(spec: ModelSpec) -> int:
    """Return how many numbers streams need as scratch space.

    These are their factors, and all streams if they are predicted or replaced by sums. With low rank, each element has
    a factor.
    """
    if spec.hyper_connections is not None and spec.hyper_connections.rank:
        return spec.num_streams * spec.hidden_size
    if spec.hyper_connections is not None:
        sums = spec.num_streams + spec.hidden_size if spec.hyper_connections.num_iterations else 0
        return spec.num_streams * (2 + sums)
    if spec.altup is None:
        return 0
    count = spec.altup.num_streams
    return count * (spec.hidden_size + count + 1)


def _low_rank_inputs(spec: ModelSpec) -> int:
    """Return the most elements that a product of a hyper-connection of low rank reads; 0 without any."""
    hyper = spec.hyper_connections
    if hyper is None or not hyper.rank:
        return 0
    return max(spec.num_streams * spec.hidden_size, hyper.rank)


def _intermediate_size(spec: ModelSpec, tensor_parallel: TensorParallel) -> int:
    """Return how many intermediate elements of the widest MLP this rank has."""
    sizes = set()
    for layer in spec.layers:
        if layer.experts is None or layer.has_dense_mlp:
            sizes.add(spec.for_layer(layer).intermediate_size)
        if layer.experts is not None:
            sizes.add(layer.experts.shared_intermediate_size)
    return max(
        len(intermediate_shares(size, tensor_parallel)[tensor_parallel.rank]) for size in sizes
    )


def latent_shape(spec: ModelSpec, latent: LatentSpec, num_heads: int) -> LatentShape:
    """Return the sizes of `num_heads` heads of a layer's latent attention. `spec` comes from `for_layer`."""
    indexer = latent.indexer
    return LatentShape(
        num_heads,
        attended_dim(spec),
        latent.query_inputs,
        latent.kv_rank,
        latent.plain_dim,
        latent.rotary_dim,
        latent.value_dim,
        latent.norms_rotated_key,
        0 if indexer is None else indexer.num_heads,
        0 if indexer is None else indexer.head_dim,
        0 if indexer is None else indexer.key_elements - indexer.head_dim,
        gates_of_head(spec, latent) if spec.gates_attention else 0,
    )


def _router_size(layer: LayerSpec) -> int:
    """Return how many logits the router of a layer computes."""
    if layer.experts is None:
        return 0
    experts = layer.experts
    num_mixtures = 2 if experts.second_tokens else 1
    return experts.num_experts * num_mixtures + experts.num_identities + experts.has_shared_gate
