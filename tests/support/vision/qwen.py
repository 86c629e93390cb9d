"""Tiny random models of the Qwen-VL families, as files on disk, with a real tokenizer and image processor."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.families.indexers import HY4
from support.families.recurrent import GROUPED_KEYS, NGRAMS, QWEN4
from support.own_code.intern import become_interns1_pro, become_interns2_mobius

IMAGE_MODELS = ("paddleocr_vl", "hunyuan_vl", "glm5_next", "ernie4_5_vl_moe", "cosmos3_edge")
"""Models that read no videos."""
QWEN_MODELS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "cohere_compass",
    "cosmos3_omni",
    "lfm3_vl",
    "qwen4_exp",
    "hy_v4_vl",
    "interns1_pro",
    "interns2_mobius",
)
GLM_MODELS = ("glm4v", "glm46v", "glm4v_moe", "glm_ocr")
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
START, END = "<|vision_start|>", "<|vision_end|>"
PATCH, MERGE, FRAMES = 4, 2, 2
UNIT = PATCH * MERGE
TOKENS_PER_SECOND = 2

_PART = (
    "{% if p.type == 'text' %}{{ p.text }}{% else %}"
    f"{START}{{% if p.type == 'video' %}}{VIDEO}{{% else %}}{IMAGE}{{% endif %}}{END}"
    "{% endif %}"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}" + _PART + "{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}
_VISION = {
    "depth": 4,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_DELTA_NET = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_VISION_BY_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "out_hidden_size": 64,
        # Two outputs in each direction.
        "window_size": 2 * UNIT,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": TOKENS_PER_SECOND,
    },
    "qwen3_vl": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2, 1],
    },
    "qwen3_5": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
    },
}
_VISION_BY_FAMILY["interns1_pro"] = _VISION_BY_FAMILY["qwen3_vl"] | {"deepstack_visual_indexes": []}
_VISION_BY_FAMILY["interns2_mobius"] = _VISION_BY_FAMILY["qwen3_5"]
_VISION_BY_FAMILY["cohere_compass"] = _VISION_BY_FAMILY["qwen3_vl"]
_VISION_BY_FAMILY["cosmos3_omni"] = _VISION_BY_FAMILY["qwen3_vl"]
_VISION_BY_FAMILY["cosmos3_edge"] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_patches": 36,
}
_VISION_BY_FAMILY["glm4v"] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    # A table of nine positions in each direction.
    "image_size": 9 * PATCH,
}
_VISION_BY_FAMILY["glm46v"] = _VISION_BY_FAMILY["glm4v"]
_VISION_BY_FAMILY["glm_ocr"] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "out_hidden_size": 64,
}
_VISION_BY_FAMILY["paddleocr_vl"] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 9 * PATCH,
}
_VISION_BY_FAMILY["hunyuan_vl"] = _VISION_BY_FAMILY["paddleocr_vl"] | {"max_image_size": 36}
_VISION_BY_FAMILY["glm5_next"] = _VISION_BY_FAMILY["glm_ocr"] | {
    "projection_intermediate_size": 40,
    "swiglu_limit": 0.5,
}
_VISION_BY_FAMILY["ernie4_5_vl"] = {"hidden_size": 48, "intermediate_size": 80}
_VISION_BY_FAMILY["lfm3_vl"] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "conv", "full_attention", "full_attention", "conv", "full_attention"],
}
_VISION_BY_FAMILY["hy_v4_vl"] = _VISION_BY_FAMILY["hunyuan_vl"] | {"out_hidden_size": 64}
_VISION_BY_FAMILY["qwen4_exp"] = _VISION_BY_FAMILY["qwen3_5"]
_NAMES = {
    "interns1_pro": "Qwen3VLMoe",
    "interns2_mobius": "Qwen3_5Moe",
    "qwen4_exp": "Qwen4Exp",
    "hy_v4_vl": "HYV4VL",
    "lfm3_vl": "Lfm3Vl",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
    "glm5_next": "Glm5Next",
    "hunyuan_vl": "HunYuanVL",
    "cohere_compass": "CohereCompass",
    "cosmos3_edge": "Cosmos3Edge",
    "cosmos3_omni": "Cosmos3Omni",
    "paddleocr_vl": "PaddleOCRVL",
    "glm_ocr": "GlmOcr",
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "glm4v": "Glm4v",
    "glm46v": "Glm46V",
    "glm4v_moe": "Glm4vMoe",
}


def _split_parts(directory: Path) -> None:
    """Put the weights of a Cosmos 3 into the folders of its decoder and its tower, as NVIDIA publishes them."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["Cosmos3ForConditionalGeneration"]
    (directory / "config.json").write_text(json.dumps(config))
    is_text = re.compile(r"(layers|embed_tokens|norm|lm_head)\.")
    for folder, belongs in (("transformer", True), ("vision_encoder", False)):
        (directory / folder).mkdir()
        part = {name: x for name, x in tensors.items() if bool(is_text.match(name)) is belongs}
        assert part
        save_file(part, directory / folder / "model.safetensors")


def qwen_directory(
    directory: Path, kind: str, tower: Mapping[str, Any] | None = None
) -> tuple[Path, Any]:
    """Write a model of one of `QWEN_MODELS` or `GLM_MODELS`. Return its directory and transformers' model.

    `tower` replaces fields of its vision_config.
    """
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, VIDEO, START, END]})
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    is_sectioned = kind.startswith(("qwen2", "glm", "paddle"))
    # Half of a head has 8 frequencies.
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3] if is_sectioned else [4, 2, 2]}
    rope["rope_theta"] = _TEXT["rope_theta"]
    text = _TEXT | ids | {"vocab_size": len(tokenizer), "rope_parameters": rope}
    if kind == "cohere_compass":
        kinds = ["sliding_attention", "full_attention"]
        text |= {"layer_types": kinds * 2, "sliding_window": 9, "logit_scale": 0.5}
        text["rope_parameters"] = {"sliding_attention": rope, "full_attention": None}
    if kind.endswith("_moe") or kind.startswith("interns"):
        text |= _MIXTURE
    if kind == "lfm3_vl":
        text |= {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
        del text["rope_parameters"], text["head_dim"]
    if kind == "ernie4_5_vl_moe":
        rope["mrope_section"] = [3, 3, 2]
        text |= {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": [48, 32]}
    if kind.startswith(("qwen3_5", "interns2")):
        text |= _DELTA_NET | {"shared_expert_intermediate_size": 48}
        rope["partial_rotary_factor"] = 1.0
    if kind == "qwen4_exp":
        # Half of a rotated key has 4 frequencies.
        rope |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
        text |= QWEN4 | NGRAMS | {"rope_parameters": rope, "indexer_head_dim": 8}
        # With fewer heads, several blocks of an image would have a score of 0.
        text["indexer_n_heads"] = 32
        text["layer_types"] = ["linear_attention", "full_attention"] * 2
    if kind in GLM_MODELS:
        rope["partial_rotary_factor"] = 1.0
        text |= {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
        if kind == "glm46v":
            text["model_type"] = "glm4v_text"
    if kind == "hunyuan_vl":
        rope |= {"rope_type": "dynamic", "factor": 1.0, "alpha": 10.0} | {
            "mrope_section": [2, 1, 2, 3]
        }
    if kind == "hy_v4_vl":
        # Half of a rotated key has 4 frequencies.
        rope["mrope_section"] = [2, 1, 1]
        text |= HY4 | {"num_hidden_layers": 3, "num_key_value_heads": 4}
        text |= {"rms_norm_eps": 1e-4}
    if kind == "glm5_next":
        text |= GROUPED_KEYS | {"num_key_value_heads": 4}
        del text["rope_parameters"], text["head_dim"]
    vision = _VISION | _VISION_BY_FAMILY[kind.removesuffix("_moe")] | dict(tower or {})
    tokens = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image", IMAGE),
            ("video", VIDEO),
            ("vision_start", START),
            ("vision_end", END),
        )
    }
    if kind in (*GLM_MODELS, "ernie4_5_vl_moe"):
        tokens["image_start_token_id"] = tokens["vision_start_token_id"]
        tokens["image_end_token_id"] = tokens["vision_end_token_id"]
    config = getattr(transformers, f"{_NAMES[kind]}Config")(
        vision_config=vision,
        text_config=text,
        tie_word_embeddings=kind == "lfm3_vl",
        **tokens,
        **ids,
    )
    model = getattr(transformers, f"{_NAMES[kind]}ForConditionalGeneration")(config)
    model = model.float().eval()
    if kind == "hunyuan_vl":
        rotary = model.model.language_model.rotary_emb
        rotary.recomposition_frequencies = partial(_by_section, rotary.mrope_section)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    model.save_pretrained(directory)
    if kind == "cosmos3_omni":
        _split_parts(directory)
    if kind == "interns1_pro":
        become_interns1_pro(directory, model)
    if kind == "interns2_mobius":
        become_interns2_mobius(directory, model)
    tokenizer.save_pretrained(directory)
    processor = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Glm4vImageProcessor"
        if kind in GLM_MODELS
        else "Qwen2VLImageProcessor",
        "patch_size": vision["patch_size"],
        "merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "min_pixels": 4 * UNIT**2,
        "max_pixels": 100 * UNIT**2,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    if kind == "glm5_next":
        processor |= {"image_processor_type": "Glm5NextImageProcessor"}
        processor |= {"min_image_tokens": 8, "max_image_tokens": 100}
        del processor["min_pixels"], processor["max_pixels"]
    if kind in ("hunyuan_vl", "hy_v4_vl"):
        processor |= {"image_processor_type": "HunYuanVLImageProcessor", "temporal_patch_size": 1}
        # The filter of the file is ignored.
        processor["resample"] = 1
    if kind == "ernie4_5_vl_moe":
        name = "Ernie4_5_VLMoeImageProcessor"
        processor |= {"image_processor_type": name, "temporal_patch_size": 1}
    if kind == "paddleocr_vl":
        processor |= {"image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1}
    if kind == "cosmos3_edge":
        name = "Cosmos3EdgeImageProcessor"
        processor |= {"image_processor_type": name, "temporal_patch_size": 1}
    if kind in (*GLM_MODELS, "ernie4_5_vl_moe", "cosmos3_edge"):
        del processor["min_pixels"], processor["max_pixels"]
        processor["size"] = {"shortest_edge": 8 * UNIT**2, "longest_edge": 200 * UNIT**2}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    if kind == "hy_v4_vl":
        # Five frames of 40 x 24 pixels are shrunk.
        processor |= {"size": {"shortest_edge": UNIT**2, "longest_edge": 60 * UNIT**2}}
        del processor["min_pixels"], processor["max_pixels"]
        (directory / "video_preprocessor_config.json").write_text(json.dumps(processor))
    return directory, model


def _by_section(sections: list[int], freq: torch.Tensor) -> torch.Tensor:
    """Return the cosines or sines [T, K] of frequencies for each of four axes, [4, T, K / 2].

    Transformers 5.24 splits both halves of a head together. Then the halves of a rotated pair have different angles,
    unlike in the code that was published with Hunyuan-OCR.
    """
    parts = freq.split(sections, dim=-1)
    return torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1).repeat(1, 1, 2)


def qwen_image_processor(path: Path) -> Any:
    """Return transformers' image processor with Pillow for a directory that `qwen_directory` wrote."""
    fields = json.loads((path / "preprocessor_config.json").read_text())
    name = fields.pop("image_processor_type")
    families = {
        "Cosmos3EdgeImageProcessor": "cosmos3_edge",
        "Ernie4_5_VLMoeImageProcessor": "ernie4_5_vl_moe",
        "Glm4vImageProcessor": "glm4v",
        "Glm5NextImageProcessor": "glm5_next",
        "HunYuanVLImageProcessor": "hunyuan_vl",
        "PaddleOCRVLImageProcessor": "paddleocr_vl",
    }
    family = families.get(name, "qwen2_vl")
    module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    return getattr(module, f"{name}Pil")(**fields)


def rotary_positions(config: Any, tokens: list[int], grids: list[tuple[int, int, int]]) -> Any:
    """Return the positions int64 [3, 1, T] of a prompt, as the papers of Qwen-VL define them.

    An image or a frame begins at the position after all earlier positions; the next token follows its last position.
    Consecutive frames of a video begin at the same position, and are some time steps apart.

    Args:
        config: The config of transformers' model.
        tokens: The prompt.
        grids: The rows and columns of outputs of each image and each run of frames, and the frames in it.
    """
    # The frames in these tests are a second apart.
    step = getattr(config.vision_config, "tokens_per_second", 0) * FRAMES or 1
    media = {config.image_token_id, config.video_token_id}
    positions: list[tuple[int, int, int]] = []
    following, remaining = 0, iter(grids)
    while len(positions) < len(tokens):
        if tokens[len(positions)] not in media:
            positions.append((following,) * 3)
            following += 1
            continue
        frames, rows, columns = next(remaining)
        positions += [
            (following + frame * step, following + row, following + column)
            for frame in range(frames)
            for row in range(rows)
            for column in range(columns)
        ]
        following = max(map(max, positions)) + 1
    return torch.from_numpy(np.array(positions).T[:, None].copy())


def video_patches(frames: list[Image.Image], mean: Any, std: Any) -> torch.Tensor:
    """Return the patches of resized frames, as transformers' video processors make them; they need torchvision."""
    pixels = np.stack([np.asarray(frame) for frame in frames])
    pixels = np.concatenate((pixels, pixels[-1:].repeat(-len(pixels) % FRAMES, 0)))
    scaled = (pixels.astype(np.float64) / 255).astype(np.float32)
    video = ((scaled - np.float32(mean)) / np.float32(std)).transpose(0, 3, 1, 2)
    height, width = video.shape[2:]
    cells = video.reshape(-1, FRAMES, 3, height // UNIT, MERGE, PATCH, width // UNIT, MERGE, PATCH)
    patches = cells.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * FRAMES * PATCH**2)
    return torch.from_numpy(patches.copy())
