"""Layers are divided into groups of equal size."""

from __future__ import annotations

import msgspec
import pytest
from engine.protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from engine.workers.layers.layer_spec import LayerSpec
from engine.workers.layers.window import Chunk, Window, first_visible
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


def grouped(windows: list[Window | None], max_model_len: int = 10_000):
    spec = model_spec(CONFIG, "model")
    layers = tuple(LayerSpec(None, window) for window in windows)
    spec = group_layers(msgspec.structs.replace(spec, layers=layers), max_model_len)
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


def test_a_window_of_two_chunks_holds_all_tokens_that_are_seen() -> None:
    window = Chunk(8, sees_previous=True)
    assert grouped([window, None]) == ([1, 0], (KVCacheGroup(), sliding(16)))
    assert grouped([window, None], max_model_len=16) == ([0, 0], (KVCacheGroup(),))
    assert all(sliding(16).first_visible(i) <= first_visible(i, window) for i in range(50))


@pytest.mark.parametrize(("block_size", "num_bytes"), [(16, 8000), (128, 6880)])
def test_entries_share_blocks_without_overlap(block_size: int, num_bytes: int) -> None:
    """The layers of DeepSeek-V4-Flash: two without entries, then alternately with one for 4 and for 128 tokens."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 2048}
    ratios = {"num_hidden_layers": 43, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}
    config = {"architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 100, **sizes, **ratios}
    spec = group_layers(model_spec(config, "model"), 1 << 20, block_size=block_size)
    groups = kv_cache_groups(spec, 1 << 20)
    assert groups.count(KVCacheGroup()) == 1
    assert set(groups) == {KVCacheGroup(), sliding(128)}
    assert 2 * spec.tensor_elements() == num_bytes
    end = 0
    for layer in spec.layers:
        if layer.compression is not None:
            assert groups[layer.entries_group] == KVCacheGroup()
            assert layer.compression.first_element == end
            end += spec.token_elements(layer)[1]
    assert end <= spec.tensor_elements()


def test_entries_of_many_layers_are_divided_into_parts() -> None:
    config = {"architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 100, "hidden_size": 64}
    config |= {"num_attention_heads": 8, "moe_intermediate_size": 32, "num_hidden_layers": 100}
    config |= {"layer_types": ["heavily_compressed_attention"] * 100, "head_dim": 64}
    config["compress_rates"] = {"heavily_compressed_attention": 2}
    spec = group_layers(model_spec(config, "model"), 1 << 20)
    groups = kv_cache_groups(spec, 1 << 20)
    # A layer has 192 elements with keys, and 32 with entries.
    assert groups.count(KVCacheGroup()) == 100 * 32 // 192
    places = [(x.entries_group, x.compression.first_element) for x in spec.layers if x.compression]
    assert len(set(places)) == 100
    assert max(first for _, first in places) + 32 <= spec.tensor_elements() <= 224
