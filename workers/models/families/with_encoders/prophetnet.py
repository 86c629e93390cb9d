"""ProphetNet (arXiv 2001.04063), whose decoder has a second hidden state of each token for the next one."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.source_text import PREDICTED_STREAM_PADDING
from .....protocol.checkpoint.speech import max_source_positions
from ....layers.spec import ModelSpec, SourceSpec
from ....layers.specs.relative_biases import PredictedStreamSpec
from ..common import Family
from .encoder_decoders import POST_NORMED, bart_spec, with_source

_NAMES: Final = (
    *((rf"\.{name}_proj\.", f".{name[0]}_proj.") for name in ("query", "key", "value")),
    (r"\.out_proj\.", ".o_proj."),
    (r"\.self_attn_layer_norm\.", ".attention_norm."),
    (r"\.cross_attn_layer_norm\.", ".cross_norm."),
    (r"\.feed_forward_layer_norm\.", ".mlp_norm."),
    (r"\.feed_forward\.intermediate\.", ".mlp.up_proj."),
    (r"\.feed_forward\.output\.", ".mlp.down_proj."),
    (r"^word_embeddings\.", "embed_tokens."),
    (r"^position_embeddings\.", "embed_positions."),
    (r"^ngram_embeddings\.", "embed_stream."),
    (r"^embeddings_layer_norm\.", "embed_norm."),
)


def _names(own: str, other: str) -> tuple[tuple[str, str], ...]:
    """Return the names of one half of the model. Both have the same embedding, of which there may be copies."""
    return (
        (r"^prophetnet\.", ""),
        (rf"^({own}|{other})\.word_embeddings\.", "word_embeddings."),
        (rf"^{other}\..*", ""),
        (rf"^{own}\.", ""),
        *_NAMES,
    )


def _prophetnet(fields: ConfigFields) -> ModelSpec:
    size = fields.integer("hidden_size")
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
        hidden_act=fields.text("activation_function", "gelu"),
        tie_word_embeddings=True,
    )
    heads = fields.integer("num_encoder_attention_heads", 16)
    encoder = fields.with_values(
        {
            "num_hidden_layers": fields.integer("num_encoder_layers", 12),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": size // heads,
            "intermediate_size": fields.integer("encoder_ffn_dim", 4096),
        }
    )
    positions = max_source_positions(fields)
    # The first token follows the row of the padding token.
    common: dict[str, Any] = {
        "num_positions": positions,
        "position_offset": fields.integer("pad_token_id", 0, minimum=0) + 1,
        "has_embedding_norm": True,
        **POST_NORMED,
    }
    dropped = (r"^lm_head\..*", "")
    names = (dropped, *_names("encoder", "decoder"))
    source = SourceSpec(bart_spec(encoder, tensor_names=names, **common), positions)
    spec = bart_spec(fields, tensor_names=_names("decoder", "encoder"), **common)
    predicted = PredictedStreamSpec(
        spec.head_dim - PREDICTED_STREAM_PADDING,
        fields.integer("num_buckets", 32),
        fields.integer("relative_max_distance", 128),
        fields.integer("ngram", 2),
    )
    scale = predicted.head_dim**-0.5
    return with_source(replace(spec, attention_scale=scale, predicted_stream=predicted), source)


FAMILIES = (Family("ProphetNetForConditionalGeneration", "prophetnet", _prophetnet),)
