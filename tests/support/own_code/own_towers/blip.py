"""BLIP of transformers, whose decoder reads an image by cross attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.own_code.model import fill, normalized
from torch import Tensor

_SIDE = 24


class Blip:
    """The tower and the decoder."""

    def __init__(self, model: Any, image_token: int) -> None:
        self.model, self.image_token = model, image_token

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits of a text, which reads the image of `images`, if there is one."""
        states = None
        for [payload] in images:
            states = self.model.vision_model(normalized(payload)[None]).last_hidden_state
        found: Tensor = self.model.text_decoder(
            torch.tensor([tokens]), encoder_hidden_states=states, use_cache=False
        ).logits[0]
        return found


def blip(directory: Path, *, vocab_size: int = 96, image_token: int = 2) -> Blip:
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
    return Blip(model, image_token)
