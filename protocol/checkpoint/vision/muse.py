"""Read the vision tower of Muse Glimmer, which attends within large windows in most of its layers."""

from __future__ import annotations

from typing import Final

from ..config_fields import ConfigFields
from .fields import head_count
from .grid import GridVisionSpec

_NORM_EPS: Final = 1e-5


def muse(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Muse Glimmer. The decoder norms its outputs, like the embeddings of tokens."""
    num_layers = vision.with_defaults(num_hidden_layers=50).layer_count("num_hidden_layers")
    types = vision.per_layer("layer_types", num_layers)
    if types is None:
        is_full = [i % 4 == 3 or i == num_layers - 1 for i in range(num_layers)]
    else:
        if not set(types) <= {"full_attention", "window_attention"}:
            raise vision.wrong("layer_types", "'full_attention' or 'window_attention' each", types)
        is_full = [kind == "full_attention" for kind in types]
    size, num_heads = vision.integer("hidden_size", 1536), head_count(vision, 1536, 16)
    # Half of a head is rotated by the column and half by the row, and elements are rotated in pairs.
    if size % (4 * num_heads):
        raise vision.wrong(
            "hidden_size", f"a multiple of 4 times num_attention_heads {num_heads}", size
        )
    side = vision.integer("pos_emb_height", 32, maximum=1024)
    vision.require("pos_emb_width", side, ", as pos_emb_height", default=32)
    merge_size = vision.integer("merge_size", 2, maximum=16)
    if side % merge_size:
        raise vision.wrong("pos_emb_height", f"a multiple of merge_size {merge_size}", side)
    fields.require("projector_hidden_act", "gelu")
    patch_size = vision.integer("patch_size", 14, maximum=256)
    rope = vision.first_section("rope_parameters")
    return GridVisionSpec(
        patch_size=patch_size,
        frames_per_patch=vision.integer("patch_temporal", 2, maximum=16),
        merge_size=merge_size,
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size", 8960),
        num_heads=num_heads,
        num_layers=num_layers,
        activation=vision.text("hidden_act", "gelu"),
        output_size=output_size,
        rope_theta=rope.positive("rope_theta", 10_000.0, above=1),
        norm_eps=_NORM_EPS,
        norms_positions=True,
        position_side=side,
        interpolation="swapped sides",
        has_final_norm=True,
        outer_eps=vision.positive("layer_norm_eps", _NORM_EPS),
        has_joined_qkv=False,
        rotary="columns first",
        has_axes=False,
        patch_layout="frames",
        merger_norm=None,
        merger_inner=fields.integer("projector_hidden_size", 4096),
        has_third_matrix=True,
        window_size=side * patch_size,
        full_layers=tuple(i for i, each in enumerate(is_full, 1) if each),
        tensor_names=_NAMES,
    )


_NAMES: Final = (
    (r"vision_tower\.patch_embedder\.patch_embedding\.", "vision_tower.patch_embed.proj."),
    (r"vision_tower\.patch_embedder\.position_embedding_table\.", "vision_tower.pos_embed."),
    (r"vision_tower\.ln_pre\.", "vision_tower.patch_norm."),
    (r"vision_tower\.ln_post\.", "vision_tower.final_norm."),
    (r"vision_tower\.layers\.", "vision_tower.blocks."),
    (r"vision_adapter\.", "vision_tower.merger."),
    (r"vision_projection\.", "vision_tower.merger.fc3."),
)
