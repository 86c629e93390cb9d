"""Tiny random Qwen-Omni and Qwen3-ASR models in the layout of Qwen's own checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

PATCH, MERGE = 4, 2
NUM_TIMES = 20
"""The number of times that the class of a token can be, in a forced aligner."""


def omni_config(
    kind: str, text: dict[str, Any], num_mel_bins: int, window_s: int, **token_ids: int
) -> Any:
    """Return the config of the part that reads. `text` has the sizes of its decoder."""
    is_third = kind == "qwen3_omni"
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": text["rope_theta"]}
    audio = {
        "num_mel_bins": num_mel_bins,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "output_dim": text["hidden_size"],
    }
    vision = {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
    }
    if is_third:
        rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        text = text | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        audio |= {"n_window_infer": 100 * window_s, "downsample_hidden_size": 6}
        vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
    else:
        audio["n_window"] = 50
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        token_ids = {name.replace("token_id", "token_index"): x for name, x in token_ids.items()}
        token_ids["audio_start_token_id"] = token_ids.pop("audio_start_token_index")
        token_ids["vision_start_token_id"] = token_ids.pop("vision_start_token_index")
    name = "Qwen3OmniMoe" if is_third else "Qwen2_5Omni"
    return getattr(transformers, f"{name}ThinkerConfig")(
        text_config=text | {"head_dim": 16, "rope_parameters": rope},
        audio_config=audio,
        vision_config=vision,
        **token_ids,
    )


def write_omni(directory: Path, kind: str) -> None:
    """Put the saved part into a whole model, and add the image processor to the file of the features' one."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({f"thinker.{name}": tensor for name, tensor in tensors.items()}, path)
    path = directory / "config.json"
    thinker = json.loads(path.read_text())
    is_third = kind == "qwen3_omni"
    name = "Qwen3OmniMoeForConditionalGeneration" if is_third else "Qwen2_5OmniModel"
    whole = {"architectures": [name], "thinker_config": thinker}
    whole["model_type"] = thinker["model_type"].removesuffix("_thinker")
    path.write_text(json.dumps(whole))
    path = directory / "preprocessor_config.json"
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | images))


def use_own_layout(directory: Path) -> None:
    """Change a Qwen3-ASR from transformers' layout to that of Qwen's own checkpoints."""
    path = directory / "model.safetensors"
    changes = (
        ("model.language_model.", "thinker.model."),
        ("model.audio_tower.", "thinker.audio_tower."),
        ("model.multi_modal_projector.linear_", "thinker.audio_tower.proj"),
        ("score.", "thinker.lm_head."),
    )
    tensors = {}
    for name, tensor in load_file(path).items():
        for old, new in changes:
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, path)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    names = ("audio_config", "text_config", "audio_token_id")
    config["thinker_config"] = {name: config.pop(name) for name in names}
    mrope = {"mrope_section": [4, 2, 2], "rope_type": "default", "rope_theta": 10_000.0}
    config["thinker_config"]["text_config"]["rope_parameters"] = mrope
    if config.pop("id2label", None):
        del config["label2id"]
        config["thinker_config"]["classify_num"] = NUM_TIMES
        config["architectures"] = ["Qwen3ASRForConditionalGeneration"]
    path.write_text(json.dumps(config))
