"""Read the configs of Parakeet, whose encoder writes the tokens of a text without a decoder that attends to it."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from ...config.audio_tower import CtcSpec, FastConformerSpec, TransducerSpec
from ...config.model import SpeechKind
from ..config_fields import ConfigFields
from .fields import MAX_POSITIONS
from .speech_encoders import fast_conformer_spec

_Duration = Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITIONS)]

WRITING: Final = frozenset(
    {SpeechKind.PARAKEET_CTC, SpeechKind.PARAKEET_RNNT, SpeechKind.PARAKEET_TDT}
)
"""Kinds of models that write tokens without a decoder."""

_PROMPT_TOKENS: Final = 1024
"""The maximum length of a prompt. Audio has a prompt of one token, and prompts of texts are refused."""

_VOCABULARIES: Final = {
    SpeechKind.PARAKEET_CTC: 1025,
    SpeechKind.PARAKEET_RNNT: 8193,
    SpeechKind.PARAKEET_TDT: 8193,
}
_SIZES: Final[dict[str, Any]] = {
    "num_mel_bins": 80,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "scale_input": True,
}


def writes_tokens(fields: ConfigFields) -> bool:
    """Return whether a model with this config transcribes by its encoder alone."""
    return fields.text("model_type", "") in WRITING


def with_encoder_fields(fields: ConfigFields) -> ConfigFields:
    """Return the config of such a model with the length of its vocabulary and of prompts."""
    kind = SpeechKind(fields.text("model_type"))
    vocab_size = _VOCABULARIES[kind]
    return fields.with_defaults(vocab_size=vocab_size, max_position_embeddings=_PROMPT_TOKENS)


def parakeet_spec(fields: ConfigFields) -> FastConformerSpec:
    """Return the encoder of Parakeet.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    fields = with_encoder_fields(fields)
    spec = fast_conformer_spec(fields, **_SIZES)
    decoder = _decoder(fields)
    size = decoder.hidden_size if isinstance(decoder, TransducerSpec) else spec.hidden_size
    return msgspec.structs.replace(spec, decoder=decoder, has_projection=False, output_size=size)


def _decoder(fields: ConfigFields) -> CtcSpec | TransducerSpec:
    vocab_size = fields.integer("vocab_size")
    is_ctc = fields.text("model_type") == SpeechKind.PARAKEET_CTC
    name = "pad_token_id" if is_ctc else "blank_token_id"
    blank = fields.integer(name, vocab_size - 1, minimum=0, maximum=vocab_size - 1)
    if is_ctc:
        return CtcSpec(vocab_size, blank)
    durations: tuple[int, ...] = ()
    if fields.text("model_type") == SpeechKind.PARAKEET_TDT:
        found = fields.get("durations", [0, 1, 2, 3, 4])
        try:
            durations = msgspec.convert(found, tuple[_Duration, ...])
        except msgspec.ValidationError:
            durations = ()
        if not durations:
            raise fields.wrong("durations", "a list of numbers of rows", found)
    return TransducerSpec(
        vocab_size=vocab_size,
        blank=blank,
        hidden_size=fields.integer("decoder_hidden_size", 640, maximum=MAX_POSITIONS),
        num_layers=fields.integer("num_decoder_layers", 2, maximum=1024),
        activation=fields.text("hidden_act", "relu"),
        max_symbols=fields.integer("max_symbols_per_step", 10, maximum=1024),
        durations=durations,
    )
