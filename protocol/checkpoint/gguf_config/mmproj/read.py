"""Translate the metadata of an mmproj file, which holds the towers of a GGUF model, to Hugging Face's fields.

llama.cpp's converter writes such files. Their architecture is "clip".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

from ....errors import CheckpointError
from ...gguf import GGUFFile
from ...vision.tiled.minicpm import NUM_QUERIES_2_5
from .audio import AUDIO_KINDS, BESIDE_IMAGES
from .fields import Audio, Mmproj, Vision
from .grid import deepseek_ocr, deepseek_ocr2, glm4v, glm5v, paddleocr
from .merged import (
    dots3_note,
    dots_ocr,
    hunyuan_vl,
    kimi_k25,
    kimi_vl,
    minimax_m3,
    muse_glimmer,
    nemotron,
    phi4,
    step3,
    youtu_vl,
)
from .qwen import exaone4_5, ling3_vl, mimo_vl, qwen2_5_vl, qwen2_vl, qwen3_vl
from .squares import gemma3n, granite4_vision, janus, minicpmv4_6


def read_mmproj(gguf: GGUFFile, decoder: GGUFFile, text: Mapping[str, Any]) -> Mmproj:
    """Return the config and the image processor that an mmproj file describes.

    Args:
        gguf: The mmproj file.
        decoder: The model's own file.
        text: The config of the decoder.

    Raises:
        CheckpointError: It is not an mmproj file, its kind is not supported, or it does not fit the decoder.
    """
    metadata = gguf.metadata
    if metadata.get("general.architecture") != "clip":
        raise CheckpointError(
            gguf.path, "not an mmproj file; its general.architecture is not 'clip'"
        )
    seen, heard = _projectors(metadata)
    readers = AUDIO_KINDS if seen is None else BESIDE_IMAGES
    if heard not in readers if seen is None else seen not in _KINDS:
        supported = sorted({*_KINDS, *AUDIO_KINDS, *BESIDE_IMAGES})
        raise CheckpointError(
            gguf.path,
            f"the projector type must be one of {', '.join(supported)}, "
            f"got {heard if seen is None else seen!r}",
        )
    found = Mmproj({})
    if seen is not None:
        found = _KINDS[seen](Vision(gguf, decoder))
        found.config["num_channels"] = 3
    # An audio tower of another type beside a vision tower is not read.
    if heard in readers:
        audio = readers[heard](Audio(gguf, decoder))
        config = found.config | audio.config
        found = found._replace(config=config, around_clip=audio.around_clip)
    return found._replace(config={"text_config": dict(text), **found.config})


def _projectors(metadata: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the types of the projectors of images and of audio clips."""
    names = ("clip.vision.projector_type", "clip.audio.projector_type", "clip.projector_type")
    values = (metadata.get(name) for name in names)
    seen, heard, kind = (None if value is None else str(value) for value in values)
    if seen is not None or heard is not None or kind is None:
        return seen, heard
    if kind == "qwen2.5o":
        return "qwen2.5vl_merger", "qwen2a"
    return (None, kind) if kind in AUDIO_KINDS else (kind, None)


def _idefics3(vision: Vision) -> Mmproj:
    side = vision.integer("image_size")
    longest = vision.integer("preproc_image_size", 4 * side)
    return Mmproj(
        {
            "model_type": "idefics3",
            "architectures": ["Idefics3ForConditionalGeneration"],
            "vision_config": vision.tower("gelu_pytorch_tanh"),
            "scale_factor": vision.integer("projector.scale_factor"),
            "image_token_id": vision.token_id("<image>"),
        },
        vision.pixels({"longest_edge": longest}) | {"max_image_size": {"longest_edge": side}},
    )


def _internvl(vision: Vision) -> Mmproj:
    side = vision.integer("image_size")
    own = {
        "norm_type": "layer_norm" if vision.has_tensor("v.blk.0.ln1.bias") else "rms_norm",
        "use_qk_norm": vision.has_tensor("v.blk.0.attn_q_norm.weight"),
        "attention_bias": vision.has_tensor("v.blk.0.attn_q.bias"),
        "use_mean_pooling": not vision.has_tensor("v.post_ln.weight"),
    }
    return Mmproj(
        {
            "model_type": "internvl",
            "architectures": ["InternVLForConditionalGeneration"],
            "vision_config": vision.tower("gelu") | own,
            "downsample_ratio": 1 / vision.integer("projector.scale_factor"),
            "image_token_id": vision.token_id("<IMG_CONTEXT>"),
        },
        vision.pixels({"height": side, "width": side}),
    )


def _gemma3(vision: Vision) -> Mmproj:
    side, factor = vision.integer("image_size"), vision.integer("projector.scale_factor", 4)
    tower = vision.tower("gelu_pytorch_tanh")
    return Mmproj(
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "vision_config": tower,
            "mm_tokens_per_image": (side // tower["patch_size"] // factor) ** 2,
            "image_token_index": vision.token_id("<image_soft_token>"),
        },
        vision.pixels({"height": side, "width": side}),
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    )


def _gemma4(vision: Vision) -> Mmproj:
    num_heads = vision.integer("attention.head_count")
    config = {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "vision_config": {
            "hidden_size": vision.integer("embedding_length"),
            "intermediate_size": vision.integer("feed_forward_length"),
            "num_hidden_layers": vision.layer_count("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": vision.num_rows("v.blk.0.attn_q.weight") // num_heads,
            "patch_size": vision.patch_size,
            "rms_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-6),
            "pooling_kernel_size": vision.integer("projector.scale_factor", 3),
            "position_embedding_size": _num_positions(vision),
            "standardize": vision.has_tensor("v.std_bias"),
            "use_clipped_linears": vision.has_tensor("v.blk.0.attn_q.input_max"),
        },
        "image_token_id": vision.token_id("<|image|>"),
    }
    if not vision.has_layer_inputs:
        # The file does not say so, but the tokens of an image see each other in all larger models.
        config["use_bidirectional_attention"] = "vision"
    return Mmproj(config, {}, _GEMMA4_TOKENS)


def _gemma4_unified(vision: Vision) -> Mmproj:
    config = {
        "model_type": "gemma4_unified",
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "vision_config": {
            "patch_size": vision.patch_size,
            "pooling_kernel_size": vision.integer("projector.scale_factor", 3),
            "mm_embed_dim": vision.integer("embedding_length"),
            "mm_posemb_size": _num_positions(vision),
            "rms_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-6),
        },
        "image_token_id": vision.token_id("<|image|>"),
    }
    return Mmproj(config, {}, _GEMMA4_TOKENS)


def _num_positions(vision: Vision) -> int:
    """Return the number of positions in each direction of a Gemma 4."""
    table = vision.gguf.tensors.get("v.position_embd.weight")
    if table is None or len(table.shape) != 3:
        raise CheckpointError(vision.path, "there is no table of positions with three dimensions")
    return table.shape[1]


_GEMMA4_TOKENS: Final = {"boi_token": "<|image>", "eoi_token": "<image|>"}


def _minicpmv(vision: Vision) -> Mmproj:
    version = vision.gguf.metadata.get("clip.minicpmv_version", 2)
    if version not in _MINICPM_VERSIONS:
        raise CheckpointError(
            vision.path,
            f"the version {version!r} of MiniCPM-V is not supported; supported are {_MINICPM_VERSIONS} (2.5 and later)",
        )
    num_queries = vision.num_rows("resampler.query")
    is_2_5 = version == _MINICPM_VERSIONS[0]
    if is_2_5 and num_queries != NUM_QUERIES_2_5:
        raise CheckpointError(
            vision.path,
            f"the file has {num_queries} queries, as MiniCPM-V 2.0, whose images differ; use version 2.5 or later",
        )
    tower = vision.tower("gelu_pytorch_tanh")
    patch_size, side = tower["patch_size"], tower["image_size"]
    # The file's size is that of slices. Positions are those of a larger image.
    tower["image_size"] = math.isqrt(vision.num_rows("v.position_embd.weight")) * patch_size
    token_id = vision.token_id("<unk>")
    return Mmproj(
        {
            "model_type": "minicpmv",
            "architectures": ["MiniCPMV"],
            # Versions later than 2.6 differ from it in the decoder only.
            "version": 2.5 if is_2_5 else 2.6,
            "vision_config": tower,
            "query_num": num_queries,
            "image_token_id": token_id,
        },
        {
            "scale_resolution": side,
            "patch_size": patch_size,
            "use_image_id": not is_2_5,
            **{f"norm_{name.removeprefix('image_')}": x for name, x in vision.statistics().items()},
        },
    )


_MINICPM_VERSIONS: Final = (2, 3, 4, 5, 6, 100_045)
"""MiniCPM-V 2.5, MiniCPM-V 2.6, MiniCPM-o 2.6, MiniCPM-V 4, MiniCPM-V 4.5 or MiniCPM-o 4, and MiniCPM-o 4.5."""


def _pixtral(vision: Vision) -> Mmproj:
    merges = vision.has_tensor("mm.patch_merger.weight")
    name = "Mistral3" if merges else "Llava"
    config = {
        "model_type": name.lower(),
        "architectures": [f"{name}ForConditionalGeneration"],
        "vision_config": vision.tower("gelu") | {"model_type": "pixtral"},
        "multimodal_projector_bias": vision.has_tensor("mm.1.bias"),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_token_index": vision.token_id("[IMG]"),
    }
    if merges:
        config["spatial_merge_size"] = vision.merge_size
    return Mmproj(config, vision.pixels({"longest_edge": vision.integer("image_size")}))


def _lighton_ocr(vision: Vision) -> Mmproj:
    merge_size = vision.merge_size
    config = {
        "model_type": "lighton_ocr",
        "architectures": ["LightOnOcrForConditionalGeneration"],
        "vision_config": vision.tower("gelu") | {"model_type": "pixtral"},
        "multimodal_projector_bias": vision.has_tensor("mm.1.bias"),
        "spatial_merge_size": merge_size,
        "image_token_id": vision.token_id("<|image_pad|>"),
    }
    pixels = vision.pixels({"longest_edge": vision.integer("image_size")})
    return Mmproj(config, pixels | {"patch_size": merge_size * vision.patch_size})


def _llama4(vision: Vision) -> Mmproj:
    side = vision.integer("image_size")
    adapter_size = vision.num_rows("mm.model.mlp.2.weight")
    return Mmproj(
        {
            "model_type": "llama4",
            "architectures": ["Llama4ForConditionalGeneration"],
            "vision_config": vision.tower("gelu")
            | {
                "pixel_shuffle_ratio": 1 / vision.integer("projector.scale_factor", 2),
                "projector_input_dim": adapter_size,
                "projector_output_dim": adapter_size,
                "vision_output_dim": adapter_size,
            },
            "image_token_id": vision.token_id("<|patch|>"),
        },
        vision.pixels({"height": side, "width": side}),
    )


def _lfm2(vision: Vision) -> Mmproj:
    factor = vision.integer("projector.scale_factor", 2)
    return Mmproj(
        {
            "model_type": "lfm2_vl",
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "vision_config": vision.tower("gelu_pytorch_tanh")
            | {"num_patches": vision.num_rows("v.position_embd.weight")},
            "downsample_factor": factor,
            "projector_hidden_size": vision.num_rows("mm.1.weight"),
            "projector_use_layernorm": vision.has_tensor("mm.input_norm.weight"),
            "projector_bias": vision.has_tensor("mm.1.bias"),
            "image_token_id": vision.token_id("<image>"),
        },
        {
            "downsample_factor": factor,
            "encoder_patch_size": vision.patch_size,
            **vision.statistics(),
        },
    )


def _llava(vision: Vision) -> Mmproj:
    side = vision.integer("image_size")
    tower = vision.tower("gelu_pytorch_tanh")
    is_clip = vision.has_tensor("v.class_embd")
    return Mmproj(
        {
            "model_type": "llava",
            "architectures": ["LlavaForConditionalGeneration"],
            "vision_config": tower
            | {"model_type": "clip_vision_model" if is_clip else "siglip_vision_model"},
            "multimodal_projector_bias": vision.has_tensor("mm.0.bias"),
            # The file omits the layers after the one whose outputs are the features.
            "vision_feature_layer": tower["num_hidden_layers"],
            "vision_feature_select_strategy": "default" if is_clip else "full",
            # The vocabularies of older models have no token for images. This one does not occur in texts.
            "image_token_index": vision.token_id("<image>", "<unk>"),
        },
        vision.pixels({"height": side, "width": side}),
    )


def _glm_edge(vision: Vision) -> Mmproj:
    side = vision.integer("image_size")
    return Mmproj(
        {
            "model_type": "glm_edge_v",
            "architectures": ["GlmEdgeForConditionalGeneration"],
            "vision_config": vision.tower("gelu_pytorch_tanh"),
            "projector_intermediate_size": vision.num_rows("adapter.linear.gate.weight"),
            "image_token_id": vision.token_id("<|begin_of_image|>"),
        },
        vision.pixels({"height": side, "width": side}),
    )


def _mobilevlm(vision: Vision, projector: str) -> Mmproj:
    found = _llava(vision)
    own = {
        "model_type": "mobilevlm",
        "architectures": ["MobileLlamaForCausalLM"],
        "mm_projector_type": projector,
    }
    return found._replace(config=found.config | own)


_Reader: TypeAlias = Callable[[Vision], Mmproj]

_KINDS: Final[dict[str, _Reader]] = {
    "adapter": _glm_edge,
    "deepseekocr": deepseek_ocr,
    "deepseekocr2": deepseek_ocr2,
    "dots3note_v": dots3_note,
    "dots_ocr": dots_ocr,
    "exaone4_5": exaone4_5,
    "gemma3": _gemma3,
    "gemma3nv": gemma3n,
    "gemma4uv": _gemma4_unified,
    "gemma4v": _gemma4,
    "glm4v": glm4v,
    "glm5v": glm5v,
    "granite4_vision": granite4_vision,
    "hunyuanvl": hunyuan_vl,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "janus_pro": janus,
    "kimik25": kimi_k25,
    "kimivl": kimi_vl,
    "ldp": partial(_mobilevlm, projector="ldpnet"),
    "ldpv2": partial(_mobilevlm, projector="ldpnetv2"),
    "lfm2": _lfm2,
    "lightonocr": _lighton_ocr,
    "ling3vl": ling3_vl,
    "llama4": _llama4,
    "mimovl": mimo_vl,
    "minicpmv4_6": minicpmv4_6,
    "minimax_m3": minimax_m3,
    "mlp": _llava,
    "muse-glimmer": muse_glimmer,
    "nemotron_v2_vl": nemotron,
    "paddleocr": paddleocr,
    "phi4": phi4,
    "pixtral": _pixtral,
    "qwen2.5vl_merger": qwen2_5_vl,
    "qwen2vl_merger": qwen2_vl,
    "qwen3vl_merger": qwen3_vl,
    "resampler": _minicpmv,
    "step3vl": step3,
    "youtuvl": youtu_vl,
}
