"""Donut of transformers, whose decoder reads a page by cross attention."""

from __future__ import annotations

from pathlib import Path

import transformers
from support.own_code.model import CrossModel, fill


def donut(
    directory: Path, *, vocab_size: int = 96, image_token: int = 2, side: int = 30
) -> CrossModel:
    """Write a Donut, whose prompts begin with `image_token`. Pages have `side` rows and 24 columns."""
    encoder = transformers.DonutSwinConfig(
        image_size=[side, 24],
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        mlp_ratio=2.0,
    )
    decoder = transformers.MBartConfig(
        vocab_size=vocab_size,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=80,
        max_position_embeddings=256,
        scale_embedding=True,
        pad_token_id=1,
        eos_token_id=image_token,
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder, decoder_start_token_id=image_token
    )
    model = transformers.VisionEncoderDecoderModel(config=config)
    fill(model)
    model.save_pretrained(directory)
    size = {"height": side, "width": 24}
    transformers.DonutImageProcessorPil(size=size).save_pretrained(directory)
    return CrossModel(model.decoder, lambda x: model.encoder(x).last_hidden_state, image_token)
