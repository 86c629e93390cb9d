"""The vision towers of Qwen-VL and GLM, which read images of any size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from ...config.images import SpanKind
from ..config_fields import ConfigFields
from .spec import MAX_SIDE


@dataclass(frozen=True)
class GridVisionSpec:
    """A vision transformer that reads images of any size, and its projection into the decoder's hidden size.

    A patch has `patch_size` pixels in both directions of `frames_per_patch` frames, which are equal for an image. Half
    of each head is rotated by the patch's row and half by its column (Qwen2-VL, arXiv 2409.12191). A square of
    `merge_size` patches becomes one output: they are normed, put side by side and projected by two matrices.

    With a `position_side` patches also have learned positions, which are a square table of this side, interpolated to
    the image's grid: "corners" bilinearly, with those of the image at those of the table, or from and to the centers of
    patches, bicubically ("centers"), bilinearly ("bilinear centers") or, where that shrinks it, with the mean of all
    positions between ("antialiased"). With `has_square_positions` the table is stored with three dimensions. With a
    `has_patch_norm` patches are normed before that. With a `window_size` patches attend within squares of this many
    pixels (Qwen2.5-VL, arXiv 2502.13923), except in `full_layers`. Each of `deepstack_layers`, counted from 1, has a
    projection of its own. The decoder adds their outputs after its first layers, in the order of the tower's layers.

    With a `merger_size` (GLM-4.1V, arXiv 2507.01006) a square is projected by one matrix, and its output by another, a
    norm and a gated MLP of this many intermediate elements. Without `has_biases` products of layers have none. With
    `has_head_norms` queries and keys of each head are normed (GLM-OCR).

    With `has_final_norm` all patches are normed before they are merged, and then once more, with `merger_eps` if that
    is not 0. Without `has_joined_qkv` queries, keys and values have a matrix each. With `num_kv_heads`, if that is not
    0, several heads share keys and values. The `rotary` angles of a head are those of rows and then of columns
    ("joined"), or they alternate, beginning with a column, and rotate neighbors ("alternating"), or None. Without
    `has_axes` the decoder's positions have one coordinate. With `has_flat_patches` the tensor for patches has two
    dimensions, and its columns are stored pixel by pixel.

    The projection norms the patches of a square one by one or together (`merger_norm`), or not at all. Between its
    matrices there are `merger_inner` elements, if that is not 0, and the matrices may be without `has_merger_biases`.

    `tensor_names` translates the checkpoint's tensor names, as in `ModelSpec`. The decoder is causal, so there is no
    `span_kind`.
    """

    patch_size: int
    frames_per_patch: int
    merge_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    activation: str
    output_size: int
    rope_theta: float
    norm_kind: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    has_gate: bool = False
    has_patch_bias: bool = False
    has_patch_norm: bool = False
    has_biases: bool = True
    has_head_norms: bool = False
    merger_size: int = 0
    position_side: int = 0
    has_square_positions: bool = False
    interpolation: Literal["corners", "centers", "bilinear centers", "antialiased"] = "corners"
    has_final_norm: bool = False
    merger_eps: float = 0.0
    has_joined_qkv: bool = True
    num_kv_heads: int = 0
    rotary: Literal["joined", "alternating"] | None = "joined"
    has_axes: bool = True
    has_flat_patches: bool = False
    merger_norm: Literal["patches", "squares"] | None = "patches"
    merger_inner: int = 0
    has_merger_biases: bool = True
    window_size: int = 0
    full_layers: tuple[int, ...] = ()
    deepstack_layers: tuple[int, ...] = ()
    span_kind: SpanKind | None = None
    tensor_names: tuple[tuple[str, str], ...] = ()

    @property
    def unit(self) -> int:
        """The side of the square of pixels that becomes one output."""
        return self.patch_size * self.merge_size


def qwen2_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Qwen2-VL."""
    size = vision.integer("embed_dim", 1280)
    _check_output_size(vision, "hidden_size", output_size)
    return GridVisionSpec(
        **_sizes(vision, size, 14),
        intermediate_size=int(size * vision.positive("mlp_ratio", 4.0)),
        activation=vision.text("hidden_act", "quick_gelu"),
        output_size=output_size,
        tensor_names=_NAMES,
    )


def qwen2_5_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Qwen2.5-VL."""
    _check_output_size(vision, "out_hidden_size", output_size)
    sizes = _sizes(vision, vision.integer("hidden_size", 3584), 14)
    window_size = vision.integer("window_size", 112)
    unit = sizes["patch_size"] * sizes["merge_size"]
    if window_size < unit:
        raise vision.error(f"{vision.prefix}window_size {window_size} must be at least {unit}")
    return GridVisionSpec(
        **sizes,
        intermediate_size=vision.integer("intermediate_size", 3420),
        activation=vision.text("hidden_act", "silu"),
        output_size=output_size,
        norm_kind="rms",
        has_gate=True,
        window_size=window_size,
        full_layers=_layers(vision, "fullatt_block_indexes", sizes["num_layers"], [7, 15, 23, 31]),
        tensor_names=_NAMES,
    )


def exaone4_5(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of EXAONE 4.5, which is that of Qwen2.5-VL with shared keys and values."""
    spec = qwen2_5_vl(fields, vision, output_size)
    num_kv_heads = vision.integer("num_key_value_heads", 8)
    if spec.num_heads % num_kv_heads:
        raise vision.wrong("num_key_value_heads", f"a divisor of {spec.num_heads}", num_kv_heads)
    return replace(spec, num_kv_heads=num_kv_heads, has_axes=False)


def qwen3_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Qwen3-VL."""
    _check_output_size(vision, "out_hidden_size", output_size)
    sizes = _sizes(vision.with_defaults(depth=27), vision.integer("hidden_size", 1152), 16)
    num_positions = vision.integer("num_position_embeddings", 2304)
    side = int(num_positions**0.5)
    if side**2 != num_positions:
        raise vision.wrong("num_position_embeddings", "a square number", num_positions)
    return GridVisionSpec(
        **sizes,
        intermediate_size=vision.integer("intermediate_size", 4304),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        output_size=output_size,
        has_patch_bias=True,
        position_side=side,
        deepstack_layers=_layers(
            vision, "deepstack_visual_indexes", sizes["num_layers"], [8, 16, 24]
        ),
        tensor_names=_NAMES,
    )


def qwen3_5(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Qwen3.5, which is that of Qwen3-VL without DeepStack."""
    without = vision.with_values({"deepstack_visual_indexes": []})
    return qwen3_vl(fields, without, output_size)


def glm4v(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of GLM-4.1V and GLM-4.5V."""
    _check_output_size(vision, "out_hidden_size", output_size)
    sizes = _sizes(
        vision.with_defaults(depth=24, num_heads=12), vision.integer("hidden_size", 1536), 14
    )
    image_size = vision.integer("image_size", 336, maximum=MAX_SIDE)
    if vision.boolean("attention_bias", False):
        raise vision.wrong("attention_bias", "false", True)
    return GridVisionSpec(
        **sizes,
        intermediate_size=output_size,
        activation=vision.text("hidden_act", "silu"),
        output_size=output_size,
        norm_kind="rms",
        norm_eps=vision.positive("rms_norm_eps", 1e-5),
        has_gate=True,
        has_patch_bias=True,
        has_patch_norm=True,
        has_biases=False,
        merger_size=vision.integer("intermediate_size", 13696),
        position_side=image_size // sizes["patch_size"],
        interpolation="centers",
        tensor_names=_GLM_NAMES,
    )


def glm_ocr(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of GLM-OCR, which has no learned positions."""
    vision = vision.with_defaults(depth=24, num_heads=16, out_hidden_size=1536)
    _check_output_size(vision, "out_hidden_size", output_size)
    return GridVisionSpec(
        **_sizes(vision, vision.integer("hidden_size", 1024), 14),
        intermediate_size=vision.integer("intermediate_size", 4096),
        activation=vision.text("hidden_act", "silu"),
        output_size=output_size,
        norm_kind="rms",
        norm_eps=vision.positive("rms_norm_eps", 1e-5),
        has_gate=True,
        has_patch_bias=True,
        has_biases=vision.boolean("attention_bias", True),
        has_head_norms=True,
        merger_size=3 * output_size,
        tensor_names=_GLM_NAMES,
    )


_GLM_NAMES: Final = (
    (r"\.embeddings\.position_embedding\.", ".pos_embed."),
    (r"\.post_conv_layernorm\.", ".patch_norm."),
    (r"\.post_layernorm\.", ".merger.norm."),
    (r"\.downsample\.", ".merger.square."),
)
_NAMES: Final = (
    (r"\.ln_q\.", ".norm."),
    (r"\.merger\.mlp\.0\.", ".merger.fc1."),
    (r"\.merger\.mlp\.2\.", ".merger.fc2."),
    (r"\.linear_fc", ".fc"),
)


def _sizes(vision: ConfigFields, size: int, patch_size: int) -> dict[str, Any]:
    for name in ("in_channels", "in_chans"):
        if vision.integer(name, 3) != 3:
            raise vision.wrong(name, "3", vision.get(name))
    num_heads = vision.integer("num_heads", 16)
    # Half of a head is rotated by the row and half by the column, in pairs.
    if size % (4 * num_heads):
        raise vision.error(
            f"the hidden size {size} of the vision tower must be a multiple of 4 times num_heads {num_heads}"
        )
    rope = vision.first_section("rope_parameters")
    return {
        "patch_size": vision.integer("patch_size", patch_size, maximum=256),
        "frames_per_patch": vision.integer("temporal_patch_size", 2, maximum=16),
        "merge_size": vision.integer("spatial_merge_size", 2, maximum=16),
        "hidden_size": size,
        "num_heads": num_heads,
        "num_layers": vision.with_defaults(depth=32).layer_count("depth"),
        "rope_theta": rope.positive("rope_theta", 10_000.0, above=1),
    }


def _check_output_size(vision: ConfigFields, name: str, output_size: int) -> None:
    size = vision.integer(name, 3584)
    if size != output_size:
        raise vision.wrong(name, f"{output_size}, which is the decoder's hidden_size", size)


def _layers(
    vision: ConfigFields, name: str, num_layers: int, default: list[int]
) -> tuple[int, ...]:
    """Return layers that a config counts from 0, counted from 1."""
    found = vision.get(name, default)
    if not isinstance(found, list) or not all(
        type(index) is int and 0 <= index < num_layers for index in found
    ):
        raise vision.wrong(name, f"indices of the {num_layers} layers", found)
    return tuple(index + 1 for index in found)
