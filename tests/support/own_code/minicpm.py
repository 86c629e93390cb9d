"""MiniCPM-V 2.6, 4 and 4.5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn

_DECODERS = {"2.6": "Qwen2", "4.0": "Llama", "4.5": "Qwen3"}
_PATCH, _SIDE = 4, 40
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": _SIDE,
    "patch_size": _PATCH,
}


class _Resampler(nn.Module):
    def __init__(self, size: int, vision_size: int, count: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(count, size))
        self.kv_proj = nn.Linear(vision_size, size, bias=False)
        self.attn = nn.MultiheadAttention(size, size // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(size, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(size, size))

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        x = self.ln_kv(self.kv_proj(x))[:, None]
        places = _places(rows, columns, x.shape[-1])[:, None]
        q = self.ln_q(self.query)[:, None]
        return self.ln_post(self.attn(q, x + places, x)[0][:, 0]) @ self.proj


def _places(rows: int, columns: int, size: int) -> Tensor:
    """Return sines and cosines of the column, then those of the row."""
    at = np.stack(np.meshgrid(np.arange(columns), np.arange(rows))).reshape(2, -1)
    waves = 1 / 10_000 ** (np.arange(size // 4, dtype=np.float32) / (size / 4))
    angles = at[:, :, None] * waves
    found = np.concatenate((np.sin(angles), np.cos(angles)), -1)
    return torch.from_numpy(np.concatenate(found, -1)).float()


def minicpmv(
    directory: Path, version: str, *, vocab_size: int = 96, image_token: int = 95, name: str = "V"
) -> OwnCodeModel:
    """Write a MiniCPM-V, or a MiniCPM-o of this version if `name` is "O"."""
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    kind = _DECODERS[version]
    decoder = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**text, attn_implementation="eager")
    )
    tower = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(**_VISION, vision_use_head=False)
    )
    resampler = _Resampler(text["hidden_size"], _VISION["hidden_size"], 5)
    fill(decoder, tower, resampler)
    side = _SIDE // _PATCH
    bounds = torch.arange(1 / side, 1.0, 1 / side)

    def encode(pixels: Tensor) -> Tensor:
        embeddings = tower.embeddings
        patches = embeddings.patch_embedding(pixels[None])[0]
        rows, columns = patches.shape[1:]
        row, column = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count), bounds, right=True)
            for count in (rows, columns)
        )
        places = embeddings.position_embedding((row[:, None] * side + column).flatten())
        x = tower.encoder(patches.flatten(1).T[None] + places).last_hidden_state
        found: Tensor = resampler(tower.post_layernorm(x)[0], rows, columns)
        return found

    config = text | {
        "architectures": [f"MiniCPM{name}"],
        "model_type": f"minicpm{name.lower()}",
        "version": float(version),
        "vision_config": _VISION,
        "query_num": 5,
        "drop_vision_last_layer": False,
    }
    processor = {
        "image_processor_type": "MiniCPMVImageProcessor",
        "scale_resolution": _SIDE,
        "patch_size": _PATCH,
        "max_slice_nums": 4,
        "image_feature_size": 5,
        "use_image_id": True,
        "norm_mean": [0.5] * 3,
        "norm_std": [0.5] * 3,
    }
    write(directory, config, {"llm.": decoder, "vpm.": tower, "resampler.": resampler}, processor)
    return OwnCodeModel(
        decoder, lambda tiles: [encode(normalized(tile)) for tile in tiles], image_token
    )
