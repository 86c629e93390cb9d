"""A vision tower whose Q-Former also reads the text of the prompt (InstructBLIP, arXiv 2305.06500)."""

from __future__ import annotations

from msgspec.structs import replace
from torch import Tensor

from ...protocol.checkpoint.vision.spec import VisionSpec
from ...protocol.encoder_inputs.payloads import ImagePayload
from .image_tower import TowerSource
from .projections.query_former import InstructedFormer
from .vision_tower import VisionTower


class InstructedTower(VisionTower):
    """The tower described by `spec`, and the Q-Former of its projection."""

    def __init__(self, spec: VisionSpec, source: TowerSource) -> None:
        super().__init__(replace(spec, projection="none"), source)
        self._former = InstructedFormer(spec, source)

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the embeddings [Q, output size] of an image and the instruction beside it."""
        return self._former(super()._encode(image), image.instruction)
