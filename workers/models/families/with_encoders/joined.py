"""Families of models that join an encoder and a decoder.

These are two BERTs (arXiv 1907.12461), or wav2vec 2.0 and the decoder of a BART or a BERT (arXiv 2104.06678).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from .....protocol.checkpoint.audio.token_writers import joined_spec
from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.field_names import with_common_names
from .....protocol.checkpoint.speech import max_source_positions
from ....layers.spec import ModelSpec, SourceSpec
from ....layers.specs.norm_names import NormNames
from ..common import Family
from ..gpt import gpt2
from .absolute import BERT_NAMES, bert, bert_generation, roberta
from .encoder_decoders import CAUSAL_NAMES, POST_NORMED, bart_spec, with_source
from .speech import with_tower


class _Part(NamedTuple):
    """A family of encoders: its spec, and the names of tensors of the head in a decoder.

    Attributes:
        read_spec: Returns the spec of an encoder.
        prefix: The prefix of the names of a decoder's layers.
        dense: That of the dense layer before the output projection; "" if there is none.
        norm: That of the norm after this layer.
        head: That of the output projection.
    """

    read_spec: Callable[[ConfigFields], ModelSpec]
    prefix: str
    dense: str = r"lm_head\.dense\."
    norm: str = r"lm_head\.layer_norm\."
    head: str = r"lm_head\."


_PARTS: Final = {
    "bert": _Part(
        bert,
        r"bert\.",
        r"cls\.predictions\.transform\.dense\.",
        r"cls\.predictions\.transform\.LayerNorm\.",
        r"cls\.predictions\.",
    ),
    "bert-generation": _Part(bert_generation, r"bert\.", ""),
    "roberta": _Part(roberta, r"roberta\."),
    "xlm-roberta": _Part(roberta, r"roberta\."),
}
"""The families of encoders and decoders by their `model_type`."""

_BARTS: Final[dict[str, dict[str, Any]]] = {"bart": POST_NORMED, "mbart": {}}
"""Decoders with the names of BART by their `model_type`, and their differences from mBART."""

_NORMS: Final = NormNames(None, "attention_norm", None, "mlp_norm", None, "cross_norm")
_CROSS_NAMES: Final = (
    *((rf"\.crossattention\.self\.{x}\w+\.", f".cross_attn.{x}_proj.") for x in "qkv"),
    (r"\.crossattention\.output\.dense\.", ".cross_attn.o_proj."),
    (r"\.crossattention\.output\.LayerNorm\.", ".cross_norm."),
)


def _encoder_decoder(fields: ConfigFields) -> ModelSpec:
    own = with_common_names(fields.required_section("encoder"))
    encoder = _PARTS[own.choice("model_type", tuple(_PARTS), "bert")]
    size, found = own.integer("hidden_size"), fields.integer("hidden_size")
    if size != found:
        raise fields.wrong("decoder.hidden_size", f"{size}, as the encoder", found)
    source = replace(
        encoder.read_spec(own),
        tensor_names=((r"^decoder\..*", ""), (r"^encoder\.(?!layer\.)", ""), *BERT_NAMES),
    )
    kind = fields.required_section("decoder").choice("model_type", tuple(_PARTS), "bert")
    spec = _bert_decoder(fields, kind)
    return with_source(spec, SourceSpec(source, max_source_positions(fields)))


def _speech_encoder_decoder(fields: ConfigFields) -> ModelSpec:
    kinds = (*_PARTS, *_BARTS, "gpt2")
    kind = fields.required_section("decoder").choice("model_type", kinds, "bert")
    if kind == "gpt2":
        spec = _gpt2_decoder(fields)
    else:
        spec = _bert_decoder(fields, kind) if kind in _PARTS else _bart_decoder(fields, kind)
    return with_tower(fields, spec, joined_spec(fields))


def _bart_decoder(fields: ConfigFields, kind: str) -> ModelSpec:
    fields = fields.with_defaults(
        rms_norm_eps=1e-5, hidden_act="gelu", max_position_embeddings=1024
    )
    return bart_spec(
        fields,
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=2,
        has_embedding_norm=True,
        tensor_names=((r"^(encoder|enc_to_dec_proj)\..*", ""), *CAUSAL_NAMES),
        **_BARTS[kind],
    )


def _gpt2_decoder(fields: ConfigFields) -> ModelSpec:
    spec = gpt2(fields)
    names = (
        (r"^(encoder|enc_to_dec_proj)\..*", ""),
        (r"^decoder\.(transformer\.)?", ""),
        (r".*\.crossattention\.(masked_)?bias$", ""),
        (r"\.ln_cross_attn\.", ".cross_norm."),
        (r"\.crossattention\.q_attn\.", ".cross_attn.q_proj."),
        (r"\.crossattention\.c_attn\.", ".cross_attn.k_v_proj."),
        (r"\.crossattention\.c_proj\.", ".cross_attn.o_proj."),
        *spec.tensor_names,
    )
    return replace(spec, norms=replace(spec.norms, cross_input="cross_norm"), tensor_names=names)


def _bert_decoder(fields: ConfigFields, kind: str) -> ModelSpec:
    decoder = _PARTS[kind]
    names = (
        (r"^(encoder|enc_to_dec_proj)\..*", ""),
        (r"^decoder\.", ""),
        *([(rf"^{decoder.dense}", "head_dense.")] if decoder.dense else []),
        (rf"^{decoder.norm}", "head_norm."),
        (rf"^{decoder.head}(decoder\.)?", "lm_head."),
        (rf"^{decoder.prefix}", ""),
        *_CROSS_NAMES,
        # The first one drops heads.
        *BERT_NAMES[1:],
    )
    return replace(
        decoder.read_spec(fields.with_values({"is_decoder": None})),
        is_causal=True,
        has_head=True,
        norms=_NORMS,
        head_dense_bias=True if decoder.dense else None,
        head_bias=True,
        tensor_names=names,
    )


FAMILIES = (
    Family("EncoderDecoderModel", "encoder-decoder", _encoder_decoder),
    Family("SpeechEncoderDecoderModel", "speech-encoder-decoder", _speech_encoder_decoder),
)
