"""Isaac, made of the tower of transformers' SigLIP 2 and the decoder of Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.own_code.known_towers.keye import KeyeModel, Rotary
from support.own_code.model import decoder_sizes, fill, normalized, write
from torch import Tensor, nn

_PATCH, _SIZE, _AXES = 4, 48, (0, 0, 0, 0, 1, 1, 2, 2)


class IsaacModel(KeyeModel):
    """The model, each of whose images is one moment of the decoder's positions."""

    def positions(self, tokens: Sequence[int], payloads: Sequence[ImagePayload]) -> Tensor:
        """Return the coordinates [3, T] of the tokens' positions."""
        unit = 2 * _PATCH
        grids = iter([(each.height // unit, each.width // unit) for each in payloads])
        found: list[tuple[int, int, int]] = []
        time = 0
        while len(found) < len(tokens):
            if tokens[len(found)] == self.image_token:
                rows, columns = next(grids)
                found += [(time, row, column) for row in range(rows) for column in range(columns)]
            else:
                found.append((time,) * 3)
            time += 1
        return torch.tensor(found).T


def isaac(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> IsaacModel:
    """Write an Isaac."""
    text = decoder_sizes(vocab_size)
    decoder: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text))
    decoder.model.rotary_emb = Rotary(decoder.model.rotary_emb.inv_freq, _AXES)
    vision = {
        "hidden_size": _SIZE,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": _PATCH,
        "num_patches": 36,
    }
    tower: Any = transformers.Siglip2VisionModel(
        transformers.Siglip2VisionConfig(**vision, vision_use_head=False)
    )
    first, second = (
        nn.Linear(4 * _SIZE, 16 * _SIZE, bias=False),
        nn.Linear(16 * _SIZE, 64, bias=False),
    )
    fill(decoder, tower, first, second)

    def encode(payload: ImagePayload) -> Tensor:
        pixels = normalized(payload)
        rows, columns = (length // _PATCH for length in pixels.shape[1:])
        patches = pixels.unflatten(1, (rows, _PATCH)).unflatten(3, (columns, _PATCH))
        patches = patches.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
        x = tower(
            pixel_values=patches[None],
            pixel_attention_mask=torch.ones(1, len(patches), dtype=torch.int64),
            spatial_shapes=torch.tensor([[rows, columns]]),
        ).last_hidden_state
        x = x.view(rows // 2, 2, columns // 2, 2, _SIZE).transpose(1, 2).reshape(-1, 4 * _SIZE)
        found: Tensor = second(nn.functional.silu(first(x)))
        return found

    config = text | {
        "architectures": ["IsaacForConditionalGeneration"],
        "model_type": "isaac",
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": None},
        "vision_config": vision
        | {"model_type": "pixel_shuffle_siglip2", "pixel_shuffle_scale_factor": 2},
        "video_patch_size": _PATCH,
        "vision_max_num_patches": 120,
        "vision_min_num_patches": 16,
        "pixel_shuffle_scale": 2,
        "vision_token": "<image>",
    }
    parts = {"": decoder, "model.vision_embedding.0.": _Unprefixed(tower)}
    parts |= {"model.vision_embedding.1.": first, "model.vision_embedding.3.": second}
    write(directory, config, parts, {"image_processor_type": "IsaacImageProcessor"})
    return IsaacModel(decoder, encode, image_token)


class _Unprefixed(nn.Module):
    """A tower without the prefix that transformers gives to the names of its tensors."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        own = getattr(tower, "vision_model", tower)
        for name, part in own.named_children():
            self.add_module(name, part)
