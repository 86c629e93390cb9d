"""Read the vision tower of FastVLM, which consists of convolutions and attention (FastViT)."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from ...config_fields import ConfigFields
from ..spec import MAX_SIDE, TowerSpec

_ARCHITECTURE: Final = "fastvit_mci3"
_DEPTHS: Final = (2, 12, 24, 4, 2)
_SIZES: Final = (96, 192, 384, 768, 1536)
HEAD_DIM: Final = 32
"""The number of elements of a head."""
NUM_ATTENTION_STAGES: Final = 2
"""The number of last stages whose blocks have attention."""


class FastVitSpec(TowerSpec, frozen=True):
    """The tower of FastVLM (arXiv 2412.13303): a FastViT (arXiv 2303.14189) with merged branches, and two products.

    Two convolutions and a product halve both sides of an image twice, and each stage but the first halves them again.
    The last convolution doubles the channels.

    Attributes:
        depths: The number of blocks of each stage.
        sizes: The number of channels of each stage.
        output_side: The number of features of an image in each direction.
    """

    depths: tuple[int, ...]
    sizes: tuple[int, ...]
    output_side: int
    activation: str
    projection_bias: bool
    output_size: int

    @property
    def hidden_size(self) -> int:
        """The number of elements of a feature."""
        return 2 * self.sizes[-1]

    @property
    def image_size(self) -> int:
        """The side of an image in pixels."""
        return self.output_side << (len(self.sizes) + 1)

    @property
    def num_outputs(self) -> int:
        """The number of embeddings of an image."""
        return self.output_side**2


def fast_vlm(fields: ConfigFields, vision: ConfigFields, output_size: int) -> FastVitSpec:
    """Return the tower of FastVLM."""
    vision.require("architecture", _ARCHITECTURE)
    options = vision.section_or_empty("model_args")
    if others := set(options.config) - {"inference_mode", "layers", "embed_dims"}:
        needed = "nothing but inference_mode, layers and embed_dims"
        raise vision.wrong("model_args", needed, sorted(others))
    options.require("inference_mode", True, ", with merged branches", default=False)
    depths, sizes = (
        _integers(options, name, default)
        for name, default in (("layers", _DEPTHS), ("embed_dims", _SIZES))
    )
    if any(size % before for before, size in pairwise(sizes)):
        raise options.wrong(
            "embed_dims", "sizes that are multiples of the size before", list(sizes)
        )
    if sizes[-NUM_ATTENTION_STAGES] % HEAD_DIM:
        raise options.wrong("embed_dims", f"multiples of {HEAD_DIM} with attention", list(sizes))
    spec = FastVitSpec(
        depths=depths,
        sizes=sizes,
        output_side=_output_side(fields, len(sizes)),
        activation=fields.text("projector_hidden_act", "gelu"),
        projection_bias=fields.boolean("multimodal_projector_bias", True),
        output_size=output_size,
    )
    size = vision.integer("hidden_size", spec.hidden_size)
    if size != spec.hidden_size:
        raise vision.wrong("hidden_size", f"{spec.hidden_size}, twice the last channels", size)
    return spec


def _output_side(fields: ConfigFields, num_stages: int) -> int:
    maximum = MAX_SIDE >> (num_stages + 1)
    return fields.square_side("image_seq_length", 576, maximum=maximum**2)


def _integers(options: ConfigFields, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    values = options.per_layer(name, len(default)) or default
    return tuple(
        options.with_values({name: each}).integer(name, maximum=1 << 14) for each in values
    )
