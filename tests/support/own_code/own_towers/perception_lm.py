"""Perception LM, with the tower of timm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.checkpoints.tiny import DECODER_SIZES
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.perception_lm import modeling_perception_lm

_PATCH, _SIDE, _SIZE, _HEADS, _TRAINED = 4, 20, 48, 4, 7
_ROWS = _SIDE // _PATCH


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(_SIZE, 1e-5) for _ in range(2))
        sizes = {"qkv": nn.Linear(_SIZE, 3 * _SIZE), "proj": nn.Linear(_SIZE, _SIZE)}
        self.attn = nn.ModuleDict(sizes)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(_SIZE, 96), "fc2": nn.Linear(96, _SIZE)})
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.empty(_SIZE)) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        qkv = self.attn["qkv"](self.norm1(x)).view(len(x), 3, _HEADS, -1)
        q, k, v = qkv.permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(_turned(q, turns), _turned(k, turns), v)
        x = x + self.gamma_1 * self.attn["proj"](attended.transpose(0, 1).flatten(1))
        inner = F.gelu(self.mlp["fc1"](self.norm2(x)))
        found: Tensor = x + self.gamma_2 * self.mlp["fc2"](inner)
        return found


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate neighboring elements, as the products of complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


class _Tower(nn.Module):
    def __init__(self, *, has_class: bool) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, _SIZE, _PATCH, _PATCH, bias=False)
        self.patch_embed = nn.ModuleDict({"proj": convolution})
        self.cls_token = nn.Parameter(torch.empty(1, 1, _SIZE)) if has_class else None
        self.pos_embed = nn.Parameter(torch.empty(1, _ROWS**2 + has_class, _SIZE))
        self.norm_pre = nn.LayerNorm(_SIZE, 1e-5)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels[None])[0].flatten(1).T
        # Places are counted from 1 if there is a class token.
        first = 0 if self.cls_token is None else 1
        places = (torch.arange(_ROWS) + first) / _ROWS * _TRAINED
        rows, columns = torch.meshgrid(places, places, indexing="ij")
        waves = 1 / 10_000 ** (torch.arange(_SIZE // _HEADS // 4) / (_SIZE // _HEADS / 4))
        angles = torch.cat([each.flatten()[:, None] * waves for each in (columns, rows)], -1)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token[0], x))
            angles = F.pad(angles, (0, 0, 1, 0))
        x = self.norm_pre(x + self.pos_embed[0])
        for block in self.blocks:
            x = block(x, torch.polar(torch.ones_like(angles), angles))
        return x[first:]


def perception_lm(
    directory: Path,
    *,
    vocab_size: int = 96,
    image_token: int = 95,
    has_class: bool = True,
) -> OwnCodeModel:
    """Write a Perception LM, with a class token as in the small one or without as in the large one."""
    text: dict[str, Any] = DECODER_SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": False}
    decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))
    tower = _Tower(has_class=has_class)
    arguments = {
        "embed_dim": _SIZE,
        "depth": 2,
        "num_heads": _HEADS,
        "mlp_ratio": 2.0,
        "img_size": [_SIDE, _SIDE],
        "patch_size": _PATCH,
        "global_pool": "",
        "use_post_transformer_norm": False,
        "init_values": 0.1,
        "ref_feat_shape": [_TRAINED, _TRAINED],
    }
    sizes: Any = SimpleNamespace(
        vision_config=SimpleNamespace(model_args=arguments),
        text_config=decoder.config,
        projector_pooling_ratio=2,
    )
    projector = modeling_perception_lm.PerceptionLMMultiModalProjector(sizes)
    fill(decoder, tower, projector)

    def encode(payloads: Sequence[ImagePayload]) -> list[Tensor]:
        return [projector(tower(normalized(payload))[None])[0] for payload in payloads]

    size = "large_patch14_336" if has_class else "gigantic_patch14_448"
    config = {
        "architectures": ["PerceptionLMForConditionalGeneration"],
        "model_type": "perception_lm",
        "text_config": text | {"model_type": "llama"},
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": f"vit_pe_core_{size}",
            "model_args": arguments,
        },
        "vision_use_cls_token": has_class,
        "projector_pooling_ratio": 2,
        "image_token_id": image_token,
        "video_token_id": image_token - 1,
    }
    parts = {
        "lm_head.": decoder.lm_head,
        "model.language_model.": decoder.model,
        "model.vision_tower.timm_model.": tower,
        "model.multi_modal_projector.": projector,
    }
    processor = {"image_processor_type": "PerceptionLMImageProcessorFast", "tile_size": _SIDE}
    write(directory, config, parts, processor | {"max_num_tiles": 4, "resample": 3})
    return OwnCodeModel(decoder, encode, image_token)
