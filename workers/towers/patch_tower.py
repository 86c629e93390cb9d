"""The projection of images in models without a vision tower (Gemma 4's unified models).

Shapes: P squares of an image, D hidden size.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.vision.gemma import PatchVisionSpec
from ...protocol.encoder_inputs.payloads import ImagePayload
from .image_tower import ImageTower, TowerSource, wrong_size
from .pixels import normalized_pixels, split_patches
from .weights import Linear, Norm

_NORM_EPS = 1e-5
_PREFIX = "embed_vision."


class PatchTower(ImageTower):
    """The projection described by `spec`, in torch."""

    def __init__(self, spec: PatchVisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.side_factor)
        self.spec = spec
        tensors = source.weights(f"{_PREFIX}patch_dense.weight", spec.tensor_names)
        size, num_pixels = spec.hidden_size, 3 * spec.side_factor**2
        norm = tensors.read_layer_norm(f"{_PREFIX}patch_ln1", num_pixels, _NORM_EPS)
        product = tensors.read_linear(f"{_PREFIX}patch_dense", size, num_pixels)
        assert norm.bias is not None
        weight, bias = _by_channel(norm.weight), _by_channel(norm.bias)
        self._first_norm = Norm(weight, bias, _NORM_EPS, is_rms=False)
        self._product = Linear(_by_channel(product.weight), product.bias)
        self._second_norm, self._third_norm = (
            tensors.read_layer_norm(f"{_PREFIX}{name}", size, _NORM_EPS)
            for name in ("patch_ln2", "pos_norm")
        )
        positions = tensors.read(f"{_PREFIX}pos_embedding", spec.num_positions, 2, size)
        self._columns, self._rows = positions.unbind(1)
        self._output = tensors.read_linear(
            f"{_PREFIX}embedding_projection", spec.output_size, size, has_bias=False
        )

    def _encode(self, image: ImagePayload) -> Tensor:
        spec, side = self.spec, self.spec.side_factor
        num_rows, num_columns = image.height // side, image.width // side
        is_whole = not (image.width % side or image.height % side)
        if not is_whole or not 0 < max(num_rows, num_columns) <= spec.num_positions:
            needed = f"multiples of {side} x {side}, up to {spec.num_positions} in each direction"
            raise wrong_size(image, needed)
        pixels = normalized_pixels(image, self._device, self._dtype)[0]
        patches = split_patches(pixels, num_rows, num_columns, side)
        x_PD = self._second_norm(self._product(self._first_norm(patches)))
        places = self._rows[:num_rows, None] + self._columns[:num_columns]
        x_PD = self._third_norm(x_PD + places.flatten(0, 1))
        return self._output(F.rms_norm(x_PD, (spec.hidden_size,), None, spec.norm_eps))


def _by_channel(stored: Tensor) -> Tensor:
    """Return a vector or matrix with an element for each of a square's numbers, channel by channel.

    Checkpoints store them pixel by pixel.
    """
    return stored.unflatten(-1, (-1, 3)).transpose(-1, -2).flatten(-2).contiguous()
