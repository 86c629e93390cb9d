"""Ovis 2.5 and 2.6."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from support.checkpoints.tiny import DECODER_SIZES
from support.own_code.model import OwnCodeModel, SiglipLayer, fill, grid_angles, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIDE, _SIZE, _HEADS, _WORDS = 4, 24, 48, 4, 40


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Conv2d(3, _SIZE, _PATCH, _PATCH),
                "position_embedding": nn.Embedding((_SIDE // _PATCH) ** 2, _SIZE),
            }
        )
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(SiglipLayer(_SIZE, _HEADS) for _ in range(2))}
        )
        self.post_layernorm = nn.LayerNorm(_SIZE, 1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.embeddings["patch_embedding"](pixels[None])
        rows, columns = patches.shape[2:]
        side = _SIDE // _PATCH
        table = self.embeddings["position_embedding"].weight.T.view(1, _SIZE, side, side)
        x = patches + F.interpolate(table, (rows, columns), mode="bicubic", align_corners=False)
        angles = grid_angles(rows, columns, _SIZE // _HEADS)
        x = x[0].flatten(1).T
        for layer in self.encoder["layers"]:
            x = layer(x, angles)
        x = self.post_layernorm(x).view(rows // 2, 2, columns // 2, 2, _SIZE)
        return x.transpose(1, 2).flatten(2).flatten(0, 1)


_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_DELTA_NET = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention"],
}
_DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Ovis2_5": ("Qwen3", "qwen3", {}),
    "Ovis2_6_MoeForCausalLM": ("Qwen3Moe", "qwen3_moe", _MIXTURE),
    "Ovis2_6_NextForCausalLM": ("Qwen3Next", "qwen3_next", _MIXTURE | _DELTA_NET),
}
"""Architecture -> the name, the type and the sizes of its decoder."""


def ovis2_5(
    directory: Path,
    *,
    vocab_size: int = 96,
    image_token: int = 95,
    architecture: str = "Ovis2_5",
) -> OwnCodeModel:
    """Write an Ovis 2.5 or 2.6."""
    name, decoder_type, sizes = _DECODERS[architecture]
    text: dict[str, Any] = DECODER_SIZES | {
        "vocab_size": vocab_size,
        "head_dim": 16,
        "tie_word_embeddings": False,
        **sizes,
    }
    config_class = getattr(transformers, f"{name}Config")
    decoder = getattr(transformers, f"{name}ForCausalLM")(config_class(**text))
    tower, table = _Tower(), nn.Embedding(_WORDS, 64)
    head = nn.Sequential(nn.Linear(4 * _SIZE, _WORDS - 4, bias=False), nn.LayerNorm(_WORDS - 4))
    fill(decoder, tower, head, table)

    def encode(payloads: Sequence[ImagePayload]) -> list[Tensor]:
        words = [head(tower(normalized(payload))).softmax(-1) for payload in payloads]
        # Videos have other marks than images.
        start, end = table.weight[-2:] if payloads[0].is_frame else table.weight[-4:-2]
        return [start[None], *(each @ table.weight[:-4] for each in words), end[None]]

    vision = {
        "model_type": "siglip2_navit",
        "hidden_size": _SIZE,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": _HEADS,
        "image_size": _SIDE,
        "patch_size": _PATCH,
        "num_patches": -1,
        "hidden_stride": 2,
        "temporal_patch_size": 1,
        "window_size": -1,
        "fullatt_block_indexes": None,
        "preserve_original_pe": True,
        "use_rope": True,
    }
    config = {
        "architectures": [architecture],
        "model_type": architecture.lower().removesuffix("forcausallm"),
        "llm_config": text | {"model_type": decoder_type},
        "vit_config": vision,
        "visual_vocab_size": _WORDS,
    }
    processor = {"image_processor_type": "SiglipImageProcessor", "size": {"height": _SIDE}}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    parts = {"llm.": decoder, "visual_tokenizer.vit.vision_model.": tower}
    parts |= {"visual_tokenizer.head.": head, "vte.": table}
    # The authors' code has these limits.
    write(directory, config, parts, processor | {"min_pixels": 64, "max_pixels": 64 * 30})
    return OwnCodeModel(decoder, encode, image_token)
