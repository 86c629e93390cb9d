"""DeepSeek-VL2, whose smallest model has no latent attention."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from safetensors.torch import load_file, save_file
from support.own_code.known_towers.deepseek_ocr import TEXT, unlimited_ocr
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIDE, _SIZE, _HEADS = 8, 40, 48, 4
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(_SIZE, 1e-6) for _ in range(2))
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(_SIZE, 3 * _SIZE), "proj": nn.Linear(_SIZE, _SIZE)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(_SIZE, 80), "fc2": nn.Linear(80, _SIZE)})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attn["qkv"](self.norm1(x)).view(len(x), 3, _HEADS, -1)
        attended = F.scaled_dot_product_attention(*qkv.permute(1, 2, 0, 3))
        x = x + self.attn["proj"](attended.transpose(0, 1).flatten(1))
        found: Tensor = x + self.mlp["fc2"](
            F.gelu(self.mlp["fc1"](self.norm2(x)), approximate="tanh")
        )
        return found


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, _SIZE, _PATCH, _PATCH)})
        self.pos_embed = nn.Parameter(torch.zeros(1, (_SIDE // _PATCH) ** 2, _SIZE))
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.norm = nn.LayerNorm(_SIZE, 1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels[None])[0].flatten(1).T + self.pos_embed[0]
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.norm(x)
        return found


class _Separators(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.image_newline, self.view_seperator = (nn.Parameter(torch.zeros(size)) for _ in "xx")


def deepseek_vl2(
    directory: Path, *, vocab_size: int = 96, image_token: int = 95, is_latent: bool = False
) -> OwnCodeModel:
    """Write a DeepSeek-VL2. The latent one has the decoder of DeepSeek-V2."""
    text = TEXT | {"vocab_size": vocab_size, "topk_method": "greedy"}
    # Transformers has the decoder without latent attention only in another model that reads images.
    decoder = unlimited_ocr(text, image_token)
    if is_latent:
        config = transformers.DeepseekV2Config(**text, **_LATENT)
        decoder = transformers.DeepseekV2ForCausalLM(config)
    tower, separators = _Tower(), _Separators(text["hidden_size"])
    projector = nn.ModuleDict(
        {"layers": nn.Sequential(nn.Linear(4 * _SIZE, 64), nn.GELU(), nn.Linear(64, 64))}
    )
    fill(decoder, tower, projector, separators)

    def embed(pixels: Tensor) -> Tensor:
        side = _SIDE // _PATCH
        x = F.pad(tower(pixels).view(side, side, _SIZE), (0, 0, 0, 1, 0, 1))
        x = F.unfold(x.permute(2, 0, 1)[None], 2, stride=2)[0].T
        found: Tensor = projector["layers"](x)
        return found.view(3, 3, -1)

    def end_rows(x: Tensor) -> Tensor:
        ends = separators.image_newline.expand(len(x), 1, -1)
        return torch.cat((x, ends), 1).flatten(0, 1)

    def encode(payloads: Sequence[ImagePayload]) -> list[Tensor]:
        [payload] = payloads
        whole, *tiles = (embed(each) for each in normalized(payload).split(_SIDE, 1))
        columns = payload.grid_columns
        rows = [
            torch.cat(tiles[start : start + columns], 1) for start in range(0, len(tiles), columns)
        ]
        return [end_rows(whole), separators.view_seperator[None], end_rows(torch.cat(rows))]

    vision = {"layers": 2, "width": _SIZE, "heads": _HEADS, "mlp_ratio": 80 / 48}
    vision |= {"image_size": _SIDE, "patch_size": _PATCH}
    sizes = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2)]
    published = {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "tile_tag": "2D",
        "global_view_pos": "head",
        "candidate_resolutions": [[x * _SIDE, y * _SIDE] for x, y in sizes],
        "language_config": text | (_LATENT if is_latent else {"use_mla": False}),
        "projector_config": {"n_embed": 64},
        "vision_config": vision,
    }
    decoder.save_pretrained(directory)
    text_tensors = load_file(directory / "model.safetensors")
    parts = {"vision.": tower, "projector.": projector, "": separators}
    write(directory, published, parts, {})
    stored = load_file(directory / "model.safetensors") | {
        f"language.{name}": tensor
        for name, tensor in text_tensors.items()
        if re.match(r"model\.(embed_tokens|layers|norm)\.|lm_head\.", name)
    }
    save_file(stored, directory / "model.safetensors")
    (directory / "preprocessor_config.json").unlink()
    return OwnCodeModel(decoder, encode, image_token)
