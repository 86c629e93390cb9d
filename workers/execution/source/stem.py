"""The convolutions with which the encoder of a speech model starts.

Shapes: C features of a frame, N frames or samples of a clip, E outputs, D hidden size, R rows, K columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.encoder_inputs.payloads import AudioPayload
from ...layers.spec import SourceSpec
from ...loaders import Checkpoint
from ...towers.audio.stems import sinusoids
from ...towers.weights import VisionWeights

Product: TypeAlias = Callable[[Tensor], Tensor]
"""Returns the product of rows [R, K], which may overlap, with a matrix."""

_GROUP_NORM_EPS: Final = 1e-5
_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "glu": F.glu,
    "tanh": torch.tanh,
}


class AudioStem:
    """Convolutions over the features or samples of an audio clip, and the embeddings of positions.

    `make_product` makes the products of the convolutions, by default in torch.
    """

    def __init__(
        self,
        spec: SourceSpec,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        make_product: Callable[[Tensor], Product] | None = None,
    ) -> None:
        weights = VisionWeights(
            checkpoint, f"encoder.{spec.convolutions[0].name}.weight", device, dtype
        )
        self._prefix = "encoder."
        self._device, self._dtype = device, dtype
        self._convolutions: list[Callable[[Tensor], Tensor]] = []
        channels = spec.num_inputs
        for each in spec.convolutions:
            name = f"{self._prefix}{each.name}"
            weight = weights.read(f"{name}.weight", each.channels, channels, each.kernel)
            bias = weights.read(f"{name}.bias", each.channels) if each.has_bias else None
            # A window of frames that follow each other is one row in memory.
            matrix = weight.transpose(1, 2).flatten(1).contiguous()
            product = (make_product or _torch_product)(matrix)
            window = each.kernel, each.stride, each.padding
            self._convolutions.append(_convolution(product, bias, *window))
            self._convolutions.append(_ACTIVATIONS[each.activation])
            channels = each.channels // 2 if each.activation == "glu" else each.channels
            if each.has_group_norm:
                norm = f"{self._prefix}groupnorm"
                scale = weights.read(f"{norm}.weight", channels)
                shift = weights.read(f"{norm}.bias", channels)
                self._convolutions.append(_group_norm(scale, shift))
        self._positions_ED: Tensor | None = None
        if spec.has_positions:
            name = f"{self._prefix}embed_positions.weight"
            self._positions_ED = weights.read(name, spec.max_positions, channels)
        self._scale = spec.output_scale
        if spec.first_sinusoid is not None:
            places = torch.arange(spec.max_positions) + spec.first_sinusoid
            self._positions_ED = sinusoids(places, channels).to(device, dtype)

    def __call__(self, clip: AudioPayload) -> Tensor:
        """Return the hidden states [E, D] of an audio clip."""
        kind = torch.float16 if clip.is_float16 else torch.float32
        # Copied, because torch requires a writable array, and the message's bytes are read-only.
        features = torch.frombuffer(bytearray(clip.features), dtype=kind)
        x_CN = features.to(self._device, self._dtype).view(max(clip.num_mel_bins, 1), -1)
        x_ED = x_CN.T.contiguous()
        for apply in self._convolutions:
            x_ED = apply(x_ED)
        if self._scale != 1:
            x_ED = x_ED * self._scale
        if self._positions_ED is not None:
            x_ED += self._positions_ED[: len(x_ED)]
        return x_ED


def _torch_product(matrix: Tensor) -> Product:
    return lambda x_RK: F.linear(x_RK, matrix)


def _convolution(
    product: Product, bias: Tensor | None, kernel: int, stride: int, padding: int
) -> Callable[[Tensor], Tensor]:
    """Return a convolution over the rows of a matrix."""

    def convolve(x_NC: Tensor) -> Tensor:
        padded = F.pad(x_NC, (0, 0, padding, padding))
        num_rows, size = max(0, (len(padded) - kernel) // stride + 1), padded.shape[1]
        rows_RK = padded.as_strided((num_rows, kernel * size), (stride * size, 1))
        out_RD = product(rows_RK)
        return out_RD if bias is None else out_RD.add_(bias)

    return convolve


def _group_norm(scale: Tensor, shift: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x_ED: F.group_norm(x_ED.T[None], 1, scale, shift, _GROUP_NORM_EPS)[
        0
    ].T.contiguous()
