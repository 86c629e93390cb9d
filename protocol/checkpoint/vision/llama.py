"""Read the vision towers of Llama 3.2 Vision and Llama 4."""

from __future__ import annotations

from typing import Final

from ..config_fields import ConfigFields
from .fields import check_factor, head_count, image_and_patch_size
from .spec import MAX_SIDE, TowerSpec, VisionSpec

_MAX_TILES: Final = 16


class TilesVisionSpec(TowerSpec, frozen=True):
    """A vision transformer that reads up to `max_tiles` tiles of an image together, and its projection.

    A tile has `image_size` x `image_size` pixels, and as many outputs as patches, plus one for the class token. Missing
    tiles are black, and a tile's rows are padded to a multiple of 8. All of them are computed, but such rows are not
    seen by each other. Learned embeddings depend on the grid of tiles. Layers with gates follow `num_layers` ones. An
    output is a projection of the last hidden state and of those after `feature_layers`, counted from 1, whose elements
    alternate.

    """

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    num_gated_layers: int
    feature_layers: tuple[int, ...]
    activation: str
    norm_eps: float
    max_tiles: int
    output_size: int

    @property
    def outputs_per_tile(self) -> int:
        """The number of outputs of a tile."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def num_outputs(self) -> int:
        """The maximum number of outputs of an image."""
        return self.max_tiles * self.outputs_per_tile

    @property
    def grids(self) -> list[tuple[int, int]]:
        """The (rows, columns) of grids of tiles, in the order of their embeddings, which begin with an unused one."""
        sides = range(1, self.max_tiles + 1)
        return [(x, y) for x in sides for y in sides if x * y <= self.max_tiles]


def mllama(fields: ConfigFields, vision: ConfigFields, output_size: int) -> TilesVisionSpec:
    """Return the tower of Llama 3.2 Vision (arXiv 2407.21783)."""
    image_size, patch_size = image_and_patch_size(vision, 448, 14)
    heads = vision.get("attention_heads", 16)
    vision = vision.with_defaults(num_attention_heads=heads, num_hidden_layers=32)
    num_layers = vision.layer_count("num_hidden_layers")
    name = "intermediate_layers_indices"
    indices = vision.get(name, [3, 7, 15, 23, 30])
    if not isinstance(indices, list) or not all(
        type(i) is int and 0 <= i < num_layers for i in indices
    ):
        raise vision.wrong(name, f"indices of the {num_layers} layers", indices)
    spec = TilesVisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=vision.integer("hidden_size", 1280),
        intermediate_size=vision.integer("intermediate_size", 5120),
        num_heads=head_count(vision, 1280, 16),
        num_layers=num_layers,
        num_gated_layers=vision.with_defaults(num_global_layers=8).layer_count("num_global_layers"),
        feature_layers=tuple(i + 1 for i in indices),
        activation=vision.text("hidden_act", "gelu"),
        norm_eps=vision.positive("norm_eps", 1e-5),
        max_tiles=vision.integer("max_num_tiles", 4, maximum=_MAX_TILES),
        output_size=output_size,
    )
    grids = vision.get("supported_aspect_ratios")
    if grids is not None and [tuple(grid) for grid in grids] != spec.grids:
        raise vision.wrong(
            "supported_aspect_ratios", f"all grids of up to {spec.max_tiles} tiles", grids
        )
    size = spec.hidden_size * (1 + len(indices))
    vision.require("vision_output_dim", size, default=7680)
    if image_size * spec.max_tiles > MAX_SIDE * 4:
        raise vision.wrong("image_size", f"at most {MAX_SIDE * 4 // spec.max_tiles}", image_size)
    return spec


def llama4(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Llama 4, which reads each tile of a grid as an image."""
    image_size, patch_size = image_and_patch_size(vision, 448, 14)
    ratio = vision.positive("pixel_shuffle_ratio", 0.5)
    factor = round(1 / ratio)
    if factor * ratio != 1:
        raise vision.wrong("pixel_shuffle_ratio", "one divided by a whole number", ratio)
    check_factor(vision, "pixel_shuffle_ratio", factor, image_size // patch_size)
    size = vision.integer("hidden_size", 768)
    merged = vision.integer("intermediate_size", 5632)
    if merged != size * factor**2:
        # Llama 4's config uses this name for the size of merged patches, which the projection reads.
        raise vision.wrong("intermediate_size", f"{size * factor**2}", merged)
    adapter = vision.integer("projector_output_dim", 4096)
    for name in ("projector_input_dim", "vision_output_dim"):
        vision.require(name, adapter, ", which is projector_output_dim")
    rope = vision.first_section("rope_parameters")
    num_layers = vision.with_defaults(num_hidden_layers=34).layer_count("num_hidden_layers")
    return VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=size,
        intermediate_size=merged,
        num_heads=head_count(vision, 768, 16),
        feature_layers=(num_layers,),
        activation="gelu",
        norm_eps=1e-5,
        output_size=output_size,
        projection="adapter",
        merge_factor=factor,
        adapter_size=adapter,
        has_class_token=True,
        has_class_last=True,
        has_patch_bias=False,
        has_flat_patches=True,
        rope_theta=rope.positive("rope_theta", vision.positive("rope_theta", 10_000.0)),
        rotary="pairs",
        has_pre_norm=True,
        has_post_norm=True,
        normalizes_in_bfloat16=True,
        tensor_names=_NAMES,
    )


_NAMES: Final = (
    (r"vision_model\.patch_embedding\.linear\.", "vision_model.embeddings.patch_embedding."),
    (r"vision_model\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (
        r"vision_model\.positional_embedding_vlm$",
        "vision_model.embeddings.position_embedding.weight",
    ),
    (r"vision_model\.layernorm_pre\.", "vision_model.pre_layrnorm."),
    (r"vision_model\.layernorm_post\.", "vision_model.post_layernorm."),
    (r"vision_model\.model\.layers\.", "vision_model.encoder.layers."),
    (r"(vision_model\..*)\.self_attn\.o_proj\.", r"\1.self_attn.out_proj."),
    (r"(vision_model\..*)\.input_layernorm\.", r"\1.layer_norm1."),
    (r"(vision_model\..*)\.post_attention_layernorm\.", r"\1.layer_norm2."),
    (r"vision_model\.vision_adapter\.mlp\.", "multi_modal_projector."),
)
