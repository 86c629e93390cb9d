"""Read the config of a checkpoint's audio tower, which turns audio clips into embeddings for the decoder."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ...config.audio.samples import FrameSpec
from ...config.audio.tower import (
    AnyAudioSpec,
    AudioChunks,
    AudioRotary,
    AudioTowerSpec,
    CausalSpec,
    OutputGroups,
    OutputTimes,
)
from ..config_fields import ConfigFields
from .conformers import conformer_spec, gemma3n_spec, gemma4_spec
from .convolutions import wave_spec
from .fields import MAX_POSITIONS, read_num_heads, read_size
from .memory import memory_spec, published_memory_spec
from .patches import patches_spec
from .speech_encoders import lfm2_audio_spec, nemotron_omni_spec, relative_conformer_spec

_THINKER: Final = "thinker_config"
_MODEL_TYPES: Final = (
    *("qwen2_audio", "voxtral", "qwen3_asr", "glmasr"),
    *("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
    *("granite_speech", "granite_speech_plus", "audioflamingo3", "musicflamingo"),
    *("moss_transcribe_diarize", "fun_asr_nano", "vibevoice_asr"),
    *("gemma3n", "gemma4", "gemma4_unified", "embedding_gemma2", "voxtral_realtime"),
    *("nemotron_h_omni", "ultravox", "funaudiochat", "midashenglm", "fireredasr2", "funasr"),
    *("lfm2_audio", "NemotronH_Nano_VL_V2", "moss_audio", "meralion2"),
)

NEMOTRON_OMNI: Final = ("nemotron_h_omni", "NemotronH_Nano_VL_V2")
"""Model types of Nemotron Omni. mmproj files describe its vision tower like the older one without audio."""

_SECTIONS: Final = {
    "fireredasr2": "audio_encoder_conf",
    "funasr": "audio_encoder_conf",
    "granite": "encoder_config",
    "midashenglm": "audio_encoder_config",
    "vibevoice": "acoustic_tokenizer_encoder_config",
}
"""The section of the encoder, if it has another name than that of other models."""

_PART_FRAMES: Final = 250
"""The maximum length of a part of a clip that Gemma 4's unified models read: 10 s, whose frames are independent."""

CAUSAL_PART: Final = 32
"""The maximum length of a part of a clip that Voxtral Realtime reads, in outputs of 80 ms."""


def audio_section(fields: ConfigFields) -> ConfigFields:
    """Return the section of a config that describes how audio is read, which is the config itself for most models."""
    return fields.section(_THINKER) or fields


def has_audio_tower(fields: ConfigFields) -> bool:
    """Return whether a model with this config has an audio tower that Engine supports."""
    kind = fields.text("model_type", "")
    section = audio_section(fields).section(_section_name(kind))
    return kind in _MODEL_TYPES and section is not None


def _section_name(kind: str) -> str:
    return _SECTIONS.get(kind.partition("_")[0], "audio_config")


def audio_tower_spec(fields: ConfigFields, output_size: int) -> AnyAudioSpec:
    """Return the audio tower of a model for which `has_audio_tower` is true.

    Args:
        fields: The content of a config.json.
        output_size: The hidden size of the decoder.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    kind = fields.text("model_type")
    if kind.startswith("granite"):
        return conformer_spec(fields, output_size)
    if kind == "vibevoice_asr":
        return wave_spec(fields, output_size)
    audio = audio_section(fields).required_section(_section_name(kind))
    if kind == "lfm2_audio":
        return lfm2_audio_spec(fields, audio, output_size)
    if kind == "fireredasr2":
        return relative_conformer_spec(fields, audio, output_size)
    if kind == "midashenglm":
        return patches_spec(fields, audio, output_size)
    if kind == "gemma3n":
        return gemma3n_spec(fields, audio, output_size)
    if kind == "gemma4_unified":
        return FrameSpec(
            num_mel_bins=audio.integer("audio_embed_dim", 640, maximum=MAX_POSITIONS),
            num_frames=_PART_FRAMES,
            norm_eps=audio.positive("rms_norm_eps", 1e-6),
            output_size=output_size,
        )
    if kind in ("gemma4", "embedding_gemma2"):
        return gemma4_spec(fields, audio, output_size)
    if kind in NEMOTRON_OMNI:
        return nemotron_omni_spec(fields, audio, output_size)
    if kind == "fun_asr_nano":
        return memory_spec(fields, audio, output_size)
    if kind == "funasr":
        return published_memory_spec(fields, audio, output_size)
    if kind == "voxtral_realtime":
        return _causal_spec(fields, audio, output_size)
    if kind == "ultravox":
        return _stacked_spec(fields, audio, output_size)
    if kind == "qwen3_asr":
        return _chunked_spec(audio, output_size)
    if kind == "qwen3_omni_moe_thinker":
        sizes = audio.with_defaults(
            d_model=1280, encoder_layers=32, encoder_attention_heads=20, encoder_ffn_dim=5120
        )
        return _chunked_spec(sizes, output_size)
    if kind == "meralion2":
        return _meralion_spec(fields, audio, output_size)
    if kind == "moss_audio":
        return _moss_audio_spec(fields, audio, output_size)
    is_moss = kind == "moss_transcribe_diarize"
    if is_moss:
        audio = audio.with_defaults(
            num_mel_bins=80,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
        )
    shape = _sizes(audio)
    hidden_size, intermediate_size = shape["hidden_size"], shape["intermediate_size"]
    num_positions_name = "max_position_embeddings" if kind == "glmasr" else "max_source_positions"
    num_positions = audio.integer(num_positions_name, 1500, maximum=MAX_POSITIONS)
    is_omni = kind in ("qwen2_5_omni_thinker", "funaudiochat")
    rows_per_output, has_mean = (
        2,
        is_omni or kind in ("qwen2_audio", "audioflamingo3", "musicflamingo"),
    )
    if is_moss:
        rows_per_output = fields.divisor("audio_merge_size", num_positions, 4)
        fields.require("audio_chunk_size", 320 * num_positions, default=480_000)
    elif not has_mean:
        rows_per_output = intermediate_size // hidden_size
        if intermediate_size % hidden_size or num_positions % rows_per_output:
            raise audio.error(
                f"{audio.prefix}intermediate_size {intermediate_size} must be a multiple of hidden_size {hidden_size}, "
                f"and the quotient must divide {num_positions_name} {num_positions}"
            )
    spec = AudioTowerSpec(
        **shape,
        num_frames=2 * num_positions,
        output_size=output_size,
        join="mean" if has_mean else "stack",
        rows_per_output=rows_per_output,
        silence="skipped" if has_mean else "kept",
        projection_size=0 if is_omni or kind == "qwen2_audio" else output_size,
        projection_activation=fields.text("projector_hidden_act", "silu" if is_moss else "gelu"),
        has_sinusoids=audio.text("pos_embed", "") == "sinusoidal",
        has_projection_bias=(has_mean or is_moss) and fields.boolean("projector_bias", True),
    )
    if is_moss:
        return msgspec.structs.replace(
            spec, silence="filling", projection_norm_eps=_text_norm_eps(fields)
        )
    if is_omni:
        spec = _with_short_windows(spec, audio)
        return _with_groups(spec, audio) if kind == "funaudiochat" else spec
    if kind == "musicflamingo":
        return _with_times(spec, fields)
    return _with_rotary(spec, audio) if kind == "glmasr" else spec


def _sizes(
    audio: ConfigFields,
    hidden_size: int = 1280,
    intermediate_size: int = 5120,
    num_layers: int = 32,
    num_heads: int = 20,
) -> dict[str, Any]:
    """Return the sizes of a tower like Whisper's, with these defaults, as keyword arguments."""
    size = read_size(audio, "d_model", "hidden_size", hidden_size)
    inner = read_size(audio, "encoder_ffn_dim", "intermediate_size", intermediate_size)
    layers = read_size(audio, "encoder_layers", "num_hidden_layers", num_layers, maximum=1024)
    return {
        "num_mel_bins": audio.integer("num_mel_bins", 128, maximum=1024),
        "hidden_size": size,
        "intermediate_size": inner,
        "num_layers": layers,
        "num_heads": read_num_heads(audio, size, num_heads),
        "activation": audio.text("activation_function", "gelu"),
    }


def _stacked_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of Ultravox, which does not pad clips with silence."""
    fields.require("audio_latency_block_size", None)
    activation = fields.text("projector_act", "swiglu")
    size = fields.integer("hidden_size", 4096, maximum=MAX_POSITIONS)
    if activation == "swiglu" and size % 2:
        raise fields.wrong("hidden_size", "an even number", size)
    return AudioTowerSpec(
        **_sizes(audio),
        num_frames=2 * audio.integer("max_source_positions", 1500, maximum=MAX_POSITIONS),
        output_size=output_size,
        join="fill",
        rows_per_output=fields.integer("stack_factor", 8, maximum=64),
        silence="absent",
        projection_size=size,
        projection_activation=activation,
        gated_norm="middle" if fields.boolean("projector_ln_mid", False) else "last",
        has_projection_bias=False,
    )


def _meralion_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of MERaLiON-2, which reads clips with silence up to the end of a window."""
    shape = _sizes(audio)
    num_positions = audio.integer("max_source_positions", 1500, maximum=MAX_POSITIONS)
    return AudioTowerSpec(
        **shape,
        num_frames=2 * num_positions,
        output_size=output_size,
        join="stack",
        rows_per_output=fields.divisor("speech_mlp_scale_factor", num_positions, 15),
        silence="kept",
        projection_size=fields.integer("projector_hidden_size", 5 * shape["hidden_size"]),
        projection_activation="silu",
        projects_gated=True,
        tensor_names=(
            (r"^speech_encoder\.", "audio_tower."),
            (r"^ln_speech\.", "multi_modal_projector.ln_pre."),
            (r"^speech_audio_adapter\.mlp_adapter\.0\.", "multi_modal_projector.linear_0."),
            (r"^speech_audio_adapter\.gate_proj\.", "multi_modal_projector.linear_1."),
            (r"^speech_audio_adapter\.pool_proj\.", "multi_modal_projector.linear_2."),
            (r"^speech_audio_adapter\.out_proj\.", "multi_modal_projector.linear_3."),
        ),
    )


def _text_norm_eps(fields: ConfigFields) -> float:
    """Return the term of the decoder's norms."""
    return (fields.section("text_config") or fields).positive("rms_norm_eps", 1e-6)


def _chunked_spec(audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of Qwen3-ASR and Qwen3-Omni, whose rows attend within windows of several chunks."""
    hidden_size = audio.multiple("d_model", 2, 1024, maximum=MAX_POSITIONS)
    chunk_frames = 2 * audio.integer("n_window", 50, maximum=MAX_POSITIONS)
    num_frames = audio.integer("n_window_infer", 800, maximum=MAX_POSITIONS)
    if num_frames % chunk_frames:
        raise audio.error(
            f"{audio.prefix}n_window_infer {num_frames} must be a multiple of {chunk_frames}, "
            "which is twice n_window"
        )
    audio.require("output_dim", output_size, ", the decoder's hidden_size")
    return AudioTowerSpec(
        **_sizes(audio, hidden_size, 4096, 24, 16),
        num_frames=num_frames,
        output_size=output_size,
        join="stack",
        rows_per_output=1,
        silence="skipped",
        chunks=AudioChunks(
            chunk_frames, audio.integer("downsample_hidden_size", 480, maximum=MAX_POSITIONS)
        ),
        has_key_bias=True,
        projection_size=hidden_size,
        projection_activation=audio.text("activation_function", "gelu"),
        tensor_names=(
            (r"\baudio_tower\.ln_post\.", "audio_tower.layer_norm."),
            # The names of Qwen's own checkpoints.
            (r"\baudio_tower\.proj([12])\.", r"multi_modal_projector.linear_\1."),
        ),
    )


def _moss_audio_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of MOSS-Audio: chunks of four seconds, whose rows attend within them."""
    hidden_size = audio.integer("d_model", 1280, maximum=MAX_POSITIONS)
    audio.require("output_dim", hidden_size, ", d_model", default=1280)
    sizes = _sizes(audio, hidden_size)
    num_layers = sizes["num_layers"]
    num_frames = 2 * audio.multiple("n_window", 4, 200, maximum=MAX_POSITIONS)
    name = "deepstack_encoder_layer_indexes"
    layers = [8, 16, 24] if audio.get(name, ()) == () else audio.integers(name)
    if (most := fields.optional_integer("deepstack_num_inject_layers")) is not None:
        layers = layers[:most]
    if any(not 0 <= layer < num_layers for layer in layers):
        raise audio.wrong(name, f"layers below {num_layers}", layers)
    return AudioTowerSpec(
        **sizes,
        num_frames=num_frames,
        output_size=output_size,
        join="stack",
        rows_per_output=1,
        silence="skipped",
        chunks=AudioChunks(
            num_frames,
            audio.integer("downsample_hidden_size", 480, maximum=MAX_POSITIONS),
            has_bias=True,
            fills_first=False,
        ),
        gated_size=fields.integer("adapter_hidden_size", 8192, maximum=MAX_POSITIONS),
        read_layers=tuple(layer + 1 for layer in layers),
        tensor_names=(
            (r"^audio_encoder\.conv(\d)\.", r"audio_tower.conv2d\1."),
            (r"^audio_encoder\.stem_proj\.", "audio_tower.conv_out."),
            (r"^audio_encoder\.", "audio_tower."),
            (r"^deepstack_audio_merger_list\.", "audio_mergers."),
        ),
    )


def _with_short_windows(spec: AudioTowerSpec, audio: ConfigFields) -> AudioTowerSpec:
    """Return the tower of Qwen2.5-Omni (arXiv 2503.20215), which has short windows and other names."""
    num_rows = audio.multiple("n_window", 2, 100, maximum=MAX_POSITIONS)
    audio.require("output_dim", spec.output_size, ", the decoder's hidden_size", default=3584)
    return msgspec.structs.replace(
        spec,
        num_frames=2 * num_rows,
        silence="absent",
        has_sinusoids=True,
        tensor_names=(
            (r"\baudio_tower\.ln_post\.", "audio_tower.layer_norm."),
            (r"\baudio_tower\.proj\.", "multi_modal_projector.linear."),
        ),
    )


def _with_groups(spec: AudioTowerSpec, audio: ConfigFields) -> AudioTowerSpec:
    """Return the tower of Fun-Audio-Chat, whose outputs are joined, and which also has a table of speech tokens.

    The speech tokens of all clips are padding, as in vLLM.
    """
    mode = audio.choice("continuous_features_mode", ("add", "replace"), "add")
    num_codes = audio.integer("codebook_size", 6565, maximum=MAX_POSITIONS)
    padding = audio.integer("pad_token_id", 0, minimum=0, maximum=num_codes - 1)
    size = audio.integer("group_size", 5, maximum=64)
    if spec.num_outputs(spec.num_frames) % size:
        raise audio.wrong("group_size", f"a divisor of {spec.num_outputs(spec.num_frames)}", size)
    groups = OutputGroups(size, num_codes, padding if mode == "add" else None)
    names = ((r"\baudio_tower\.", "audio_groups."), (r"\bcontinuous_audio_tower\.", "audio_tower."))
    return msgspec.structs.replace(spec, groups=groups, tensor_names=(*names, *spec.tensor_names))


def _with_times(spec: AudioTowerSpec, fields: ConfigFields) -> AudioTowerSpec:
    """Return the tower of Music Flamingo, whose outputs are rotated by their times."""
    rope = fields.section("rope_parameters") or fields
    theta = rope.positive("rope_theta", 1200.0)
    share = rope.number("partial_rotary_factor", 0.2)
    num_rotated = int(spec.hidden_size * share)
    if num_rotated < 2 or num_rotated % 2 or 2 * num_rotated > spec.hidden_size:
        needed = f"a share that is an even part of {spec.hidden_size}, at most its half"
        raise rope.wrong("partial_rotary_factor", needed, share)
    if theta < spec.num_outputs(spec.num_frames):
        raise rope.wrong("rope_theta", "at least the outputs of a window", theta)
    seconds = fields.positive("audio_frame_step", 0.01) * 2 * spec.rows_per_output
    return msgspec.structs.replace(spec, times=OutputTimes(theta, num_rotated, seconds))


def _causal_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> CausalSpec:
    """Return the encoder of Voxtral Realtime."""
    hidden_size = read_size(audio, "d_model", "hidden_size", 1280)
    num_heads = read_size(audio, "encoder_attention_heads", "num_attention_heads", 32)
    rope = audio.section("rope_parameters") or audio
    rope.require("rope_type", "default")
    head_dim = audio.multiple("head_dim", 2, 64)
    rows = fields.integer("downsample_factor", 4, maximum=64)
    fields.require("audio_length_per_tok", 2 * rows, ", the frames of an output", default=8)
    return CausalSpec(
        num_mel_bins=audio.integer("num_mel_bins", 128, maximum=1024),
        hidden_size=hidden_size,
        intermediate_size=read_size(audio, "encoder_ffn_dim", "intermediate_size", 5120),
        num_layers=read_size(audio, "encoder_layers", "num_hidden_layers", 32, maximum=1024),
        num_heads=num_heads,
        head_dim=head_dim,
        window=audio.integer("sliding_window", 750, maximum=MAX_POSITIONS),
        theta=rope.positive("rope_theta", 10_000.0),
        norm_eps=audio.positive("rms_norm_eps", 1e-5),
        activation=audio.text("hidden_act", "silu"),
        projection_activation=fields.text("projector_hidden_act", "gelu"),
        rows_per_output=rows,
        num_frames=2 * rows * CAUSAL_PART,
        output_size=output_size,
        delay=fields.integer("default_num_delay_tokens", 6, maximum=64),
    )


def _with_rotary(spec: AudioTowerSpec, audio: ConfigFields) -> AudioTowerSpec:
    """Return the tower of GLM-ASR, which has rotary positions, and other names."""
    head_dim = audio.integer("head_dim", spec.hidden_size // spec.num_heads)
    num_kv_heads = audio.integer("num_key_value_heads", spec.num_heads)
    if head_dim * spec.num_heads != spec.hidden_size or num_kv_heads != spec.num_heads:
        raise audio.error(
            f"{audio.prefix}head_dim {head_dim} and num_key_value_heads {num_kv_heads} must be those of "
            f"{spec.num_heads} equal heads in hidden_size {spec.hidden_size}"
        )
    rope = audio.section("rope_parameters") or audio
    share = rope.number("partial_rotary_factor", 0.5)
    num_rotated = int(head_dim * share)
    if not 0 < num_rotated <= head_dim or num_rotated % 2:
        raise rope.wrong(
            "partial_rotary_factor", f"a share that is an even part of {head_dim}", share
        )
    return msgspec.structs.replace(
        spec,
        activation=audio.text("hidden_act", "gelu"),
        silence="dropped",
        rotary=AudioRotary(rope.number("rope_theta", 10_000.0), num_rotated),
        projection_size=2 * spec.output_size,
        has_projection_bias=True,
        tensor_names=(
            (r"\baudio_tower\.norm\.", "audio_tower.layer_norm."),
            (r"(\baudio_tower\.layers\.\d+\.)self_attn\.o_proj\.", r"\1self_attn.out_proj."),
            (r"(\baudio_tower\.layers\.\d+\.)mlp\.", r"\1"),
            (r"(\baudio_tower\.layers\.\d+\.)input_layernorm\.", r"\1self_attn_layer_norm."),
            (
                r"(\baudio_tower\.layers\.\d+\.)post_attention_layernorm\.",
                r"\1final_layer_norm.",
            ),
        ),
    )
