"""Files of InternVL in the format of its authors, and of models whose configs have other names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from support.vision.published_llava import as_llava

_NAMES = {
    "bee": ("Bee", "bee"),
    "r_vl": ("R", "R"),
    "internvl-s1": ("InternS1", "interns1"),
    "lighton_ocr": ("LightOnOCR", "mistral3"),
}
"""The architectures and model types in published configs, which otherwise are those of transformers."""


def rename(directory: Path, kind: str, *, is_published: bool) -> None:
    """Give the config of a model the names that its authors gave it, if these differ."""
    if is_published:
        as_llava(directory, kind)
    if kind in _NAMES:
        file = directory / "config.json"
        name, model_type = _NAMES[kind]
        fields = json.loads(file.read_text()) | {"model_type": model_type}
        fields["architectures"] = [f"{name}ForConditionalGeneration"]
        file.write_text(json.dumps(fields))


VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "internvl_chat-h2ovl": {
        "architectures": ["H2OVLChatModel"],
        "model_type": "h2ovl_chat",
        "use_msac": True,
    },
    "internvl_chat-nvlm": {
        "architectures": ["NVLM_D_Model"],
        "model_type": "NVLM_D",
        "ps_version": "v1",
    },
    "internvl_chat-skywork": {
        "architectures": ["SkyworkR1VChatModel"],
        "model_type": "skywork_chat",
    },
}
"""The fields of models that are like InternVL in the format of its authors."""


def as_nvlm(model: Any, inner: int) -> None:
    """Give a model the projection of NVLM-D, and the order of embeddings that it has with `ps_version` v1."""
    projector, shuffle = model.model.multi_modal_projector, model.model.pixel_shuffle
    for name, sizes in (("linear_1", (-1, inner)), ("linear_2", (inner, -1))):
        old = getattr(projector, name)
        columns, rows = (
            given if given > 0 else own
            for given, own in zip(sizes, (old.in_features, old.out_features), strict=True)
        )
        setattr(projector, name, torch.nn.Linear(columns, rows, bias=False))
    model.model.pixel_shuffle = lambda *args, **named: shuffle(*args, **named).transpose(1, 2)


def as_published(directory: Path, kind: str) -> None:
    """Change an InternVL to the format of its authors, or of authors of a model that is like it."""
    config = json.loads((directory / "config.json").read_text())
    vision = config["vision_config"]
    [side], _ = {*vision.pop("image_size")}, vision.pop("model_type")
    [patch] = {*vision.pop("patch_size")}
    vision |= {"image_size": side, "patch_size": patch, "qkv_bias": vision["attention_bias"]}
    vision["qk_normalization"] = vision["use_qk_norm"]
    published = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": config["text_config"],
        "vision_config": vision,
        "downsample_ratio": config["downsample_ratio"],
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "max_dynamic_patch": 12,
        "force_image_size": side,
        "select_layer": -1,
        "ps_version": "v2",
    } | VARIANTS.get(kind, {})
    (directory / "config.json").write_text(json.dumps(published))
    tensors = load_file(directory / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "q_proj.bias")) and "vision_tower" in name:
            parts = [tensors[name.replace(".q_", f".{x}_")] for x in "qkv"]
            name, tensor = name.replace("attention.q_proj", "attn.qkv"), torch.cat(parts)
        elif re.search(r"vision_tower.*\.[kv]_proj\.", name):
            continue
        for pattern, replacement in _INTERNVL_NAMES:
            name = re.sub(pattern, replacement, name)
        stored[name] = tensor
    save_file(stored, directory / "model.safetensors")


_INTERNVL_NAMES = (
    (r".*language_model\.", "language_model."),
    (r".*multi_modal_projector\.layer_norm", "mlp1.0"),
    (r".*multi_modal_projector\.linear_1", "mlp1.1"),
    (r".*multi_modal_projector\.linear_2", "mlp1.3"),
    (r".*vision_tower\.", "vision_model."),
    (r"cls_token", "class_embedding"),
    (r"patch_embeddings\.projection", "patch_embedding"),
    (r"position_embeddings", "position_embedding"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.", ".attn."),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"lambda_", "ls"),
)
