"""Vision encoder-decoders of transformers, whose decoder reads an image by cross attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from support.own_code.model import CrossModel, fill
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

_SIDE = 24


def trocr(
    directory: Path,
    *,
    vocab_size: int = 96,
    image_token: int = 2,
    is_projected: bool = False,
    is_small: bool = False,
) -> CrossModel:
    """Write a TrOCR, whose texts begin with `image_token`. If projected, its positions are not learned.

    The encoder of small ones is a DeiT.
    """
    encoder = (transformers.DeiTConfig if is_small else transformers.ViTConfig)(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=_SIDE,
        patch_size=4,
        qkv_bias=is_projected or is_small,
    )
    decoder = transformers.TrOCRConfig(
        vocab_size=vocab_size,
        d_model=48,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=80,
        max_position_embeddings=256,
        cross_attention_hidden_size=None if is_projected else 32,
        use_learned_position_embeddings=not is_projected,
        scale_embedding=is_projected or is_small,
        activation_function="relu" if is_projected or is_small else "gelu",
        pad_token_id=1,
        decoder_start_token_id=image_token,
        eos_token_id=image_token,
    )
    kind = transformers.ViTImageProcessorPil
    options = {}
    if is_small:
        kind, options = transformers.DeiTImageProcessorPil, {"do_center_crop": False}
    return _saved(directory, encoder, decoder, kind(size=_SIDE, **options), image_token)


def donut(
    directory: Path,
    *,
    vocab_size: int = 96,
    image_token: int = 2,
    side: int = 30,
    is_nougat: bool = False,
) -> CrossModel:
    """Write a Donut or a Nougat, whose prompts begin with `image_token`. Pages have `side` rows and 24 columns."""
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
    size = {"height": side, "width": 24}
    kind = (
        transformers.NougatImageProcessorPil if is_nougat else transformers.DonutImageProcessorPil
    )
    processor = kind(size=size)
    return _saved(directory, encoder, decoder, processor, image_token)


def formula_net(directory: Path, *, vocab_size: int = 96, image_token: int = 2) -> CrossModel:
    """Write a PP-FormulaNet, whose prompts begin with `image_token`. Pages have 36 rows and columns."""
    vision = {
        "image_size": 36,
        "patch_size": 3,
        "hidden_size": 32,
        "mlp_dim": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "output_channels": 12,
        "window_size": 5,
        "global_attn_indexes": [1],
        "post_conv_in_channels": 12,
        "post_conv_mid_channels": 16,
        "post_conv_out_channels": 20,
        "decoder_hidden_size": 32,
    }
    text = {
        "vocab_size": vocab_size,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 80,
        "max_position_embeddings": 256,
        "pad_token_id": 1,
        "eos_token_id": image_token,
        "decoder_start_token_id": image_token,
    }
    config = transformers.PPFormulaNetConfig(vision_config=vision, text_config=text)
    model = transformers.PPFormulaNetForConditionalGeneration(config)
    fill(model)
    model.save_pretrained(directory)
    size = {"height": 36, "width": 36}
    gray = {"image_mean": [0.7931] * 3, "image_std": [0.1738] * 3}
    transformers.NougatImageProcessorPil(size=size, **gray).save_pretrained(directory)

    def decode(tokens: Tensor, encoder_hidden_states: Tensor | None, use_cache: bool) -> Any:
        hidden = model.model.decoder(
            tokens, encoder_hidden_states=encoder_hidden_states, use_cache=use_cache
        ).last_hidden_state
        return CausalLMOutput(logits=model.lm_head(hidden))

    return CrossModel(decode, lambda x: model.model.encoder(x).pooler_output, image_token)


def _saved(
    directory: Path, encoder: Any, decoder: Any, processor: Any, image_token: int
) -> CrossModel:
    """Write the model with these configurations, and its image processor."""
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder, decoder_start_token_id=image_token
    )
    model = transformers.VisionEncoderDecoderModel(config=config)
    fill(model)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)

    def encode(pixels: Tensor) -> Tensor:
        states: Tensor = model.encoder(pixels).last_hidden_state
        # The decoder may have another size.
        return model.enc_to_dec_proj(states) if hasattr(model, "enc_to_dec_proj") else states

    return CrossModel(model.decoder, encode, image_token)
