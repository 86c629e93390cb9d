"""Read the vision tower of Moondream, which reads an image as a whole and in tiles that overlap."""

from __future__ import annotations

from typing import ClassVar, Final

from ....config.images.settings import SpanKind
from ...config_fields import ConfigFields
from ..fields import image_and_patch_size
from ..spec import TowerSpec, VisionSpec


class WindowsVisionSpec(TowerSpec, frozen=True):
    """The tower of a Moondream: a vision transformer, and an MLP.

    It reads an image as a whole and as a canvas of tiles, which overlap by twice `margin` patches. The patches of the
    canvas are reduced to as many means as the whole image has patches. The MLP reads a patch and a mean side by side.
    The embedding of the token `start_id` precedes its outputs, and all of them attend to each other.

    Attributes:
        tower: The vision transformer.
        vocab_size: The number of rows of the decoder's embedding.
        max_tiles: The largest number of tiles.
    """

    tower: VisionSpec
    margin: int
    intermediate_size: int
    activation: str
    vocab_size: int
    start_id: int
    max_tiles: int
    output_size: int
    span_kind: ClassVar[SpanKind | None] = SpanKind.IMAGE

    @property
    def num_patches(self) -> int:
        """The number of patches of a tile in each direction."""
        return self.tower.image_size // self.tower.patch_size

    @property
    def window(self) -> int:
        """The distance of neighboring tiles in patches."""
        return self.num_patches - 2 * self.margin

    @property
    def num_outputs(self) -> int:
        """The number of embeddings of an image."""
        return 1 + self.num_patches**2


def moondream(fields: ConfigFields, vision: ConfigFields, output_size: int) -> WindowsVisionSpec:
    """Return the tower of a Moondream 2 or 3."""
    image_size, patch_size = image_and_patch_size(vision, 378, 14)
    size = vision.integer("hidden_size")
    heads = vision.divisor("num_attention_heads", size, 16)
    tower = VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=heads,
        feature_layers=(vision.layer_count("num_hidden_layers"),),
        activation="gelu_pytorch_tanh",
        norm_eps=1e-5,
        output_size=size,
        projection="means",
        has_flat_patches=True,
        has_post_norm=True,
        normalizes_in_bfloat16=True,
        tensor_names=_NAMES,
    )
    text = fields.required_section("text_config")
    vocab_size = text.integer("vocab_size")
    spec = WindowsVisionSpec(
        tower=tower,
        margin=vision.integer("overlap_margin", minimum=0, maximum=1 << 10),
        intermediate_size=vision.integer("projector_hidden_size"),
        activation="gelu_pytorch_tanh",
        vocab_size=vocab_size,
        start_id=fields.integer("bos_token_id", minimum=0, maximum=vocab_size - 1),
        max_tiles=vision.integer("max_crops", maximum=64),
        output_size=output_size,
    )
    if spec.window < 1:
        limit = (spec.num_patches - 1) // 2
        raise vision.wrong(
            "overlap_margin", f"at most {limit} of {spec.num_patches} patches", spec.margin
        )
    return spec


_NAMES: Final = (
    (r"^(model\.)?text\.wte$", "embed_tokens.weight"),
    (r"^(model\.)?vision\.", "vision."),
    (r"^vision\.proj_mlp\.", "projector."),
    (r"^vision\.patch_emb\.", "vision.embeddings.patch_embedding."),
    (r"^vision\.pos_emb$", "vision.embeddings.position_embedding.weight"),
    (r"^vision\.post_ln\.", "vision.post_layernorm."),
    (r"^vision\.blocks\.", "vision.encoder.layers."),
    (r"(^vision\..*)\.ln([12])\.", r"\1.layer_norm\2."),
    (r"(^vision\..*)\.attn\.qkv\.", r"\1.self_attn.qkv."),
    (r"(^vision\..*)\.attn\.proj\.", r"\1.self_attn.out_proj."),
)
