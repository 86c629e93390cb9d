"""Rotary frequencies and rotation, compared with transformers for every scaling."""

import pytest
import torch
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.workers.layers.read_rope import read_rope
from engine.workers.layers.rope import RotaryEmbedding, RotaryTables, apply_rotary
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

pytestmark = pytest.mark.slow

HEAD_DIM = 32
factors = st.floats(1.0, 40.0)
originals = st.integers(64, 8192)
divisors = st.lists(st.floats(1.0, 60.0), min_size=HEAD_DIM // 2, max_size=HEAD_DIM // 2)
scalings = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors}),
    st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": factors}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": factors,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
            "original_max_position_embeddings": originals,
        }
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "factor": factors,
            "original_max_position_embeddings": originals,
        },
        optional={
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.floats(0.5, 2.0),
            "mscale_all_dim": st.floats(0.5, 2.0),
            "truncate": st.booleans(),
        },
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("longrope"),
            "short_factor": divisors,
            "long_factor": divisors,
            "original_max_position_embeddings": originals,
        },
        optional={"factor": factors, "attention_factor": st.floats(0.5, 2.0)},
    ),
)


@given(scaling=scalings, theta=st.floats(100.0, 1e6), max_model_len=st.integers(64, 16_384))
def test_frequencies_equal_those_of_transformers(scaling, theta, max_model_len):
    config = LlamaConfig(
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        config, torch.device("cpu"), seq_len=max_model_len
    )
    rope = read_rope(ConfigFields(config.to_dict(), "model"), HEAD_DIM)
    inv_freq, factor = rope.inverse_frequencies(max_model_len)
    torch.testing.assert_close(torch.from_numpy(inv_freq), expected, rtol=1e-4, atol=0)
    assert factor == pytest.approx(expected_factor)


@given(
    num_heads=st.integers(1, 4),
    rotary_dim=st.sampled_from([2, 16, 24, HEAD_DIM]),
    seed=st.integers(0, 99),
)
def test_rotation_equals_that_of_transformers(num_heads, rotary_dim, seed):
    torch.manual_seed(seed)
    x_THK = torch.randn(5, num_heads, HEAD_DIM)
    angles = torch.randn(5, rotary_dim // 2).repeat(1, 2)
    expected, _ = apply_rotary_pos_emb(
        x_THK[..., :rotary_dim].transpose(0, 1),
        x_THK[..., :rotary_dim].transpose(0, 1),
        angles.cos(),
        angles.sin(),
        unsqueeze_dim=0,
    )
    sin = angles.sin()
    sin[:, : rotary_dim // 2] *= -1
    rotated = apply_rotary(x_THK, RotaryTables(angles.cos()[:, None], sin[:, None]))
    torch.testing.assert_close(rotated[..., :rotary_dim], expected.transpose(0, 1))
    assert torch.equal(rotated[..., rotary_dim:], x_THK[..., rotary_dim:])


def test_scores_depend_only_on_the_distance():
    rope = read_rope(ConfigFields({"rope_theta": 1e4}, "model"), HEAD_DIM)
    embedding = RotaryEmbedding(
        rope, max_model_len=4096, dtype=torch.float32, device=torch.device("cpu")
    )
    q, k = torch.randn(2, 1, 1, HEAD_DIM)

    def score(query_position, key_position):
        tables = [embedding.tables(torch.tensor([p])) for p in (query_position, key_position)]
        return (apply_rotary(q, tables[0]) * apply_rotary(k, tables[1])).sum()

    torch.testing.assert_close(score(107, 100), score(3007, 3000), atol=1e-3, rtol=1e-3)
