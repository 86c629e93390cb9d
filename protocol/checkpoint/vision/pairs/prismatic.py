"""Read the vision towers of models with the code of Prismatic VLMs (arXiv 2402.07865), such as OpenVLA."""

from __future__ import annotations

from typing import Any

from ...config_fields import ConfigFields
from ..fields import Sizes, read_sizes
from ..janus import TIMM_NAMES
from ..spec import TowerSpec, VisionSpec


class PairVisionSpec(TowerSpec, frozen=True):
    """Two vision transformers with the same number of patches, and a projection of their joined features.

    The projection has three matrices, between which there is an activation.

    Attributes:
        towers: Both transformers.
        mean: The mean of each channel, with which the second one normalizes pixels.
        std: The standard deviation of each channel for the second one.
    """

    towers: tuple[VisionSpec, VisionSpec]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    output_size: int

    @property
    def image_size(self) -> int:
        """The side of an image in pixels."""
        return self.towers[0].image_size

    @property
    def num_outputs(self) -> int:
        """The number of embeddings of an image."""
        return self.towers[0].num_patches


def openvla(fields: ConfigFields, vision: ConfigFields, output_size: int) -> PairVisionSpec:
    """Return the tower of OpenVLA (arXiv 2406.09246): a DINOv2 with registers, and a SigLIP."""
    dino = _tower(vision.required_section("dinov2"), "featurizer", num_registers=5)
    siglip = _tower(vision.required_section("siglip"), "fused_featurizer")
    if dino.num_patches != siglip.num_patches or dino.image_size != siglip.image_size:
        raise vision.error("both vision towers must have images and patches of the same sizes")
    half = (0.5, 0.5, 0.5)
    return PairVisionSpec((dino, siglip), half, half, output_size)


def _tower(section: ConfigFields, name: str, num_registers: int = 0) -> VisionSpec:
    """Return a tower of timm, whose features are the inputs of its last layer."""
    sizes: dict[str, Any] = read_sizes(section, Sizes(224, 14, 1024, 4096, 16, 24, "gelu"))
    (num_layers,) = sizes["feature_layers"]
    if num_layers < 2:
        raise section.wrong("num_hidden_layers", "at least 2", num_layers)
    return VisionSpec(
        **sizes | {"feature_layers": (num_layers - 1,)},
        output_size=sizes["hidden_size"],
        projection="means",
        num_registers=num_registers,
        has_layer_scales=num_registers > 0,
        tensor_names=(
            (rf"^vision_backbone\.{name}\.", "vision_tower."),
            (r"^vision_tower\.cls_token$", "vision_tower.embeddings.class_embedding"),
            (r"^vision_tower\.reg_token$", "vision_tower.embeddings.registers"),
            (r"^(vision_tower\..*)\.ls([12])\.\w+$", r"\1.lambda_\2"),
            *TIMM_NAMES,
        ),
    )
