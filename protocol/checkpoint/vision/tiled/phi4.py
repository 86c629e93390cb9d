"""Read the vision towers of Phi-3-Vision and Phi-4-multimodal."""

from __future__ import annotations

from typing import Final

from ...config_fields import ConfigFields
from ..fields import Sizes, feature_layers, read_sizes
from ..spec import VisionSpec

_SIZES: Final = Sizes(448, 14, 1152, 4304, num_heads=16, num_layers=27)


def phi4_multimodal(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Phi-4-multimodal (arXiv 2503.01743), which reads an image as tiles and as a whole.

    The original config (`phi4mm`) has no sizes, because they are always the default.
    """
    sizes = read_sizes(vision, _SIZES)
    image_size, patch_size = sizes["image_size"], sizes["patch_size"]
    if image_size % (2 * patch_size):
        raise vision.wrong("image_size", f"a multiple of 2 * patch_size {patch_size}", image_size)
    vision.require("crop_size", image_size, ", as image_size")
    layer = {"vision_feature_layer": vision.get("feature_layer", -2)}
    sizes["feature_layers"] = feature_layers(vision.with_values(layer), sizes, -2)
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="means",
        merge_factor=2,
        positions="inverse",
        margins="unseen",
        has_crops=True,
        tensor_names=_PHI4_NAMES,
    )


def phi3_v(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Phi-3-Vision and Phi-3.5-Vision, which is CLIP's. Its sizes are always the default."""
    embeddings = fields.first_section("embd_layer")
    embeddings.require_all(
        hd_transform_order="sub_glb",
        projection_cls="mlp",
        use_hd_transform=True,
        with_learnable_separator=True,
    )
    vision.require("type_feature", "patch")
    sizes = read_sizes(vision, _CLIP_SIZES)
    if (sizes["image_size"] // sizes["patch_size"]) % 2:
        raise vision.error(
            f"an image of {sizes['image_size']} pixels must have an even number of patches"
        )
    vision.require("image_dim_out", sizes["hidden_size"], ", the hidden size of the tower")
    layer = {"vision_feature_layer": vision.get("layer_idx", -2)}
    sizes["feature_layers"] = feature_layers(vision.with_values(layer), sizes, -2)
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="squares",
        merge_factor=2,
        has_class_token=True,
        has_patch_bias=False,
        has_pre_norm=True,
        has_crops=True,
        tensor_names=_PHI3_NAMES,
    )


_CLIP_SIZES: Final = Sizes(336, 14, 1024, 4096, 16, 24, "quick_gelu", 1e-5)
_PHI4_NAMES: Final = (
    (r"(.*\.image_embed\.)img_projection\.0\.", r"\1img_projection_up."),
    (r"(.*\.image_embed\.)img_projection\.2\.", r"\1img_projection_down."),
    (r"(.*\.image_embed\.)glb_GN$", r"\1global_img_feature_extensor"),
    (r"(.*\.image_embed\.)sub_GN$", r"\1sub_img_feature_extensor"),
)
_PHI3_NAMES: Final = (
    (r"(.*)vision_embed_tokens\.", r"\1vision_embed_tokens.image_embed."),
    *_PHI4_NAMES,
)
