"""Read the configs of encoders that have attention with a memory (Fun-ASR-Nano)."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from ...config.audio.tower import MemoryAdaptor, MemorySpec
from ..config_fields import ConfigFields
from .fields import MAX_POSITIONS, read_num_heads

_MOST_ROWS: Final = 1000
"""The maximum length of a clip that Fun-ASR-Nano in its authors' layout reads: 60 s."""

_MEMORY_NAMES: Final = (
    (r"^audio_adaptor\.linear(\d)\.", r"multi_modal_projector.linear_\1."),
    (r"^audio_adaptor\.blocks\.", "multi_modal_projector.layers."),
    (r"\.self_attn\.linear_q_k_v\.", ".self_attn.qkv_proj."),
    (r"\.self_attn\.linear_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.(linear_out|out_proj)\.", ".self_attn.o_proj."),
    (r"\.self_attn\.fsmn_block\.", ".self_attn.fsmn.conv."),
    (r"\.feed_forward\.w_(\d)\.", r".mlp.fc\1."),
    (r"\.norm1\.", ".input_layernorm."),
    (r"\.norm2\.", ".post_attention_layernorm."),
)


def memory_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> MemorySpec:
    """Return the encoder of Fun-ASR-Nano."""
    audio.require("num_stacked_frames", 7)
    adaptor = fields.section("adaptor_config") or fields.with_values({})
    adaptor.require("hidden_size", output_size, ", the decoder's hidden_size", default=1024)
    num_layers = audio.integer("num_hidden_layers", 70, maximum=1024)
    num_after = audio.integer("num_timestamp_prediction_layers", 20, minimum=0, maximum=num_layers)
    hidden_size = audio.integer("hidden_size", 512, maximum=MAX_POSITIONS)
    return MemorySpec(
        num_mel_bins=7 * audio.integer("num_mel_bins", 80, maximum=1024),
        hidden_size=hidden_size,
        intermediate_size=audio.integer("intermediate_size", 2048, maximum=MAX_POSITIONS),
        num_layers=num_layers,
        num_heads=read_num_heads(audio, hidden_size, 4),
        # The position of the first row is 1.
        num_frames=audio.integer("max_position_embeddings", 2049, maximum=MAX_POSITIONS) - 1,
        normed_layers=(num_layers - num_after - 1, num_layers - 1),
        kernel_size=audio.integer("fsmn_kernel_size", 11, maximum=1023),
        activation=audio.text("hidden_act", "relu"),
        norm_eps=audio.positive("layer_norm_eps", 1e-5),
        projection_size=adaptor.integer("projector_hidden_size", 2048, maximum=MAX_POSITIONS),
        projection_activation=adaptor.text("projector_hidden_act", "relu"),
        adaptor=MemoryAdaptor(
            intermediate_size=adaptor.integer("intermediate_size", 256, maximum=MAX_POSITIONS),
            num_layers=adaptor.integer("num_hidden_layers", 2, minimum=0, maximum=1024),
            num_heads=read_num_heads(adaptor, output_size, 8),
            activation=adaptor.text("hidden_act", "relu"),
            norm_eps=adaptor.positive("layer_norm_eps", 1e-5),
        ),
        output_size=output_size,
    )


def published_memory_spec(fields: ConfigFields, conf: ConfigFields, output_size: int) -> MemorySpec:
    """Return the encoder of Fun-ASR-Nano in its authors' layout, whose config omits the sizes of the adaptor."""
    conf.require_all(normalize_before=True, sanm_shift=0)
    num_first, num_last = conf.integer("num_blocks", 6), conf.integer("tp_blocks")
    audio = {
        "hidden_size": conf.integer("output_size", 256),
        "num_attention_heads": conf.integer("attention_heads", 4),
        "intermediate_size": conf.integer("linear_units", 2048),
        "num_hidden_layers": num_first + num_last,
        "num_timestamp_prediction_layers": num_last,
        "fsmn_kernel_size": conf.integer("kernel_size", 11),
        "max_position_embeddings": _MOST_ROWS + 1,
        "layer_norm_eps": 1e-12,
    }
    adaptor = {"hidden_size": output_size, "intermediate_size": output_size // 4}
    spec = memory_spec(
        fields.with_values({"adaptor_config": adaptor | {"layer_norm_eps": 1e-12}}),
        conf.with_values(audio),
        output_size,
    )
    names = (
        "encoders0.0",
        *(f"encoders.{i}" for i in range(num_first - 1)),
        *(f"tp_encoders.{i}" for i in range(num_last)),
    )
    layers = tuple(
        (rf"^audio_encoder\.{re.escape(name)}\.", f"audio_tower.layers.{index}.")
        for index, name in enumerate(names)
    )
    last, final = num_first - 1, num_first + num_last - 1
    norms = (
        (r"^audio_encoder\.after_norm\.", f"audio_tower.layers.{last}.final_layernorm."),
        (r"^audio_encoder\.tp_norm\.", f"audio_tower.layers.{final}.final_layernorm."),
    )
    return msgspec.structs.replace(
        spec, num_halvings=3, tensor_names=(*layers, *norms, *_MEMORY_NAMES)
    )
