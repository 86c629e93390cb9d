"""dots.ocr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from safetensors.torch import load_file
from support.checkpoints.tiny import DECODER_SIZES
from support.families.experts import GROUPS, LATENT
from support.gguf.finish import finish
from support.own_code.model import OwnCodeModel, fill, grid_angles, normalized, rotated, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIZE, _HEADS = 4, 48, 4


def _module(**parts: nn.Module) -> nn.Module:
    """Return a module with these parts."""
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(_SIZE, 1e-5) for _ in range(2))
        self.attn = _module(
            qkv=nn.Linear(_SIZE, 3 * _SIZE, bias=False), proj=nn.Linear(_SIZE, _SIZE, bias=False)
        )
        self.mlp = _module(
            fc1=nn.Linear(_SIZE, 80, bias=False),
            fc3=nn.Linear(_SIZE, 80, bias=False),
            fc2=nn.Linear(80, _SIZE, bias=False),
        )

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        qkv = self.attn.qkv(self.norm1(x)).view(len(x), 3, _HEADS, -1).permute(1, 2, 0, 3)
        q, k, v = qkv
        q, k = (rotated(each, angles) for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = x + self.attn.proj(attended)
        y, mlp = self.norm2(x), self.mlp
        found: Tensor = x + mlp.fc2(F.silu(mlp.fc1(y)) * mlp.fc3(y))
        return found


def dots_ocr(
    directory: Path, *, vocab_size: int = 96, image_token: int = 95, is_vlm: bool = False
) -> OwnCodeModel:
    """Write a dots.ocr, or a dots.vlm1, which has the decoder of DeepSeek-V3."""
    text: dict[str, Any] = DECODER_SIZES | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
    }
    decoder = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text))
    if is_vlm:
        experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "rms_norm_eps": 1e-6}
        text |= LATENT | GROUPS | experts | {"num_key_value_heads": 4}
        decoder = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**text))
    square = 4 * _SIZE
    tower = _module(
        patch_embed=_module(
            patchifier=_module(
                proj=nn.Conv2d(3, _SIZE, _PATCH, _PATCH), norm=nn.RMSNorm(_SIZE, 1e-5)
            )
        ),
        blocks=nn.ModuleList(_Block() for _ in range(3)),
        post_trunk_norm=nn.RMSNorm(_SIZE, 1e-5),
        merger=_module(
            ln_q=nn.LayerNorm(_SIZE, 1e-6),
            mlp=nn.Sequential(nn.Linear(square, square), nn.GELU(), nn.Linear(square, 64)),
        ),
    )
    fill(decoder, tower)

    def encode(pixels: Tensor) -> Tensor:
        patches = tower.patch_embed.patchifier
        x = patches.proj(pixels[None])[0]
        rows, columns = x.shape[1:]
        angles = grid_angles(rows, columns, _SIZE // _HEADS)
        x = patches.norm(x.flatten(1).T)
        for block in tower.blocks:
            x = block(x, angles)
        x = tower.merger.ln_q(tower.post_trunk_norm(x)).view(rows // 2, 2, columns // 2, 2, _SIZE)
        found: Tensor = tower.merger.mlp(x.transpose(1, 2).flatten(2).flatten(0, 1))
        return found

    vision = {
        "model_type": "dots_vit",
        "embed_dim": _SIZE,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": _HEADS,
        "patch_size": _PATCH,
        "temporal_patch_size": 1,
        "rms_norm_eps": 1e-5,
    }
    config = text | {
        "architectures": ["DotsVLMForCausalLM" if is_vlm else "DotsOCRForCausalLM"],
        "model_type": "dots_vlm" if is_vlm else "dots_ocr",
        "image_token_id": image_token,
        "vision_config": vision,
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 8 * 8 * 4,
        "max_pixels": 8 * 8 * 60,
        "patch_size": _PATCH,
        "merge_size": 2,
        "temporal_patch_size": 1,
    }
    write(directory, config, {"": decoder, "vision_tower.": tower}, processor)
    return OwnCodeModel(
        decoder, lambda images: [encode(normalized(each)) for each in images], image_token
    )


def write_dots_mmproj(path: Path, checkpoint: Path) -> None:
    """Write the tower of a dots.ocr in a directory as an mmproj file."""
    config = json.loads((checkpoint / "config.json").read_text())
    vision = config["vision_config"]
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    writer = GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "dots_ocr")
    numbers = {
        "image_size": 0,
        "image_min_pixels": processor["min_pixels"],
        "image_max_pixels": processor["max_pixels"],
        "patch_size": vision["patch_size"],
        "embedding_length": vision["embed_dim"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": vision["num_hidden_layers"],
        "attention.head_count": vision["num_attention_heads"],
        "projector.scale_factor": 2,
    }
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision["rms_norm_eps"])
    writer.add_bool("clip.use_silu", True)
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    mlps = {".fc1.": ".gate_proj.", ".fc2.": ".down_proj.", ".fc3.": ".up_proj."}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if not name.startswith("vision_tower."):
            continue
        if ".blocks." in name and ".mlp." in name:
            name = name.replace("vision_tower.", "visual.")
            for ours, theirs in mlps.items():
                name = name.replace(ours, theirs)
        found = names.get_name(name, (".weight", ".bias"))
        if ".merger.mlp.2." in name:
            found = f"mm.2.{name.rpartition('.')[2]}"
        assert found is not None, name
        writer.add_tensor(found, tensor.numpy())
    finish(writer)
