"""Youtu-VL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors.torch import load_file
from support.checkpoints.tiny import DECODER_SIZES
from support.gguf.finish import finish
from support.mmproj.header import tower_sizes, vision_writer
from support.own_code.model import OwnCodeModel, SiglipLayer, fill, grid_angles, normalized, write
from torch import Tensor, nn

_PATCH, _SIZE, _HEADS, _LAYERS = 4, 48, 4, 3
_WINDOW, _FULL = 16, [1]


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        patches = nn.Linear(3 * _PATCH**2, _SIZE)
        self.embeddings = nn.ModuleDict({"patch_embedding": patches})
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(SiglipLayer(_SIZE, _HEADS) for _ in range(_LAYERS))}
        )
        self.post_layernorm = nn.LayerNorm(_SIZE, 1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the patches [rows, columns, size] of an image [3, height, width]."""
        cells = pixels.unflatten(1, (-1, _PATCH)).unflatten(3, (-1, _PATCH))
        # The pixels of a patch are ordered by row, by column and then by channel.
        x = self.embeddings["patch_embedding"](cells.permute(1, 3, 2, 4, 0).flatten(2))
        rows, columns = x.shape[:2]
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        angles = grid_angles(rows, columns, _SIZE // _HEADS)
        window = places // (_WINDOW // _PATCH)
        sees = (window[:, None] == window).all(-1)
        x = x.flatten(0, 1)
        for index, layer in enumerate(self.encoder["layers"]):
            x = layer(x, angles, torch.ones_like(sees) if index in _FULL else sees)
        found: Tensor = self.post_layernorm(x).view(rows, columns, _SIZE)
        return found


class _Merger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_q = nn.RMSNorm(_SIZE, 1e-6)
        square = 4 * _SIZE
        self.mlp = nn.Sequential(nn.Linear(square, square), nn.GELU(), nn.Linear(square, 64))

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (side // 2 for side in x.shape[:2])
        squares = self.ln_q(x).view(rows, 2, columns, 2, _SIZE).transpose(1, 2)
        found: Tensor = self.mlp(squares.flatten(2).flatten(0, 1))
        return found


def youtu_vl(
    directory: Path, *, vocab_size: int = 96, image_token: int = 95, max_patches: int | None = None
) -> OwnCodeModel:
    """Write a Youtu-VL as its authors publish it."""
    text: dict[str, Any] = DECODER_SIZES | {
        "num_key_value_heads": 4,
        "vocab_size": vocab_size,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "rope_theta": 500_000.0,
    }
    decoder = transformers.YoutuForCausalLM(transformers.YoutuConfig(**text))
    tower, merger = _Tower(), _Merger()
    fill(decoder, tower, merger)
    config = text | {
        "architectures": ["YoutuVLForConditionalGeneration"],
        "model_type": "youtu_vl",
        "image_token_id": image_token,
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": _SIZE,
            "out_hidden_size": 64,
            "intermediate_size": 80,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "patch_size": _PATCH,
            "window_size": _WINDOW,
            "fullatt_block_indexes": _FULL,
        },
    }
    processor = {
        "image_processor_type": "Siglip2ImageProcessorFast",
        # The authors' code replaces this limit.
        "max_num_patches": 4,
        "patch_size": _PATCH,
        "max_image_patches": max_patches,
    }
    parts = {"": decoder, "siglip2.vision_model.": tower, "merger.": merger}
    write(directory, config, parts, processor)
    return OwnCodeModel(
        decoder, lambda images: [merger(tower(normalized(each))) for each in images], image_token
    )


def write_youtu_mmproj(path: Path, checkpoint: Path) -> None:
    """Write the tower of a Youtu-VL in a directory as the mmproj file that llama.cpp's converter would make of it."""
    config = json.loads((checkpoint / "config.json").read_text())
    vision = config["vision_config"]
    numbers = tower_sizes(vision) | {
        "image_size": 560,
        "spatial_merge_size": 2,
        "window_size": vision["window_size"],
    }
    writer = vision_writer(path, "youtuvl", numbers)
    writer.add_array("clip.vision.wa_layer_indexes", vision["fullatt_block_indexes"])
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.startswith(("siglip2.", "merger.")):
            found = names.get_name(name, (".weight", ".bias"))
            assert found is not None, name
            writer.add_tensor(found, tensor.numpy())
    finish(writer)
