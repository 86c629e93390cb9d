"""Write the vision tower of a Qwen-VL model as the mmproj file that llama.cpp's converter would make of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from support.qwen_checkpoints import MERGE

PROJECTORS = {
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
}
_NAMES = (
    (r"^model\.visual\.", "v."),
    (r"^v\.blocks\.", "v.blk."),
    (r"\.norm([12])\.", r".ln\1."),
    (r"\.attn\.(qkv|q|k|v)\.", r".attn_\1."),
    (r"\.attn\.proj\.", ".attn_out."),
    (r"\.mlp\.(fc1|linear_fc1|up_proj)\.", ".ffn_up."),
    (r"\.mlp\.gate_proj\.", ".ffn_gate."),
    (r"\.mlp\.(fc2|linear_fc2|down_proj)\.", ".ffn_down."),
    (r"^v\.merger\.(ln_q|norm)\.", "v.post_ln."),
    (r"^v\.merger\.(mlp\.0|linear_fc1)\.", "mm.0."),
    (r"^v\.merger\.(mlp\.2|linear_fc2)\.", "mm.2."),
    (r"^v\.pos_embed\.", "v.position_embd."),
    (r"^v\.patch_embed\.proj\.", "v.patch_embd."),
    (r"\.linear_fc([12])\.", r".fc\1."),
)


def write_qwen_mmproj(path: Path, model: Any, kind: str) -> Path:
    """Write the tower of `model`, of this kind of `support.qwen_checkpoints`, to `path` and return it."""
    config = model.config.vision_config
    writer = GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", PROJECTORS[kind])
    writer.add_bool("clip.has_vision_encoder", True)
    size = config.embed_dim if kind == "qwen2_vl" else config.hidden_size
    numbers = {
        "image_size": 560,
        "patch_size": config.patch_size,
        "embedding_length": size,
        "feed_forward_length": getattr(config, "intermediate_size", config.hidden_size),
        "block_count": config.depth,
        "attention.head_count": config.num_heads,
        "spatial_merge_size": MERGE,
    }
    if kind == "qwen2_5_vl":
        numbers |= {"n_wa_pattern": config.fullatt_block_indexes[0] + 1}
        numbers |= {"window_size": config.window_size}
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    if kind == "qwen2_5_vl":
        writer.add_bool("clip.use_silu", True)
    elif kind != "qwen2_vl":
        writer.add_bool("clip.use_gelu", True)
        added = getattr(config, "deepstack_visual_indexes", [])
        flags = [layer in added for layer in range(config.depth)]
        writer.add_array("clip.vision.is_deepstack_layers", flags)
    for name in ("mean", "std"):
        writer.add_array(f"clip.vision.image_{name}", [0.5, 0.5, 0.5])
    for name, tensor in _tensors(model, kind):
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        if not name.startswith("model.visual."):
            continue
        if match := re.search(r"deepstack_merger_list\.(\d+)\.", name):
            layer = model.config.vision_config.deepstack_visual_indexes[int(match[1])]
            yield _gguf_name(name.replace(match[0], f"deepstack.{layer}.")), tensor
        elif name.endswith("patch_embed.proj.weight"):
            yield "v.patch_embd.weight", tensor[:, :, 0]
            yield "v.patch_embd.weight.1", tensor[:, :, 1]
        elif ".qkv." in name and kind.startswith("qwen2"):
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                yield _gguf_name(name.replace(".qkv.", f".{part}.")), rows
        else:
            yield _gguf_name(name), tensor


def _gguf_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name
