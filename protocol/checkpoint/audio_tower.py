"""Read the config of a checkpoint's audio tower, which turns audio clips into embeddings for the decoder."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec

from ..config.audio_tower import (
    AnyAudioSpec,
    AudioChunks,
    AudioRotary,
    AudioTowerSpec,
    CausalSpec,
    ConformerSpec,
    FixedOutputs,
    FrameSpec,
    MemoryAdaptor,
    MemorySpec,
    OutputTimes,
    UniversalSpeechSpec,
)
from .config_fields import ConfigFields
from .vision.granite import query_former

MAX_POSITIONS: Final = 1 << 16

Channels = Annotated[int, msgspec.Meta(ge=1, le=MAX_POSITIONS)]

_THINKER: Final = "thinker_config"
_MODEL_TYPES: Final = (
    *("qwen2_audio", "voxtral", "qwen3_asr", "glmasr"),
    *("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
    *("granite_speech", "granite_speech_plus", "audioflamingo3", "musicflamingo"),
    *("moss_transcribe_diarize", "fun_asr_nano"),
    *("gemma3n", "gemma4", "gemma4_unified", "embedding_gemma2", "voxtral_realtime"),
)

_MAX_CONFORMER_ROWS: Final = 15_000
"""The maximum length of a clip of Granite Speech: 300 s. It has no windows, because its convolutions read all rows."""

_MAX_UNIVERSAL_FRAMES: Final = 3000
"""The maximum length of a clip of Gemma 3n and Gemma 4: 30 s."""

_PART_FRAMES: Final = 250
"""The maximum length of a part of a clip that Gemma 4's unified models read: 10 s, whose frames are independent."""

CAUSAL_PART: Final = 32
"""The maximum length of a part of a clip that Voxtral Realtime reads, in outputs of 80 ms."""

_GEMMA4_NAMES: Final = (
    (r"(\baudio_tower\..*)\.linear\.weight$", r"\1.weight"),
    (r"(\baudio_tower\.subsample_conv_projection\.)layer", r"\1conv_"),
    (r"\baudio_tower\.layers\.", "audio_tower.conformer."),
    (r"(\baudio_tower\.conformer\.\d+\.)feed_forward1\.", r"\1ffw_layer_start."),
    (r"(\baudio_tower\.conformer\.\d+\.)feed_forward2\.", r"\1ffw_layer_end."),
    (r"(\baudio_tower\.conformer\.\d+\.)norm_pre_attn\.", r"\1attention.pre_attn_norm."),
    (r"(\baudio_tower\.conformer\.\d+\.)norm_post_attn\.", r"\1attention.post_norm."),
    (r"(\baudio_tower\.conformer\.\d+\.)norm_out\.", r"\1norm."),
    (r"(\baudio_tower\.conformer\.\d+\.)self_attn\.post\.", r"\1attention.post."),
    (
        r"(\baudio_tower\.conformer\.\d+\.)self_attn\.relative_k_proj\.",
        r"\1attention.attn.relative_position_embedding.pos_proj.",
    ),
    (r"(\baudio_tower\.conformer\.\d+\.)self_attn\.", r"\1attention.attn."),
)


def audio_section(fields: ConfigFields) -> ConfigFields:
    """Return the section of a config that describes how audio is read, which is the config itself for most models."""
    return fields.section(_THINKER) or fields


def has_audio_tower(fields: ConfigFields) -> bool:
    """Return whether a model with this config has an audio tower that Engine supports."""
    kind = fields.text("model_type", "")
    name = "encoder_config" if kind.startswith("granite") else "audio_config"
    return kind in _MODEL_TYPES and audio_section(fields).section(name) is not None


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
        return _conformer_spec(fields, output_size)
    audio = audio_section(fields).required_section("audio_config")
    if kind == "gemma3n":
        return _gemma3n_spec(fields, audio, output_size)
    if kind == "gemma4_unified":
        return FrameSpec(
            num_mel_bins=audio.integer("audio_embed_dim", 640, maximum=MAX_POSITIONS),
            num_frames=_PART_FRAMES,
            norm_eps=audio.positive("rms_norm_eps", 1e-6),
            output_size=output_size,
        )
    if kind in ("gemma4", "embedding_gemma2"):
        return _gemma4_spec(fields, audio, output_size)
    if kind == "fun_asr_nano":
        return _memory_spec(fields, audio, output_size)
    if kind == "voxtral_realtime":
        return _causal_spec(fields, audio, output_size)
    if kind == "qwen3_asr":
        return _chunked_spec(audio, output_size)
    if kind == "qwen3_omni_moe_thinker":
        sizes = audio.with_defaults(
            d_model=1280, encoder_layers=32, encoder_attention_heads=20, encoder_ffn_dim=5120
        )
        return _chunked_spec(sizes, output_size)
    is_moss = kind == "moss_transcribe_diarize"
    if is_moss:
        audio = audio.with_defaults(
            num_mel_bins=80,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
        )
    hidden_size = _size(audio, "d_model", "hidden_size", 1280)
    intermediate_size = _size(audio, "encoder_ffn_dim", "intermediate_size", 5120)
    num_positions_name = "max_position_embeddings" if kind == "glmasr" else "max_source_positions"
    num_positions = audio.integer(num_positions_name, 1500, maximum=MAX_POSITIONS)
    is_omni = kind == "qwen2_5_omni_thinker"
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
        num_mel_bins=audio.integer("num_mel_bins", 128, maximum=1024),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=_size(audio, "encoder_layers", "num_hidden_layers", 32, maximum=1024),
        num_heads=read_num_heads(audio, hidden_size, 20),
        num_frames=2 * num_positions,
        activation=audio.text("activation_function", "gelu"),
        output_size=output_size,
        join="mean" if has_mean else "stack",
        rows_per_output=rows_per_output,
        silence="skipped" if has_mean else "kept",
        projection_size=0 if is_omni or kind == "qwen2_audio" else output_size,
        projection_activation=fields.text("projector_hidden_act", "silu" if is_moss else "gelu"),
        has_projection_bias=(has_mean or is_moss) and fields.boolean("projector_bias", True),
    )
    if is_moss:
        return msgspec.structs.replace(
            spec, silence="filling", projection_norm_eps=_text_norm_eps(fields)
        )
    if is_omni:
        return _with_short_windows(spec, audio)
    if kind == "musicflamingo":
        return _with_times(spec, fields)
    return _with_rotary(spec, audio) if kind == "glmasr" else spec


def _text_norm_eps(fields: ConfigFields) -> float:
    """Return the term of the decoder's norms."""
    return (fields.section("text_config") or fields).positive("rms_norm_eps", 1e-6)


def _size(
    audio: ConfigFields, name: str, other: str, default: int, maximum: int = MAX_POSITIONS
) -> int:
    """Return a size, which configs have under one of two names."""
    return audio.integer(name if audio.get(name) is not None else other, default, maximum=maximum)


def read_num_heads(audio: ConfigFields, hidden_size: int, default: int) -> int:
    """Return the number of attention heads.

    Raises:
        CheckpointError: They do not divide the hidden size.
    """
    num_heads = _size(audio, "encoder_attention_heads", "num_attention_heads", default)
    if hidden_size % num_heads:
        raise audio.error(
            f"{audio.prefix}d_model {hidden_size} must be a multiple of the {num_heads} attention heads"
        )
    return num_heads


def _chunked_spec(audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of Qwen3-ASR and Qwen3-Omni, whose rows attend within windows of several chunks."""
    hidden_size = audio.integer("d_model", 1024, maximum=MAX_POSITIONS)
    chunk_frames = 2 * audio.integer("n_window", 50, maximum=MAX_POSITIONS)
    num_frames = audio.integer("n_window_infer", 800, maximum=MAX_POSITIONS)
    if num_frames % chunk_frames:
        raise audio.error(
            f"{audio.prefix}n_window_infer {num_frames} must be a multiple of {chunk_frames}, "
            "which is twice n_window"
        )
    if hidden_size % 2:
        raise audio.wrong("d_model", "an even number", hidden_size)
    audio.require("output_dim", output_size, ", the decoder's hidden_size")
    return AudioTowerSpec(
        num_mel_bins=audio.integer("num_mel_bins", 128, maximum=1024),
        hidden_size=hidden_size,
        intermediate_size=audio.integer("encoder_ffn_dim", 4096, maximum=MAX_POSITIONS),
        num_layers=audio.integer("encoder_layers", 24, maximum=1024),
        num_heads=read_num_heads(audio, hidden_size, 16),
        num_frames=num_frames,
        activation=audio.text("activation_function", "gelu"),
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


def _with_short_windows(spec: AudioTowerSpec, audio: ConfigFields) -> AudioTowerSpec:
    """Return the tower of Qwen2.5-Omni (arXiv 2503.20215), which has short windows and other names."""
    num_rows = audio.integer("n_window", 100, maximum=MAX_POSITIONS)
    if num_rows % 2:
        raise audio.wrong("n_window", "an even number", num_rows)
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
    hidden_size = _size(audio, "d_model", "hidden_size", 1280)
    num_heads = _size(audio, "encoder_attention_heads", "num_attention_heads", 32)
    rope = audio.section("rope_parameters") or audio
    rope.require("rope_type", "default")
    head_dim = audio.integer("head_dim", 64)
    if head_dim % 2:
        raise audio.wrong("head_dim", "an even number", head_dim)
    rows = fields.integer("downsample_factor", 4, maximum=64)
    fields.require("audio_length_per_tok", 2 * rows, ", the frames of an output", default=8)
    return CausalSpec(
        num_mel_bins=audio.integer("num_mel_bins", 128, maximum=1024),
        hidden_size=hidden_size,
        intermediate_size=_size(audio, "encoder_ffn_dim", "intermediate_size", 5120),
        num_layers=_size(audio, "encoder_layers", "num_hidden_layers", 32, maximum=1024),
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


def _memory_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> MemorySpec:
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


def _conformer_spec(fields: ConfigFields, output_size: int) -> ConformerSpec:
    """Return the tower of Granite Speech."""
    encoder = fields.required_section("encoder_config")
    queries = fields.section("projector_config") or fields.with_values({})
    hidden_size = _size(encoder, "hidden_dim", "hidden_size", 1024)
    num_heads = _size(encoder, "num_heads", "num_attention_heads", 8)
    rows, rate = fields.integer("window_size", 15), fields.integer("downsample_rate", 5)
    if rows % rate:
        raise fields.wrong("window_size", f"a multiple of downsample_rate {rate}", rows)
    block_rows = encoder.integer("context_size", 200, maximum=MAX_POSITIONS)
    max_distance = encoder.integer("max_pos_emb", 512, maximum=MAX_POSITIONS)
    if block_rows > max_distance:
        raise encoder.wrong("context_size", f"at most max_pos_emb {max_distance}", block_rows)
    num_layers = _size(encoder, "num_layers", "num_hidden_layers", 10, maximum=1024)
    layers = encoder.get("cat_hidden_layers") or ()
    try:
        layers = msgspec.convert(layers, tuple[Annotated[int, msgspec.Meta(ge=0)], ...])
    except msgspec.ValidationError:
        raise encoder.wrong("cat_hidden_layers", "a list of layers", layers) from None
    if max(layers, default=0) >= num_layers or list(layers) != sorted(set(layers)):
        raise encoder.wrong("cat_hidden_layers", f"rising, below {num_layers}", layers)
    read_size = hidden_size * (len(layers) + 1)
    queries.require("encoder_hidden_size", read_size, ", the encoder's size", default=1408)
    return ConformerSpec(
        num_mel_bins=_size(encoder, "input_dim", "num_mel_bins", 160, maximum=2048),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * encoder.integer("feedforward_mult", 4),
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=encoder.integer("dim_head", hidden_size // num_heads),
        num_frames=_MAX_CONFORMER_ROWS,
        num_classes=encoder.integer("output_dim", 42, maximum=MAX_POSITIONS),
        block_rows=block_rows,
        max_distance=max_distance,
        kernel_size=encoder.integer("conv_kernel_size", 15, maximum=1024),
        conv_channels=hidden_size * encoder.integer("conv_expansion_factor", 2),
        output_size=output_size,
        rows_per_query_block=rows,
        outputs_per_block=rows // rate,
        queries=query_former(queries, read_size),
        # The decoder multiplies the embeddings of tokens and of audio.
        output_scale=fields.required_section("text_config").positive("embedding_multiplier", 1.0),
        read_layers=layers,
    )


def _gemma3n_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> UniversalSpeechSpec:
    for name, each in (("sscp_conv_kernel_size", 3), ("sscp_conv_stride_size", 2)):
        if (found := audio.get(name)) is not None and list(map(list, found)) != [[each, each]] * 2:
            raise audio.wrong(name, f"[[{each}, {each}], [{each}, {each}]]", found)
    vocab_size = audio.integer("vocab_size", 128, maximum=MAX_POSITIONS)
    first = audio.integer("vocab_offset", 262_272, minimum=0)
    end = fields.integer("eoa_token_id", 262_272, minimum=0)
    if not first <= end < first + vocab_size:
        raise fields.wrong(
            "eoa_token_id", f"one of the {vocab_size} tokens from audio_config.vocab_offset", end
        )
    rate = audio.integer("conf_reduction_factor", 4, maximum=MAX_POSITIONS)
    num_outputs = fields.integer("audio_soft_tokens_per_image", 188)
    most = -(-_MAX_UNIVERSAL_FRAMES // (4 * rate))
    if num_outputs < most:
        raise fields.wrong(
            "audio_soft_tokens_per_image", f"at least {most}, the outputs of 30 s", num_outputs
        )
    return UniversalSpeechSpec(
        num_mel_bins=audio.integer("input_feat_size", 128, maximum=1024),
        num_layers=audio.integer("conf_num_hidden_layers", 12, maximum=1024),
        conv_channels=_conv_channels(audio, "sscp_conv_channel_size"),
        conv_norm_eps=audio.positive("sscp_conv_group_norm_eps", 1e-3),
        kernel_size=audio.integer("conf_conv_kernel_size", 5, maximum=1024),
        rows_before=audio.integer("conf_attention_context_left", 13) - 1,
        rows_after=audio.integer("conf_attention_context_right", 0, minimum=0),
        score_cap=audio.positive("conf_attention_logit_cap", 50.0),
        residual_weight=audio.number("conf_residual_weight", 0.5),
        rows_per_output=rate,
        fixed=FixedOutputs(num_outputs, vocab_size, end - first),
        **_universal_sizes(audio, "conf_num_attention_heads", 1536),
        output_size=output_size,
    )


def _gemma4_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> UniversalSpeechSpec:
    channels = _conv_channels(audio, "subsampling_conv_channels")
    if channels[0] % 4:
        raise audio.wrong("subsampling_conv_channels", "first a multiple of 4", channels)
    before = audio.integer("attention_context_left", 13) - 1
    after = audio.integer("attention_context_right", 0, minimum=0)
    rows = audio.integer("attention_chunk_size", 12)
    # The embeddings of distances begin with half of the rows that a chunk of rows attends to.
    if (rows + before + after) // 2 != before:
        raise audio.error(
            f"{audio.prefix}attention_chunk_size {rows} and attention_context_right {after} must together be "
            f"{before} or {before + 1}, one less than or as many as attention_context_left"
        )
    audio.require("hidden_act", "silu")
    return UniversalSpeechSpec(
        # The size of the projection after the convolutions tells the number of features.
        num_mel_bins=channels[0],
        num_layers=audio.integer("num_hidden_layers", 12, maximum=1024),
        conv_channels=channels,
        conv_norm_eps=audio.positive("rms_norm_eps", 1e-6),
        kernel_size=audio.integer("conv_kernel_size", 5, maximum=1024),
        # In transformers, rows do not see those at the largest distances.
        rows_before=before - 1,
        rows_after=max(after - 1, 0),
        score_cap=audio.positive("attention_logit_cap", 50.0),
        residual_weight=audio.number("residual_weight", 0.5),
        projection_size=audio.integer("output_proj_dims", 1536, maximum=MAX_POSITIONS),
        key_scale=math.log1p(math.e) / math.log(2),
        clips=audio.boolean("use_clipped_linears", True),
        tensor_names=_GEMMA4_NAMES,
        **_universal_sizes(audio, "num_attention_heads", 1024),
        output_size=output_size,
    )


def _universal_sizes(audio: ConfigFields, heads: str, default: int) -> dict[str, Any]:
    """Return the sizes that both kinds of the Universal Speech Model have in fields of the same names."""
    hidden_size = audio.integer("hidden_size", default, maximum=MAX_POSITIONS)
    num_heads = audio.integer(heads, 8)
    if hidden_size % num_heads or hidden_size % 2:
        raise audio.wrong("hidden_size", f"even, and a multiple of {num_heads} heads", hidden_size)
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_frames": _MAX_UNIVERSAL_FRAMES,
        "max_value": audio.positive("gradient_clipping", 1e10),
        "norm_eps": audio.positive("rms_norm_eps", 1e-6),
    }


def _conv_channels(audio: ConfigFields, name: str) -> tuple[int, int]:
    found = audio.get(name, [128, 32])
    try:
        return msgspec.convert(found, tuple[Channels, Channels])
    except msgspec.ValidationError:
        raise audio.wrong(name, "two numbers of channels", found) from None
