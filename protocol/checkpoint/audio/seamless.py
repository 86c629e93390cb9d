"""Read the config of SeamlessM4T, whose decoder writes texts in the language that its second token names."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ...config.audio.conformer_layers import CtcConformerSpec
from ..config_fields import ConfigFields
from .ctc_conformers import CONFORMER_NAMES, bert_layers, read_adapters

_CODES: Final = {
    "af": "afr",
    "am": "amh",
    "ar": "arb",
    "as": "asm",
    "az": "azj",
    "be": "bel",
    "bg": "bul",
    "bn": "ben",
    "bs": "bos",
    "ca": "cat",
    "cs": "ces",
    "cy": "cym",
    "da": "dan",
    "de": "deu",
    "el": "ell",
    "en": "eng",
    "es": "spa",
    "et": "est",
    "eu": "eus",
    "fa": "pes",
    "fi": "fin",
    "fr": "fra",
    "gl": "glg",
    "gu": "guj",
    "he": "heb",
    "hi": "hin",
    "hr": "hrv",
    "hu": "hun",
    "hy": "hye",
    "id": "ind",
    "is": "isl",
    "it": "ita",
    "ja": "jpn",
    "jw": "jav",
    "ka": "kat",
    "kk": "kaz",
    "km": "khm",
    "kn": "kan",
    "ko": "kor",
    "lo": "lao",
    "lt": "lit",
    "lv": "lvs",
    "mk": "mkd",
    "ml": "mal",
    "mn": "khk",
    "mr": "mar",
    "ms": "zlm",
    "mt": "mlt",
    "my": "mya",
    "ne": "npi",
    "nl": "nld",
    "nn": "nno",
    "no": "nob",
    "oc": "oci",
    "pa": "pan",
    "pl": "pol",
    "ps": "pbt",
    "pt": "por",
    "ro": "ron",
    "ru": "rus",
    "sd": "snd",
    "sk": "slk",
    "sl": "slv",
    "sn": "sna",
    "so": "som",
    "sr": "srp",
    "sv": "swe",
    "sw": "swh",
    "ta": "tam",
    "te": "tel",
    "tg": "tgk",
    "th": "tha",
    "tl": "tgl",
    "tr": "tur",
    "uk": "ukr",
    "ur": "urd",
    "uz": "uzn",
    "vi": "vie",
    "yo": "yor",
    "yue": "yue",
    "zh": "cmn",
}
"""The code of a language -> its code in the checkpoint."""

_DEFAULTS: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "vocab_size": 256_102,
    "decoder_layers": 24,
    "decoder_ffn_dim": 8192,
    "decoder_attention_heads": 16,
    "pad_token_id": 0,
    "feature_projection_input_dim": 160,
}
_NAMES: Final = (
    (r"^speech_encoder\.feature_projection\.layer_norm\.", "encoder.subsampling.norm."),
    (r"^speech_encoder\.feature_projection\.projection\.", "encoder.subsampling.linear."),
    (r"^speech_encoder\.encoder\.layer_norm\.", "encoder.out_norm."),
    (r"^speech_encoder\.intermediate_ffn\.intermediate_dense\.", "encoder.middle.linear1."),
    (r"^speech_encoder\.intermediate_ffn\.output_dense\.", "encoder.middle.linear2."),
    (r"^speech_encoder\.inner_layer_norm\.", "encoder.last_norm."),
    (r"^speech_encoder\.adapter\.layers\.", "encoder.adapters."),
    (r"^speech_encoder\.", ""),
    (r"\.ffn\.intermediate_dense\.", ".ffn.linear1."),
    (r"\.ffn\.output_dense\.", ".ffn.linear2."),
    *CONFORMER_NAMES,
)


def seamless_fields(fields: ConfigFields) -> ConfigFields:
    """Return the config with the defaults of transformers for its version."""
    is_second = fields.text("model_type") == "seamless_m4t_v2"
    return fields.with_defaults(**_DEFAULTS, max_position_embeddings=4096 if is_second else 1024)


def seamless_spec(fields: ConfigFields) -> CtcConformerSpec:
    """Return the encoder of SeamlessM4T. Raise CheckpointError if a field is missing or invalid."""
    is_second = fields.text("model_type") == "seamless_m4t_v2"
    fields = seamless_fields(fields).with_defaults(
        position_embeddings_type="relative_key" if is_second else "relative"
    )
    names = ("intermediate_size", "hidden_act")
    sizes = {name: fields.get(f"speech_encoder_{name}") for name in names}
    sizes |= {
        "num_hidden_layers": fields.get("speech_encoder_layers"),
        "num_attention_heads": fields.get("speech_encoder_attention_heads"),
    }
    sizes |= {
        f"adapter_{name}": fields.get(f"adaptor_{name}", 8) for name in ("stride", "kernel_size")
    }
    own = fields.with_values({**sizes, "add_adapter": fields.get("add_adapter", True)})
    layers = bert_layers(own)
    if not is_second:
        layers = msgspec.structs.replace(layers, conv_norm="batch", is_causal=False)
    num_frames = 1500
    # Longer windows would attend within chunks of this many rows.
    chunk = fields.get("speech_encoder_chunk_size", 20_000) if is_second else None
    if chunk is not None and fields.integer("speech_encoder_chunk_size", 20_000) < num_frames:
        raise fields.wrong("speech_encoder_chunk_size", f"at least {num_frames}", chunk)
    return CtcConformerSpec(
        layers=layers,
        num_mel_bins=fields.integer("feature_projection_input_dim", maximum=1024),
        num_frames=num_frames,
        output_size=layers.hidden_size,
        decoder=None,
        tensor_names=_NAMES,
        adapters=read_adapters(own),
        has_last_norm=True,
        has_middle_mlp=True,
    )


def seamless_languages(fields: ConfigFields) -> dict[str, int]:
    """Return the token of each language in which the decoder writes.

    Raises:
        CheckpointError: The generation config has no tokens of languages.
    """
    section = fields.required_section("text_decoder_lang_to_code_id")
    return {
        code: section.integer(name, minimum=0)
        for code, name in _CODES.items()
        if section.get(name) is not None
    }
