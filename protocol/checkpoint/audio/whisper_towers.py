"""Read the configs of audio towers like Whisper's encoder, and of the causal one of Voxtral Realtime."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ...config.audio.tower import (
    AudioChunks,
    AudioRotary,
    AudioTowerSpec,
    CausalSpec,
    OutputGroups,
    OutputTimes,
)
from ..config_fields import ConfigFields
from .fields import MAX_POSITIONS, read_num_heads, read_size

CAUSAL_PART: Final = 32
"""The maximum length of a part of a clip that Voxtral Realtime reads, in outputs of 80 ms."""


def qwen2_audio_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of Qwen2-Audio (arXiv 2407.10759), whose outputs are the means of two rows each."""
    return AudioTowerSpec(
        **_sizes(audio),
        num_frames=2 * audio.integer("max_source_positions", 1500, maximum=MAX_POSITIONS),
        output_size=output_size,
        join="mean",
        rows_per_output=2,
        silence="skipped",
        projection_activation=fields.text("projector_hidden_act", "gelu"),
        has_sinusoids=audio.text("pos_embed", "") == "sinusoidal",
        has_projection_bias=fields.boolean("projector_bias", True),
    )


def audio_flamingo_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> AudioTowerSpec:
    """Return the tower of Audio Flamingo 3, which is that of Qwen2-Audio with two projections."""
    spec = qwen2_audio_spec(fields, audio, output_size)
    return msgspec.structs.replace(spec, projection_size=output_size)


def voxtral_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of Voxtral (arXiv 2507.13264), whose outputs are stacked rows."""
    return _stacked_spec(fields, audio, output_size, "max_source_positions")


def _stacked_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int, positions_name: str
) -> AudioTowerSpec:
    """Return a tower with as many rows in an output as hidden sizes in the intermediate size."""
    shape = _sizes(audio)
    hidden_size, intermediate_size = shape["hidden_size"], shape["intermediate_size"]
    num_positions = audio.integer(positions_name, 1500, maximum=MAX_POSITIONS)
    rows_per_output = intermediate_size // hidden_size
    if intermediate_size % hidden_size or num_positions % rows_per_output:
        raise audio.error(
            f"{audio.prefix}intermediate_size {intermediate_size} must be a multiple of hidden_size {hidden_size}, "
            f"and the quotient must divide {positions_name} {num_positions}"
        )
    return AudioTowerSpec(
        **shape,
        num_frames=2 * num_positions,
        output_size=output_size,
        join="stack",
        rows_per_output=rows_per_output,
        silence="kept",
        projection_size=output_size,
        projection_activation=fields.text("projector_hidden_act", "gelu"),
        has_sinusoids=audio.text("pos_embed", "") == "sinusoidal",
        has_projection_bias=False,
    )


def moss_transcribe_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> AudioTowerSpec:
    """Return the tower of MOSS-Transcribe-Diarize, whose clips fill their last output with silence."""
    sizes = audio.with_defaults(
        num_mel_bins=80,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
    )
    num_positions = audio.integer("max_source_positions", 1500, maximum=MAX_POSITIONS)
    fields.require("audio_chunk_size", 320 * num_positions, default=480_000)
    text = fields.section("text_config") or fields
    return AudioTowerSpec(
        **_sizes(sizes),
        num_frames=2 * num_positions,
        output_size=output_size,
        join="stack",
        rows_per_output=fields.divisor("audio_merge_size", num_positions, 4),
        silence="filling",
        projection_size=output_size,
        projection_activation=fields.text("projector_hidden_act", "silu"),
        projection_norm_eps=text.positive("rms_norm_eps", 1e-6),
        has_sinusoids=audio.text("pos_embed", "") == "sinusoidal",
        has_projection_bias=fields.boolean("projector_bias", True),
    )


def ultravox_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
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


def meralion_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
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


def qwen3_omni_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of Qwen3-Omni, which is that of Qwen3-ASR with other default sizes."""
    sizes = audio.with_defaults(
        d_model=1280, encoder_layers=32, encoder_attention_heads=20, encoder_ffn_dim=5120
    )
    return qwen3_asr_spec(fields, sizes, output_size)


def qwen3_asr_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of Qwen3-ASR, whose rows attend within windows of several chunks."""
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


def moss_audio_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
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


def qwen2_5_omni_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> AudioTowerSpec:
    """Return the tower of Qwen2.5-Omni (arXiv 2503.20215), which has short windows and other names."""
    spec = qwen2_audio_spec(fields, audio, output_size)
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


def fun_audio_chat_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> AudioTowerSpec:
    """Return the tower of Fun-Audio-Chat, whose outputs are joined, and which also has a table of speech tokens.

    The speech tokens of all clips are padding, as in vLLM.
    """
    spec = qwen2_5_omni_spec(fields, audio, output_size)
    mode = audio.choice("continuous_features_mode", ("add", "replace"), "add")
    num_codes = audio.integer("codebook_size", 6565, maximum=MAX_POSITIONS)
    padding = audio.integer("pad_token_id", 0, minimum=0, maximum=num_codes - 1)
    size = audio.integer("group_size", 5, maximum=64)
    if spec.num_outputs(spec.num_frames) % size:
        raise audio.wrong("group_size", f"a divisor of {spec.num_outputs(spec.num_frames)}", size)
    groups = OutputGroups(size, num_codes, padding if mode == "add" else None)
    names = ((r"\baudio_tower\.", "audio_groups."), (r"\bcontinuous_audio_tower\.", "audio_tower."))
    return msgspec.structs.replace(spec, groups=groups, tensor_names=(*names, *spec.tensor_names))


def music_flamingo_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> AudioTowerSpec:
    """Return the tower of Music Flamingo, whose outputs are rotated by their times."""
    spec = audio_flamingo_spec(fields, audio, output_size)
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


def causal_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> CausalSpec:
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


def glm_asr_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of GLM-ASR, which has rotary positions, and other names."""
    spec = _stacked_spec(fields, audio, output_size, "max_position_embeddings")
    head_dim = audio.integer("head_dim", spec.hidden_size // spec.num_heads)
    num_kv_heads = audio.integer("num_key_value_heads", spec.num_heads)
    if head_dim * spec.num_heads != spec.hidden_size or num_kv_heads != spec.num_heads:
        raise audio.error(
            f"{audio.prefix}head_dim {head_dim} and num_key_value_heads {num_kv_heads} must be those of "
            f"{spec.num_heads} equal heads in hidden_size {spec.hidden_size}"
        )
    return msgspec.structs.replace(
        spec,
        activation=audio.text("hidden_act", "gelu"),
        silence="dropped",
        rotary=_rotary(audio, head_dim),
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


def dots3_note_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of dots3-note, which reads windows of a minute.

    The config is that of its authors, or that of transformers.
    """
    own = audio.with_values({**audio.config, **audio.first_section("whisper_config").config})
    own.require_all(
        encoder_type="dots",
        use_conv2d_stem=True,
        use_rope=True,
        use_rms_norm=True,
        use_causal=False,
        merge_factor=1,
        activation_function="swiglu",
        hidden_act="silu",
    )
    sizes = _sizes(own.with_defaults(num_mel_bins=own.get("feature_size", 128)))
    num_frames = 100 * own.integer("chunk_seconds", 60, maximum=600)
    return AudioTowerSpec(
        **sizes | {"activation": "silu"},
        num_frames=num_frames,
        output_size=output_size,
        join="stack",
        rows_per_output=1,
        silence="cut",
        chunks=AudioChunks(
            num_frames, own.integer("downsample_hidden_size", 480, maximum=MAX_POSITIONS)
        ),
        rotary=_rotary(own, sizes["hidden_size"] // sizes["num_heads"]),
        norm_kind="rms",
        has_gate=True,
        has_projection_norm=True,
        projection_size=output_size,
        tensor_names=(
            (r"^(model\.)?audio_encoder\.dots_encoder\.speech_encoder\.", "audio_tower."),
            (
                r"^(model\.)?audio_encoder\.audio_adapter\.proj\.0\.",
                "multi_modal_projector.ln_pre.",
            ),
            (
                r"^(model\.)?audio_encoder\.audio_adapter\.proj\.1\.",
                "multi_modal_projector.linear_1.",
            ),
            (
                r"^(model\.)?audio_encoder\.audio_adapter\.proj\.3\.",
                "multi_modal_projector.linear_2.",
            ),
        ),
    )


def _rotary(audio: ConfigFields, head_dim: int) -> AudioRotary:
    """Return the rotation of a part of each head."""
    rope = audio.section("rope_parameters") or audio
    share = rope.number("partial_rotary_factor", 0.5)
    num_rotated = int(head_dim * share)
    if not 0 < num_rotated <= head_dim or num_rotated % 2:
        raise rope.wrong(
            "partial_rotary_factor", f"a share that is an even part of {head_dim}", share
        )
    return AudioRotary(rope.number("rope_theta", 10_000.0), num_rotated)


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
