"""Kosmos-2 of transformers, whose images are between two tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor

_SIDE = 24


def kosmos2(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a Kosmos-2."""
    text = {
        "vocab_size": vocab_size,
        "embed_dim": 64,
        "layers": 3,
        "ffn_dim": 96,
        "attention_heads": 4,
        # No token is padding, which would not count as a position.
        "pad_token_id": 1,
    }
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "image_size": _SIDE,
        "patch_size": 4,
    }
    config = transformers.Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=5)
    model = transformers.Kosmos2ForConditionalGeneration(config)
    fill(model)

    def encode(images: Sequence[ImagePayload]) -> list[Tensor]:
        pixels = torch.stack([normalized(each) for each in images])
        features = model.vision_model(pixels).last_hidden_state
        features = model.vision_model.model.post_layernorm(features)
        features = torch.nn.functional.normalize(features, dim=-1)
        return list(model.image_to_text_projection(features)[0])

    saved = model.config.to_dict() | {"architectures": ["Kosmos2ForConditionalGeneration"]}
    sides = {"height": _SIDE, "width": _SIDE}
    processor = {"size": {"shortest_edge": _SIDE}, "crop_size": sides, "do_center_crop": True}
    write(directory, saved, {"": model}, processor)
    return OwnCodeModel(model.text_model, encode, image_token)
