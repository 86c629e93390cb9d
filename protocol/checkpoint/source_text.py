"""Read the settings of encoder-decoder models of text, from the files of transformers.

A table names the families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec

from ..config.model import SourceTextConfig
from .audio.fields import read_token
from .config_fields import MAX_INTEGER, ConfigFields
from .pooling.classification import TOKEN_CLASSIFIER_SUFFIX

FieldNames: TypeAlias = Mapping[str, tuple[str, ...]]
"""For each of Llama's names of fields, the names of a family, the first of which that has a value is taken."""

_Token = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]

MAX_SOURCE_TOKENS: Final = 512
"""Default maximum length of a T5 source and of its output, in tokens.

T5 has no limit, but was trained with this one.
"""

_SOURCE_SIZE: Final = "source_vocab_size"
_POSITION_ROWS: Final = "num_position_rows"
"""The field with the `max_position_embeddings` of a ProphetNet."""

PREDICTED_STREAM_PADDING: Final = 8
"""The number of elements of a ProphetNet's head in the cache besides those of a key. One of them is used."""

BART_FIELDS: Final[FieldNames] = {
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("decoder_layers",),
    "num_attention_heads": ("decoder_attention_heads",),
    "num_key_value_heads": ("decoder_attention_heads",),
    "intermediate_size": ("decoder_ffn_dim",),
}
_T5_FIELDS: Final[FieldNames] = {
    "hidden_size": ("d_model",),
    "head_dim": ("d_kv",),
    "num_hidden_layers": ("num_decoder_layers", "num_layers"),
    "num_attention_heads": ("num_heads",),
    "num_key_value_heads": ("num_heads",),
    "intermediate_size": ("d_ff",),
    "max_position_embeddings": ("n_positions",),
}


def renamed_fields(fields: ConfigFields, names: FieldNames) -> dict[str, Any]:
    """Return the fields of a config under Llama's names."""
    values = {
        name: next((v for other in others if (v := fields.get(other)) is not None), None)
        for name, others in names.items()
    }
    return {name: value for name, value in values.items() if value is not None}


def _bart_fields(fields: ConfigFields) -> dict[str, Any]:
    return renamed_fields(fields, BART_FIELDS)


def _led_fields(fields: ConfigFields) -> dict[str, Any]:
    length = fields.integer("max_decoder_position_embeddings", 1024)
    return _bart_fields(fields) | {"max_position_embeddings": length}


def _max_led_tokens(fields: ConfigFields) -> int:
    return fields.integer("max_encoder_position_embeddings", 16_384)


def _marian_fields(fields: ConfigFields) -> dict[str, Any]:
    found = _bart_fields(fields)
    target = fields.get("decoder_vocab_size")
    if has_source_vocabulary(fields) and target is not None:
        found |= {"vocab_size": target, _SOURCE_SIZE: fields.get("vocab_size")}
    return found


def _fsmt_fields(fields: ConfigFields) -> dict[str, Any]:
    sizes = {"vocab_size": ("tgt_vocab_size",), _SOURCE_SIZE: ("src_vocab_size",)}
    return renamed_fields(fields, {**BART_FIELDS, **sizes})


def _t5_fields(fields: ConfigFields) -> dict[str, Any]:
    return {"max_position_embeddings": MAX_SOURCE_TOKENS} | renamed_fields(fields, _T5_FIELDS)


def _t5gemma_fields(fields: ConfigFields) -> dict[str, Any]:
    own = fields.required_section("decoder").config
    is_tied = fields.get("tie_word_embeddings", True)
    return {**own, "model_type": "t5gemma", "tie_word_embeddings": is_tied}


def _prophetnet_rows(fields: ConfigFields) -> int:
    """Return the number of rows of the table of positions that follow the padding token's."""
    rows = fields.integer(_POSITION_ROWS, fields.integer("max_position_embeddings", 512))
    return rows - fields.integer("pad_token_id", 0, minimum=0) - 1


def _prophetnet_fields(fields: ConfigFields) -> dict[str, Any]:
    """Return the fields of the decoder, whose tokens have two queries and one key; see `PredictedStreamSpec`."""
    heads, size = fields.integer("num_decoder_attention_heads", 16), fields.integer("hidden_size")
    return {
        "num_hidden_layers": fields.integer("num_decoder_layers", 12),
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": heads,
        "head_dim": size // heads + PREDICTED_STREAM_PADDING,
        "intermediate_size": fields.integer("decoder_ffn_dim", 4096),
        # The second state of the last token has the last row.
        "max_position_embeddings": _prophetnet_rows(fields) - 1,
        _POSITION_ROWS: fields.get(_POSITION_ROWS, fields.get("max_position_embeddings", 512)),
    }


def joined_fields(fields: ConfigFields) -> dict[str, Any]:
    """Return the fields of a decoder that is joined to an encoder, which may have the names of BART."""
    own = fields.required_section("decoder")
    kept = ("architectures", "encoder", "decoder", "model_type", "decoder_start_token_id")
    found = {name: value for name, value in own.config.items() if name not in kept}
    return found | renamed_fields(own, BART_FIELDS)


def _max_joined_tokens(fields: ConfigFields) -> int:
    encoder = fields.required_section("encoder")
    length = encoder.integer("max_position_embeddings", 512)
    if encoder.text("model_type", "bert").endswith("roberta"):
        # Positions follow that of the padding token.
        length -= encoder.integer("pad_token_id", 1, minimum=0) + 1
    return length


def _longt5_tokens(fields: ConfigFields) -> int:
    return fields.integer("n_positions", 16_384)


def _max_t5_tokens(fields: ConfigFields) -> int:
    return fields.integer("n_positions", MAX_SOURCE_TOKENS)


def _max_t5gemma_tokens(fields: ConfigFields) -> int:
    return fields.required_section("encoder").integer("max_position_embeddings", 8192)


class _Family(NamedTuple):
    """A family of models.

    Attributes:
        start: The default `decoder_start_token_id`; None for the padding token.
        read_fields: Returns the decoder's fields under Llama's names.
        max_tokens: Returns the maximum length of a source, or is the default of `max_position_embeddings`.
        begins_with_last: See `SourceTextConfig`.
        vocab_size: The name of the field with the number of tokens of sources.
    """

    start: int | None = 2
    read_fields: Callable[[ConfigFields], dict[str, Any]] = _bart_fields
    max_tokens: Callable[[ConfigFields], int] | int = 1024
    begins_with_last: bool = False
    vocab_size: str = "vocab_size"


_T5: Final = _Family(None, _t5_fields, _max_t5_tokens)
_FAMILIES: Final[dict[str, _Family]] = {
    "bart": _Family(),
    "blenderbot": _Family(1, max_tokens=128),
    "encoder-decoder": _Family(None, joined_fields, _max_joined_tokens),
    "florence2": _Family(),
    "fsmt": _Family(2, _fsmt_fields, vocab_size="src_vocab_size"),
    "led": _Family(2, _led_fields, _max_led_tokens),
    "longt5": _Family(None, _t5_fields, _longt5_tokens),
    "m2m_100": _Family(),
    "marian": _Family(58_100, _marian_fields),
    "mbart": _Family(begins_with_last=True),
    "mt5": _T5,
    "mvp": _Family(),
    "nllb-moe": _Family(),
    "pegasus": _Family(0),
    "pegasus_x": _Family(0, max_tokens=16_384),
    "plbart": _Family(begins_with_last=True),
    "prophetnet": _Family(0, _prophetnet_fields, _prophetnet_rows),
    "switch_transformers": _Family(None, _t5_fields, _max_t5_tokens),
    "t5": _T5,
    "t5gemma": _Family(2, _t5gemma_fields, _max_t5gemma_tokens),
    "umt5": _T5,
}
"""The families by their `model_type`."""

SOURCE_TEXT: Final = frozenset(_FAMILIES)
"""The model types of encoder-decoder models of text."""


def is_t5_encoder(fields: ConfigFields) -> bool:
    """Return whether the model is the encoder of a T5 without its decoder, which may classify tokens."""
    names = fields.texts("architectures")
    is_t5 = _FAMILIES.get(fields.text("model_type", "")) is _T5
    return is_t5 and any(name.endswith(("EncoderModel", TOKEN_CLASSIFIER_SUFFIX)) for name in names)


def has_source_vocabulary(fields: ConfigFields) -> bool:
    """Return whether sources and outputs have different vocabularies, as in some Marian models."""
    if fields.text("model_type", "") != "marian":
        return False
    return not fields.boolean("share_encoder_decoder_embeddings", True)


def source_vocab_size(fields: ConfigFields) -> int:
    """Return the number of tokens of sources, from the fields that `with_source_text_fields` returns."""
    return fields.integer(_SOURCE_SIZE, fields.integer("vocab_size"))


def with_source_text_fields(fields: ConfigFields) -> ConfigFields:
    """Return the config of one of these models, adding the decoder's fields under Llama's names.

    If the model is only an encoder, the encoder's fields are added.
    """
    if is_t5_encoder(fields):
        # The first token of a text has no special meaning.
        fields = fields.with_values({"num_decoder_layers": None, "classifier_pooling": "mean"})
    family = _FAMILIES[fields.text("model_type")]
    return fields.with_values(family.read_fields(fields))


def max_source_tokens(config: ConfigFields) -> int:
    """Return the maximum length of a source in tokens."""
    maximum = _FAMILIES[config.text("model_type")].max_tokens
    return (
        maximum(config) if callable(maximum) else config.integer("max_position_embeddings", maximum)
    )


def read_source_text(config: ConfigFields, generation: ConfigFields) -> SourceTextConfig | None:
    """Return the settings of source texts, or None if the model is not an encoder-decoder model of text.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    kind, text = config.text("model_type", ""), config.section("text_config")
    if kind not in _FAMILIES and text is not None:
        # A model with a tower may have any decoder (InstructBLIP).
        kind = text.text("model_type", "")
    family = _FAMILIES.get(kind)
    if family is None or is_t5_encoder(config):
        return None
    if text is not None:
        config = text.with_values({"model_type": kind})
    fields = config.with_values(
        {
            name: value
            for name in ("decoder_start_token_id", "forced_bos_token_id")
            if (value := generation.get(name)) is not None
        }
    )
    default = family.start
    if default is None:
        default = config.integer("pad_token_id", 0, minimum=0)
    start = (read_token(fields, "decoder_start_token_id", default),)
    forced = read_token(fields, "forced_bos_token_id", -1)
    return SourceTextConfig(
        start if forced < 0 else (*start, forced),
        max_source_tokens(config),
        (config.section("encoder") or config).integer(family.vocab_size),
        _bad_words(generation if generation.get("bad_words_ids") is not None else config),
        end if type(end := config.get("eos_token_id")) is int else -1,
        begins_with_last=family.begins_with_last,
    )


def _bad_words(fields: ConfigFields) -> tuple[tuple[int, ...], ...]:
    words: tuple[tuple[int, ...], ...] = ()
    needed = "a list of lists of token ids"
    return fields.convert("bad_words_ids", words, tuple[tuple[_Token, ...], ...], needed)
