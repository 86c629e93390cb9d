"""Read the vision tower of Phi-4-multimodal."""

from __future__ import annotations

from typing import Final

from ...config_fields import ConfigFields
from ..fields import feature_layers, head_count, image_and_patch_size
from ..spec import VisionSpec


def phi4_multimodal(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Phi-4-multimodal (arXiv 2503.01743), which reads an image as tiles and as a whole.

    The original config (`phi4mm`) has no sizes, because they are always the default.
    """
    image_size, patch_size = image_and_patch_size(vision, 448, 14)
    if image_size % (2 * patch_size):
        raise vision.wrong("image_size", f"a multiple of 2 * patch_size {patch_size}", image_size)
    if vision.integer("crop_size", image_size) != image_size:
        raise vision.wrong("crop_size", f"{image_size}, as image_size", vision.get("crop_size"))
    num_layers = vision.with_defaults(num_hidden_layers=27).layer_count("num_hidden_layers")
    layer = {"vision_feature_layer": vision.get("feature_layer", -2)}
    return VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=vision.integer("hidden_size", 1152),
        intermediate_size=vision.integer("intermediate_size", 4304),
        num_heads=head_count(vision, 1152, 16),
        feature_layers=feature_layers(vision.with_values(layer), num_layers, -2),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        norm_eps=vision.positive("layer_norm_eps", 1e-6),
        output_size=output_size,
        projection="mlp",
        merge_factor=2,
        positions="nearest",
        margins="unseen",
        has_crops=True,
        tensor_names=_PHI4_NAMES,
    )


_PHI4_NAMES: Final = (
    (r"(.*\.image_embed\.)img_projection\.0\.", r"\1img_projection_up."),
    (r"(.*\.image_embed\.)img_projection\.2\.", r"\1img_projection_down."),
    (r"(.*\.image_embed\.)glb_GN$", r"\1global_img_feature_extensor"),
    (r"(.*\.image_embed\.)sub_GN$", r"\1sub_img_feature_extensor"),
)
