"""Keye-VL and Keye-VL 1.5, made of the tower of transformers' PaddleOCR-VL and the decoder of Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.own_code.model import decoder_sizes, fill, normalized, write
from support.vision.qwen import rotary_positions
from torch import Tensor, nn

_PATCH, _SECTIONS, _AXES = 4, (2, 3, 3), (0, 0, 1, 1, 1, 2, 2, 2)


class KeyeModel(NamedTuple):
    """The decoder, whose positions have three coordinates, and the function that makes an image's embeddings."""

    decoder: Any
    encode: Callable[[ImagePayload], Tensor]
    image_token: int

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits [T, V] of a prompt with images, each of which is one encoder input."""
        payloads = [payload for [payload] in images]
        self.decoder.model.rotary_emb.positions = self.positions(tokens, payloads)
        ids = torch.tensor([tokens])
        embeddings = self.decoder.get_input_embeddings()(ids).clone()
        if payloads:
            rows = torch.cat([self.encode(payload) for payload in payloads])
            embeddings[ids == self.image_token] = rows
        logits: Tensor = self.decoder(inputs_embeds=embeddings).logits[0]
        return logits

    def positions(self, tokens: Sequence[int], payloads: Sequence[ImagePayload]) -> Tensor:
        """Return the coordinates [3, T] of the tokens' positions, as those of Qwen2-VL."""
        unit = 2 * _PATCH
        grids = [(1, each.height // unit, each.width // unit) for each in payloads]
        config = SimpleNamespace(
            vision_config=None, image_token_id=self.image_token, video_token_id=-1
        )
        return rotary_positions(config, list(tokens), grids)[:, 0]


class Rotary(nn.Module):
    """Rotates each frequency of heads by the coordinate of `positions` [3, T] that `axes` names."""

    positions: Tensor

    def __init__(self, frequencies: Tensor, axes: Sequence[int]) -> None:
        super().__init__()
        self.frequencies, self.axes = frequencies, list(axes)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        angles = (self.positions[self.axes].T * self.frequencies)[None]
        chosen = torch.cat((angles, angles), -1)
        return chosen.cos(), chosen.sin()


def keye(
    directory: Path, *, vocab_size: int = 96, image_token: int = 95, is_later: bool = False
) -> KeyeModel:
    """Write a Keye-VL, or a Keye-VL 1.5 if `is_later`."""
    text = decoder_sizes(vocab_size)
    decoder: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text))
    decoder.model.rotary_emb = Rotary(decoder.model.rotary_emb.inv_freq, _AXES)
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 9 * _PATCH,
        "patch_size": _PATCH,
    }
    tower: Any = transformers.PaddleOCRVLModel(
        transformers.PaddleOCRVLConfig(
            vision_config=vision, text_config={"hidden_size": 64, "num_hidden_layers": 1}
        )
    )
    projector = nn.ModuleDict(
        {
            "pre_norm": nn.LayerNorm(192 if is_later else 48, 1e-5),
            "linear_1": nn.Linear(192, 192),
            "linear_2": nn.Linear(192, 64),
        }
    )
    fill(decoder, tower.visual, projector)

    def encode(payload: ImagePayload) -> Tensor:
        pixels = normalized(payload)
        rows, columns = (length // _PATCH for length in pixels.shape[1:])
        patches = pixels.unflatten(1, (rows, _PATCH)).unflatten(3, (columns, _PATCH))
        patches = patches.permute(1, 3, 0, 2, 4).flatten(0, 1)
        grid = torch.tensor([[1, rows, columns]])
        x = tower.visual(patches[None], grid).last_hidden_state.view(-1, 48)
        if not is_later:
            x = projector["pre_norm"](x)
        x = x.view(rows // 2, 2, columns // 2, 2, 48).transpose(1, 2).reshape(-1, 192)
        if is_later:
            x = projector["pre_norm"](x)
        inner = nn.functional.gelu(projector["linear_1"](x))
        found: Tensor = projector["linear_2"](inner)
        return found

    name = "KeyeVL1_5" if is_later else "Keye"
    config = text | {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": name,
        "image_token_id": image_token,
        "rope_scaling": {"type": "default", "mrope_section": list(_SECTIONS)},
        "vision_config": vision,
    }
    processor = {"image_processor_type": "KeyeImageProcessor", "patch_size": _PATCH}
    processor |= {"merge_size": 2, "temporal_patch_size": 1, "min_pixels": 64}
    processor |= {"max_pixels": 64 * 30, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    parts = {"": decoder, "visual.": tower.visual, "mlp_AR.": projector}
    write(directory, config, parts, processor)
    return KeyeModel(decoder, encode, image_token)
