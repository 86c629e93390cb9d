"""Read the config of TrOCR (arXiv 2109.10282), an encoder and a decoder that have a section each."""

from __future__ import annotations

from typing import Any

from ..config_fields import ConfigFields


def trocr(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a TrOCR. Raise CheckpointError if it is another encoder and decoder."""
    encoder, decoder = fields.required_section("encoder"), fields.required_section("decoder")
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
