"""Read the config of Kyutai's speech-to-text models, whose decoder reads the codes of Mimi beside its text."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ...config.audio.codec import CodecSpec
from ..config_fields import ConfigFields
from .fields import MAX_POSITIONS
from .whisper_towers import CAUSAL_PART

_Ratio = Annotated[int, msgspec.Meta(ge=1, le=64)]
_Ratios = Annotated[tuple[_Ratio, ...], msgspec.Meta(min_length=1, max_length=8)]
_DEFAULTS: Final = {
    "vocab_size": 4001,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "max_position_embeddings": 750,
    "sliding_window": 375,
    "rms_norm_eps": 1e-8,
    "tie_word_embeddings": False,
}


def kyutai_fields(fields: ConfigFields) -> ConfigFields:
    """Return the config with the decoder's fields under Llama's names."""
    inner = fields.multiple("ffn_dim", 2, 11_264) // 2
    own = {"intermediate_size": inner, "num_unused_embeddings": _num_vectors(fields)}
    return fields.with_defaults(**_DEFAULTS).with_values(own)


def _num_vectors(fields: ConfigFields) -> int:
    """Return the number of rows of the embedding that are not those of tokens. The last one is for padding."""
    count = fields.integer("num_codebooks", 32, maximum=256)
    return count * fields.integer("codebook_vocab_size", 2049, maximum=1 << 20) + 1


def codec_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> CodecSpec:
    """Return the encoder of Mimi in one of these models. Raise CheckpointError if a field is missing or invalid."""
    audio.require_all(
        audio_channels=1, attention_bias=False, pad_mode="constant", use_causal_conv=True
    )
    rope = audio.section_or_empty("rope_parameters")
    rope.require("rope_type", "default")
    size = audio.integer("hidden_size", 512, maximum=MAX_POSITIONS)
    num_heads = audio.divisor("num_attention_heads", size, 8)
    audio.require("num_key_value_heads", num_heads, default=8)
    ratios = audio.convert("upsampling_ratios", (8, 6, 5, 4), _Ratios, "1 to 8 numbers up to 64")
    count = fields.integer("num_codebooks", 32, maximum=256)
    audio.require("num_quantizers", count, default=32)
    vocab_size = fields.integer("vocab_size", 4001)
    num_vectors = fields.integer("codebook_vocab_size", 2049, maximum=1 << 20)
    last_row = vocab_size + count * num_vectors
    first_token = fields.integer("bos_token_id", 48_000, minimum=0, maximum=last_row)
    spec = CodecSpec(
        num_frames=0,
        hidden_size=size,
        num_layers=audio.integer("num_hidden_layers", 8, maximum=1024),
        num_heads=num_heads,
        head_dim=audio.multiple("head_dim", 2, size // num_heads),
        output_size=output_size,
        intermediate_size=audio.integer("intermediate_size", 2048, maximum=MAX_POSITIONS),
        window=audio.integer("sliding_window", 250, maximum=MAX_POSITIONS),
        theta=rope.positive("rope_theta", 10_000.0),
        norm_eps=audio.positive("norm_eps", 1e-5),
        activation=audio.text("hidden_act", "gelu"),
        num_filters=audio.integer("num_filters", 64, maximum=MAX_POSITIONS),
        kernel_size=audio.integer("kernel_size", 7, maximum=1023),
        last_kernel_size=audio.integer("last_kernel_size", 3, maximum=1023),
        residual_kernel_size=audio.integer("residual_kernel_size", 3, maximum=1023),
        ratios=ratios[::-1],
        num_residuals=audio.integer("num_residual_layers", 1, minimum=0, maximum=16),
        dilation_growth=audio.integer("dilation_growth_rate", 2, maximum=64),
        compress=audio.integer("compress", 2, maximum=64),
        has_shortcut=audio.boolean("use_conv_shortcut", False),
        codebook_size=audio.integer("codebook_size", 2048, maximum=num_vectors),
        codebook_dim=audio.integer("codebook_dim", 256, maximum=MAX_POSITIONS),
        num_codebooks=count,
        num_semantic=audio.integer("num_semantic_quantizers", 1, maximum=count - 1),
        first_vector=vocab_size,
        num_vectors=num_vectors,
        first_code=fields.integer("audio_bos_token_id", 2048, minimum=0, maximum=num_vectors - 1),
        first_token=first_token,
        # A prompt has tokens of texts only.
        prompt_token=first_token
        if first_token < vocab_size
        else fields.integer("pad_token_id", 3, minimum=0, maximum=vocab_size - 1),
    )
    audio.require("vector_quantization_hidden_dimension", spec.codebook_dim, default=256)
    return msgspec.structs.replace(spec, num_frames=CAUSAL_PART * spec.frames_per_output)
