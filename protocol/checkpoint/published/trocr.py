"""Read the configs of TrOCR, Donut, Nougat, PP-FormulaNet and Pix2Struct: sections of an encoder and of a decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config_fields import ConfigFields


def image_encoder_decoder(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a TrOCR, a Donut or a Nougat. Raise CheckpointError if it is another encoder and decoder."""
    encoder, decoder = fields.required_section("encoder"), fields.required_section("decoder")
    if encoder.get("model_type") == "donut-swin":
        return _donut(fields, encoder, decoder)
    return _trocr(fields, encoder, decoder)


def _donut(fields: ConfigFields, encoder: ConfigFields, decoder: ConfigFields) -> dict[str, Any]:
    """Return the fields of a Donut (arXiv 2111.15664) or a Nougat (arXiv 2308.13418), whose decoder is an mBART's.

    They differ in how images are read.
    """
    decoder.choice("model_type", ("mbart",), "mbart")
    processor = ConfigFields.read_if_present(Path(fields.path).parent / "preprocessor_config.json")
    name = processor.text("image_processor_type", processor.text("feature_extractor_type", ""))
    kind, family = ("nougat", "Nougat") if name.startswith("Nougat") else ("donut", "Donut")
    start = fields.get("decoder_start_token_id")
    if start is None:
        start = decoder.get("decoder_start_token_id", decoder.get("bos_token_id", 0))
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "tie_word_embeddings": decoder.boolean("tie_word_embeddings", True),
        "image_parts": ["encoder"],
        **_page_reader(kind, encoder, decoder, start),
    }


def formula_net(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a PP-FormulaNet (arXiv 2503.18382), whose decoder is an mBART's as well."""
    encoder, decoder = (
        fields.section_or_empty("vision_config"),
        fields.section_or_empty("text_config"),
    )
    decoder = decoder.with_defaults(d_model=512, decoder_layers=8, decoder_ffn_dim=2048)
    decoder = decoder.with_defaults(vocab_size=50_000, max_position_embeddings=2560)
    decoder = decoder.with_defaults(scale_embedding=True)
    start = decoder.get("decoder_start_token_id", 2)
    return {
        "architectures": [architecture],
        "tie_word_embeddings": False,
        "image_parts": ["model.encoder"],
        **_page_reader("pp_formulanet", encoder, decoder, start),
    }


def pix2struct(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a Pix2Struct (arXiv 2210.03347), whose decoder is that of a T5."""
    encoder, decoder = (
        fields.section_or_empty("vision_config"),
        fields.required_section("text_config"),
    )
    return {
        "text_config": {
            **decoder.config,
            "model_type": "pix2struct",
            "hidden_size": decoder.integer("hidden_size", 768),
            "num_hidden_layers": decoder.integer("num_layers", 12),
            "num_attention_heads": decoder.integer("num_heads", 12),
            "intermediate_size": decoder.integer("d_ff", 2048),
            "head_dim": decoder.integer("d_kv", 64),
            "vocab_size": decoder.integer("vocab_size", 50_244),
            # As in T5, distances have no limit.
            "max_position_embeddings": decoder.integer("max_position_embeddings", 512),
        },
        "vision_config": dict(encoder.config),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        "eos_token_id": decoder.get("eos_token_id", 1),
        # The token at which each text begins also represents the image, which cross attention reads.
        "image_token_id": decoder.get("decoder_start_token_id", 0),
        "image_mark": "<image>",
        "image_parts": ["encoder"],
    }


def _page_reader(
    kind: str, encoder: ConfigFields, decoder: ConfigFields, start: object
) -> dict[str, Any]:
    """Return the fields of a model whose decoder is an mBART's and reads a page."""
    return {
        "model_type": kind,
        "text_config": {
            **decoder.config,
            "model_type": kind,
            "hidden_size": decoder.integer("d_model", 1024),
            "num_hidden_layers": decoder.integer("decoder_layers", 12),
            "num_attention_heads": decoder.integer("decoder_attention_heads", 16),
            "intermediate_size": decoder.integer("decoder_ffn_dim", 4096),
        },
        "vision_config": dict(encoder.config),
        "eos_token_id": decoder.get("eos_token_id", 2),
        # The token of the task, at which a prompt begins, also represents the page, which cross attention reads.
        "image_token_id": start,
        "image_mark": "<image>",
    }


def _trocr(fields: ConfigFields, encoder: ConfigFields, decoder: ConfigFields) -> dict[str, Any]:
    """Return the fields of a TrOCR (arXiv 2109.10282)."""
    encoder.choice("model_type", ("deit", "vit"), "vit")
    decoder.choice("model_type", ("trocr",), "")
    size = decoder.integer("d_model", 1024)
    own = encoder.integer("hidden_size", 768)
    read_size = decoder.integer("cross_attention_hidden_size", size)
    names = ("decoder_start_token_id", "eos_token_id")
    start, end = (fields.get(name) or decoder.get(name, 2) for name in names)
    # The hidden states of the encoder are projected only if their size is not declared.
    is_projected = own != size and decoder.get("cross_attention_hidden_size") is None
    if not is_projected and own != read_size:
        raise decoder.wrong("cross_attention_hidden_size", f"{own}, as the encoder", read_size)
    return {
        # Other models whose architecture ends with "Model" have no head.
        "architectures": ["TrOCRForConditionalGeneration"],
        "model_type": "trocr",
        "text_config": {
            **decoder.config,
            "model_type": "trocr",
            "hidden_size": size,
            "num_hidden_layers": decoder.integer("decoder_layers", 12),
            "num_attention_heads": decoder.integer("decoder_attention_heads", 16),
            "intermediate_size": decoder.integer("decoder_ffn_dim", 4096),
        },
        # The field beside the sections is about the pair, not about the decoder.
        "tie_word_embeddings": decoder.boolean("tie_word_embeddings", True),
        "vision_config": {**encoder.config, "is_projected": is_projected},
        "eos_token_id": end,
        # The token at which each text begins also represents the image, which cross attention reads.
        "image_token_id": start,
        "image_mark": "<image>",
        "image_parts": ["encoder", "enc_to_dec_proj"],
    }
