"""Translate the audio encoder of a ``params.json`` into the sections of Voxtral or Voxtral Realtime."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

_TOWER_FIELDS: Final = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
}
_FEATURES: Final = {"sampling_rate": 16_000, "hop_length": 160, "window_size": 400}
"""Fields of the features, and the only values that Whisper's features have."""

_ROWS_PER_OUTPUT: Final = 4
_LAYER: Final = r"^(audio_tower\.layers\.\d+\.)"
_TOWER_NAMES: Final = (
    (r"^mm_(?:streams_embeddings\.embedding_module|whisper_embeddings)\.", ""),
    (r"^audio_language_projection\.0\.", "multi_modal_projector.linear_1."),
    (r"^audio_language_projection\.2\.", "multi_modal_projector.linear_2."),
    (r"^whisper_encoder\.transformer\.layers\.", "audio_tower.layers."),
    (_LAYER + r"attention_norm\.", r"\1self_attn_layer_norm."),
    (_LAYER + r"ffn_norm\.", r"\1final_layer_norm."),
    (_LAYER + r"attention\.w([qkv])\.", r"\1self_attn.\2_proj."),
)
NAMES: Final = {
    "voxtral": (
        *_TOWER_NAMES,
        (r"^whisper_encoder\.conv_layers\.0\.", "audio_tower.conv1."),
        (r"^whisper_encoder\.conv_layers\.1\.", "audio_tower.conv2."),
        (r"^whisper_encoder\.transformer\.norm\.", "audio_tower.layer_norm."),
        (_LAYER + r"attention\.wo\.", r"\1self_attn.out_proj."),
        (_LAYER + r"feed_forward\.w([12])\.", r"\1fc\2."),
    ),
    "voxtral_realtime": (
        *_TOWER_NAMES,
        (r"^whisper_encoder\.conv_layers\.0\.conv\.", "audio_tower.embedder.conv1."),
        (r"^whisper_encoder\.conv_layers\.1\.conv\.", "audio_tower.embedder.conv2."),
        (r"^whisper_encoder\.transformer\.norm\.", "audio_tower.norm."),
        (_LAYER + r"attention\.wo\.", r"\1self_attn.o_proj."),
        (_LAYER + r"feed_forward\.w1\.", r"\1mlp.gate_proj."),
        (_LAYER + r"feed_forward\.w2\.", r"\1mlp.down_proj."),
        (_LAYER + r"feed_forward\.w3\.", r"\1mlp.up_proj."),
        (r"^(layers\.\d+\.)ada_rms_norm_t_cond\.0\.", r"\1ada_rms_norm.linear1."),
        (r"^(layers\.\d+\.)ada_rms_norm_t_cond\.2\.", r"\1ada_rms_norm.linear2."),
    ),
}
"""Model type -> the names of an encoder, and of norms that depend on the delay, in Mistral's files and transformers."""


def with_audio(params: ConfigFields, text: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config of the whole model with sections for audio; None if the model reads no audio.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    multimodal = params.section("multimodal")
    if multimodal is None:
        return None
    whisper = multimodal.required_section("whisper_model_args")
    encoder = whisper.required_section("encoder_args")
    features = encoder.required_section("audio_encoding_args")
    features.require_all(**_FEATURES)
    rows = whisper.first_section("downsample_args").integer("downsample_factor", _ROWS_PER_OUTPUT)
    tower: dict[str, Any] = {other: encoder.integer(name) for name, other in _TOWER_FIELDS.items()}
    tower["num_mel_bins"] = features.integer("num_mel_bins", 128)
    is_causal = encoder.boolean("causal", False)
    name = "VoxtralRealtime" if is_causal else "Voxtral"
    config: dict[str, Any] = {
        "model_type": "voxtral_realtime" if is_causal else "voxtral",
        "architectures": [f"{name}ForConditionalGeneration"],
        "text_config": text,
        "audio_config": tower,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "eos_token_id": text["eos_token_id"],
    }
    if "quantization_config" in text:
        config["quantization_config"] = text["quantization_config"]
    if not is_causal:
        encoder.require("pos_embed", "sinusoidal", default="sinusoidal")
        # The encoder's intermediate size tells the number of rows of an output.
        if tower["intermediate_size"] != rows * tower["hidden_size"]:
            raise encoder.wrong("hidden_dim", f"{rows} times dim", tower["intermediate_size"])
        tower |= {"pos_embed": "sinusoidal", "activation_function": "gelu"}
        if (num_positions := encoder.optional_integer("max_source_positions")) is not None:
            tower["max_source_positions"] = num_positions
        return config
    encoder.require_all(pos_embed="rope", ffn_type="swiglu", norm_type="rms_norm")
    params.require("ada_rms_norm_t_cond", True)
    text["model_type"] = "voxtral_realtime_text"
    tower |= {
        "head_dim": encoder.integer("head_dim", 64),
        "sliding_window": encoder.integer("sliding_window", 750),
        "rope_theta": encoder.positive("rope_theta", 1e6),
        "rms_norm_eps": encoder.positive("norm_eps", 1e-5),
        "hidden_act": "silu",
    }
    return config | {
        "downsample_factor": rows,
        "audio_length_per_tok": 2 * rows,
        "feature_extractor": {
            "sampling_rate": 16_000,
            "hop_length": 160,
            "n_fft": 400,
            "feature_size": tower["num_mel_bins"],
            "global_log_mel_max": features.number("global_log_mel_max", 1.5),
        },
    }
