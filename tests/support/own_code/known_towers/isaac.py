"""Isaac, made of the tower of transformers' SigLIP 2 and the decoder of Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.own_code.known_towers.keye import Rotary
from support.own_code.model import fill, normalized, write
from torch import Tensor, nn

_PATCH, _SIZE, _SECTIONS = 4, 48, (4, 2, 2)


class IsaacModel(NamedTuple):
    """The decoder, whose positions have three coordinates, and the function that makes an image's embeddings."""

    decoder: Any
    encode: Callable[[ImagePayload], Tensor]
    image_token: int

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits [T, V] of a prompt with images, each of which is one encoder input."""
        payloads = [payload for [payload] in images]
        unit = 2 * _PATCH
        grids = iter([(each.height // unit, each.width // unit) for each in payloads])
        positions: list[tuple[int, int, int]] = []
        time = 0
        while len(positions) < len(tokens):
            if tokens[len(positions)] == self.image_token:
                # An image is one moment.
                rows, columns = next(grids)
                positions += [
                    (time, row, column) for row in range(rows) for column in range(columns)
                ]
            else:
                positions.append((time,) * 3)
            time += 1
        self.decoder.model.rotary_emb.positions = torch.from_numpy(np.array(positions).T.copy())
        ids = torch.tensor([tokens])
        embeddings = self.decoder.get_input_embeddings()(ids).clone()
        if payloads:
            rows = torch.cat([self.encode(payload) for payload in payloads])
            embeddings[ids == self.image_token] = rows
        logits: Tensor = self.decoder(inputs_embeds=embeddings).logits[0]
        return logits


def isaac(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> IsaacModel:
    """Write an Isaac."""
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    decoder: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text))
    decoder.model.rotary_emb = Rotary(decoder.model.rotary_emb.inv_freq, _SECTIONS)
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
