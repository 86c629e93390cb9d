"""Translate the metadata of towers in mmproj files that merge squares of patches of images of any size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ....errors import CheckpointError
from .fields import Mmproj, Vision


def _kimi(vision: Vision, family: str, name: str, processor: Mapping[str, Any]) -> Mmproj:
    """Return the fields of a Kimi with the tower MoonViT."""
    side = _kimi_side(vision)
    return Mmproj(
        {
            "model_type": family,
            "architectures": [f"{name}ForConditionalGeneration"],
            "vision_config": vision.sizes()
            | {
                "patch_size": vision.patch_size,
                "merge_kernel_size": [vision.merge_size] * 2,
                "pos_emb_height": side,
                "pos_emb_width": side,
            },
            "projection_layer_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-5),
            "image_token_id": vision.token_id("<|media_pad|>"),
        },
        {"patch_size": vision.patch_size, **processor, **vision.statistics()},
    )


def _kimi_side(vision: Vision) -> int:
    """Return the side of the square table of positions, which Kimi-VL's files store with two dimensions."""
    table = vision.gguf.tensors.get("v.position_embd.weight")
    if table is None or len(table.shape) not in (2, 3):
        raise CheckpointError(vision.path, "there is no table of positions")
    return table.shape[0] if len(table.shape) == 3 else math.isqrt(table.shape[0])


def kimi_vl(vision: Vision) -> Mmproj:
    """Return the fields of Kimi-VL."""
    # The file has no limit. This one is its author's.
    merged = [vision.merge_size] * 2
    processor = {"merge_kernel_size": merged, "pad_input": True, "in_token_limit": 4096}
    return _kimi(vision, "kimi_vl", "KimiVL", processor)


def kimi_k25(vision: Vision) -> Mmproj:
    """Return the fields of Kimi K2.5."""
    area = vision.patch_size**2
    most = vision.integer("image_max_pixels", 16384 * area)
    processor = {"merge_size": vision.merge_size, "max_patches": most // area}
    return _kimi(vision, "kimi_k25", "KimiK25", processor)


def dots_ocr(vision: Vision) -> Mmproj:
    """Return the fields of dots.ocr."""
    size = vision.integer("embedding_length")
    return Mmproj(
        {
            "model_type": "dots_ocr",
            "architectures": ["DotsOCRForCausalLM"],
            "vision_config": {
                "embed_dim": size,
                "hidden_size": vision.num_rows("mm.2.weight"),
                "intermediate_size": vision.integer("feed_forward_length"),
                "num_hidden_layers": vision.layer_count("block_count"),
                "num_attention_heads": vision.integer("attention.head_count"),
                "patch_size": vision.patch_size,
                "spatial_merge_size": vision.merge_size,
                "rms_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-5),
            },
            "image_token_id": vision.token_id("<|imgpad|>"),
        },
        {
            "min_pixels": 56 * 56,
            "max_pixels": 28 * 28 * 14400,
            **vision.merged_pixels(temporal_patch_size=1),
        },
    )


def dots3_note(vision: Vision) -> Mmproj:
    """Return the fields of dots3-note, whose file has the experts of a layer in one tensor."""
    found = dots_ocr(vision)
    tower = found.config["vision_config"]
    layers = [f"v.blk.{i}" for i in range(tower["num_hidden_layers"])]
    with_experts = [each for each in layers if vision.has_tensor(f"{each}.ffn_gate_inp.weight")]
    own = {
        "adapter_type": "patch_merger",
        "adapter_out_dim": tower["hidden_size"],
        "pre_pixel_shuffle": True,
        "pyramid_num_routed": [
            vision.num_rows(f"{each}.ffn_gate_inp.weight") if each in with_experts else 0
            for each in layers
        ],
        "capacity_factor": vision.integer("expert_used_count", 2),
    }
    if with_experts:
        experts = f"{with_experts[0]}.ffn_gate_exps.weight"
        own["moe_intermediate_size"] = vision.num_rows_of_each(experts)
    config = {
        "model_type": "dots3_note",
        "architectures": ["Dots3NoteForConditionalGeneration"],
        "vision_config": tower | own,
    }
    return found._replace(config=found.config | config)


def hunyuan_vl(vision: Vision) -> Mmproj:
    """Return the fields of Hunyuan-OCR."""
    side = math.isqrt(vision.num_rows("v.position_embd.weight"))
    return Mmproj(
        {
            "model_type": "hunyuan_vl",
            "architectures": ["HunYuanVLForConditionalGeneration"],
            "vision_config": vision.sizes()
            | {
                "patch_size": vision.patch_size,
                # The file's size is that of the largest image. Positions are those of a smaller one.
                "max_image_size": side * vision.patch_size,
                "spatial_merge_size": vision.merge_size,
                "rms_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-5),
                "hidden_act": vision.activation("gelu"),
            },
            "image_token_id": vision.token_id("<｜hy_place▁holder▁no▁102｜>"),
        },
        vision.merged_pixels(temporal_patch_size=1),
    )


def minimax_m3(vision: Vision) -> Mmproj:
    """Return the fields of MiniMax M3."""
    return Mmproj(
        {
            "model_type": "minimax_m3_vl",
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "vision_config": vision.sizes()
            | {
                "patch_size": vision.patch_size,
                "spatial_merge_size": vision.merge_size,
                "temporal_patch_size": 2,
                "layer_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-5),
                "hidden_act": vision.activation("gelu"),
            },
            "projector_hidden_size": vision.num_rows("mm.1.weight"),
            "image_token_id": vision.token_id("]<]image[>["),
        },
        vision.merged_pixels(temporal_patch_size=2),
    )


def muse_glimmer(vision: Vision) -> Mmproj:
    """Return the fields of Muse Glimmer. Its converter sums the weights of the two frames of an image."""
    side = math.isqrt(vision.num_rows("v.position_embd.weight"))
    return Mmproj(
        {
            "model_type": "muse_glimmer",
            "architectures": ["MuseGlimmerForConditionalGeneration"],
            "vision_config": vision.sizes()
            | {
                "patch_size": vision.patch_size,
                "merge_size": vision.merge_size,
                "patch_temporal": 1,
                "pos_emb_height": side,
                "pos_emb_width": side,
                "layer_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-5),
            },
            "projector_hidden_size": vision.num_rows("mm.0.weight"),
            "image_token_id": vision.token_id("<|patch|>"),
        },
        vision.merged_pixels(temporal_patch_size=1),
    )


def step3(vision: Vision) -> Mmproj:
    """Return the fields of Step 3.7 or Step3-VL 10B."""
    side = vision.integer("image_size")
    size = vision.integer("embedding_length")
    # Both have the same tower, with another decoder.
    is_10b = vision.decoder_architecture.startswith("qwen3")
    names = ("step3_vl", "StepVL") if is_10b else ("step3p7", "Step3p7")
    return Mmproj(
        {
            "model_type": names[0],
            "architectures": [f"{names[1]}ForConditionalGeneration"],
            "vision_config": vision.sizes()
            | {
                "patch_size": vision.patch_size,
                "image_size": side,
                "mlp_ratio": vision.num_rows("v.blk.0.ffn_up.weight") / size,
                "layer_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-5),
            },
            "projector_bias": vision.has_tensor("mm.model.fc.bias"),
            "image_token_id": vision.token_id("<im_patch>"),
        },
        {
            "size": {"height": side, "width": side},
            "patch_size": 504,
            "max_image_size": vision.integer("preproc_image_size", 3024),
            **vision.statistics(),
        },
    )


def phi4(vision: Vision) -> Mmproj:
    """Return the fields of Phi-4-reasoning-vision."""
    return Mmproj(
        {
            "model_type": "phi4_siglip",
            "architectures": ["Phi4SiglipForCausalLM"],
            "vision_config": vision.tower("gelu_pytorch_tanh")
            | {"num_patches": vision.num_rows("v.position_embd.weight")},
            "projector_hidden_size": vision.num_rows("mm.0.weight"),
            # No token of the decoder stands for images. This one does not occur in texts.
            "image_token_id": vision.token_id("<|dummy_0|>", "<|fim_prefix|>", "<|endoftext|>"),
        },
        vision.merged_pixels(temporal_patch_size=1) | {"merge_size": 1, "resample": _BILINEAR},
    )


def youtu_vl(vision: Vision) -> Mmproj:
    """Return the fields of Youtu-VL."""
    tower = vision.tower("gelu_pytorch_tanh")
    return Mmproj(
        {
            "model_type": "youtu_vl",
            "architectures": ["YoutuVLForConditionalGeneration"],
            "vision_config": tower
            | {
                "out_hidden_size": vision.num_rows("mm.2.weight"),
                "spatial_merge_size": vision.merge_size,
                "window_size": vision.integer("window_size"),
                "fullatt_block_indexes": vision.integers("wa_layer_indexes"),
            },
            "image_token_id": vision.token_id("<|image_pad|>"),
        },
        {"patch_size": vision.patch_size, **vision.statistics()},
    )


_BILINEAR = 2


def nemotron(vision: Vision) -> Mmproj:
    """Return the fields of Nemotron Nano VL 2. The converter stores the positions for the size of a tile."""
    ratio = 1 / vision.merge_size
    size = vision.integer("embedding_length")
    return Mmproj(
        {
            "model_type": "NemotronH_Nano_VL_V2",
            "architectures": ["NemotronH_Omni_Reasoning_V3"],
            "vision_config": vision.sizes()
            | {
                "patch_size": vision.patch_size,
                "max_img_size": vision.integer("image_size"),
                "mlp_ratio": vision.integer("feed_forward_length") / size,
                "layer_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-6),
            },
            "downsample_ratio": ratio,
            "projector_hidden_size": vision.num_rows("mm.model.mlp.1.weight"),
            "image_token_id": vision.token_id("<image>"),
        },
        {"image_size": vision.integer("image_size"), "use_thumbnail": True, **vision.statistics()},
    )
