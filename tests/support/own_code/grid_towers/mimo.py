"""MiMo-V2.5, in whose tower most patches attend to those near them in rows or in columns.

Its authors add the number of a head that is called a sink to the scores of the first patch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors.torch import load_file, save_file
from support.families.published import save_published
from support.gguf.finish import finish
from support.mmproj.header import vision_writer
from support.own_code.model import OwnCodeModel, fill, grid_angles, normalized, rotated
from torch import Tensor, nn

_PATCH, _SIZE, _HEADS, _KV_HEADS, _HEAD_DIM = 4, 48, 4, 2, 16
_TYPES = [-1, 0, 0, 1, 1, -1, 1]
_NEAR = 5


class _Layer(nn.Module):
    def __init__(self, has_sinks: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(_SIZE, 1e-6), nn.RMSNorm(_SIZE, 1e-6)
        parts = {
            "qkv": nn.Linear(_SIZE, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM),
            "proj": nn.Linear(_HEADS * _HEAD_DIM, _SIZE),
        }
        self.attn = nn.ModuleDict(parts)
        if has_sinks:
            self.attn.register_parameter("sinks", nn.Parameter(torch.zeros(_HEADS)))
        names = (("gate_proj", _SIZE, 40), ("up_proj", _SIZE, 40), ("down_proj", 40, _SIZE))
        self.mlp = nn.ModuleDict({name: nn.Linear(*sizes) for name, *sizes in names})

    def forward(self, x: Tensor, angles: Tensor, order: Tensor) -> Tensor:
        """Return the outputs of patches that are counted by `order`, or all attend to each other if it is empty."""
        heads = self.attn["qkv"](self.norm1(x)).unflatten(-1, (-1, _HEAD_DIM)).transpose(0, 1)
        q, k, v = heads.split((_HEADS, _KV_HEADS, _KV_HEADS))
        k, v = (part.repeat_interleave(_HEADS // _KV_HEADS, 0) for part in (k, v))
        scores = rotated(q, angles) @ rotated(k, angles).transpose(1, 2) / _HEAD_DIM**0.5
        if len(order):
            is_far = (order[:, None] - order).abs() > _NEAR
            scores = scores.masked_fill(is_far, -torch.inf)
            first = torch.zeros(len(x))
            first[order == 0] = 1
            scores = scores + self.attn.get_parameter("sinks")[:, None, None] * first
        x = x + self.attn["proj"]((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        normed = self.norm2(x)
        inner = nn.functional.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        found: Tensor = x + self.mlp["down_proj"](inner)
        return found


class _Tower(nn.Module):
    def __init__(self, output_size: int) -> None:
        super().__init__()
        convolution = nn.Conv3d(3, _SIZE, (2, _PATCH, _PATCH), (2, _PATCH, _PATCH), bias=False)
        self.patch_embed = nn.ModuleDict({"proj": convolution})
        self.blocks = nn.ModuleList(_Layer(kind >= 0) for kind in _TYPES)
        square = 4 * _SIZE
        mlp = nn.Sequential(
            nn.Linear(square, square, bias=False),
            nn.GELU(),
            nn.Linear(square, output_size, bias=False),
        )
        norm = nn.LayerNorm(_SIZE, 1e-6, bias=False)
        self.merger = nn.ModuleDict({"ln_q": norm, "mlp": mlp})

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embeddings of an image [3, height, width]."""
        frames = pixels[None, :, None].expand(-1, -1, 2, -1, -1)
        x = self.patch_embed["proj"](frames)[0, :, 0]
        rows, columns = x.shape[1:]
        number = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2).transpose(1, 2)
        # Cells are squares of 2 x 2 patches.
        cells = torch.arange(rows * columns // 4).view(rows // 2, columns // 2)
        by_rows = 4 * cells[..., None] + torch.arange(4)
        turned = torch.arange(rows * columns // 4).view(columns // 2, rows // 2).T
        by_columns = 4 * turned[..., None] + torch.arange(4)
        places = number.flatten()
        x = x.flatten(1).T[places]
        angles = grid_angles(rows, columns, _HEAD_DIM)[places]
        orders = {-1: torch.empty(0), 0: by_rows.flatten(), 1: by_columns.flatten()}
        for kind, layer in zip(_TYPES, self.blocks, strict=True):
            x = layer(x, angles, orders[kind])
        found: Tensor = self.merger["mlp"](self.merger["ln_q"](x).view(-1, 4 * _SIZE))
        return found


def mimo_v2(
    directory: Path,
    *,
    architecture: str = "MiMoV2ForCausalLM",
    vocab_size: int = 96,
    image_token: int = 95,
) -> OwnCodeModel:
    """Write a MiMo-V2.5 as its authors publish it. The files of an Omni describe images in the config alone."""
    decoder: Any = save_published("MiMoV2", directory, vocab_size=vocab_size, hidden_size=64)
    tower = _Tower(decoder.config.hidden_size)
    fill(tower)
    file = directory / "model.safetensors"
    tensors = {f"visual.{name}": tensor.contiguous() for name, tensor in tower.state_dict().items()}
    save_file(load_file(file) | tensors, file)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": [architecture], "image_token_id": image_token}
    config["vision_config"] = {
        "depth": len(_TYPES),
        "hidden_size": _SIZE,
        "intermediate_size": 40,
        "num_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "qk_channels": _HEAD_DIM,
        "kv_channels": _HEAD_DIM,
        "patch_size": _PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": decoder.config.hidden_size,
        "fullatt_block_indexes": [i for i, kind in enumerate(_TYPES) if kind < 0],
        "vit_window_attn_types": _TYPES,
        "visual_token_window_size": _NEAR,
        "use_sink": True,
    }
    least, most = ((2 * _PATCH) ** 2 * count for count in (4, 60))
    is_described = architecture == "MiMoV2OmniForCausalLM"
    if is_described:
        del config["image_token_id"]
        config["processor_config"] = {"image_min_pixels": least, "image_max_pixels": most}
    (directory / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": least,
        "max_pixels": most,
        "patch_size": _PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    if not is_described:
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return OwnCodeModel(
        decoder, lambda images: [tower(normalized(each)) for each in images], image_token
    )


def write_mimo_mmproj(path: Path, checkpoint: Path) -> None:
    """Write the tower of a MiMo-V2.5 as the mmproj file that llama.cpp's converter would make of it."""
    config = json.loads((checkpoint / "config.json").read_text())
    vision = config["vision_config"]
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    numbers = {
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": vision["depth"],
        "attention.head_count": vision["num_heads"],
        "attention.head_count_kv": vision["num_key_value_heads"],
        "image_size": 560,
        "spatial_merge_size": 2,
        "window_size": vision["visual_token_window_size"],
        "image_min_pixels": processor["min_pixels"],
        "image_max_pixels": processor["max_pixels"],
    }
    writer = vision_writer(path, "mimovl", numbers, uses_gelu=None)
    writer.add_bool("clip.use_silu", True)
    writer.add_array("clip.vision.wa_pattern_mode", vision["vit_window_attn_types"])
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, vision["depth"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name == "visual.patch_embed.proj.weight":
            for number, part in enumerate(tensor.unbind(2)):
                suffix = f".{number}" if number else ""
                writer.add_tensor(f"v.patch_embd.weight{suffix}", part.contiguous().numpy())
        elif name.endswith(".sinks"):
            writer.add_tensor(f"v.blk.{name.split('.')[2]}.attn_sinks", tensor.numpy())
        elif name.startswith("visual."):
            found = names.get_name(name, (".weight", ".bias"))
            assert found is not None, name
            writer.add_tensor(found, tensor.numpy())
    finish(writer)
