"""Divides a model's layers into KV-cache groups of equal size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from ...protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from ..layers.spec import LayerSpec, ModelSpec


def group_layers(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    """Return the spec with every layer assigned to a group, full attention first.

    Layers with a window have groups of their own, unless no sequence is longer than the window. The group size is
    chosen so that few groups are incomplete.
    """
    windows = [_limiting_window(layer, max_model_len) for layer in spec.layers]
    num_layers = Counter(windows)
    size = _group_size(num_layers.values())
    groups_of_window: dict[int | None, range] = {}
    num_groups = 0
    for window in sorted(num_layers, key=lambda window: window or 0):
        first = num_groups
        num_groups += -(-num_layers[window] // size)
        groups_of_window[window] = range(first, num_groups)
    seen: Counter[int | None] = Counter()
    layers = []
    for layer, window in zip(spec.layers, windows, strict=True):
        groups = groups_of_window[window]
        layers.append(replace(layer, kv_cache_group=groups[seen[window] % len(groups)]))
        seen[window] += 1
    return replace(spec, layers=tuple(layers))


def kv_cache_groups(spec: ModelSpec, max_model_len: int) -> tuple[KVCacheGroup, ...]:
    """Return the KV-cache groups of a spec from `group_layers`."""
    windows = {
        layer.kv_cache_group: _limiting_window(layer, max_model_len) for layer in spec.layers
    }
    return tuple(
        KVCacheGroup()
        if windows[group] is None
        else KVCacheGroup(AttentionKind.SLIDING_WINDOW, windows[group] or 0)
        for group in sorted(windows)
    )


def _limiting_window(layer: LayerSpec, max_model_len: int) -> int | None:
    window = layer.window
    return window if window is not None and window < max_model_len else None


def _group_size(num_layers: Collection[int]) -> int:
    """Return the number of layers per group that leaves the fewest places empty, the largest among equals."""
    return min(num_layers, key=lambda size: (sum(-n % size for n in num_layers), -size))
