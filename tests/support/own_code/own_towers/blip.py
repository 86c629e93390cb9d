"""BLIP of transformers, whose decoder reads an image by cross attention."""

from __future__ import annotations

from pathlib import Path

import transformers
from support.own_code.model import CrossModel, fill

_SIDE = 24


def blip(directory: Path, *, vocab_size: int = 96, image_token: int = 2) -> CrossModel:
    """Write a BLIP that writes captions, whose texts begin with `image_token`."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BlipConfig(
        vision_config=sizes
        | {"hidden_size": 32, "intermediate_size": 48, "image_size": _SIDE, "patch_size": 4},
        text_config=sizes
        | {
            "vocab_size": vocab_size,
            "hidden_size": 48,
            "intermediate_size": 80,
            "encoder_hidden_size": 32,
            "max_position_embeddings": 256,
            "bos_token_id": image_token,
            "sep_token_id": image_token,
        },
    )
    model = transformers.BlipForConditionalGeneration(config)
    fill(model)
    model.save_pretrained(directory)
    size = {"height": _SIDE, "width": _SIDE}
    transformers.BlipImageProcessorPil(size=size).save_pretrained(directory)
    return CrossModel(
        model.text_decoder, lambda x: model.vision_model(x).last_hidden_state, image_token
    )
