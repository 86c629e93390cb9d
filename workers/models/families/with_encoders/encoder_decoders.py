"""Families of encoder-decoder models. The decoder's spec contains the spec of the encoder as its `source`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.pooling.classification import CLASSIFIER_SUFFIX
from .....protocol.checkpoint.source_text import source_vocab_size
from .....protocol.checkpoint.speech import max_source_positions
from .....protocol.checkpoint.vision.read import AnyVisionSpec
from ....layers.spec import ModelSpec, SourceSpec
from ....layers.specs.norm_names import NormNames
from ....layers.specs.positions import Sinusoids
from ....layers.window import TokenBlocks
from ..common import Family, base_spec, uniform_layers, with_score_head
from .absolute import BERT_NAMES

BART_LAYER_NAMES: Final = (
    (r"\.encoder_attn_layer_norm\.", ".cross_norm."),
    (r"\.self_attn_layer_norm\.", ".attention_norm."),
    (r"(layers\.\d+)\.final_layer_norm\.", r"\1.mlp_norm."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.out_proj\.", ".o_proj."),
    (r"\.fc1\.", ".mlp.up_proj."),
    (r"\.fc2\.", ".mlp.down_proj."),
    (r"^layernorm_embedding\.", "embed_norm."),
    (r"^layer_norm\.", "norm."),
)
_LED_NAMES: Final = (
    (r"^led\.", ""),
    (r"\.longformer_self_attn\.([qkv])\w+_global\.", r".\1_proj_global."),
    (r"\.longformer_self_attn\.([qkv])[a-z]+\.", r".\1_proj."),
    (r"\.self_attn\.output\.", ".self_attn.o_proj."),
)
_PEGASUS_X_NAMES: Final = (
    (r"\.global_self_attn_layer_norm\.", ".self_attn.global_norm."),
    (r"\.self_attn_layer_norm\.", ".self_attn.text_norm."),
)
_BART_DECODER_NAMES: Final = (
    # The embedding of the decoder, if it has its own, else the shared one.
    (r"^(model\.)?decoder\.embed_tokens\.", "embed_tokens."),
    (r"^(model\.)?shared\.", "embed_tokens."),
    (r"^(model\.)?encoder\.embed_tokens\.", "embed_tokens."),
    (r"^(model\.)?encoder\..*", ""),
    (r"^final_logits_bias$", "lm_head.bias"),
    (r"^(model\.)?decoder\.", ""),
    *BART_LAYER_NAMES,
)
_BART_ENCODER_NAMES: Final = (
    (r"^(model\.)?encoder\.embed_tokens\.", "embed_tokens."),
    (r"^(model\.)?shared\.", "embed_tokens."),
    (r"^(model\.)?decoder\.embed_tokens\.", "embed_tokens."),
    (r"^(model\.)?decoder\..*", ""),
    (r"^(final_logits_bias|lm_head\..*)$", ""),
    (r"^(model\.)?encoder\.", ""),
    *BART_LAYER_NAMES,
)
CAUSAL_NAMES: Final = (
    (r"^decoder\.lm_head\.", "lm_head."),
    (r"^decoder\.model\.decoder\.", ""),
    *BART_LAYER_NAMES,
)
"""The names of tensors of a decoder that is stored as `decoder`, beside an encoder of another family."""

_BLIP_NAMES: Final = (
    (r"^text_decoder\.cls\.predictions\.decoder\..*", ""),
    (r"^text_decoder\.cls\.predictions\.bias$", "lm_head.bias"),
    (r"^text_decoder\.cls\.predictions\.transform\.dense\.", "head_dense."),
    (r"^text_decoder\.cls\.predictions\.transform\.LayerNorm\.", "head_norm."),
    (r"^text_decoder\.bert\.", ""),
    *((rf"\.crossattention\.self\.{x}\w+\.", f".cross_attn.{x}_proj.") for x in "qkv"),
    (r"\.crossattention\.output\.dense\.", ".cross_attn.o_proj."),
    (r"\.crossattention\.output\.LayerNorm\.", ".cross_norm."),
    # The first one drops heads.
    *BERT_NAMES[1:],
)
SINUSOIDS: Final = (
    # Some checkpoints contain the table, which is the same in all of them.
    (r"^(model\.)?(en|de)coder\.embed_positions\..*", ""),
)
BESIDE_IMAGES: Final = (
    (
        r"^(model\.)?(vision_tower|multi_modal_projector|image_proj\w*|image_pos_embed|visual_temporal_embed)\b.*",
        "",
    ),
    (r"^(vision_model|qformer|query_tokens|language_projection)\b.*", ""),
    (r"^(model\.)?language_model\.", ""),
)
"""Drops the tensors of a tower, and the prefix of the others."""

PRE_NORMS: Final = NormNames("attention_norm", None, "mlp_norm", None, "cross_norm", None)
_POST_NORMS: Final = NormNames(None, "attention_norm", None, "mlp_norm", None, "cross_norm")
POST_NORMED: Final[dict[str, Any]] = {
    "norms": _POST_NORMS,
    "norms_stream": True,
    "has_final_norm": False,
}

WHOLE: Final = (r"^transformer\.", "")
"""Drops the prefix that the tensors of a classifier of a T5 have."""


def with_source(decoder: ModelSpec, source: SourceSpec) -> ModelSpec:
    """Return a decoder whose layers attend to the outputs of an encoder."""
    assert source.encoder is not None
    encoder = replace(source.encoder, is_causal=False, has_head=False)
    layers = tuple(replace(layer, reads_source=True) for layer in decoder.layers)
    return replace(decoder, layers=layers, source=replace(source, encoder=encoder))


def with_images(spec: ModelSpec, tower: AnyVisionSpec) -> ModelSpec:
    """Return the spec of a model whose encoder reads the outputs of a vision tower among its tokens."""
    assert spec.source is not None and spec.source.encoder is not None
    encoder = replace(spec.source.encoder, encoder=tower)
    return replace(spec, source=replace(spec.source, encoder=encoder))


def with_pages(spec: ModelSpec, tower: AnyVisionSpec) -> ModelSpec:
    """Return the spec of a decoder whose layers read a page or an image that a tower encodes."""
    source = SourceSpec(
        None,
        are_images=True,
        max_positions=tower.num_page_outputs,
        output_size=tower.output_size,
    )
    layers = tuple(replace(layer, reads_source=True) for layer in spec.layers)
    return replace(spec, layers=layers, source=source)


def bart_fields(fields: ConfigFields) -> tuple[ConfigFields, ConfigFields]:
    """Return the fields of the decoder and those of the encoder."""
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
        hidden_act=fields.text("activation_function", "gelu"),
        tie_word_embeddings=True,
        max_position_embeddings=max_source_positions(fields),
    )
    num_heads = fields.integer("encoder_attention_heads")
    encoder = fields.with_values(
        {
            "vocab_size": source_vocab_size(fields),
            "num_hidden_layers": fields.integer("encoder_layers"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "intermediate_size": fields.integer("encoder_ffn_dim"),
        }
    )
    return fields, encoder


def bart_spec(fields: ConfigFields, **differences: Any) -> ModelSpec:
    """Return the spec of the layers of BART, changed by `differences`."""
    bart: dict[str, Any] = {
        "norms": PRE_NORMS,
        "norm_kind": "layer",
        "norm_bias": True,
        "has_gate": False,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }
    if fields.boolean("scale_embedding", False):
        bart["embedding_scale"] = math.sqrt(fields.integer("hidden_size"))
    return base_spec(fields, uniform_layers(fields, None), **bart | differences)


def _bart_model(
    fields: ConfigFields,
    *,
    sinusoids: Sinusoids | None = None,
    has_head_bias: bool = True,
    **differences: Any,
) -> ModelSpec:
    decoder, encoder = bart_fields(fields)
    positions = max_source_positions(fields)
    # The first two rows of the position table are unused.
    common = {
        "num_positions": positions,
        "position_offset": 2,
        "sinusoids": sinusoids,
        "has_embedding_norm": True,
    } | differences
    dropped = () if sinusoids is None else SINUSOIDS
    source = SourceSpec(
        bart_spec(encoder, tensor_names=(*dropped, *_BART_ENCODER_NAMES), **common), positions
    )
    spec = bart_spec(
        decoder,
        tensor_names=(*dropped, *_BART_DECODER_NAMES),
        head_bias=has_head_bias,
        **common,
    )
    return with_source(spec, source)


def _bart(fields: ConfigFields) -> ModelSpec:
    return _bart_model(fields, **POST_NORMED)


def _florence2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the text part of Florence-2 (arXiv 2311.06242): a BART with names of its own."""
    spec = _bart_model(fields, has_head_bias=False, **POST_NORMED)
    assert spec.source is not None and spec.source.encoder is not None
    encoder, source = spec.source.encoder, spec.source
    encoder = replace(encoder, tensor_names=(*BESIDE_IMAGES, *encoder.tensor_names))
    source = replace(source, encoder=encoder)
    return replace(spec, source=source, tensor_names=(*BESIDE_IMAGES, *spec.tensor_names))


def _nemotron_parse(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder of a Nemotron Parse: an mBART's without positions."""
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
        hidden_act=fields.text("activation_function", "gelu"),
        max_position_embeddings=9000,
    )
    return bart_spec(
        fields,
        has_embedding_norm=True,
        # Others read several tokens at once.
        tensor_names=((r"^decoder\.(embed_positions|extra_\w+)\..*", ""), *_BART_DECODER_NAMES),
    )


def _trocr(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder of a TrOCR: a BART's."""
    fields = fields.with_defaults(
        rms_norm_eps=1e-5, hidden_act=fields.text("activation_function", "gelu")
    )
    learned = fields.boolean("use_learned_position_embeddings", True)
    return bart_spec(
        fields,
        num_positions=fields.integer("max_position_embeddings", 512),
        position_offset=2 if learned else fields.integer("pad_token_id", 1, minimum=0) + 1,
        sinusoids=None if learned else "by last",
        has_embedding_norm=fields.boolean("layernorm_embedding", True),
        tensor_names=(
            (r"^decoder\.output_projection\.", "lm_head."),
            (r"^decoder\.model\.", ""),
            *_BART_DECODER_NAMES,
        ),
        **POST_NORMED,
    )


def _blip(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder of a BLIP: a BERT."""
    fields = fields.with_defaults(rms_norm_eps=fields.positive("layer_norm_eps", 1e-12))
    return bart_spec(
        fields,
        num_positions=fields.integer("max_position_embeddings", 512),
        has_embedding_norm=True,
        head_dense_bias=True,
        head_bias=True,
        tensor_names=_BLIP_NAMES,
        **POST_NORMED,
    )


def _led(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an LED (arXiv 2004.05150): a BART with windows in its encoder, beside the first token."""
    spec = _bart_model(fields, position_offset=0, **POST_NORMED)
    assert spec.source is not None and spec.source.encoder is not None
    source, encoder = spec.source, spec.source.encoder
    sizes = fields.get("attention_window", 512)
    sizes = [sizes] * len(encoder.layers) if isinstance(sizes, int) else sizes
    fields = fields.with_values({"attention_window": sizes})
    windows = fields.per_layer("attention_window", len(encoder.layers)) or []
    if not all(type(size) is int and size > 0 and size % 2 == 0 for size in windows):
        raise fields.wrong("attention_window", "even numbers above 0", sizes)
    encoder = replace(
        encoder,
        # Half of the window is on each side, and the token itself in the middle.
        layers=tuple(
            replace(layer, window=size // 2 + 1)
            for layer, size in zip(encoder.layers, windows, strict=True)
        ),
        max_position_embeddings=source.max_positions,
        reads_first_token=True,
        tensor_names=(*_LED_NAMES, *encoder.tensor_names),
    )
    return replace(
        spec,
        num_positions=spec.max_position_embeddings,
        source=replace(source, encoder=encoder),
        tensor_names=(_LED_NAMES[0], *spec.tensor_names),
    )


def _mvp(fields: ConfigFields) -> ModelSpec:
    if fields.boolean("use_prompt", False):
        raise fields.wrong("use_prompt", "false", True)
    return _bart(fields)


def _plbart(fields: ConfigFields) -> ModelSpec:
    return _bart(fields.with_defaults(scale_embedding=True))


def _blenderbot(fields: ConfigFields) -> ModelSpec:
    return _bart_model(fields, position_offset=0, has_embedding_norm=False)


def _marian(fields: ConfigFields) -> ModelSpec:
    return _bart_model(
        fields, sinusoids="by size", position_offset=0, has_embedding_norm=False, **POST_NORMED
    )


def _pegasus(fields: ConfigFields) -> ModelSpec:
    return _bart_model(fields, sinusoids="by size", position_offset=0, has_embedding_norm=False)


def _pegasus_x(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Pegasus-X (arXiv 2208.04347), whose encoder has global tokens and blocks of tokens."""
    fields = fields.with_defaults(scale_embedding=True, max_position_embeddings=16_384)
    size = fields.integer("block_size", 512)
    staggers = fields.boolean("stagger_local_blocks", True)
    if staggers and size % 2:
        raise fields.wrong("block_size", "an even number", size)
    spec = _bart_model(
        fields,
        sinusoids="by last",
        has_head_bias=False,
        position_offset=0,
        has_embedding_norm=False,
        qkv_bias=False,
        attention_output_bias=False,
    )
    assert spec.source is not None and spec.source.encoder is not None
    source, encoder = spec.source, spec.source.encoder
    # The blocks of every second layer begin in the middle of those of the others.
    blocks = TokenBlocks(size, size), TokenBlocks(size, size // 2 if staggers else size)
    encoder = replace(
        encoder,
        layers=tuple(
            replace(layer, token_blocks=blocks[i % 2]) for i, layer in enumerate(encoder.layers)
        ),
        norms=NormNames(None, None, "mlp_norm", None),
        num_global_tokens=fields.integer("num_global_tokens", 32),
        tensor_names=(*_PEGASUS_X_NAMES, *encoder.tensor_names),
    )
    return replace(spec, source=replace(source, encoder=encoder))


def _fsmt(fields: ConfigFields) -> ModelSpec:
    """Return the spec of FAIR's models of WMT19 (arXiv 1907.06616): an M2M100 with norms after its blocks."""
    # The output projection is the decoder's embedding unless the checkpoint has another one.
    spec = m2m100(fields.with_values({"tie_word_embeddings": True}), **POST_NORMED)
    head = (r"^model\.decoder\.output_projection\.", "lm_head.")
    return replace(spec, tensor_names=(head, *spec.tensor_names))


def m2m100(fields: ConfigFields, **differences: Any) -> ModelSpec:
    """Return the spec of an M2M100 (arXiv 2010.11125), changed by `differences`."""
    return _bart_model(
        fields.with_defaults(scale_embedding=True, activation_function="relu"),
        sinusoids="by last",
        has_head_bias=False,
        position_offset=fields.integer("pad_token_id", 1, minimum=0) + 1,
        has_embedding_norm=False,
        **differences,
    )


def classifier(fields: ConfigFields, family: Callable[[ConfigFields], ModelSpec]) -> ModelSpec:
    """Return the spec with a head that reads the decoder's last token, instead of the output projection."""
    spec = family(fields)
    assert spec.source is not None and spec.source.encoder is not None
    own: tuple[tuple[str, str], ...] = ((r"^classification_head\..*", ""), WHOLE)
    encoder = spec.source.encoder
    encoder = replace(encoder, tensor_names=(*own, *encoder.tensor_names))
    spec = replace(
        spec,
        source=replace(spec.source, encoder=encoder),
        tensor_names=(WHOLE, *spec.tensor_names),
    )
    return with_score_head(
        spec,
        fields,
        dense=r"^classification_head\.dense\.",
        output=r"^classification_head\.out_proj\.",
        output_bias=True,
    )


_BART_FAMILIES: Final = (
    ("Bart", _bart),
    ("MBart", _bart_model),
    ("Mvp", _mvp),
    ("PLBart", _plbart),
)

FAMILIES = (
    # Configs without an architecture get the last family with their model_type.
    *(
        Family(f"{name}{CLASSIFIER_SUFFIX}", name.lower(), partial(classifier, family=family))
        for name, family in _BART_FAMILIES
    ),
    Family("BartForConditionalGeneration", "bart", _bart),
    Family("BlenderbotForConditionalGeneration", "blenderbot", _blenderbot),
    Family("Florence2ForConditionalGeneration", "florence2", _florence2),
    Family("FSMTForConditionalGeneration", "fsmt", _fsmt),
    Family("LEDForConditionalGeneration", "led", _led),
    Family("M2M100ForConditionalGeneration", "m2m_100", m2m100),
    Family("MarianMTModel", "marian", _marian),
    Family("MBartForConditionalGeneration", "mbart", _bart_model),
    Family("MvpForConditionalGeneration", "mvp", _mvp),
    Family("NemotronParseForConditionalGeneration", "nemotron_parse", _nemotron_parse),
    Family("PegasusForConditionalGeneration", "pegasus", _pegasus),
    Family("PegasusXForConditionalGeneration", "pegasus_x", _pegasus_x),
    Family("PLBartForConditionalGeneration", "plbart", _plbart),
    Family("BlipForConditionalGeneration", "blip", _blip),
    Family("TrOCRForConditionalGeneration", "trocr", _trocr),
)
