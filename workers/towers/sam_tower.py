"""A vision tower that projects the features of SAM's image encoder (GOT-OCR 2, PP-FormulaNet)."""

from __future__ import annotations

from torch import Tensor

from ...protocol.checkpoint.vision.deepseek import SamVisionSpec
from ...protocol.encoder_inputs.payloads import ImagePayload
from .image_tower import ImageTower, TowerSource, verify_square
from .pixels import normalized_pixels
from .sam_encoder import SamEncoder
from .weights import check_activation

_PROJECTION = "multi_modal_projector"


class SamTower(ImageTower):
    """The tower described by `spec`, in torch."""

    def __init__(self, spec: SamVisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.image_size)
        self.spec = spec
        check_activation(source.checkpoint, spec.sam.activation)
        tensors = source.weights("patch_embed.projection.weight", _NAMES)
        self._encode_image = SamEncoder(spec.sam, tensors)
        size = spec.sam.output_size
        name = f"{_PROJECTION}.linear_1" if spec.projection_size else _PROJECTION
        projections = source.weights(f"{name}.weight", _NAMES)
        self._projections = [projections.read_linear(name, size, size)]
        if spec.projection_size:
            name = f"{_PROJECTION}.linear_2"
            self._projections.append(projections.read_linear(name, spec.projection_size, size))

    def _encode(self, image: ImagePayload) -> Tensor:
        verify_square(image, self.spec.image_size)
        pixels = normalized_pixels(image, self._device, self._dtype)[0]
        features = self._encode_image(pixels)
        for project in self._projections:
            features = project(features)
        return features


_NAMES = (
    (rf"(.*\.)?{_PROJECTION}\.conv_upsampler", "sam.proj.conv"),
    (rf"(.*\.)?{_PROJECTION}\.multimodal_projector\.", f"{_PROJECTION}."),
    (r"(.*\.)?vision_tower\.", "sam."),
    # The names of PP-FormulaNet.
    (rf"^model\.encoder\.{_PROJECTION}\.conv", "sam.proj.conv"),
    (rf"^model\.encoder\.{_PROJECTION}\.", f"{_PROJECTION}."),
    (r"^model\.encoder\.", "sam."),
)
