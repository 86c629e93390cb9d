"""Divide a model's layers into KV-cache groups of equal size.

The size of a group is its number of cache tensors. A cache tensor holds one layer with the most elements per token, or
several layers with fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from ...protocol.checkpoint.recurrent_layers import RecurrentLayer
from ...protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from ..layers.layer_spec import LayerSpec
from ..layers.spec import ModelSpec
from ..layers.specs.compressed import CompressedSpec
from ..layers.window import AfterPrompt, Chunk


class _Attention(NamedTuple):
    """Full or windowed attention: its window and heads, and how many such layers share a cache tensor.

    In compressed attention, the head dimension is the number of a token's elements in the cache.
    """

    window: int | Chunk | None
    layers_per_tensor: int
    num_kv_heads: int
    head_dim: int
    num_heads: int


class _Entries(NamedTuple):
    """A part of the entries of compressed attention, which fits into one cache tensor."""

    part: int


class _CrossAttention(NamedTuple):
    """Attention to the outputs of an encoder, at most `max_positions` of them, or to none if it `is_optional`."""

    max_positions: int
    is_optional: bool


_Kind: TypeAlias = _Attention | _Entries | RecurrentLayer | _CrossAttention


def group_layers(
    spec: ModelSpec, max_model_len: int, ranks: int = 1, block_size: int = 16
) -> ModelSpec:
    """Return the spec with every layer assigned to groups, ordered: full attention, windows, states, cross attention.

    Layers with a window have their own groups, unless no sequence exceeds the window. So do layers with other heads.
    Layers with attention and a state, or with entries, are in two groups. A layer that reads the cache of another layer
    is in the same group. The group size is chosen so that few groups are incomplete. `ranks` is the tensor-parallel
    size, `block_size` the number of tokens of a block.

    Indexers are dropped if no sequence exceeds the number of keys that they choose.
    """
    spec = _without_needless_indexers(spec, max_model_len)
    if spec.compressed is not None:
        spec = _with_places_of_entries(spec, spec.compressed, block_size)
    kinds = [_kinds(spec, layer, max_model_len, ranks) for layer in spec.layers]
    num_layers = Counter(kind for of_layer in kinds for kind in of_layer)
    num_tensors = {kind: _num_tensors(kind, count) for kind, count in num_layers.items()}
    size = _group_size(num_tensors.values())
    groups_of_kind: dict[_Kind, range] = {}
    num_groups = 0
    for kind in sorted(num_layers, key=_group_order):
        first = num_groups
        num_groups += -(-num_tensors[kind] // size)
        groups_of_kind[kind] = range(first, num_groups)
    seen: Counter[_Kind] = Counter()
    layers: list[LayerSpec] = []
    for layer, of_layer in zip(spec.layers, kinds, strict=True):
        if layer.cache_source is not None:
            group = layers[layer.cache_source].kv_cache_group
            layers.append(replace(layer, kv_cache_group=group))
            continue
        groups = [groups_of_kind[kind][seen[kind] % len(groups_of_kind[kind])] for kind in of_layer]
        seen.update(of_layer)
        layers.append(_with_groups(layer, groups))
    return replace(spec, layers=tuple(layers))


def group_as_one(spec: ModelSpec, max_model_len: int) -> ModelSpec | None:
    """Return the spec with all layers in one group that keeps every token, whatever the windows of the layers.

    Return None if the layers differ in more than their windows, or have another cache than that of attention.
    """
    whole = replace(spec, layers=tuple(replace(layer, window=None) for layer in spec.layers))
    grouped = group_layers(whole, max_model_len)
    if kv_cache_groups(grouped, max_model_len) != (KVCacheGroup(),):
        return None
    layers = (
        replace(layer, window=own.window)
        for layer, own in zip(grouped.layers, spec.layers, strict=True)
    )
    return replace(grouped, layers=tuple(layers))


def _without_needless_indexers(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    blocks, latent, compressed = spec.block_indexer, spec.latent, spec.compressed
    if compressed is not None:
        return _without_needless_index_keys(spec, compressed, max_model_len)
    if blocks is not None and max_model_len > blocks.num_tokens:
        return replace(spec, block_indexer=replace(blocks, max_model_len=max_model_len))
    if blocks is not None:
        spec = replace(spec, block_indexer=None)
    elif latent is not None and latent.indexer and max_model_len <= latent.indexer.num_tokens:
        head_dim = spec.head_dim - latent.indexer.key_elements
        spec = replace(spec, latent=replace(latent, indexer=None), head_dim=head_dim)
    else:
        return spec
    return replace(
        spec,
        layers=tuple(replace(layer, chooses_keys=False) for layer in spec.layers),
        tensor_names=(*spec.tensor_names, (r".*\.self_attn\.indexer\..*", "")),
    )


def _without_needless_index_keys(
    spec: ModelSpec, compressed: CompressedSpec, max_model_len: int
) -> ModelSpec:
    indexed = [
        i
        for i, each in enumerate(spec.layers)
        if _needs_no_indexer(each, compressed, max_model_len)
    ]
    layers = list(spec.layers)
    for i in indexed:
        compression = layers[i].compression
        assert compression is not None
        compression = replace(
            compression, has_indexer=False, keeps_candidates=False, candidate_source=None
        )
        layers[i] = replace(layers[i], compression=compression)
    names = tuple(
        (rf"(^|.*\.)layers\.{i}\.self_attn\.compressor\.indexer\..*", "") for i in indexed
    )
    return replace(spec, layers=tuple(layers), tensor_names=(*spec.tensor_names, *names))


def _needs_no_indexer(layer: LayerSpec, compressed: CompressedSpec, max_model_len: int) -> bool:
    """Return whether the layer has an indexer, but always chooses all entries."""
    compression = layer.compression
    if compression is None or not compression.has_indexer:
        return False
    return max_model_len // compression.rate <= compressed.indexer.num_chosen


def _with_places_of_entries(
    spec: ModelSpec, compressed: CompressedSpec, block_size: int
) -> ModelSpec:
    compressions = compressed.place_entries(
        spec.head_dim, [layer.compression for layer in spec.layers], block_size
    )
    layers = (
        replace(layer, compression=compression)
        for layer, compression in zip(spec.layers, compressions, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def kv_cache_groups(spec: ModelSpec, max_model_len: int) -> tuple[KVCacheGroup, ...]:
    """Return the KV-cache groups of a spec that `group_layers` has returned."""
    groups = {
        group: _kv_cache_group(kind)
        for layer in spec.layers
        if layer.cache_source is None
        for group, kind in zip(
            layer.cache_groups, _kinds(spec, layer, max_model_len, 1), strict=True
        )
    }
    return tuple(groups[group] for group in sorted(groups))


def _kinds(spec: ModelSpec, layer: LayerSpec, max_model_len: int, ranks: int) -> list[_Kind]:
    """Return the kinds of cache that the layer needs, in the order of its `cache_groups`."""
    kinds: list[_Kind] = []
    if spec.compressed is not None:
        size, *_ = spec.token_elements(layer, ranks)
        layers_per_tensor = spec.tensor_elements(ranks) // size
        window = _limiting_window(layer, max_model_len)
        kinds.append(_Attention(window, layers_per_tensor, 1, size, spec.num_heads))
        return kinds if layer.compression is None else [*kinds, _Entries(layer.compression.part)]
    if layer.attends and layer.cache_source is None:
        kinds.append(
            _Attention(
                _limiting_window(layer, max_model_len),
                spec.tensor_elements(ranks) // spec.token_elements(layer, ranks)[0],
                layer.num_kv_heads or spec.num_kv_heads,
                layer.head_dim or spec.head_dim,
                layer.num_heads or spec.num_heads,
            )
        )
    if layer.reads_source and spec.source is not None:
        is_optional = spec.source.are_images
        return [*kinds, _CrossAttention(spec.source.max_positions, is_optional)]
    return kinds if layer.recurrent is None else [*kinds, layer.recurrent]


def _num_tensors(kind: _Kind, num_layers: int) -> int:
    if isinstance(kind, _Entries):
        return 1
    return -(-num_layers // (kind.layers_per_tensor if isinstance(kind, _Attention) else 1))


def _with_groups(layer: LayerSpec, groups: list[int]) -> LayerSpec:
    if layer.attends:
        layer = replace(layer, kv_cache_group=groups[0])
    if layer.reads_source:
        return replace(layer, cross_group=groups[-1])
    if layer.compression is not None:
        return replace(layer, entries_group=groups[-1])
    return layer if layer.recurrent is None else replace(layer, state_group=groups[-1])


def _kv_cache_group(kind: _Kind) -> KVCacheGroup:
    if isinstance(kind, _CrossAttention):
        return KVCacheGroup(AttentionKind.CROSS, kind.max_positions, kind.is_optional)
    if isinstance(kind, _Entries):
        return KVCacheGroup()
    if not isinstance(kind, _Attention):
        return KVCacheGroup(AttentionKind.STATE_SPACE, kind.segment)
    window = kind.window
    if window is None:
        return KVCacheGroup()
    if isinstance(window, Chunk) and window.sees_previous:
        # A window of two chunks begins at the earlier one's start or before it.
        return KVCacheGroup(AttentionKind.SLIDING_WINDOW, window.longest)
    if isinstance(window, Chunk):
        return KVCacheGroup(AttentionKind.CHUNKED_LOCAL, window.size)
    return KVCacheGroup(AttentionKind.SLIDING_WINDOW, window)


def _group_order(kind: _Kind) -> tuple[int, ...]:
    if isinstance(kind, _Entries):
        return 0, 0, kind.part
    if not isinstance(kind, _Attention):
        return (2,) if isinstance(kind, RecurrentLayer) else (3,)
    window, *sizes = kind
    if isinstance(window, Chunk):
        return 1, window.longest, *sizes
    return 0, window or 0, *sizes


def _limiting_window(layer: LayerSpec, max_model_len: int) -> int | Chunk | None:
    window = layer.window
    if window is None or isinstance(window, AfterPrompt):
        return None
    size = window.longest if isinstance(window, Chunk) else window
    return window if size < max_model_len else None


def _group_size(num_tensors: Collection[int]) -> int:
    """Return the number of tensors per group that leaves the fewest places empty, the largest among equals."""
    return min(num_tensors, key=lambda size: (sum(-n % size for n in num_tensors), -size))
