"""Read the vision towers of Step 3, Step 3.7 and Step3-VL 10B."""

from __future__ import annotations

from typing import Final

from ...config_fields import ConfigFields
from ..fields import image_and_patch_size
from ..grid import GridVisionSpec
from ..merged import merged_sizes


def step3p7(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Step 3.7 and Step3-VL 10B, a Perception Encoder (arXiv 2504.13181)."""
    vision.require_all(use_cls_token=False, use_ln_post=False, use_abs_posemb=True, use_rope2d=True)
    names = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
    vision = vision.with_defaults(
        **{
            name: vision.get(other)
            for name, other in names.items()
            if vision.get(other) is not None
        }
    )
    size = vision.integer("hidden_size", 1536)
    inner = int(size * vision.positive("mlp_ratio", 8960 / 1536))
    image_size, patch_size = image_and_patch_size(vision, 728, 14)
    sizes = merged_sizes(
        vision.with_values({"intermediate_size": inner}), patch_size, 1536, 8960, 47
    )
    return GridVisionSpec(
        **sizes | {"has_patch_bias": False, "has_final_norm": False},
        merge_size=1,
        activation=vision.text("hidden_act", "quick_gelu"),
        output_size=output_size,
        norm_eps=vision.positive("layer_norm_eps", 1e-5),
        norms_positions=True,
        rotary="pairs",
        has_axes=False,
        position_side=image_size // patch_size,
        interpolation="bilinear centers",
        has_layer_scales=True,
        has_merger_biases=fields.boolean("projector_bias", False),
        convolves=True,
        tensor_names=_NAMES,
    )


def step3(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Step 3 (arXiv 2507.19427), whose blocks norm their outputs."""
    fields.require("understand_projector_stride", 2, default=2)
    image_size, patch_size = image_and_patch_size(vision, 728, 14)
    return GridVisionSpec(
        **merged_sizes(vision, patch_size, 1792, 3072, 63)
        | {"has_patch_bias": True, "has_final_norm": False},
        merge_size=1,
        activation=vision.text("hidden_act", "quick_gelu"),
        output_size=output_size,
        norm_eps=vision.positive("layer_norm_eps", 1e-5),
        norms_outputs=True,
        rotary=None,
        has_axes=False,
        has_class_token=True,
        has_class_position=True,
        num_class_rows=4,
        position_side=image_size // patch_size,
        interpolation="antialiased bicubic",
        has_merger_biases=fields.boolean("projector_bias", True),
        convolves=True,
        convolved_size=vision.integer("output_hidden_size", 4096),
        tensor_names=_FIRST_NAMES,
    )


_NAMES: Final = (
    (r"(.*)vision_model\.conv1\.", "visual.patch_embed.proj."),
    (r"(.*)vision_model\.positional_embedding$", "visual.pos_embed.weight"),
    (r"(.*)vision_model\.ln_pre\.", "visual.patch_norm."),
    (r"(.*)vision_model\.transformer\.resblocks\.", "visual.blocks."),
    (r"(.*)vision_model\.vit_downsampler", "visual.merger.conv"),
    (r"(.*)vit_large_projector\.", "visual.merger.proj."),
    (r"(visual\.blocks\..*)\.ln_", r"\1.norm"),
    (r"(visual\.blocks\..*)\.attn\.in_proj_", r"\1.attn.qkv."),
    (r"(visual\.blocks\..*)\.attn\.out_proj\.", r"\1.attn.proj."),
    (r"(visual\.blocks\..*)\.mlp\.c_fc\.", r"\1.mlp.fc1."),
    (r"(visual\.blocks\..*)\.mlp\.c_proj\.", r"\1.mlp.fc2."),
    (r"(visual\.blocks\..*)\.ls_([12])\.gamma$", r"\1.lambda_\2"),
)
_FIRST_NAMES: Final = (
    (r"(.*)vision_model\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"(.*)vision_model\.embeddings\.position_embedding\.", "visual.pos_embed."),
    (r"(.*)vision_model\.embeddings\.class_embedding$", "visual.class_embedding"),
    (r"(.*)vision_model\.transformer\.layers\.", "visual.blocks."),
    (r"(.*)vit_downsampler\.", "visual.merger.conv1."),
    (r"(.*)vit_downsampler2\.", "visual.merger.conv2."),
    (r"(.*)vit_large_projector\.", "visual.merger.proj."),
    (r"(visual\.blocks\..*)\.layer_norm", r"\1.norm"),
    (r"(visual\.blocks\..*)\.self_attn\.qkv_proj\.", r"\1.attn.qkv."),
    (r"(visual\.blocks\..*)\.self_attn\.out_proj\.", r"\1.attn.proj."),
)
