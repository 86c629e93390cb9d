"""A tiny FastVLM, with weights that are determined by their names.

Transformers builds the vision tower with timm, which these tests do without. So the names and shapes are those of timm
1.0.31 (`fastvit_mci3` with other `layers` and `embed_dims`).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.vision.gemma3n import named_weight

SIDE = 256
NUM_IMAGE_TOKENS = 16
DEPTHS = (1, 2, 1, 2, 1)
SIZES = (8, 16, 32, 64, 128)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def fast_vlm_directory(directory: Path) -> Path:
    """Write the model, its tokenizer and its image processor. Return the directory."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = transformers.Qwen2Config(**TEXT, vocab_size=len(tokenizer))
    config = {
        "architectures": ["FastVlmForConditionalGeneration"],
        "model_type": "fast_vlm",
        "text_config": text.to_dict(),
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "fastvit_mci3",
            "hidden_size": 2 * SIZES[-1],
            "model_args": {"inference_mode": True, "layers": DEPTHS, "embed_dims": SIZES},
        },
        "image_seq_length": NUM_IMAGE_TOKENS,
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(directory)
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": SIDE, "width": SIDE},
        "size": {"shortest_edge": SIDE},
        "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    save_file(_tensors(text), directory / "model.safetensors")
    return directory


def _tensors(text: transformers.Qwen2Config) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        decoder = transformers.Qwen2ForCausalLM(text)
    shapes = {
        name.replace("model.", "model.language_model.", 1): tuple(value.shape)
        for name, value in decoder.state_dict().items()
    }
    tower = "model.vision_tower.timm_model."
    for name, *sizes in _layers():
        shapes[f"{tower}{name}.weight"] = tuple(sizes)
        if not name.endswith((".conv", ".qkv")):
            shapes[f"{tower}{name}.bias"] = (sizes[0],)
    for name in ("running_mean", "running_var"):
        for norm in [name for name in shapes if name.endswith(".bn.weight")]:
            shapes[norm.replace("weight", name)] = shapes[norm]
    for name, size in _scales():
        shapes[f"{tower}{name}.gamma"] = (size, 1, 1)
    projector = "model.multi_modal_projector.linear"
    for number, columns in ((1, 2 * SIZES[-1]), (2, text.hidden_size)):
        shapes[f"{projector}_{number}.weight"] = (text.hidden_size, columns)
        shapes[f"{projector}_{number}.bias"] = (text.hidden_size,)
    return {name: named_weight(name, shape) for name, shape in shapes.items()}


def _layers() -> list[tuple[str | int, ...]]:
    """Return the name of each layer and the shape of its weight."""
    first, last = SIZES[0], SIZES[-1]
    layers: list[tuple[str | int, ...]] = [
        ("stem.0.reparam_conv", first, 3, 3, 3),
        ("stem.1.reparam_conv", first, 1, 3, 3),
        ("stem.2.reparam_conv", first, first, 1, 1),
        ("final_conv.reparam_conv", 2 * last, 1, 3, 3),
        ("final_conv.se.fc1", last // 8, 2 * last, 1, 1),
        ("final_conv.se.fc2", 2 * last, last // 8, 1, 1),
    ]
    for stage, (depth, size) in enumerate(zip(DEPTHS, SIZES, strict=True)):
        prefix = f"stages.{stage}."
        if stage:
            layers.append((f"{prefix}downsample.proj.0.reparam_conv", size, 1, 7, 7))
            layers.append((f"{prefix}downsample.proj.1.reparam_conv", size, size, 1, 1))
        if stage > 2:
            layers.append((f"{prefix}pos_emb.reparam_conv", size, 1, 7, 7))
        for block in (f"{prefix}blocks.{i}." for i in range(depth)):
            if stage > 2:
                layers.append((f"{block}norm", size))
                layers.append((f"{block}token_mixer.qkv", 3 * size, size))
                layers.append((f"{block}token_mixer.proj", size, size))
            else:
                layers.append((f"{block}token_mixer.reparam_conv", size, 1, 3, 3))
            layers.append((f"{block}mlp.conv.conv", size, 1, 7, 7))
            layers.append((f"{block}mlp.conv.bn", size))
            layers.append((f"{block}mlp.fc1", 4 * size, size, 1, 1))
            layers.append((f"{block}mlp.fc2", size, 4 * size, 1, 1))
    return layers


def _scales() -> list[tuple[str, int]]:
    scales = []
    for stage, (depth, size) in enumerate(zip(DEPTHS, SIZES, strict=True)):
        names = ("layer_scale_1", "layer_scale_2") if stage > 2 else ("layer_scale",)
        scales += [
            (f"stages.{stage}.blocks.{i}.{name}", size) for i in range(depth) for name in names
        ]
    return scales
