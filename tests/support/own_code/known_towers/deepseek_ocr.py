"""DeepSeek-OCR, made of transformers' Unlimited-OCR, whose prompts it computes in the same way."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors.torch import load_file, save_file
from support.gguf.finish import finish
from support.mmproj.header import vision_writer
from support.own_code.model import OwnCodeModel, fill, normalized
from torch import Tensor

_CLIP = {"heads": 4, "image_size": 16, "layers": 2, "patch_size": 4, "width": 32}
_SAM: dict[str, Any] = {
    "heads": 2,
    "layers": 3,
    "width": 24,
    "downsample_channels": [16, 32],
    "global_attn_indexes": [1],
    "output_channels": 16,
    "window_size": 3,
    "image_size": 64,
    "patch_size": 4,
    "mlp_dim": 48,
}
_PROCESSOR = {"tile_size": 48, "size": {"height": 64, "width": 64}, "max_patches": 6}
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}


def deepseek_ocr(
    directory: Path,
    *,
    vocab_size: int = 96,
    image_token: int = 95,
    window: int | None = None,
    is_saved: bool = False,
) -> OwnCodeModel:
    """Write a DeepSeek-OCR in the format of its authors.

    With a `window` of output tokens, it is an Unlimited-OCR, which may be `is_saved` in the format of transformers.
    """
    text = (
        TEXT | {"vocab_size": vocab_size} | ({} if window is None else {"sliding_window": window})
    )
    model = unlimited_ocr(text, image_token)
    fill(model)
    model.save_pretrained(directory)
    if is_saved:
        (directory / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    else:
        _write(directory, text)

    def encode(payloads: Sequence[ImagePayload]) -> list[Tensor]:
        *grids, whole = payloads
        local: dict[str, Any] = {}
        for grid in grids:
            tiles = normalized(grid).unflatten(1, (-1, grid.width)).transpose(0, 1)
            columns = grid.grid_columns
            local["pixel_values_local"] = tiles
            local["num_local_patches"] = [len(tiles)]
            local["patches_grid"] = [[columns, len(tiles) // columns]]
        features = model.model.get_image_features(normalized(whole)[None], **local)
        found: list[Tensor] = features.pooler_output
        return found

    return OwnCodeModel(model, encode, image_token, window or 0)


def unlimited_ocr(text: dict[str, Any], image_token: int) -> Any:
    """Return transformers' Unlimited-OCR with a decoder of these sizes."""
    config = transformers.UnlimitedOcrConfig(
        vision_config={
            "sam_config": _renamed(_SAM),
            "encoder_config": _renamed(_CLIP) | {"intermediate_size": 4 * _CLIP["width"]},
        },
        text_config=text,
        image_token_id=image_token,
    )
    return transformers.UnlimitedOcrForConditionalGeneration(config)


def _renamed(sizes: dict[str, Any]) -> dict[str, Any]:
    names = {"heads": "num_attention_heads", "layers": "num_hidden_layers", "width": "hidden_size"}
    return {names.get(name, name): value for name, value in sizes.items()}


def _write(directory: Path, text: dict[str, Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        if "vision_model" in name and ".q_proj." in name:
            tensor = torch.cat([tensors[name.replace(".q_", f".{x}_")] for x in "qkv"])
            name = name.replace(".q_proj.", ".qkv_proj.")
        elif re.search(r"vision_model.*\.[kv]_proj\.", name):
            continue
        stored[re.sub(r"vision_model\.encoder\.", "vision_model.transformer.", name)] = tensor
    assert any("vision_model.transformer.layers.0.self_attn.qkv_proj" in name for name in stored)
    assert {"model.sam_model.pos_embed", "model.view_seperator"} <= stored.keys()
    save_file(stored, directory / "model.safetensors")
    published = {
        "architectures": ["DeepseekOCRForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": {name: x for name, x in text.items() if name != "sliding_window"}
        | {
            "topk_method": "greedy",
            "use_mla": False,
            "qk_nope_head_dim": 0,
            "qk_rope_head_dim": 0,
            "v_head_dim": 0,
            "n_group": 1,
            "topk_group": 1,
        },
        "projector_config": {"projector_type": "linear"},
        "vision_config": {"width": {"clip-l-14-224": _CLIP, "sam_vit_b": _SAM}},
    }
    if "sliding_window" in text:
        published |= {
            "architectures": ["UnlimitedOCRForCausalLM"],
            "model_type": "unlimited-ocr",
            "sliding_window": text["sliding_window"],
        }
    (directory / "config.json").write_text(json.dumps(published))
    (directory / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))


def write_deepseek_mmproj(path: Path, checkpoint: Path) -> Path:
    """Write the tower of a DeepSeek-OCR in a directory to `path` and return it."""
    numbers = {
        "image_size": _CLIP["image_size"],
        "patch_size": _CLIP["patch_size"],
        "embedding_length": _CLIP["width"],
        # The converter computes this size wrongly.
        "feed_forward_length": 4 * _CLIP["heads"],
        "block_count": _CLIP["layers"],
        "attention.head_count": _CLIP["heads"],
        "window_size": 14,
        "sam.block_count": _SAM["layers"],
        "sam.embedding_length": _SAM["width"],
        "sam.head_count": _SAM["heads"],
    }
    writer = vision_writer(path, "deepseekocr", numbers, uses_gelu=None)
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 8)
    tower = r"model\.(sam_model|vision_model|projector|image_newline|view_seperator)"
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if not re.match(tower, name):
            continue
        if name.endswith(("pos_embed", "rel_pos_h", "rel_pos_w")):
            name += ".weight"
        tensor = tensor[None] if name.endswith("view_seperator") else tensor
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, tensor.float().contiguous().numpy())
    return finish(writer)
