"""Read the vision towers of Qwen-VL and GLM, which process images of any size."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import msgspec
from msgspec.structs import replace

from ...config.images.settings import SpanKind
from ..config_fields import ConfigFields
from .fields import require_rotated_pairs
from .spec import MAX_SIDE, PageSpec


class GridVisionSpec(msgspec.Struct, frozen=True):
    """A vision transformer that reads images of any size, and its projection to the decoder's hidden size.

    A patch covers `patch_size` x `patch_size` pixels in `frames_per_patch` frames, which are equal for an image. Half
    of each head is rotated by the patch's row and half by its column (Qwen2-VL, arXiv 2409.12191). The projection
    merges a square of `merge_size` x `merge_size` patches into one output: their rows are normed, concatenated and
    multiplied by two matrices.

    Attributes:
        frames_per_tubelet: If not 0, this many frames of a video become a patch by a projection of their own.
        norm_kind: The kind of every norm.
        norms_outputs: True if the outputs of blocks are normed instead of their inputs.
        has_gate: True if MLPs are gated.
        has_patch_norm: True if patch embeddings are normed before learned positions are added.
        norms_positions: True if the norm of patch embeddings follows the addition of learned positions.
        has_biases: True if the matrices of the layers have biases.
        has_head_norms: True if the queries and keys of each head are normed (GLM-OCR).
        gate_limit: If not 0, gated MLPs are clamped: the gate to at most this, the up projection to plus or minus this.
        merger_size: If not 0 (GLM-4.1V, arXiv 2507.01006), one matrix projects a square, and its output passes through
            another matrix, a norm and a gated MLP with this many intermediate elements.
        position_side: If not 0, patches also have learned positions: a square table with this side, interpolated to the
            patches of the image.
        has_square_positions: True if the checkpoint stores that table with three dimensions.
        has_class_position: True if the table has another row before the others, for the class token if there is one.
        interpolation: The interpolation of the table. "corners" is bilinear and aligns the corners of the image and the
            table. The others align the centers of patches: "centers" is bicubic, "bilinear centers" bilinear, and
            "antialiased" and "antialiased bicubic" average over all positions in between where the image has fewer
            patches. "cropped" (RADIO) is
            bilinear over a square with the longer side of the image, whose upper left part is used. "swapped sides" is
            bilinear with zeros outside of the table, and assigns positions row by row as if the image had as many rows
            as it has columns, and the other way around (Muse).
        side_offset: A number that is added to the image's rows and columns of patches when these centers are computed.
        has_final_norm: True if all patches are normed before they are merged, in addition to the projection's norm.
        outer_eps: The epsilon of the norms of patch embeddings and of all patches before they are merged, if not 0 and
            different from `norm_eps`.
        merger_eps: The epsilon of the projection's norm, if not 0 and different from `norm_eps`.
        has_joined_qkv: True if queries, keys and values have one matrix together.
        conv_layers: The layers, counted from 1, that have a convolution over the patches of the image instead of
            attention (LFM3-VL): the patches' rows are multiplied by gates, convolved in each channel by a square of
            `conv_size` x `conv_size`, and multiplied by other gates.
        num_kv_heads: If not 0, several query heads share keys and values, of which there are this many heads.
        head_dim: The number of elements of a head, if not 0 and different from `hidden_size` / `num_heads`.
        bands: For each layer the order of cells in which patches attend to those that are at most `band_size` patches
            away (MiMo), or None if they attend to all. Empty if the patches of all layers do.
        has_first_biases: True if each head of the layers with a band adds a number to the scores of the first patch.
        rotary: The order of a head's angles: those of the row before those of the column ("joined"), the other way
            around ("columns first"; with "pairs", neighboring elements are rotated together), or alternating, beginning
            with the column, where neighboring elements are rotated together, too ("alternating"). With "thirds"
            (MiniMax M3), a third of a head each is rotated by the frame, the row and the column. With "crossed"
            (LLaVA-OneVision 2), neighbors are mixed by two angles, which follow the row, the column or neither. None if
            there is no rotation.
        has_axes: True if the decoder's positions have three coordinates, else one.
        patch_layout: The stored form of the patch projection: as a convolution with all dimensions, or with two
            dimensions, of which the second is ordered by "pixels", "frames" or "channels" first.
        merger_norm: The rows that the projection norms: patches or squares of patches; None if it has no norm.
        merger_norm_kind: The kind of that norm, if it differs from the others.
        has_merger_norm_bias: True if that norm has a bias, if its kind is "layer".
        merger_activation: The activation between the two matrices of the projection.
        merger_inner: If not 0, the number of elements between the two matrices of the projection.
        has_merger_biases: True if the matrices of the projection have biases.
        projects_patches: True if the projection has two matrices for each patch, and two for each square (MiniMax M3).
        convolves: True if the projection has two convolutions, which halve both sides and double the elements, and a
            matrix (Step 3.7).
        convolved_size: If not 0, the first of them is over squares of 2 x 2 patches and has this many outputs (Step 3).
        middle_size: If not 0, the number of outputs of the projection's second matrix, which is followed by a third.
        has_third_matrix: True if the projection has three matrices, of which the first reads an element of all patches
            of a square before the next element.
        has_output_norm: True if embeddings are normed (Sarashina2-Vision).
        num_words: If not 0, the rows of a table of visual words. The projection makes a distribution over all but the
            last four, which are marks. The first two marks are around an image (Ovis 2.5, arXiv 2508.11737).
        newlines: If not None, the projection adds a learned embedding after each row of an image. With "framed", it has
            three matrices between two norms, and other embeddings before the image and after it (Hunyuan-OCR, arXiv
            2511.19575). With "plain", a norm is followed by two matrices (Hy4-VL).
        merges_frames: True if the projection has an MLP and a norm for each square, the same for two frames, and then a
            matrix and an RMS norm with the epsilon `merger_eps` (ERNIE 4.5 VL). The two frames of an image are equal.
        window_size: If not 0, patches attend within squares with this side in pixels (Qwen2.5-VL, arXiv 2502.13923),
            except in `full_layers`.
        deepstack_layers: Layers, counted from 1, whose outputs have their own projections. The decoder adds these to
            its hidden states after its first layers, in the order of the tower's layers.
        summed_layers: Layers, counted from 1, whose outputs are normed like those of the last one and have their own
            projections to `middle_size` elements, in this order. The sum of these is activated by SiLU and multiplied
            by a matrix (openPangu-VL).
        frame_merge: The side of the square of patches of a video's frame whose mean becomes one output (VideoLLaMA 3).
        has_class_token: True if there is a learned row before the patches, whose output is not used. Rows and columns
            are then counted from 1.
        num_class_rows: The number of rows before the patches that are this row.
        has_class_angles: True if that row is rotated by angles of its own, which the checkpoint stores. Rows and
            columns are then counted from 0 (LLaVA-OneVision 1.5).
        has_registers: True if there is a table of learned rows before the patches, whose outputs are not used.
        has_layer_scales: True if stored factors multiply the output of each block.
        page: If not None, all images have one size, and the projection joins neighbors of a row.
        margin: If not None, the value, from 0 to 255 for others, of all pixels in the margins of an image.
        num_experts: For each layer the number of experts of its MLP, or 0 (dots3-note). Empty if no MLP has experts. A
            patch passes through the `num_chosen` experts with the highest scores, whose MLPs have `expert_size` inner
            elements.
        expert_tokens: The decoder's tokens that have experts of their own, because they belong to images.
        span_kind: Always None, because the decoder is causal.
        tensor_names: Translates the checkpoint's tensor names, as in `ModelSpec`.
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
    frames_per_tubelet: int = 0
    norm_kind: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    norms_outputs: bool = False
    has_gate: bool = False
    gate_limit: float = 0.0
    has_patch_bias: bool = False
    has_patch_norm: bool = False
    norms_positions: bool = False
    has_biases: bool = True
    has_head_norms: bool = False
    merger_size: int = 0
    position_side: int = 0
    has_square_positions: bool = False
    has_class_position: bool = False
    interpolation: Literal[
        "corners",
        "centers",
        "bilinear centers",
        "antialiased",
        "antialiased bicubic",
        "cropped",
        "swapped sides",
    ] = "corners"
    side_offset: float = 0.0
    has_final_norm: bool = False
    outer_eps: float = 0.0
    merger_eps: float = 0.0
    has_joined_qkv: bool = True
    num_kv_heads: int = 0
    head_dim: int = 0
    bands: tuple[Literal["rows", "columns"] | None, ...] = ()
    band_size: int = 0
    has_first_biases: bool = False
    conv_layers: tuple[int, ...] = ()
    conv_size: int = 0
    rotary: (
        Literal["joined", "columns first", "pairs", "alternating", "thirds", "crossed"] | None
    ) = "joined"
    has_axes: bool = True
    patch_layout: Literal["convolution", "pixels", "frames", "channels"] = "convolution"
    merger_norm: Literal["patches", "squares"] | None = "patches"
    merger_norm_kind: Literal["layer", "rms"] | None = None
    has_merger_norm_bias: bool = True
    merger_activation: str = "gelu"
    merger_inner: int = 0
    has_merger_biases: bool = True
    projects_patches: bool = False
    convolves: bool = False
    convolved_size: int = 0
    middle_size: int = 0
    has_third_matrix: bool = False
    has_output_norm: bool = False
    num_words: int = 0
    newlines: Literal["framed", "plain"] | None = None
    merges_frames: bool = False
    window_size: int = 0
    full_layers: tuple[int, ...] = ()
    deepstack_layers: tuple[int, ...] = ()
    summed_layers: tuple[int, ...] = ()
    frame_merge: int = 1
    has_class_token: bool = False
    num_class_rows: int = 1
    has_class_angles: bool = False
    has_registers: bool = False
    has_layer_scales: bool = False
    page: PageSpec | None = None
    margin: float | None = None
    num_experts: tuple[int, ...] = ()
    num_chosen: int = 0
    expert_size: int = 0
    expert_tokens: tuple[int, ...] = ()
    span_kind: ClassVar[SpanKind | None] = None
    tensor_names: tuple[tuple[str, str], ...] = ()

    @property
    def added_after(self) -> tuple[int, ...]:
        """The decoder's layers, from 0, after which the outputs of `deepstack_layers` are added."""
        return tuple(range(len(self.deepstack_layers)))

    @property
    def num_page_outputs(self) -> int:
        """The number of embeddings of a page; 0 for other images."""
        if (page := self.page) is None:
            return 0
        rows, columns = page.height // self.patch_size, page.width // self.patch_size
        return rows * (columns // page.columns_per_output) + 1

    @property
    def size_of_heads(self) -> int:
        """The number of elements of a head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def unit(self) -> int:
        """The side, in pixels, of the square of an image that becomes one embedding."""
        return self.patch_size * self.merge_size


def qwen2_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Qwen2-VL."""
    size = vision.integer("embed_dim", 1280)
    vision.require("hidden_size", output_size, _OUTPUT_SIZE, default=3584)
    return GridVisionSpec(
        **grid_sizes(vision, size, 14),
        intermediate_size=int(size * vision.positive("mlp_ratio", 4.0)),
        activation=vision.text("hidden_act", "quick_gelu"),
        output_size=output_size,
        tensor_names=NAMES,
    )


def points(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of POINTS 1.5 (arXiv 2412.08443): Qwen2-VL's, for a decoder whose positions have one axis."""
    names = ((r"^vision_encoder\.", "visual."), (r"^vision_projector\.", "visual.merger."))
    spec = qwen2_vl(fields, vision.with_values({"hidden_size": output_size}), output_size)
    return replace(spec, has_axes=False, tensor_names=(*names, *NAMES))


def sarashina2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Sarashina2-Vision, which is that of POINTS 1.5 with a norm of its embeddings."""
    spec = points(fields, vision, output_size)
    names = ((r"^norm\.", "visual.merger.output_norm."), *NAMES)
    return replace(spec, has_output_norm=True, tensor_names=names)


def qwen2_5_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Qwen2.5-VL."""
    vision.require("out_hidden_size", output_size, _OUTPUT_SIZE, default=3584)
    sizes = grid_sizes(vision, vision.integer("hidden_size", 3584), 14)
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
        full_layers=read_layers(
            vision, "fullatt_block_indexes", sizes["num_layers"], [7, 15, 23, 31]
        ),
        tensor_names=NAMES,
    )


def opencua(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of OpenCUA (arXiv 2508.09123): Qwen2.5-VL's, for a decoder whose positions have one axis."""
    names = ((r"^(model\.)?vision_tower\.", "visual."), *NAMES)
    spec = qwen2_5_vl(fields, vision, output_size)
    return replace(spec, has_axes=False, tensor_names=names)


def llava_onevision1_5(
    fields: ConfigFields, vision: ConfigFields, output_size: int
) -> GridVisionSpec:
    """Return the tower of LLaVA-OneVision 1.5 (arXiv 2509.23661), a RICE-ViT for images of any size."""
    vision.require("text_hidden_size", output_size, _OUTPUT_SIZE)
    own = vision.with_defaults(depth=24).with_values({"temporal_patch_size": 1})
    return GridVisionSpec(
        **grid_sizes(own, vision.integer("hidden_size", 1024), 14),
        intermediate_size=vision.integer("intermediate_size", 4096),
        activation=vision.text("hidden_act", "gelu"),
        output_size=output_size,
        norm_eps=vision.positive("layer_norm_eps", 1e-5),
        norms_positions=True,
        has_class_token=True,
        has_class_angles=True,
        has_axes=False,
        tensor_names=(*NAMES, (r"\.pre_layernorm\.", ".patch_norm.")),
    )


def exaone4_5(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of EXAONE 4.5, which is like Qwen2.5-VL's but shares keys and values among heads."""
    spec = qwen2_5_vl(fields, vision, output_size)
    num_kv_heads = vision.divisor("num_key_value_heads", spec.num_heads, 8)
    return replace(spec, num_kv_heads=num_kv_heads, has_axes=False)


def hyperclovax(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of HyperCLOVA X SEED Vision: that of Qwen2.5-VL, followed by another matrix."""
    middle_size = vision.integer("out_hidden_size", 3584)
    return replace(
        qwen2_5_vl(fields, vision, middle_size),
        output_size=output_size,
        middle_size=middle_size,
        has_axes=False,
        tensor_names=(
            *NAMES,
            (r"(model\.)?(vision_model|visual)\.", "visual."),
            (r"(model\.)?((mm_|vision_)?projector)\.", "visual.merger.fc3."),
        ),
    )


def qwen3_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Qwen3-VL."""
    vision.require("out_hidden_size", output_size, _OUTPUT_SIZE, default=3584)
    sizes = grid_sizes(vision.with_defaults(depth=27), vision.integer("hidden_size", 1152), 16)
    return GridVisionSpec(
        **sizes,
        intermediate_size=vision.integer("intermediate_size", 4304),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        output_size=output_size,
        has_patch_bias=True,
        position_side=vision.square_side("num_position_embeddings", 2304),
        deepstack_layers=read_layers(
            vision, "deepstack_visual_indexes", sizes["num_layers"], [8, 16, 24]
        ),
        tensor_names=NAMES,
    )


def qwen2_5_omni(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Qwen2.5-Omni, which is Qwen2.5-VL's with separate queries, keys and values."""
    names = ((r"\.attn\.([qkv])\.", r".attn.\1_proj."), *NAMES)
    spec = qwen2_5_vl(fields, vision, output_size)
    return replace(spec, has_joined_qkv=False, tensor_names=names)


def qwen3_omni(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Qwen3-Omni, which is Qwen3-VL's with other names."""
    return replace(qwen3_vl(fields, vision, output_size), tensor_names=(*_OMNI_NAMES, *NAMES))


def qwen3_5(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Qwen3.5, which is like Qwen3-VL's without DeepStack."""
    without = vision.with_values({"deepstack_visual_indexes": []})
    return qwen3_vl(fields, without, output_size)


def interns1_pro(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Intern-S1 Pro: Qwen3.5's, for a decoder whose positions have one coordinate."""
    return replace(qwen3_5(fields, vision, output_size), has_axes=False)


def ling3_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Ling 3, which is Qwen3-VL's without DeepStack and with a narrower projection."""
    vision.require("deepstack_visual_indexes", [], default=[])
    own = vision.with_values({"out_hidden_size": output_size, "deepstack_visual_indexes": []})
    return replace(
        qwen3_vl(fields, own, output_size),
        merger_inner=output_size,
        tensor_names=(
            (r"^model\.visual\.", "visual."),
            (r"^(model\.)?linear_proj\.0\.", "visual.merger.fc1."),
            (r"^(model\.)?linear_proj\.2\.", "visual.merger.fc2."),
            *NAMES,
        ),
    )


def glm4v(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of GLM-4.1V and GLM-4.5V."""
    vision.require("out_hidden_size", output_size, _OUTPUT_SIZE, default=3584)
    sizes = grid_sizes(
        vision.with_defaults(depth=24, num_heads=12), vision.integer("hidden_size", 1536), 14
    )
    image_size = vision.integer("image_size", 336, maximum=MAX_SIDE)
    vision.require("attention_bias", False)
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
    vision.require("out_hidden_size", output_size, _OUTPUT_SIZE, default=3584)
    return GridVisionSpec(
        **grid_sizes(vision, vision.integer("hidden_size", 1024), 14),
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


def glm5_next(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of GLM-5.3-Flash: that of GLM-OCR with limited gates."""
    return replace(
        glm_ocr(fields, vision, output_size),
        merger_size=vision.integer("projection_intermediate_size", 10240),
        gate_limit=vision.positive("swiglu_limit", 10.0),
        has_axes=False,
    )


_OUTPUT_SIZE: Final = ", which is the decoder's hidden_size"
_GLM_NAMES: Final = (
    (r"\.embeddings\.position_embedding\.", ".pos_embed."),
    (r"\.post_conv_layernorm\.", ".patch_norm."),
    (r"\.post_layernorm\.", ".merger.norm."),
    (r"\.downsample\.", ".merger.square."),
)
NAMES: Final = (
    (r"\.ln_q\.", ".norm."),
    (r"\.merger\.mlp\.0\.", ".merger.fc1."),
    (r"\.merger\.mlp\.2\.", ".merger.fc2."),
    (r"\.linear_fc", ".fc"),
)
_OMNI_NAMES: Final = (
    (r"\.merger_list\.(\d+)\.mlp\.0\.", r".merger_list.\1.fc1."),
    (r"\.merger_list\.(\d+)\.mlp\.2\.", r".merger_list.\1.fc2."),
    (r"\.merger_list\.", ".deepstack_merger_list."),
)


def grid_sizes(vision: ConfigFields, size: int, patch_size: int) -> dict[str, Any]:
    """Return the sizes that the config of a tower has. `patch_size` is the default of that of patches."""
    vision.require_all(in_channels=3, in_chans=3)
    num_heads = vision.integer("num_heads", 16)
    require_rotated_pairs(vision, size, num_heads, "num_heads")
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


def read_layers(
    vision: ConfigFields, name: str, num_layers: int, default: list[int]
) -> tuple[int, ...]:
    """Return a config's list of layers, which counts from 0, as layers counted from 1."""
    found = vision.get(name, default)
    if not isinstance(found, list) or not all(
        type(index) is int and 0 <= index < num_layers and found.count(index) == 1
        for index in found
    ):
        raise vision.wrong(name, f"different indices of the {num_layers} layers", found)
    return tuple(index + 1 for index in found)
