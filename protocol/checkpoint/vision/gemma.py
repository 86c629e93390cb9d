"""Read the vision towers of PaliGemma and Gemma."""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from ...config.images.settings import SpanKind
from ..config_fields import ConfigFields
from .fields import Sizes, image_and_patch_size, read_sizes
from .spec import VisionSpec


class PatchVisionSpec(msgspec.Struct, frozen=True):
    """The projection of images in Gemma 4's unified models, which have no vision tower.

    The pixels of each square are normed, multiplied by a matrix and normed again. Learned positions of the column and
    the row are added. A third norm follows, and a fourth without weights, whose epsilon is `norm_eps`. A matrix makes
    the embedding.

    Attributes:
        side_factor: The side of a square in pixels.
        num_positions: The maximum number of squares in each direction.
        has_axes: Always False, because the decoder's positions have one coordinate.
        added_after: Always empty, because outputs have one part.
        num_page_outputs: Always 0, because no cross attention reads images.
    """

    side_factor: int
    hidden_size: int
    num_positions: int
    norm_eps: float
    output_size: int
    span_kind: SpanKind | None
    tensor_names: tuple[tuple[str, str], ...]
    has_axes: ClassVar[bool] = False
    added_after: ClassVar[tuple[int, ...]] = ()
    num_page_outputs: ClassVar[int] = 0

    @property
    def num_outputs(self) -> int:
        """The default maximum number of embeddings of an image."""
        return MAX_OUTPUTS


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


def gemma4_unified(fields: ConfigFields, vision: ConfigFields, output_size: int) -> PatchVisionSpec:
    """Return the projection of Gemma 4's unified models."""
    text = fields.first_section("text_config")
    text = text.with_defaults(use_bidirectional_attention="vision")
    patch_size = vision.integer("patch_size", 16, maximum=256)
    return PatchVisionSpec(
        side_factor=patch_size * vision.integer("pooling_kernel_size", 3, maximum=64),
        hidden_size=vision.integer("mm_embed_dim", 3840),
        num_positions=vision.integer("mm_posemb_size", 1120),
        norm_eps=vision.positive("rms_norm_eps", 1e-6),
        output_size=output_size,
        span_kind=SpanKind.WHOLE_IMAGE
        if text.get("use_bidirectional_attention") == "vision"
        else None,
        tensor_names=(
            (r"\bvision_embedder\.", "embed_vision."),
            (r"\bembed_vision\.multimodal_embedder\.", "embed_vision."),
        ),
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
