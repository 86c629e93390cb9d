"""LLaVA-OneVision 2, in whose tower the elements of a pair have different angles."""

from __future__ import annotations

from pathlib import Path

import torch
from support.own_code.model import OwnCodeModel, VitBlock, fill, joined_squares, write_beside_qwen3
from torch import Tensor, nn

_PATCH, _SIZE, _HEADS = 4, 128, 2
_HALF = _SIZE // _HEADS // 2


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Return queries or keys [H, P, K], mixed with their neighbors by angles [P, K]."""
    neighbors = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * angles.cos() + neighbors * angles.sin()


def _block() -> VitBlock:
    return VitBlock(_SIZE, _HEADS, 1e-6, _turned, ("layer_norm1", "layer_norm2"), "self_attn")


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, _SIZE, _PATCH, _PATCH, bias=False)
        self.embeddings = nn.ModuleDict({"patch_embedding": convolution})
        self.layernorm_pre = nn.LayerNorm(_SIZE, 1e-6)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(_block() for _ in range(3))})
        mlp = nn.Sequential(nn.Linear(4 * _SIZE, 4 * _SIZE), nn.GELU(), nn.Linear(4 * _SIZE, 64))
        self.merger = nn.ModuleDict({"ln_q": nn.LayerNorm(_SIZE, 1e-6), "mlp": mlp})

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings["patch_embedding"](pixels[None])[0]
        rows, columns = x.shape[1:]
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        # Of 16 parts of the angles, 4 follow the frame, which is the first one.
        own = 6 * _HALF // 16
        waves = 1 / 10_000 ** (torch.arange(own) / own)
        parts = [each[:, None] * waves for each in places.unbind(1)]
        angles = torch.cat((torch.zeros(len(places), _HALF - 2 * own), *parts), 1).repeat(1, 2)
        x = self.layernorm_pre(x.flatten(1).T)
        for block in self.encoder["layers"]:
            x = block(x, angles)
        found: Tensor = self.merger["mlp"](joined_squares(self.merger["ln_q"](x), columns))
        return found


def onevision2(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a LLaVA-OneVision 2 as its authors publish it."""
    tower = _Tower()
    fill(tower)
    vision = {
        "hidden_size": _SIZE,
        "intermediate_size": 80,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": 3,
        "patch_size": _PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "frame_windows_size": 4,
    }
    config = {
        "architectures": ["LlavaOnevision2ForConditionalGeneration"],
        "model_type": "llava_onevision2",
        "image_token_id": image_token,
        "text_config": {"model_type": "qwen3"},
        "vision_config": vision,
    }
    return write_beside_qwen3(directory, tower, config, vocab_size=vocab_size, patch_size=_PATCH)
