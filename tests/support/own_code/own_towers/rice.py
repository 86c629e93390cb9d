"""LLaVA-OneVision 1.5, whose tower is a RICE-ViT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from support.checkpoints.tiny import DECODER_SIZES
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIZE, _HEADS = 4, 48, 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(_SIZE, 1e-5) for _ in range(2))
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(_SIZE, 3 * _SIZE), "proj": nn.Linear(_SIZE, _SIZE)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(_SIZE, 80), "fc2": nn.Linear(80, _SIZE)})

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).view(len(x), 3, _HEADS, -1).permute(1, 2, 0, 3)
        q, k = (_rotated(each, angles) for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = x + self.attn["proj"](attended)
        inner = F.gelu(self.mlp["fc1"](self.norm2(x)))
        found: Tensor = x + self.mlp["fc2"](inner)
        return found


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


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
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.merger = _Merger()

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels[None])[0]
        rows, columns = x.shape[1:]
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        waves = 1 / 10_000 ** (torch.arange(_SIZE // _HEADS // 4) / (_SIZE // _HEADS / 4))
        angles = torch.cat([each[:, None] * waves for each in places.unbind(1)], -1)
        angles = torch.cat((self.class_pos_emb, angles))
        x = self.pre_layernorm(torch.cat((self.class_embedding[None], x.flatten(1).T)))
        for block in self.blocks:
            x = block(x, angles)
        squares = self.merger.ln_q(x[1:]).view(rows // 2, 2, columns // 2, 2, _SIZE)
        found: Tensor = self.merger.mlp(squares.transpose(1, 2).flatten(2).flatten(0, 1))
        return found


def rice(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a LLaVA-OneVision 1.5 as its authors publish it."""
    text: dict[str, Any] = DECODER_SIZES | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "head_dim": 16,
        "rope_theta": 5e6,
    }
    decoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text))
    tower = _Tower()
    fill(decoder, tower)
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
        "text_config": text | {"model_type": "LLaVAOneVision1_5_text"},
        "vision_config": vision,
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 8 * 8 * 4,
        "max_pixels": 8 * 8 * 60,
        "patch_size": _PATCH,
        "merge_size": 2,
        "temporal_patch_size": 1,
    }
    parts = {
        "model.language_model.": decoder.model,
        "lm_head.": decoder.lm_head,
        "model.visual.": tower,
    }
    write(directory, config, parts, processor)
    return OwnCodeModel(
        decoder, lambda images: [tower(normalized(each)) for each in images], image_token
    )
