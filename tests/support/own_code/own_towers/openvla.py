"""OpenVLA, which has two vision towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from msgspec.structs import replace
from support.checkpoints.tiny import DECODER_SIZES
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIDE = 4, 8
_NAMES = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]


class _Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _Block(nn.Module):
    def __init__(self, size: int, inner: int, *, has_scales: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(size, 1e-6) for _ in range(2))
        self.attn = nn.ModuleDict({"qkv": nn.Linear(size, 3 * size), "proj": nn.Linear(size, size)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(size, inner), "fc2": nn.Linear(inner, size)})
        self.ls1, self.ls2 = (_Scale(size) if has_scales else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attn["qkv"](self.norm1(x)).view(len(x), 3, 4, -1).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(*qkv).transpose(0, 1).flatten(1)
        x = x + self.ls1(self.attn["proj"](attended))
        found: Tensor = x + self.ls2(self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x)))))
        return found


class _Tower(nn.Module):
    def __init__(self, size: int, inner: int, depth: int, *, is_dino: bool) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, size, _PATCH, _PATCH)})
        self.pos_embed = nn.Parameter(torch.zeros(1, _SIDE**2, size))
        self.cls_token = nn.Parameter(torch.zeros(1, int(is_dino), size))
        self.reg_token = nn.Parameter(torch.zeros(1, 4 * is_dino, size))
        self.blocks = nn.ModuleList(_Block(size, inner, has_scales=is_dino) for _ in range(depth))
        self.norm = nn.LayerNorm(size)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels[None])[0].flatten(1).T + self.pos_embed[0]
        x = torch.cat((self.cls_token[0], self.reg_token[0], x))
        for block in self.blocks[:-1]:
            x = block(x)
        return x[-(_SIDE**2) :]


def openvla(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write an OpenVLA."""
    text: dict[str, Any] = DECODER_SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": False}
    decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))
    dino, siglip = _Tower(48, 80, 3, is_dino=True), _Tower(32, 56, 4, is_dino=False)
    projector = nn.ModuleDict(
        {"fc1": nn.Linear(80, 320), "fc2": nn.Linear(320, 64), "fc3": nn.Linear(64, 64)}
    )
    fill(decoder, dino, siglip, projector)
    sizes = {"num_attention_heads": 4, "image_size": _SIDE * _PATCH, "patch_size": _PATCH}
    config = {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "image_resize_strategy": "resize-naive",
        "timm_model_ids": _NAMES,
        "use_fused_vision_backbone": True,
        "text_config": text | {"model_type": "llama"},
        "vision_config": {
            "dinov2": sizes | {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3},
            "siglip": sizes | {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4},
        },
    }
    half = [0.5, 0.5, 0.5]
    processor = {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, _SIDE * _PATCH, _SIDE * _PATCH]] * 2,
        "means": [[0.484375, 0.455078125, 0.40625], half],
        "stds": [[0.228515625, 0.2236328125, 0.224609375], half],
    }
    parts = {
        "language_model.": decoder,
        "vision_backbone.featurizer.": dino,
        "vision_backbone.fused_featurizer.": siglip,
        "projector.": projector,
    }
    write(directory, config, parts, processor)

    def encode(payload: ImagePayload) -> Tensor:
        assert payload.mean == (0.484375, 0.455078125, 0.40625)
        other = replace(payload, mean=(0.5,) * 3, std=(0.5,) * 3)
        x = torch.cat((dino(normalized(payload)), siglip(normalized(other))), 1)
        found: Tensor = projector["fc3"](F.gelu(projector["fc2"](F.gelu(projector["fc1"](x)))))
        return found

    return OwnCodeModel(decoder, lambda images: [encode(each) for each in images], image_token)
