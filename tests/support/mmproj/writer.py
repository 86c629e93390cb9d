"""Write the vision tower of a transformers model as the mmproj file that llama.cpp's converter would make of it."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from safetensors.torch import load_file
from support.gguf.finish import finish
from support.mmproj.header import tower_sizes, vision_writer

PROJECTORS = {
    "idefics3": "idefics3",
    "internvl": "internvl",
    "llava-clip": "mlp",
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
    "pixtral": "pixtral",
    "mistral3": "pixtral",
    "lighton_ocr": "lightonocr",
    "llama4": "llama4",
}
_NAMES = (
    (r"^model\.", ""),
    (r"^vision_(tower|model|encoder)\.", "v."),
    (r"^vision_projection\.", "multi_modal_projector."),
    (r"^v\.vision_model\.", "v."),
    (r"encoder\.layers?\.|transformer\.layers\.", "blk."),
    (r"\.(layer_norm1|layernorm_before|attention_norm)\.", ".ln1."),
    (r"\.(layer_norm2|layernorm_after|ffn_norm)\.", ".ln2."),
    (r"\.(self_attn|attention)\.(q|k|v)_proj\.", r".attn_\2."),
    (r"\.(self_attn|attention)\.(out_proj|o_proj|projection_layer)\.", ".attn_out."),
    (r"\.(mlp\.fc1|feed_forward\.up_proj)\.", ".ffn_up."),
    (r"\.feed_forward\.gate_proj\.", ".ffn_gate."),
    (r"\.(mlp\.fc2|feed_forward\.down_proj)\.", ".ffn_down."),
    (r"\.lambda_([12])$", r".ls\1.weight"),
    (r"embeddings\.patch_embeddings?\.(projection\.)?|patch_conv\.", "patch_embd."),
    (r"embeddings\.position_embeddings?(\.weight)?$", "position_embd.weight"),
    (r"embeddings\.(class_embedding|cls_token)$", "class_embd"),
    (r"pre_layrnorm|ln_pre", "pre_ln"),
    (r"post_layernorm", "post_ln"),
    (r"^v\.layernorm", "v.post_ln"),
    (r"^vision_tower", "v"),
    (r"patch_embedder\.input_proj\.", "patch_embd."),
    (r"patch_embedder\.position_embedding_table", "position_embd.weight"),
    (r"^embed_vision\.embedding_projection\.", "mm.input_projection."),
    (r"^connector\.modality_projection\.proj\.", "mm.model.fc."),
    (r"multi_modal_projector\.mm_input_projection_weight", "mm.input_projection.weight"),
    (r"multi_modal_projector\.mm_soft_emb_norm", "mm.soft_emb_norm"),
    (r"multi_modal_projector\.patch_merger\.merging_layer", "mm.patch_merger"),
    (r"multi_modal_projector\.norm", "mm.input_norm"),
)
_GEMMA4_NAMES = (
    (r"\.linear\.", "."),
    (r"\.input_layernorm\.", ".ln1."),
    (r"\.post_attention_layernorm\.", ".attn_post_norm."),
    (r"\.pre_feedforward_layernorm\.", ".ln2."),
    (r"\.post_feedforward_layernorm\.", ".ffn_post_norm."),
    (r"\.self_attn\.([qk])_norm\.", r".attn_\1_norm."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1."),
)
_PROJECTIONS = {
    "internvl": {
        "layer_norm": "mm.model.mlp.0",
        "linear_1": "mm.model.mlp.1",
        "linear_2": "mm.model.mlp.3",
    },
    "mlp": {"linear_1": "mm.0", "linear_2": "mm.2"},
    "lightonocr": {"linear_1": "mm.1", "linear_2": "mm.2"},
    "pixtral": {"linear_1": "mm.1", "linear_2": "mm.2"},
}

PIXTRALS = ("lightonocr", "pixtral")


def write_mmproj(path: Path, model: Any, kind: str) -> Path:
    """Write the tower of `model`, of this kind of `support.vision.checkpoints`, to `path` and return it."""
    config, projector = model.config.vision_config, PROJECTORS[kind]
    sides = getattr(config, "image_size", 224), config.patch_size
    image_size, patch_size = (x if isinstance(x, int) else x[0] for x in sides)
    num_layers = config.num_hidden_layers
    if projector == "mlp":
        num_layers -= 1
    numbers = tower_sizes(config.to_dict()) | {
        "image_size": 2 * image_size if projector in PIXTRALS else image_size,
        "patch_size": patch_size,
        "block_count": num_layers,
    }
    if projector in ("idefics3", "internvl", "gemma3", "gemma4v", "llama4"):
        numbers["projector.scale_factor"] = 2
    if projector == "idefics3":
        numbers["preproc_image_size"] = 4 * image_size
    if kind in ("mistral3", "lighton_ocr"):
        numbers["spatial_merge_size"] = 2
    eps = 1e-6 if projector == "gemma4v" else getattr(config, "layer_norm_eps", 1e-5)
    uses_gelu = True if getattr(config, "hidden_act", "gelu") != "quick_gelu" else None
    writer = vision_writer(path, projector, numbers, eps=eps, uses_gelu=uses_gelu)
    writer.add_bool("clip.has_vision_encoder", True)
    for name, tensor in model.state_dict().items():
        found = _gguf_name(name, projector)
        match = re.match(r"v\.blk\.(\d+)\.", found)
        if found.startswith(("v.", "mm.")) and not (match and int(match[1]) >= num_layers):
            writer.add_tensor(found, _stored(found, tensor, config, projector))
    return finish(writer)


def write_lfm2_mmproj(path: Path, model: Any) -> Path:
    """Write the tower of an LFM2-VL to `path` and return it."""
    config = model.config.vision_config
    numbers = tower_sizes(config.to_dict()) | {
        "image_size": 256,
        "projector.scale_factor": model.config.downsample_factor,
    }
    writer = vision_writer(path, "lfm2", numbers, eps=config.layer_norm_eps)
    projections = {"layer_norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2"}
    for name, tensor in model.state_dict().items():
        found = _gguf_name(name, "lfm2")
        for ours, theirs in projections.items():
            found = found.replace(f"multi_modal_projector.{ours}", theirs)
        if found == "v.patch_embd.weight":
            size = config.patch_size
            tensor = tensor.view(-1, size, size, 3).permute(0, 3, 1, 2)
        if found.startswith(("v.", "mm.")):
            writer.add_tensor(found, tensor.float().contiguous().numpy())
    return finish(writer)


def write_kimi_mmproj(path: Path, checkpoint: Path) -> Path:
    """Write the tower of a Kimi in a directory to `path` and return it."""
    config = json.loads((checkpoint / "config.json").read_text())
    vision, is_k25 = config["vision_config"], config["model_type"] == "kimi_k25"
    numbers = tower_sizes(vision) | {
        "image_size": 64 * vision["patch_size"],
        "projector.scale_factor": 2,
    }
    if is_k25:
        numbers["image_max_pixels"] = 60 * vision["patch_size"] ** 2
    writer = vision_writer(path, "kimik25" if is_k25 else "kimivl", numbers, eps=1e-5)
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if not re.match(r"(model\.)?(vision_tower|multi_modal_projector|mm_projector)\.", name):
            continue
        # Transformers saves other names than those of the published files.
        name = name.removeprefix("model.").replace("encoder.patch_embed", "patch_embed")
        name = name.replace("proj.0.", "proj.linear_1.").replace("proj.2.", "proj.linear_2.")
        parts = {name: tensor}
        if "pos_emb." in name and not is_k25:
            parts = {name: tensor.flatten(0, 1)}
        if ".wqkv." in name and is_k25:
            heads = tensor.unflatten(0, (3, vision["num_attention_heads"], -1, 2, 2))
            halves = heads[:2].transpose(2, 3).flatten(0, 4)
            parts = {name: torch.cat((halves, heads[2].flatten(0, 3)))}
        elif ".wqkv." in name:
            split = zip("qkv", tensor.chunk(3), strict=True)
            parts = {name.replace("wqkv", f"w{x}"): part for x, part in split}
        for each, part in parts.items():
            found = names.get_name(each, (".weight", ".bias"))
            if "linear_2." in each:
                found = f"mm.2.{each.rpartition('.')[2]}"
            assert found is not None, each
            writer.add_tensor(found, part.float().contiguous().numpy())
    return finish(writer)


def write_unified_mmproj(path: Path, model: Any) -> Path:
    """Write the projection of a unified Gemma 4 to `path` and return it."""
    config = model.config.vision_config
    numbers = {
        "image_size": 224,
        "patch_size": config.patch_size,
        "embedding_length": config.mm_embed_dim,
        "feed_forward_length": 0,
        "block_count": 0,
        "attention.head_count": 0,
        "projector.scale_factor": config.pooling_kernel_size,
    }
    writer = GGUFWriter(path, "clip")
    writer.add_string("clip.vision.projector_type", "gemma4uv")
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    names = {
        "patch_dense": "v.patch_embd",
        "patch_ln1": "v.patch_norm.1",
        "patch_ln2": "v.patch_norm.2",
        "pos_norm": "v.patch_norm.3",
        "embedding_projection": "mm.input_projection",
    }
    for name, tensor in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        stem = stem.rpartition(".")[2]
        if "language_model" in name or "embed_audio" in name:
            continue
        if last == "pos_embedding":
            writer.add_tensor("v.position_embd.weight", tensor.transpose(0, 1).contiguous().numpy())
        elif stem in names:
            if stem == "patch_ln1" or name.endswith("patch_dense.weight"):
                # By channel instead of by pixel.
                tensor = tensor.unflatten(-1, (-1, 3)).transpose(-1, -2).flatten(-2)
            writer.add_tensor(f"{names[stem]}.{last}", tensor.float().contiguous().numpy())
    return finish(writer)


def write_phi4_mmproj(path: Path, tower: Any, projection: torch.nn.Module) -> None:
    """Write a SigLIP 2 and the projection of Phi-4-reasoning-vision as llama.cpp's converter does."""
    config = tower.config
    numbers = tower_sizes(config.to_dict()) | {
        "image_size": 24,
        "block_count": config.num_hidden_layers - 1,
        "image_min_pixels": 256,
        "image_max_pixels": 2048,
    }
    writer = vision_writer(path, "phi4", numbers, eps=config.layer_norm_eps)
    last = f"encoder.layers.{config.num_hidden_layers - 1}."
    for name, tensor in tower.state_dict().items():
        if last in name or "post_layernorm" in name or "head." in name:
            continue
        if name.endswith("patch_embedding.weight"):
            size = config.patch_size
            tensor = tensor.view(-1, size, size, 3).permute(0, 3, 1, 2)
        found = _gguf_name(f"vision_tower.{name.removeprefix('vision_model.')}", "phi4")
        writer.add_tensor(found, tensor.contiguous().numpy())
    for name, tensor in projection.state_dict().items():
        writer.add_tensor(f"mm.{name}", tensor.numpy())
    finish(writer)


def _gguf_name(name: str, projector: str) -> str:
    """Return the name of a tensor in an mmproj file."""
    if projector == "llama4":
        return _llama4_name(name.removeprefix("model."))
    others = _GEMMA4_NAMES if projector == "gemma4v" else ()
    for pattern, replacement in (*_NAMES, *others):
        name = re.sub(pattern, replacement, name)
    for ours, theirs in _PROJECTIONS.get(projector, {}).items():
        name = name.replace(f"multi_modal_projector.{ours}", theirs)
    return name


def _llama4_name(name: str) -> str:
    if name.startswith("multi_modal_projector.linear_1"):
        return "mm.model.fc.weight"
    if not name.startswith("vision_model."):
        return name
    # The installed table has Gemma's name for this norm, but llama.cpp reads this one.
    if match := re.search(r"layers\.(\d+)\.post_attention_layernorm\.(\w+)$", name):
        return f"v.blk.{match[1]}.ln2.{match[2]}"
    if name.endswith("positional_embedding_vlm"):
        name += ".weight"
    found = get_tensor_name_map(MODEL_ARCH.MMPROJ, 8).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def _stored(name: str, tensor: torch.Tensor, config: Any, projector: str) -> np.ndarray:
    if projector in PIXTRALS and name.endswith(("attn_q.weight", "attn_k.weight")):
        heads = tensor.unflatten(0, (config.num_attention_heads, 2, -1))
        tensor = heads.transpose(1, 2).flatten(0, 2)
    if projector == "gemma4v" and name == "v.patch_embd.weight":
        patch = config.patch_size
        tensor = tensor.view(-1, patch, patch, 3).permute(0, 3, 1, 2).contiguous()
    if not tensor.ndim:
        tensor = tensor[None]
    if name == "mm.soft_emb_norm.weight":
        tensor = tensor + 1
    if name == "v.position_embd.weight" or name == "v.class_embd":
        tensor = tensor.squeeze()
    return tensor.float().numpy()
