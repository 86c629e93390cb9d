"""Read the vision towers of PaliGemma and Gemma."""

from __future__ import annotations

from typing import Final

from ...config.images import SpanKind
from ..config_fields import ConfigFields
from .fields import Sizes, image_and_patch_size, read_sizes
from .spec import VisionSpec

SIGLIP_SIZES: Final = Sizes(224, 16, 768, 3072, num_heads=12, num_layers=12)
MAX_OUTPUTS: Final = 280
"""Default number of embeddings per image in Gemma 4."""


def paligemma(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of PaliGemma (arXiv 2407.07726), whose prompt tokens all attend to each other."""
    return siglip(
        vision,
        output_size,
        projection="matrix",
        span_kind=SpanKind.PROMPT,
        tensor_names=((r"multi_modal_projector\.linear\.", "connector.modality_projection.proj."),),
    )


def gemma3(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Gemma 3."""
    num_outputs = fields.integer("mm_tokens_per_image", 256)
    image_size, patch_size = image_and_patch_size(vision, 224, 16)
    side, num_patches = round(num_outputs**0.5), image_size // patch_size
    if side**2 != num_outputs or num_patches % side:
        raise fields.wrong(
            "mm_tokens_per_image", f"the square of a divisor of {num_patches}", num_outputs
        )
    return siglip(
        vision,
        output_size,
        projection="mean",
        merge_factor=num_patches // side,
        projection_eps=vision.positive("layer_norm_eps", 1e-6),
        span_kind=SpanKind.IMAGE,
    )


def siglip(vision: ConfigFields, output_size: int, **differences: object) -> VisionSpec:
    """Return a SigLIP tower with a norm after its last layer, and the other fields as given in `differences`."""
    return VisionSpec(
        **read_sizes(vision, SIGLIP_SIZES),
        output_size=output_size,
        has_post_norm=True,
        **differences,  # type: ignore[arg-type]
    )


def gemma4(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Gemma 4, which reads images of any size."""
    text = fields.section("text_config") or fields
    num_heads = vision.integer("num_attention_heads", 12)
    vision.require("num_key_value_heads", num_heads)
    patch_size = vision.integer("patch_size", 16, maximum=1024)
    rope = vision.first_section("rope_parameters")
    # GGUF models have this field outside of the section.
    name = "use_bidirectional_attention"
    sees_on = "vision" in (text.get(name), fields.get(name))
    return VisionSpec(
        image_size=0,
        patch_size=patch_size,
        hidden_size=vision.integer("hidden_size", 768),
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_heads=num_heads,
        head_dim=vision.integer("head_dim", 64),
        attention_scale=1.0,
        feature_layers=(
            vision.with_defaults(num_hidden_layers=16).layer_count("num_hidden_layers"),
        ),
        activation=vision.text("hidden_activation", "gelu_pytorch_tanh"),
        norm_eps=vision.positive("rms_norm_eps", 1e-6),
        output_size=output_size,
        projection="standardized mean",
        max_outputs=MAX_OUTPUTS,
        merge_factor=vision.integer("pooling_kernel_size", 3, maximum=64),
        projection_eps=vision.positive("rms_norm_eps", 1e-6),
        standardizes=vision.boolean("standardize", False),
        has_patch_bias=False,
        has_channels_last=True,
        positions="axes",
        num_positions=vision.integer("position_embedding_size", 10 * 1024),
        rope_theta=rope.positive("rope_theta", 100.0),
        rotary="halves",
        norm_kind="rms",
        qk_norm="head",
        has_value_norm=True,
        has_output_norms=True,
        has_gate=True,
        qkv_bias=False,
        product_bias=False,
        clips_products=vision.boolean("use_clipped_linears", False),
        span_kind=SpanKind.IMAGE_IN_WINDOWS if sees_on else None,
        tensor_names=_GEMMA4_NAMES,
    )


_GEMMA4_NAMES: Final = (
    (r"vision_tower\.patch_embedder\.input_proj\.", "vision_tower.embeddings.patch_embedding."),
    (
        r"vision_tower\.patch_embedder\.position_embedding_table$",
        "vision_tower.embeddings.position_embedding.weight",
    ),
    (r"(vision_tower\..*_proj)\.linear\.", r"\1."),
    (r"(vision_tower\..*)\.input_layernorm\.", r"\1.layer_norm1."),
    (r"(vision_tower\..*)\.post_attention_layernorm\.", r"\1.output_norm1."),
    (r"(vision_tower\..*)\.pre_feedforward_layernorm\.", r"\1.layer_norm2."),
    (r"(vision_tower\..*)\.post_feedforward_layernorm\.", r"\1.output_norm2."),
    (r"(vision_tower\..*)\.self_attn\.o_proj\.", r"\1.self_attn.out_proj."),
    (r"(vision_tower\..*)\.mlp\.up_proj\.", r"\1.mlp.fc1."),
    (r"(vision_tower\..*)\.mlp\.down_proj\.", r"\1.mlp.fc2."),
    (r"embed_vision\.embedding_projection\.", "connector.modality_projection.proj."),
)
