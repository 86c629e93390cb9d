"""LLaVA-OneVision 1.5, whose tower is a RICE-ViT."""

from __future__ import annotations

from pathlib import Path

import torch
from support.own_code.model import (
    OwnCodeModel,
    VitBlock,
    fill,
    grid_angles,
    joined_squares,
    rotated,
    write_beside_qwen3,
)
from torch import Tensor, nn

_PATCH, _SIZE, _HEADS = 4, 48, 4


class _Merger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_q = nn.LayerNorm(_SIZE, 1e-5)
        square = 4 * _SIZE
        self.mlp = nn.Sequential(nn.Linear(square, square), nn.GELU(), nn.Linear(square, 64))


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, _SIZE, _PATCH, _PATCH, bias=False)})
        self.class_embedding = nn.Parameter(torch.zeros(_SIZE))
        self.class_pos_emb = nn.Parameter(torch.zeros(1, _SIZE // _HEADS // 2))
        self.pre_layernorm = nn.LayerNorm(_SIZE, 1e-5)
        self.blocks = nn.ModuleList(VitBlock(_SIZE, _HEADS, 1e-5, rotated) for _ in range(3))
        self.merger = _Merger()

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels[None])[0]
        rows, columns = x.shape[1:]
        angles = torch.cat((self.class_pos_emb, grid_angles(rows, columns, _SIZE // _HEADS)))
        x = self.pre_layernorm(torch.cat((self.class_embedding[None], x.flatten(1).T)))
        for block in self.blocks:
            x = block(x, angles)
        found: Tensor = self.merger.mlp(joined_squares(self.merger.ln_q(x[1:]), columns))
        return found


def rice(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a LLaVA-OneVision 1.5 as its authors publish it."""
    tower = _Tower()
    fill(tower)
    with torch.no_grad():
        tower.class_pos_emb.normal_(0, 2)
    vision = {
        "model_type": "rice_vit",
        "depth": 3,
        "hidden_size": _SIZE,
        "intermediate_size": 80,
        "num_heads": _HEADS,
        "patch_size": _PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "text_hidden_size": 64,
    }
    config = {
        "architectures": ["LLaVAOneVision1_5_ForConditionalGeneration"],
        "model_type": "llavaonevision1_5",
        "image_token_id": image_token,
        "video_token_id": image_token - 1,
        "vocab_size": vocab_size,
        "text_config": {"model_type": "LLaVAOneVision1_5_text"},
        "vision_config": vision,
    }
    return write_beside_qwen3(directory, tower, config, vocab_size=vocab_size, patch_size=_PATCH)
