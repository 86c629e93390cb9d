"""Layers are divided into groups of equal size."""

from __future__ import annotations

import dataclasses

import pytest
from engine.protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from engine.workers.layers.spec import LayerSpec
from engine.workers.models.families import model_spec
from engine.workers.models.kv_cache_groups import group_layers, kv_cache_groups

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 10_000,
}


def grouped(windows: list[int | None], max_model_len: int = 10_000):
    spec = model_spec(CONFIG, "model")
    layers = tuple(LayerSpec(None, window) for window in windows)
    spec = group_layers(dataclasses.replace(spec, layers=layers), max_model_len)
    groups = kv_cache_groups(spec, max_model_len)
    return [layer.kv_cache_group for layer in spec.layers], groups


def sliding(size: int) -> KVCacheGroup:
    return KVCacheGroup(AttentionKind.SLIDING_WINDOW, size)


@pytest.mark.parametrize(
    ("windows", "layers", "groups"),
    [
        ([None] * 3, [0, 0, 0], (KVCacheGroup(),)),
        ([512] * 3, [0, 0, 0], (sliding(512),)),
        ([512, None] * 2, [1, 0, 1, 0], (KVCacheGroup(), sliding(512))),
        # Five windowed layers to a full one: their blocks take five times the memory, so they are five.
        ([8] * 5 + [None], [1, 2, 3, 4, 5, 0], (KVCacheGroup(), *[sliding(8)] * 5)),
        ([8, 16], [0, 1], (sliding(8), sliding(16))),
        # Two full layers to six with a window: three groups of two, which take turns.
        (
            [8, 8, 8, None] * 2,
            [1, 2, 3, 0] * 2,
            (KVCacheGroup(), *[sliding(8)] * 3),
        ),
        # 5 and 6 layers make one group each, one of them with an empty place, instead of 11 groups.
        ([None] * 6 + [8] * 5, [0] * 6 + [1] * 5, (KVCacheGroup(), sliding(8))),
    ],
)
def test_3_7_groups_have_equal_numbers_of_layers(windows, layers, groups) -> None:
    assert grouped(windows) == (layers, groups)


def test_a_window_as_long_as_the_context_is_ignored() -> None:
    assert grouped([512, None], max_model_len=512) == ([0, 0], (KVCacheGroup(),))
    assert grouped([512, None], max_model_len=513) == ([1, 0], (KVCacheGroup(), sliding(512)))
