"""Step 3, whose tower has four equal rows before the patches and norms the outputs of its blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.families.published import save_published
from support.own_code.model import OwnCodeModel, fill, normalized
from torch import Tensor, nn

_PATCH, _SIZE, _HEADS, _LAYERS, _SIDE, _CONVOLVED = 4, 48, 4, 3, 12, 40


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(_SIZE, 1e-5) for _ in range(2))
        parts = {"qkv_proj": nn.Linear(_SIZE, 3 * _SIZE), "out_proj": nn.Linear(_SIZE, _SIZE)}
        self.self_attn = nn.ModuleDict(parts)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(_SIZE, 80), "fc2": nn.Linear(80, _SIZE)})

    def forward(self, x: Tensor) -> Tensor:
        heads = self.self_attn["qkv_proj"](x).view(len(x), 3, _HEADS, -1)
        q, k, v = heads.permute(1, 2, 0, 3)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.layer_norm1(self.self_attn["out_proj"](attended.transpose(0, 1).flatten(1)))
        inner = self.mlp["fc1"](x)
        found: Tensor = x + self.layer_norm2(self.mlp["fc2"](inner * (1.702 * inner).sigmoid()))
        return found


class _Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(1, _SIZE))
        self.patch_embedding = nn.Conv2d(3, _SIZE, _PATCH, _PATCH)
        self.position_embedding = nn.Embedding(_SIDE**2 + 1, _SIZE)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels[None])
        first, table = self.position_embedding.weight.split((1, _SIDE**2))
        square = table.T.view(1, _SIZE, _SIDE, _SIDE)
        if patches.shape[-1] != _SIDE:
            square = nn.functional.interpolate(
                square, patches.shape[-2:], mode="bicubic", antialias=True
            )
        rows = (patches + square)[0].flatten(1).T
        return torch.cat((*[self.class_embedding + first] * 4, rows))


class _Tower(nn.Module):
    def __init__(self, output_size: int) -> None:
        super().__init__()
        layers = nn.ModuleList(_Layer() for _ in range(_LAYERS))
        parts = {"embeddings": _Embeddings(), "transformer": nn.ModuleDict({"layers": layers})}
        self.vision_model = nn.ModuleDict(parts)
        self.vit_downsampler = nn.Conv2d(_SIZE, _CONVOLVED, 2, 2)
        self.vit_downsampler2 = nn.Conv2d(_CONVOLVED, 2 * _CONVOLVED, 3, 2, 1)
        self.vit_large_projector = nn.Linear(2 * _CONVOLVED, output_size, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embeddings of a square [3, side, side]."""
        x = self.vision_model["embeddings"](pixels)
        for layer in self.vision_model["transformer"]["layers"]:  # type: ignore[index]
            x = layer(x)
        square = x[4:].T.unflatten(1, (pixels.shape[1] // _PATCH, -1))[None]
        convolved = self.vit_downsampler2(self.vit_downsampler(square))
        found: Tensor = self.vit_large_projector(convolved[0].flatten(1).T)
        return found


def step3(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a Step 3 as its authors publish it."""
    decoder: Any = save_published("Step3Text", directory, vocab_size=vocab_size)
    size = decoder.config.hidden_size
    tower = _Tower(size)
    fill(tower)
    file = directory / "model.safetensors"
    parts = {name: tensor.contiguous() for name, tensor in tower.state_dict().items()}
    save_file(load_file(file) | parts, file)
    text = json.loads((directory / "config.json").read_text())
    config = {
        "architectures": ["Step3VLForConditionalGeneration"],
        "model_type": "step3_vl",
        "image_token_id": image_token,
        "hidden_size": size,
        "projector_bias": False,
        "understand_projector_stride": 2,
        "text_config": text,
        "vision_config": {
            "model_type": "step3_vision_encoder",
            "hidden_size": _SIZE,
            "intermediate_size": 80,
            "output_hidden_size": _CONVOLVED,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "image_size": _SIDE * _PATCH,
            "patch_size": _PATCH,
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    side = _SIDE * _PATCH
    processor = {"size": {"height": side, "width": side}, "patch_size": 32, "max_image_size": 96}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return OwnCodeModel(
        decoder, lambda images: [tower(normalized(each)) for each in images], image_token
    )
