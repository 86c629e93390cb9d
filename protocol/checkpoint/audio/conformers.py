"""Read the configs of the audio towers of Granite Speech and Gemma, which are conformers but for one."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec

from ...config.audio.samples import FrameSpec
from ...config.audio.tower import ConformerSpec, FixedOutputs, UniversalSpeechSpec
from ..config_fields import ConfigFields
from ..vision.granite import query_former
from .fields import MAX_POSITIONS, Channels, read_size

_Layer = Annotated[int, msgspec.Meta(ge=0)]

_MAX_CONFORMER_ROWS: Final = 15_000
"""The maximum length of a clip of Granite Speech: 300 s. It has no windows, because its convolutions read all rows."""

_PART_FRAMES: Final = 250
"""The maximum length of a part of a clip that Gemma 4's unified models read: 10 s, whose frames are independent."""

_MAX_UNIVERSAL_FRAMES: Final = 3000
"""The maximum length of a clip of Gemma 3n and Gemma 4: 30 s."""

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


def conformer_spec(fields: ConfigFields, encoder: ConfigFields, output_size: int) -> ConformerSpec:
    """Return the tower of Granite Speech. Raise CheckpointError if a field is missing or invalid."""
    queries = fields.section("projector_config") or fields.with_values({})
    hidden_size = read_size(encoder, "hidden_dim", "hidden_size", 1024)
    num_heads = read_size(encoder, "num_heads", "num_attention_heads", 8)
    rows, rate = fields.integer("window_size", 15), fields.integer("downsample_rate", 5)
    if rows % rate:
        raise fields.wrong("window_size", f"a multiple of downsample_rate {rate}", rows)
    block_rows = encoder.integer("context_size", 200, maximum=MAX_POSITIONS)
    max_distance = encoder.integer("max_pos_emb", 512, maximum=MAX_POSITIONS)
    if block_rows > max_distance:
        raise encoder.wrong("context_size", f"at most max_pos_emb {max_distance}", block_rows)
    num_layers = read_size(encoder, "num_layers", "num_hidden_layers", 10, maximum=1024)
    default: tuple[int, ...] = ()
    layers = encoder.convert("cat_hidden_layers", default, tuple[_Layer, ...], "a list of layers")
    if max(layers, default=0) >= num_layers or list(layers) != sorted(set(layers)):
        raise encoder.wrong("cat_hidden_layers", f"rising, below {num_layers}", layers)
    width = hidden_size * (len(layers) + 1)
    queries.require("encoder_hidden_size", width, ", the encoder's size", default=1408)
    return ConformerSpec(
        num_mel_bins=read_size(encoder, "input_dim", "num_mel_bins", 160, maximum=2048),
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
        queries=query_former(queries, width),
        # The decoder multiplies the embeddings of tokens and of audio.
        output_scale=fields.required_section("text_config").positive("embedding_multiplier", 1.0),
        read_layers=layers,
    )


def gemma3n_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> UniversalSpeechSpec:
    """Return the tower of Gemma 3n. Raise CheckpointError if a field is missing or invalid."""
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


def frames_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> FrameSpec:
    """Return the projection of frames of Gemma 4's unified models, which have no encoder.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    return FrameSpec(
        num_mel_bins=audio.integer("audio_embed_dim", 640, maximum=MAX_POSITIONS),
        num_frames=_PART_FRAMES,
        norm_eps=audio.positive("rms_norm_eps", 1e-6),
        output_size=output_size,
    )


def gemma4_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> UniversalSpeechSpec:
    """Return the tower of Gemma 4. Raise CheckpointError if a field is missing or invalid."""
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
    return audio.convert(name, (128, 32), tuple[Channels, Channels], "two numbers of channels")
