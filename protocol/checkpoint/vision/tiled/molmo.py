"""Read the vision towers of Molmo 1 and 2, whose patches are pooled by attention."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from msgspec.structs import asdict, replace

from ....config.images.settings import SpanKind
from ...config_fields import ConfigFields
from ..fields import image_and_patch_size
from ..spec import TowerSpec, VisionSpec

MARGINS: Final = (4, 4)
"""The patches of a tile that overlap with those of the tile before it, and of the one after it."""
POOL_SIDE: Final = 2
"""The side, in patches, of the square that becomes one feature."""


class PooledVisionSpec(TowerSpec, frozen=True):
    """The tower of a Molmo: a vision transformer, and an adapter that pools its patches by attention.

    It reads an image as a whole and as a canvas of tiles, which overlap. Each square of patches becomes one feature:
    the mean of the patches attends to them. A gated MLP projects the features. They are added to the embedding of the
    first of `token_ids`. The other tokens of an image, which also attend to all of them, keep their own embeddings.

    Attributes:
        tower: The vision transformer, whose outputs are those of several layers together.
        num_heads: The number of heads that pool patches.
        head_dim: The number of elements of each.
        attention_bias: True if the products of the attention have biases.
        mlp_bias: True if the first two products of the MLP have biases.
        vocab_size: The number of rows of the decoder's embedding.
        token_ids: The tokens of an image: a feature's, the end of a row, the start of the whole image, the start of the
            canvas, and the end of both.
    """

    tower: VisionSpec
    num_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    activation: str
    attention_bias: bool
    mlp_bias: bool
    vocab_size: int
    token_ids: tuple[int, int, int, int, int]
    output_size: int
    has_margins: ClassVar[bool] = False
    """True if stored rows are added to the features of patches that are margins."""
    span_kind: ClassVar[SpanKind | None] = SpanKind.IMAGE

    @property
    def num_patches(self) -> int:
        """The number of patches of a tile in each direction."""
        return self.tower.image_size // self.tower.patch_size

    @property
    def window(self) -> int:
        """The distance of neighboring tiles in patches."""
        return self.num_patches - sum(MARGINS)


class PaddedVisionSpec(PooledVisionSpec, frozen=True):
    """The tower of Molmo 1, whose images have margins, and whose tokens attend to earlier ones only."""

    has_margins: ClassVar[bool] = True
    span_kind: ClassVar[SpanKind | None] = None


def molmo2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> PooledVisionSpec:
    """Return the tower of Molmo 2."""
    adapter = fields.first_section("adapter_config")
    names = {"image_size": "image_default_input_size", "patch_size": "image_patch_size"}
    renamed = {name: vision.get(name, vision.get(other)) for name, other in names.items()}
    image_size, patch_size = image_and_patch_size(vision.with_values(renamed), 378, 14)
    heads, pooling_heads = (_heads(each) for each in (vision, adapter))
    size = vision.integer("hidden_size", 1152)
    adapter.require("hidden_size", size, ", as in vision_config")
    adapter.require("text_hidden_size", output_size, ", which is the decoder's hidden_size")
    layers = _feature_layers(adapter, vision)
    tower = VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size", 4304),
        num_heads=heads[0],
        head_dim=heads[1],
        feature_layers=layers,
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        norm_eps=vision.positive("layer_norm_eps", 1e-6),
        output_size=size * len(layers),
        projection="means",
        has_channels_last=True,
        qkv_bias=vision.boolean("attention_bias", True),
        tensor_names=_NAMES,
    )
    spec = PooledVisionSpec(
        tower=tower,
        num_heads=pooling_heads[0],
        head_dim=pooling_heads[1],
        hidden_size=size,
        intermediate_size=adapter.integer("intermediate_size", 18_944),
        activation=adapter.text("hidden_act", "silu"),
        attention_bias=adapter.boolean("attention_bias", True),
        mlp_bias=adapter.boolean("mlp_bias", False),
        vocab_size=_vocab_size(fields),
        token_ids=_token_ids(fields),
        output_size=output_size,
    )
    if spec.window < 1:
        raise vision.wrong("image_size", f"more than {sum(MARGINS)} patches", image_size)
    return spec


def molmo(fields: ConfigFields, vision: ConfigFields, output_size: int) -> PaddedVisionSpec:
    """Return the tower of Molmo 1: a CLIP whose images have margins."""
    text = fields.required_section("text_config")
    adapter: dict[str, Any] = {
        name: vision.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim")
    }
    adapter |= {
        "num_key_value_heads": vision.get("num_attention_heads"),
        "text_hidden_size": output_size,
        "intermediate_size": text.integer("intermediate_size"),
        "vit_layers": fields.get("vit_layers", [-2, -9]),
    }
    own = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    values = {"num_key_value_heads": vision.get("num_attention_heads")}
    vision = vision.with_defaults(**own).with_values(values)
    spec = molmo2(fields.with_values({"adapter_config": adapter}), vision, output_size)
    if spec.num_patches % POOL_SIDE:
        raise vision.wrong(
            "image_size", f"an even number of patches of {spec.tower.patch_size}", spec.num_patches
        )
    tower = replace(spec.tower, has_class_token=True, has_patch_bias=False, has_pre_norm=True)
    return PaddedVisionSpec(**asdict(spec) | {"tower": tower})


def _heads(section: ConfigFields) -> tuple[int, int]:
    """Return the number and the size of the heads, all of which have keys and values of their own."""
    num_heads = section.integer("num_attention_heads", 16)
    section.require("num_key_value_heads", num_heads, ", as num_attention_heads")
    return num_heads, section.integer("head_dim", 72)


def _feature_layers(adapter: ConfigFields, vision: ConfigFields) -> tuple[int, ...]:
    """Return the layers, counted from 1, whose outputs are the features."""
    num_layers = vision.with_defaults(num_hidden_layers=25).layer_count("num_hidden_layers")
    layers = adapter.get("vision_feature_layer", adapter.get("vit_layers", [24, 18]))
    if (
        not isinstance(layers, list)
        or not layers
        or not all(type(i) is int and -num_layers <= i < num_layers for i in layers)
    ):
        raise adapter.wrong(
            "vision_feature_layer", f"one or more of the {num_layers} layers", layers
        )
    return tuple(i % num_layers + 1 for i in layers)


def _vocab_size(fields: ConfigFields) -> int:
    text = fields.first_section("text_config")
    return text.integer("vocab_size", 151_936) + text.integer("additional_vocab_size", 128)


def _token_ids(fields: ConfigFields) -> tuple[int, int, int, int, int]:
    most = _vocab_size(fields) - 1
    names = {
        "image_patch_id": 151_938,
        "image_col_id": 151_939,
        "low_res_image_start_token_id": 151_940,
        "image_start_token_id": 151_936,
        "image_end_token_id": 151_937,
    }
    patch, column, whole, canvas, end = (
        fields.integer(name, default, minimum=0, maximum=most) for name, default in names.items()
    )
    return patch, column, whole, canvas, end


_VIT = r"^model\.vision_backbone\.image_vit\."
_NAMES: Final = (
    (_VIT + r"transformer\.resblocks\.", "vision_tower.layers."),
    (_VIT, "vision_tower."),
    (r"^model\.vision_backbone\.", "adapter."),
    (r"^model\.vision_tower\.", "vision_tower."),
    (r"^model\.multi_modal_projector\.", "adapter."),
    (r"\.attention\.w([qkv])\.", r".self_attn.\1_proj."),
    (r"\.attention\.wo\.", ".self_attn.out_proj."),
    (r"(vision_tower\..*\.self_attn)\.o_proj\.", r"\1.out_proj."),
    (r"\.feed_forward\.w([12])\.", r".mlp.fc\1."),
    (r"\.attention_norm\.", ".layer_norm1."),
    (r"\.ffn_norm\.", ".layer_norm2."),
    (r"vision_tower\.layers\.", "vision_tower.encoder.layers."),
    (r"vision_tower\.class_embedding$", "vision_tower.embeddings.class_embedding"),
    (r"vision_tower\.pre_ln\.", "vision_tower.pre_layrnorm."),
    (r"vision_tower\.patch_embedding\.", "vision_tower.embeddings.patch_embedding."),
    (
        r"vision_tower\.positional_embedding$",
        "vision_tower.embeddings.position_embedding.weight",
    ),
    (r"image_pooling_2d\.w([qkvo])\.", r"image_pooling_2d.\1_proj."),
    (r"image_projector\.w1\.", "image_projector.gate_proj."),
    (r"image_projector\.w2\.", "image_projector.down_proj."),
    (r"image_projector\.w3\.", "image_projector.up_proj."),
    (r"^model\.transformer\.wte\.embedding$", "embed_tokens.weight"),
    (r"^model\.language_model\.embed_tokens\.", "embed_tokens."),
)
"""Translates the names of published checkpoints and of transformers."""
