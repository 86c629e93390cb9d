"""GIT of transformers, whose prompts begin with an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.own_code.model import fill, normalized
from torch import Tensor

_SIDE = 24


class Git(NamedTuple):
    """The model, and the token that represents the image."""

    model: Any
    image_token: int

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits of a prompt, which begins with the tokens of the only image."""
        [[payload]] = images
        text = [token for token in tokens if token != self.image_token]
        found: Tensor = self.model(
            torch.tensor([text]), pixel_values=normalized(payload)[None], use_cache=False
        ).logits[0]
        return found


def git(directory: Path, *, vocab_size: int = 96, image_token: int = 0) -> Git:
    """Write a GIT."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
    vision = sizes | {"hidden_size": 32, "image_size": _SIDE, "patch_size": 8}
    config = transformers.GitConfig(
        vision_config=vision,
        vocab_size=vocab_size,
        hidden_size=48,
        max_position_embeddings=240,
        pad_token_id=image_token,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
    )
    model = transformers.GitForCausalLM(config)
    fill(model)
    model.save_pretrained(directory)
    sides = {"height": _SIDE, "width": _SIDE}
    transformers.CLIPImageProcessorPil(
        size={"shortest_edge": _SIDE}, crop_size=sides
    ).save_pretrained(directory)
    return Git(model, image_token)
