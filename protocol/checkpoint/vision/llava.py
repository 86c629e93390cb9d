"""Read the vision towers of the LLaVA models, and of CLIP and SigLIP themselves."""

from __future__ import annotations

import math
import re
from typing import Final

from msgspec.structs import replace

from ...config.images.settings import SpanKind
from ..config_fields import ConfigFields
from .fields import Sizes, check_factor, feature_layers, read_sizes
from .gemma import SIGLIP_SIZES, siglip
from .grid import GridVisionSpec
from .merged import merged_sizes
from .pixtral import pixtral
from .spec import MAX_SIDE, VisionSpec

_EVA_SIZES: Final = Sizes(1120, 14, 1792, 15_360, 16, 63, "gelu")
_GLM_NAMES: Final = (
    (r"^transformer\.vision\.", "vision."),
    (r"^vision\.patch_embedding\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^vision\.patch_embedding\.cls_embedding$", "vision.embeddings.class_embedding"),
    (r"^vision\.patch_embedding\.position_", "vision.embeddings.position_"),
    (r"^vision\.transformer\.", "vision.encoder."),
    (r"^(vision\.encoder\..*)\.attention\.query_key_value\.", r"\1.self_attn.qkv."),
    (r"^(vision\.encoder\..*)\.attention\.dense\.", r"\1.self_attn.out_proj."),
    (r"^(vision\.encoder\..*)\.input_layernorm\.", r"\1.output_norm1."),
    (r"^(vision\.encoder\..*)\.post_attention_layernorm\.", r"\1.output_norm2."),
    (r"^vision\.(boi|conv|eoi|linear_proj)\b", r"multi_modal_projector.\1"),
)
_GLM_EDGE_NAMES: Final = (
    (r"^(model\.)?vision\.vit\.model\.vision_model\.", "vision_tower."),
    (r"^(model\.)?vision\.adapter\.linear\.gate\.", "multi_modal_projector.linear_proj.gate_proj."),
    (
        r"^(model\.)?vision\.adapter\.linear\.linear\.",
        "multi_modal_projector.linear_proj.linear_proj.",
    ),
    (r"^(model\.)?vision\.adapter\.linear\.", "multi_modal_projector.linear_proj."),
    (r"^(model\.)?vision\.adapter\.", "multi_modal_projector."),
)
_VIT_SIZES: Final = Sizes(224, 16, 768, 3072, 12, 12, "gelu", 1e-12)
_PIX2STRUCT_NAMES: Final = (
    (r"^decoder\..*", ""),
    (r"\.patch_projection\.", ".patch_embedding."),
    (r"^encoder\.encoder\.layer\.", "encoder.encoder.layers."),
    *(
        (rf"\.attention\.{name}\.", f".self_attn.{name[0]}_proj.")
        for name in ("query", "key", "value")
    ),
    (r"\.attention\.output\.", ".self_attn.out_proj."),
    (r"\.pre_attention_layer_norm\.", ".layer_norm1."),
    (r"\.pre_mlp_layer_norm\.", ".layer_norm2."),
    (r"\.mlp\.wi_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.wi_1\.", ".mlp.fc1."),
    (r"\.mlp\.wo\.", ".mlp.fc2."),
    (r"^encoder\.layernorm\.", "encoder.post_layernorm."),
)
_VIT_NAMES: Final = (
    (r"^enc_to_dec_proj\.", "connector.modality_projection.proj."),
    (r"^encoder\.embeddings\.cls_token$", "encoder.embeddings.class_embedding"),
    (r"^encoder\.embeddings\.position_embeddings$", "encoder.embeddings.position_embedding.weight"),
    (
        r"^encoder\.embeddings\.patch_embeddings\.projection\.",
        "encoder.embeddings.patch_embedding.",
    ),
    (r"^encoder\.layernorm\.", "encoder.post_layernorm."),
    (r"^encoder\.encoder\.layer\.(\d+)\.", r"encoder.encoder.layers.\1."),
    (r"^(encoder\..*)\.attention\.attention\.query\.", r"\1.self_attn.q_proj."),
    (r"^(encoder\..*)\.attention\.attention\.key\.", r"\1.self_attn.k_proj."),
    (r"^(encoder\..*)\.attention\.attention\.value\.", r"\1.self_attn.v_proj."),
    (r"^(encoder\..*)\.attention\.output\.dense\.", r"\1.self_attn.out_proj."),
    (r"^(encoder\..*)\.intermediate\.dense\.", r"\1.mlp.fc1."),
    (r"^(encoder\..*)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"^(encoder\..*)\.layernorm_before\.", r"\1.layer_norm1."),
    (r"^(encoder\..*)\.layernorm_after\.", r"\1.layer_norm2."),
)
_PUBLISHED_NAMES: Final = (
    (r"^model\.mm_projector\.0\.", "multi_modal_projector.linear_1."),
    (r"^model\.mm_projector\.2\.", "multi_modal_projector.linear_2."),
)
_NVILA_NAMES: Final = (
    (r"^mm_projector\.layers\.1\.", "multi_modal_projector.layer_norm."),
    (r"^mm_projector\.layers\.2\.", "multi_modal_projector.linear_0."),
    (r"^mm_projector\.layers\.4\.", "multi_modal_projector.middle_norm."),
    (r"^mm_projector\.layers\.5\.", "multi_modal_projector.linear_1."),
    (r"^mm_projector\.layers\.7\.", "multi_modal_projector.linear_2."),
)
_KOSMOS_SIZES: Final = Sizes(224, 14, 1024, 4096, 16, 24, "quick_gelu", 1e-5)
_CLIP_SIZES: Final = SIGLIP_SIZES._replace(patch_size=32, activation="quick_gelu", norm_eps=1e-5)


def clip(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of CLIP (arXiv 2103.00020), which makes one vector of an image."""
    return VisionSpec(
        **read_sizes(vision, _CLIP_SIZES),
        output_size=fields.integer("projection_dim", 512),
        projection="class",
        projection_bias=False,
        has_class_token=True,
        keeps_class_token=True,
        has_patch_bias=False,
        has_pre_norm=True,
        has_post_norm=True,
        tensor_names=((r"^visual_projection\.", "connector.modality_projection.proj."),),
    )


def git(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of GIT: CLIP's, whose outputs and class token are projected and normed."""
    sizes = read_sizes(vision, _CLIP_SIZES._replace(patch_size=16))
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="normed matrix",
        projection_eps=sizes["norm_eps"],
        has_class_token=True,
        keeps_class_token=True,
        has_patch_bias=False,
        has_pre_norm=True,
        has_post_norm=True,
        span_kind=SpanKind.IMAGE,
        tensor_names=(
            (r"visual_projection\.visual_projection\.0\.", "connector.modality_projection.proj."),
            (r"visual_projection\.visual_projection\.1\.", "connector.modality_projection.norm."),
        ),
    )


def kosmos2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Kosmos-2: CLIP's, whose outputs learned queries read."""
    text = fields.required_section("text_config")
    return VisionSpec(
        **read_sizes(vision, _KOSMOS_SIZES),
        output_size=output_size,
        output_scale=math.sqrt(output_size) if text.boolean("scale_embedding", True) else 1.0,
        projection="latents",
        has_class_token=True,
        keeps_class_token=True,
        has_patch_bias=False,
        has_pre_norm=True,
        has_post_norm=True,
        num_queries=fields.integer("latent_query_num", 64, maximum=4096),
        num_query_heads=text.divisor("num_attention_heads", output_size, 32),
    )


def siglip_alone(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of SigLIP (arXiv 2303.15343), which makes one vector of an image."""
    vision.require("vision_use_head", True)
    spec = siglip(vision, 0, projection="probe")
    return replace(spec, output_size=spec.hidden_size, projection_activation=spec.activation)


def trocr(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of TrOCR, a vision transformer (arXiv 2010.11929) whose outputs cross attention reads."""
    sizes = read_sizes(vision, _VIT_SIZES)
    is_projected = vision.boolean("is_projected", False)
    is_deit = vision.text("model_type", "vit") == "deit"
    return VisionSpec(
        **sizes,
        output_size=output_size if is_projected else sizes["hidden_size"],
        projection="matrix" if is_projected else "none",
        is_read=True,
        has_class_token=True,
        keeps_class_token=True,
        has_teacher_token=is_deit,
        has_post_norm=True,
        qkv_bias=vision.boolean("qkv_bias", True),
        tensor_names=_VIT_NAMES,
    )


def pix2struct(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Pix2Struct (arXiv 2210.03347), which has the layers of a T5 and reads images of any size."""
    num_pixels = vision.integer("patch_embed_hidden_size", 768, maximum=3 * MAX_SIDE**2)
    side = math.isqrt(num_pixels // 3)
    if 3 * side**2 != num_pixels:
        raise vision.wrong("patch_embed_hidden_size", "three times a square", num_pixels)
    num_positions = vision.integer("seq_len", 4096, minimum=2) - 1
    size = vision.integer("hidden_size", 768)
    layers = vision.with_defaults(num_hidden_layers=12)
    return VisionSpec(
        image_size=0,
        patch_size=side,
        hidden_size=size,
        intermediate_size=vision.integer("d_ff", 2048),
        num_heads=vision.integer("num_attention_heads", 12),
        head_dim=vision.integer("d_kv", 64),
        attention_scale=1.0,
        feature_layers=(layers.layer_count("num_hidden_layers"),),
        activation=vision.text("dense_act_fn", "gelu_new"),
        norm_kind="rms",
        norm_eps=vision.positive("layer_norm_eps", 1e-6),
        has_post_norm=True,
        post_norm_kind="rms",
        has_gate=True,
        qkv_bias=False,
        product_bias=False,
        has_channels_last=True,
        positions="tables",
        num_positions=num_positions,
        max_outputs=num_positions,
        output_size=size,
        projection="none",
        is_read=True,
        tensor_names=_PIX2STRUCT_NAMES,
    )


def llava(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of LLaVA, or of Pixtral, which uses the same model type."""
    if vision.get("model_type") == "pixtral":
        return pixtral(fields, vision, output_size)
    is_clip = vision.text("model_type", "clip_vision_model") == "clip_vision_model"
    if not is_clip and vision.text("model_type") != "siglip_vision_model":
        raise vision.wrong(
            "model_type", "clip_vision_model or siglip_vision_model", vision.get("model_type")
        )
    sizes = read_sizes(vision, _CLIP_SIZES if is_clip else SIGLIP_SIZES)
    sizes["feature_layers"] = feature_layers(fields, sizes, -2)
    strategy = fields.choice("vision_feature_select_strategy", ("default", "full"), "default")
    if strategy == "default" and not is_clip:
        raise fields.wrong(
            "vision_feature_select_strategy", "'full' without a class token", strategy
        )
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="mlp",
        projection_activation=fields.text("projector_hidden_act", "gelu"),
        projection_bias=fields.boolean("multimodal_projector_bias", True),
        has_class_token=is_clip,
        keeps_class_token=is_clip and strategy == "full",
        has_patch_bias=not is_clip,
        has_pre_norm=is_clip,
        tensor_names=_PUBLISHED_NAMES,
    )


def glm4v_9b(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of GLM-4V 9B and CogAgent 9B (arXiv 2406.12793), whose blocks norm only their outputs."""
    vision.require("in_channels", 3)
    own = vision.with_values({"num_attention_heads": vision.get("num_heads")})
    sizes = read_sizes(own, _EVA_SIZES)
    side = sizes["image_size"] // sizes["patch_size"]
    check_factor(fields, "the stride", 2, side)
    vision.require("num_positions", side**2 + 1, ", the patches of an image and one more")
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="gated squares",
        merge_factor=2,
        adapter_size=fields.integer("ffn_hidden_size", 13_696),
        output_scale=1 / vision.positive("scaling_factor", 1.0),
        has_class_token=True,
        has_input_norms=False,
        has_output_norms=True,
        has_axes=True,
        tensor_names=_GLM_NAMES,
    )


def glm_edge(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of GLM-Edge-V, a SigLIP with the projection of GLM-4V 9B."""
    spec = siglip(vision, output_size, projection="gated squares", merge_factor=2)
    check_factor(fields, "the stride", 2, spec.image_size // spec.patch_size)
    text = fields.required_section("text_config")
    inner = fields.integer("projector_intermediate_size", text.integer("intermediate_size", 13_696))
    return replace(spec, adapter_size=inner, tensor_names=_GLM_EDGE_NAMES)


def mobilevlm(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of MobileVLM, which is LLaVA's with a projection that halves both sides of an image."""
    kind = fields.choice("mm_projector_type", ("ldpnet", "ldpnetv2"), "ldpnet")
    spec = llava(fields, vision, output_size)
    check_factor(fields, "the stride", 2, spec.image_size // spec.patch_size)
    return replace(
        spec, projection="convolved mlp" if kind == "ldpnet" else "pooled mlp", merge_factor=2
    )


def vipllava(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of ViP-LLaVA, whose features are those of several layers, normed together."""
    fields = fields.with_defaults(
        vision_feature_layer=[-2, -5, -8, -11, 6], vision_feature_select_strategy="default"
    )
    return replace(
        llava(fields, vision, output_size),
        has_projection_norm=True,
        projection_eps=fields.positive("projector_layernorm_eps", 1e-5),
        projection_bias=True,
        tensor_names=(
            (r"multi_modal_projector\.projector_layernorm\.", "multi_modal_projector.layer_norm."),
        ),
    )


def nvila_lite(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of NVILA-Lite (arXiv 2412.04468), a SigLIP whose squares of 3 x 3 patches become embeddings."""
    sizes = read_sizes(vision, SIGLIP_SIZES)
    sizes["feature_layers"] = feature_layers(fields, sizes, -2)
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="normed squares",
        merge_factor=3,
        adapter_size=3 * sizes["hidden_size"],
        tensor_names=_NVILA_NAMES,
    )


def llava_next(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of LLaVA-NeXT, which reads an image as a grid of tiles."""
    return replace(llava(fields, vision, output_size), has_newlines=True)


def llava_onevision(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of LLaVA-OneVision, which reads an image as a grid of tiles and then reduces the patches."""
    fields = fields.with_defaults(
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        multimodal_projector_bias=True,
    )
    ratio = fields.text("vision_aspect_ratio", "anyres_max_9")
    if not (found := re.fullmatch(r"anyres_max_(\d{1,3})", ratio)) or not int(found[1]):
        raise fields.wrong("vision_aspect_ratio", "'anyres_max_' and a number", ratio)
    spec = llava(fields, vision, output_size)
    return replace(spec, has_newlines=True, max_tiles=int(found[1]))


def bee(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Bee (arXiv 2510.13795), which is LLaVA-OneVision's with a normed, wider projection."""
    return replace(r_vl(fields, vision, output_size), adapter_size=4 * output_size)


def r_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of R-4B (arXiv 2508.21113), which is LLaVA-OneVision's with a normed projection."""
    spec = llava_onevision(fields, vision, output_size)
    return replace(
        spec,
        has_projection_norm=True,
        projection_eps=1e-6,
        tensor_names=(
            *spec.tensor_names,
            (r"(.*multi_modal_projector)\.pre_norm\.", r"\1.layer_norm."),
        ),
    )


def llava_onevision2(
    fields: ConfigFields, vision: ConfigFields, output_size: int
) -> GridVisionSpec:
    """Return the tower of LLaVA-OneVision 2, which reads images of any size."""
    sizes = merged_sizes(
        vision, vision.integer("patch_size", 14, maximum=256), 1024, 4096, num_layers=24
    )
    size, num_heads = sizes["hidden_size"], sizes["num_heads"]
    if size % (32 * num_heads):
        needed = f"a multiple of 32 times num_attention_heads {num_heads}"
        raise vision.wrong("hidden_size", needed, size)
    theta = vision.positive("rope_theta", sizes["rope_theta"], above=1)
    return GridVisionSpec(
        **sizes | {"has_patch_bias": False, "has_final_norm": False, "rope_theta": theta},
        merge_size=vision.integer("spatial_merge_size", 2, maximum=16),
        activation="gelu",
        output_size=output_size,
        norm_eps=vision.positive("layer_norm_eps", 1e-6),
        has_patch_norm=True,
        rotary="crossed",
        has_axes=False,
        tensor_names=_ONEVISION2_NAMES,
    )


_ONEVISION2_NAMES: Final = (
    (r"^(model\.)?visual\.", "visual."),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.layernorm_pre\.", "visual.patch_norm."),
    (r"^visual\.encoder\.layers\.", "visual.blocks."),
    (r"^(visual\.blocks\..*)\.layer_norm", r"\1.norm"),
    (r"^(visual\.blocks\..*)\.self_attn\.", r"\1.attn."),
    (r"^visual\.merger\.ln_q\.", "visual.merger.norm."),
    (r"^visual\.merger\.mlp\.0\.", "visual.merger.fc1."),
    (r"^visual\.merger\.mlp\.2\.", "visual.merger.fc2."),
)
