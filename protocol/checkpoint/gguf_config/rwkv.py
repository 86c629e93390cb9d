"""Translate the metadata of RWKV models."""

from typing import Any, Final

from ...errors import CheckpointError
from .fields import ModelFields, Translate


def _columns(fields: ModelFields, name: str) -> int:
    """Return the number of elements to which a layer's first matrix projects; 0 if the last layer has no such matrix.

    The metadata of some converters has constants instead.
    """
    tensor = fields.gguf.tensors.get(f"blk.{fields.num_layers - 1}.{name}.weight")
    return 0 if tensor is None else int(tensor.shape[0])


def _rwkv7(fields: ModelFields) -> dict[str, Any]:
    config = {
        "model_type": "rwkv7",
        "architectures": ["RWKV7ForCausalLM"],
        # llama.cpp has a constant epsilon for the outputs of heads.
        "output_norm_eps": 64e-5,
        "hidden_act": "sqrelu",
        # The file says a million because the model has no limit.
        "max_position_embeddings": None,
    }
    for field, name in (
        ("decay_low_rank_dim", "w1"),
        ("a_low_rank_dim", "a1"),
        ("v_low_rank_dim", "v1"),
        ("gate_low_rank_dim", "g1"),
    ):
        config[field] = _columns(fields, f"time_mix_{name}")
        if not config[field] and name != "g1":
            raise CheckpointError(fields.path, f"there is no matrix 'time_mix_{name}.weight'")
    return config


def _rwkv6(fields: ModelFields) -> dict[str, Any]:
    return {
        "model_type": "rwkv6",
        "architectures": ["RWKV6ForCausalLM"],
        "num_heads": fields.num_heads,
        "expand_k": 1.0,
        "mixtures": "wkvrg",
        "proj_low_rank_dim": _columns(fields, "time_mix_w1") // 5,
        "gate_low_rank_dim": _columns(fields, "time_mix_decay_w1"),
        "halving_period": fields.integer("rescale_every_n_layers", 0, minimum=0),
        "output_norm_eps": 64e-5,
        "hidden_act": "sqrelu",
        "max_position_embeddings": None,
    }


def _arwkv7(fields: ModelFields) -> dict[str, Any]:
    """Return the config of a Qwen2 whose attention was replaced by that of RWKV-7."""
    return _rwkv7(fields) | {
        "hidden_act": "silu",
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "shifts_mlp": False,
        "has_output_norm": fields.has_tensor("blk.0.time_mix_ln.weight"),
    }


def _rwkv6_qwen2(fields: ModelFields) -> dict[str, Any]:
    """Return the config of a Qwen2 whose attention was replaced by a variant of that of RWKV-6."""
    return _rwkv6(fields) | {
        "hidden_act": "silu",
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "shifts_mlp": False,
        "attention_bias": fields.has_tensor("blk.0.time_mix_key.bias"),
    }


RWKV: Final[dict[str, Translate]] = {
    "rwkv6": _rwkv6,
    "rwkv6qwen2": _rwkv6_qwen2,
    "rwkv7": _rwkv7,
    "arwkv7": _arwkv7,
}
