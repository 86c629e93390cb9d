"""Read the vision towers of DeepSeek-VL2, and those that begin with SAM's image encoder: DeepSeek-OCR, GOT-OCR 2."""

from __future__ import annotations

from typing import Final

from ..config_fields import ConfigFields
from .fields import Sizes, head_count, image_and_patch_size, read_sizes
from .spec import SamSpec, TowerSpec, VisionSpec

NUM_QUERIES: Final = (144, 256)
"""The number of queries for a tile and for a whole image."""


class QueryVisionSpec(TowerSpec, frozen=True):
    """The tower of DeepSeek-OCR 2: an image encoder, and a reader that is like a decoder.

    The image encoder reduces each square of 4 x 4 patches to one feature. The features and the learned queries after
    them are the sequence of the reader. Features attend to each other, and a query attends to all features and to the
    queries before it. The outputs of the queries are projected.

    Attributes:
        sam: The image encoder.
        reader_size: The hidden size of the reader, and the number of elements of a feature.
    """

    sam: SamSpec
    reader_size: int
    reader_intermediate_size: int
    reader_heads: int
    reader_kv_heads: int
    reader_layers: int
    reader_activation: str
    reader_eps: float
    reader_theta: float
    output_size: int


class JoinedVisionSpec(TowerSpec, frozen=True):
    """The tower of DeepSeek-OCR (arXiv 2510.18234): an image encoder, and the layers of CLIP, which read its features.

    The features are in the place of CLIP's patches. Both outputs of a place are concatenated and projected. Each row of
    an image, or of the grid of its tiles, ends with a stored embedding, and the last tile with another.

    Attributes:
        sam: The image encoder.
        reader: The layers of CLIP. Their positions are interpolated.
    """

    sam: SamSpec
    reader: VisionSpec

    @property
    def output_size(self) -> int:
        """The number of elements of an embedding."""
        return self.reader.output_size


class SamVisionSpec(TowerSpec, frozen=True):
    """The tower of GOT-OCR 2 (arXiv 2409.01704): an image encoder, and a matrix that reads its features.

    Attributes:
        sam: The image encoder.
        projection_size: The number of outputs of a second matrix; 0 for none.
        is_read: True if cross attention reads the embeddings, which then replace no tokens (PP-FormulaNet).
    """

    sam: SamSpec
    projection_size: int = 0
    is_read: bool = False

    @property
    def image_size(self) -> int:
        """The side of an image in pixels."""
        return self.sam.image_size

    @property
    def height(self) -> int:
        """The number of rows of pixels of a page."""
        return self.sam.image_size

    @property
    def width(self) -> int:
        """The number of columns of pixels of a page."""
        return self.sam.image_size

    @property
    def output_size(self) -> int:
        """The number of elements of an embedding."""
        return self.projection_size or self.sam.output_size

    @property
    def num_outputs(self) -> int:
        """The number of embeddings of an image."""
        return (self.sam.image_size // self.sam.unit) ** 2

    @property
    def num_page_outputs(self) -> int:
        """The number of embeddings of an image that cross attention reads; 0 for other images."""
        return self.num_outputs if self.is_read else 0


def got_ocr2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> SamVisionSpec:
    """Return the tower of GOT-OCR 2."""
    sam = sam_encoder(vision, 2 * vision.integer("output_channels", 256), output_size)
    if sam.image_size % sam.unit:
        raise vision.wrong("image_size", f"a multiple of {sam.unit}", sam.image_size)
    return SamVisionSpec(sam)


def formula_net(fields: ConfigFields, vision: ConfigFields, output_size: int) -> SamVisionSpec:
    """Return the tower of PP-FormulaNet, whose two matrices are those of GOT-OCR 2 and one more."""
    vision.require("decoder_hidden_size", output_size, ", the decoder's d_model", default=512)
    middle = vision.integer("post_conv_mid_channels", 512)
    tower = vision.with_defaults(image_size=512, mlp_dim=3072)
    sam = sam_encoder(tower, middle, vision.integer("post_conv_out_channels", 1024))
    vision.require("post_conv_in_channels", sam.neck_size, ", output_channels", default=256)
    if sam.image_size % sam.unit:
        raise vision.wrong("image_size", f"a multiple of {sam.unit}", sam.image_size)
    return SamVisionSpec(sam, output_size, is_read=True)


def deepseek_vl2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of DeepSeek-VL2, a SigLIP whose config has names of its own."""
    fields.require_all(tile_tag="2D", global_view_pos="head")
    projector = fields.first_section("projector_config")
    projector.require_all(projector_type="downsample_mlp_gelu", token_pooling=False, depth=2)
    projector.require("n_embed", output_size, ", the hidden size of the decoder", default=2048)
    section = _with_names(vision.with_defaults(layers=27, heads=16), 1152)
    size = section.integer("hidden_size")
    inner = {"intermediate_size": int(size * section.positive("mlp_ratio", 3.7362))}
    return VisionSpec(
        **read_sizes(section.with_values(inner), _VL2_SIZES),
        output_size=output_size,
        projection="padded mlp",
        merge_factor=projector.integer("downsample_ratio", 2, maximum=16),
        adapter_size=output_size * projector.integer("mlp_ratio", 1, maximum=16),
        has_post_norm=True,
        has_rows=True,
        tensor_names=_VL2_NAMES,
    )


_VL2_SIZES: Final = Sizes(384, 14, 1152, 4304, num_heads=16, num_layers=27)
_VL2_NAMES: Final = (
    (r"vision\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"vision\.pos_embed$", "vision.embeddings.position_embedding.weight"),
    (r"vision\.norm\.", "vision.post_layernorm."),
    (r"vision\.blocks\.", "vision.encoder.layers."),
    (r"(vision\.encoder\..*)\.norm([12])\.", r"\1.layer_norm\2."),
    (r"(vision\.encoder\..*)\.attn\.proj\.", r"\1.self_attn.out_proj."),
    (r"(vision\.encoder\..*)\.attn\.", r"\1.self_attn."),
    (r"projector\.layers\.0\.", "multi_modal_projector.linear_1."),
    (r"projector\.layers\.2\.", "multi_modal_projector.linear_2."),
)


def deepseek_ocr(fields: ConfigFields, vision: ConfigFields, output_size: int) -> JoinedVisionSpec:
    """Return the tower of DeepSeek-OCR, whose config names only some sizes."""
    projector = fields.first_section("projector_config")
    projector.require("projector_type", "linear")
    widths = vision.first_section("width")
    clip, sam = (
        _with_names(widths.first_section(name), size)
        for name, size in (("clip-l-14-224", 1024), ("sam_vit_b", 768))
    )
    sizes = read_sizes(clip, _CLIP_SIZES)
    size = sizes["hidden_size"]
    middle, last = _channels(sam, [512, 1024])
    if last != size:
        raise sam.wrong("downsample_channels", f"two numbers, of which the second is {size}", last)
    reader = VisionSpec(
        **sizes | {"intermediate_size": 4 * size},
        output_size=output_size,
        projection="matrix",
        has_class_token=True,
        has_pre_norm=True,
    )
    return JoinedVisionSpec(sam_encoder(sam, middle, last), reader)


_CLIP_SIZES: Final = Sizes(224, 14, 1024, 4096, 16, 24, "quick_gelu", 1e-5)


def _with_names(section: ConfigFields, width: int) -> ConfigFields:
    """Return the sizes of an encoder with transformers' names."""
    others = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
    section = section.with_defaults(width=width)
    return section.with_values({name: section.get(other) for name, other in others.items()})


def _channels(sam: ConfigFields, default: list[int]) -> tuple[int, int]:
    """Return the numbers of channels after the two convolutions at the end of an image encoder."""
    name = "downsample_channels"
    channels = sam.get(name, default)
    if not isinstance(channels, list) or len(channels) != 2:
        raise sam.wrong(name, "two numbers", channels)
    middle, last = (sam.with_values({name: each}).integer(name) for each in channels)
    return middle, last


def deepseek_ocr2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> QueryVisionSpec:
    """Return the tower of DeepSeek-OCR 2."""
    sam, reader = vision.first_section("sam_config"), vision.first_section("encoder_config")
    middle, last = _channels(sam, [512, 896])
    reader_size = reader.integer("hidden_size", 4096)
    if reader_size != last:
        raise reader.wrong(
            "hidden_size", f"{last}, as in sam_config.downsample_channels", reader_size
        )
    num_heads = head_count(reader, reader_size, 32)
    reader.require("use_sliding_window", False)
    return QueryVisionSpec(
        sam=sam_encoder(sam, middle, reader_size),
        reader_size=reader_size,
        reader_intermediate_size=reader.integer("intermediate_size", 22016),
        reader_heads=num_heads,
        reader_kv_heads=reader.divisor("num_key_value_heads", num_heads, num_heads),
        reader_layers=reader.with_defaults(num_hidden_layers=32).layer_count("num_hidden_layers"),
        reader_activation=reader.text("hidden_act", "silu"),
        reader_eps=reader.positive("rms_norm_eps", 1e-6),
        reader_theta=reader.first_section("rope_parameters").positive(
            "rope_theta", reader.positive("rope_theta", 10_000.0, above=1), above=1
        ),
        output_size=output_size,
    )


def sam_encoder(sam: ConfigFields, middle_size: int, output_size: int) -> SamSpec:
    """Return the encoder that a section of a config describes.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    sam.require_all(use_abs_pos=True, use_rel_pos=True, qkv_bias=True)
    image_size, patch_size = image_and_patch_size(sam, 1024, 16)
    num_layers = sam.with_defaults(num_hidden_layers=12).layer_count("num_hidden_layers")
    full = sam.get("global_attn_indexes", [2, 5, 8, 11])
    if not isinstance(full, list) or not all(type(i) is int and i >= 0 for i in full):
        raise sam.wrong("global_attn_indexes", "a list of indices", full)
    size = sam.integer("hidden_size", 768)
    return SamSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=size,
        intermediate_size=sam.integer("mlp_dim", int(size * sam.positive("mlp_ratio", 4.0))),
        num_heads=head_count(sam, 768, 12),
        num_layers=num_layers,
        activation=sam.text("hidden_act", "gelu"),
        norm_eps=sam.positive("layer_norm_eps", 1e-6),
        window_size=sam.integer("window_size", 14, maximum=1024),
        full_layers=tuple(i + 1 for i in full if i < num_layers),
        neck_size=sam.integer("output_channels", 256),
        middle_size=middle_size,
        output_size=output_size,
    )
