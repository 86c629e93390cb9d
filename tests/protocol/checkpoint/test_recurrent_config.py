"""The recurrent layers that a config describes."""

from __future__ import annotations

from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.recurrent_config import RecurrentModel


def test_a_minicpm_sala_has_blocks_as_large_as_its_states() -> None:
    """Its queries are rotated, but its attention is not latent."""
    config = {"model_type": "minicpm_sala", "hidden_size": 32, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "lightning_nkv": 4, "use_output_gate": True}
    model = RecurrentModel.read(ConfigFields(config, "config.json"))
    assert model is not None and (model.num_kv_heads, model.head_dim) == (2, 8)
    state, token = model.layer.state_parts.size(1).num_bytes(4), 2 * 2 * 8 * 4
    assert model.smallest_block_size(1, 4, 4) == -(-state // token)
