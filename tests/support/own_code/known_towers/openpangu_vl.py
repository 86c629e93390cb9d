"""openPangu-VL, made of the tower of transformers' Qwen2.5-VL and the decoder of a Llama with biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.own_code.known_towers.keye import KeyeModel, Rotary
from support.own_code.model import decoder_sizes, fill, qwen_patches, write
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

_PATCH, _SIZE, _MIDDLE, _SECTIONS = 4, 48, 40, [2, 3, 3]
_AXES = [0, 1, 2, 1, 2, 1, 2, 0]


class _Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_q = nn.RMSNorm(_SIZE, 1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(4 * _SIZE, 4 * _SIZE), nn.GELU(), nn.Linear(4 * _SIZE, _MIDDLE)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(self.ln_q(x).view(-1, 4 * _SIZE))
        return found


class _Tower(nn.Module):
    """A Qwen2.5-VL whose last layer and the one two layers before are projected, added up and projected again."""

    def __init__(self, tower: Any, size: int) -> None:
        super().__init__()
        self.patch_embed, self.blocks = tower.patch_embed, tower.blocks
        self.final_layernorm = nn.RMSNorm(_SIZE, 1e-6)
        self.merger = nn.ModuleList([_Part(), _Part()])
        self.vision_projection = nn.ModuleDict({"fc1": nn.Linear(_MIDDLE, size)})
        self.whole, self.earlier = [tower], list[Tensor]()
        tower.blocks[-3].register_forward_hook(lambda _, inputs, x: self.earlier.append(x))
        tower.merger = self.merge

    def merge(self, x: Tensor) -> Tensor:
        layers = zip(self.merger, (x, self.earlier.pop()), strict=True)
        return torch.stack([part(self.final_layernorm(layer)) for part, layer in layers]).sum(0)

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        x = self.whole[0](patches, grid).pooler_output
        found: Tensor = self.vision_projection["fc1"](F.silu(x))
        return found


def openpangu_vl(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> KeyeModel:
    """Write an openPangu-VL."""
    text = decoder_sizes(vocab_size)
    decoder: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**text, attention_bias=True)
    )
    decoder.model.rotary_emb = Rotary(decoder.model.rotary_emb.inv_freq, _AXES)
    vision = {
        "depth": 4,
        "hidden_act": "silu",
        "hidden_size": _SIZE,
        "intermediate_size": 80,
        "num_heads": 4,
        "out_hidden_size": _MIDDLE,
        "patch_size": _PATCH,
        # Two outputs in each direction.
        "window_size": 4 * _PATCH,
        "fullatt_block_indexes": [1, 3],
    }
    made = qwen.Qwen2_5_VLVisionConfig(**vision, _attn_implementation="eager")
    inner = qwen.Qwen2_5_VisionTransformerPretrainedModel(made)
    del inner.merger
    tower = _Tower(inner, text["hidden_size"])
    fill(decoder, tower)

    def encode(payload: ImagePayload) -> Tensor:
        found: Tensor = tower(*qwen_patches(payload, _PATCH))
        return found

    rope = {"rope_theta": 10_000.0, "mrope_section": _SECTIONS, "mrope_interleaved": True}
    config = text | {
        "architectures": ["OpenPanguVLForConditionalGeneration"],
        "model_type": "openpangu_vl",
        "attention_bias": True,
        "qkv_bias": True,
        "image_token_id": image_token,
        "rope_scaling": rope | {"rope_type": "default"},
        "vision_config": vision | {"mm_unit_vision_select_layer": [-1, -3]},
    }
    processor = {"image_processor_type": "OpenPanguImageProcessor", "patch_size": _PATCH}
    processor |= {"merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256}
    processor |= {"max_pixels": 64 * 60}
    parts = {
        "model.language_model.": decoder.model,
        "lm_head.": decoder.lm_head,
        "model.visual.": tower,
    }
    write(directory, config, parts, processor)
    return KeyeModel(decoder, encode, image_token)
