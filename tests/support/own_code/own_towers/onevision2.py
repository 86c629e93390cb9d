"""LLaVA-OneVision 2, in whose tower the elements of a pair have different angles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from support.checkpoints.tiny import DECODER_SIZES
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIZE, _HEADS = 4, 128, 2
_HALF = _SIZE // _HEADS // 2


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Return queries or keys [H, P, K], mixed with their neighbors by angles [P, K]."""
    neighbors = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * angles.cos() + neighbors * angles.sin()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(_SIZE, 1e-6) for _ in range(2))
        self.self_attn = nn.ModuleDict(
            {"qkv": nn.Linear(_SIZE, 3 * _SIZE), "proj": nn.Linear(_SIZE, _SIZE)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(_SIZE, 80), "fc2": nn.Linear(80, _SIZE)})

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        heads = self.self_attn["qkv"](self.layer_norm1(x)).view(len(x), 3, _HEADS, -1)
        q, k, v = heads.permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(_turned(q, angles), _turned(k, angles), v)
        x = x + self.self_attn["proj"](attended.transpose(0, 1).flatten(1))
        found: Tensor = x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.layer_norm2(x))))
        return found


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, _SIZE, _PATCH, _PATCH, bias=False)
        self.embeddings = nn.ModuleDict({"patch_embedding": convolution})
        self.layernorm_pre = nn.LayerNorm(_SIZE, 1e-6)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(_Block() for _ in range(3))})
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
        squares = self.merger["ln_q"](x).view(rows // 2, 2, columns // 2, 2, _SIZE)
        found: Tensor = self.merger["mlp"](squares.transpose(1, 2).flatten(2).flatten(0, 1))
        return found


def onevision2(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a LLaVA-OneVision 2 as its authors publish it."""
    text: dict[str, Any] = DECODER_SIZES | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "head_dim": 16,
        "rope_theta": 5e6,
    }
    decoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text))
    tower = _Tower()
    fill(decoder, tower)
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
        "text_config": text | {"model_type": "qwen3"},
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
