"""MiniCPM-V 2.5, 2.6, 4 and 4.5, and their mmproj files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from support.checkpoints.tiny import DECODER_SIZES
from support.gguf.finish import finish
from support.mmproj.header import tower_sizes, vision_writer
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn

_DECODERS = {"2.5": "Llama", "2.6": "Qwen2", "4.0": "Llama", "4.5": "Qwen3"}
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
    text: dict[str, Any] = DECODER_SIZES | {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    kind, num_queries = _DECODERS[version], 96 if version == "2.5" else 5
    decoder = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**text, attn_implementation="eager")
    )
    tower = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(**_VISION, vision_use_head=False)
    )
    resampler = _Resampler(text["hidden_size"], _VISION["hidden_size"], num_queries)
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
        "version": None if version == "2.5" else float(version),
        "vision_config": _VISION,
        "query_num": num_queries,
        "drop_vision_last_layer": False,
    }
    processor = {
        "image_processor_type": "MiniCPMVImageProcessor",
        "scale_resolution": _SIDE,
        "patch_size": _PATCH,
        "max_slice_nums": 4,
        "image_feature_size": num_queries,
        "use_image_id": version != "2.5",
        "norm_mean": [0.5] * 3,
        "norm_std": [0.5] * 3,
    }
    write(directory, config, {"llm.": decoder, "vpm.": tower, "resampler.": resampler}, processor)
    return OwnCodeModel(
        decoder, lambda tiles: [encode(normalized(tile)) for tile in tiles], image_token
    )


_GGUF_NAMES = (
    (r"^vpm\.(vision_model\.)?encoder\.layers\.", "v.blk."),
    (r"^vpm\.(vision_model\.)?embeddings\.patch_embedding\.", "v.patch_embd."),
    (r"^vpm\.(vision_model\.)?embeddings\.position_embedding\.", "v.position_embd."),
    (r"^vpm\.(vision_model\.)?post_layernorm\.", "v.post_ln."),
    (r"\.layer_norm", ".ln"),
    (r"\.self_attn\.(q|k|v|out)_proj\.", r".attn_\1."),
    # The converter of this family swaps these names.
    (r"\.mlp\.fc1\.", ".ffn_down."),
    (r"\.mlp\.fc2\.", ".ffn_up."),
    (r"^(resampler\.(kv|attn\.out))_proj\.", r"\1."),
    (r"^resampler\.proj$", "resampler.proj.weight"),
)


def write_minicpmv_mmproj(path: Path, model: Path) -> None:
    """Write the tower of a MiniCPM-V as the mmproj file that llama.cpp's converter would make of it."""
    numbers = tower_sizes(_VISION | {"patch_size": _PATCH}) | {"image_size": _SIDE}
    writer = vision_writer(path, "resampler", numbers)
    is_2_5 = json.loads((model / "config.json").read_text())["version"] is None
    writer.add_int32("clip.minicpmv_version", 2 if is_2_5 else 3)
    writer.add_bool("clip.has_vision_encoder", True)
    for name, tensor in load_file(model / "model.safetensors").items():
        for pattern, replacement in _GGUF_NAMES:
            name = re.sub(pattern, replacement, name)
        if match := re.fullmatch(r"resampler\.attn\.in_proj_(\w+)", name):
            for part, values in zip("qkv", tensor.chunk(3), strict=True):
                writer.add_tensor(f"resampler.attn.{part}.{match[1]}", values.numpy())
        elif name.startswith(("v.", "resampler.")):
            values = tensor.T if name == "resampler.proj.weight" else tensor
            writer.add_tensor(name, values.contiguous().numpy())
    finish(writer)
