"""A tower that turns an image into tokens of the decoder, whose embeddings it returns, in torch.

Shapes: H rows and W columns of places, P places, C channels, D elements of a code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.convolutional.codes import NUM_GROUPS, CodesVisionSpec
from ....protocol.encoder_inputs.payloads import ImagePayload
from ..image_tower import ImageTower, TowerSource, wrong_size
from ..pixels import normalized_pixels
from ..weights import VisionWeights

_NORM_EPS = 1e-6
_PREFIX = "vision_tokenizer."
_TABLE = "embed_tokens.weight"


class CodesTower(ImageTower):
    """The encoder described by `spec`, in float32, because its codes change with small errors."""

    def __init__(self, spec: CodesVisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.unit)
        self.spec = spec
        exact = source._replace(dtype=torch.float32)
        tensors = exact.weights(f"{_PREFIX}encoder.conv_in.weight", spec.tensor_names)
        encoder = f"{_PREFIX}encoder."
        channels = spec.first_channels
        self._first = _Convolution(tensors, f"{encoder}conv_in", channels, 3)
        self._blocks: list[_Block | _Attention | _Halving] = []
        for stage, outputs in enumerate(spec.stage_channels):
            prefix = f"{encoder}stages.{stage}."
            for index in range(spec.num_blocks):
                name = f"{prefix}layers.{index}."
                self._blocks.append(_Block(tensors, f"{name}resnet.", channels, outputs))
                if stage in spec.attending_stages:
                    self._blocks.append(_Attention(tensors, f"{name}attention.", outputs))
                channels = outputs
            if stage + 1 < len(spec.stage_channels):
                self._blocks.append(_Halving(tensors, f"{prefix}downsample.conv", channels))
        self._blocks.append(_Block(tensors, f"{encoder}mid.block_1.", channels, channels))
        if spec.attends_last:
            self._blocks.append(_Attention(tensors, f"{encoder}mid.attn_1.", channels))
        self._blocks.append(_Block(tensors, f"{encoder}mid.block_2.", channels, channels))
        self._norm = _GroupNorm(tensors, f"{encoder}norm_out", channels)
        self._last = _Convolution(tensors, f"{encoder}conv_out", spec.latent_size, channels)
        self._to_code = _Convolution(
            tensors, f"{_PREFIX}quant_conv", spec.code_size, spec.latent_size, side=1
        )
        self._codes = tensors.read_linear(
            f"{_PREFIX}quantize.embedding", spec.num_codes, spec.code_size, has_bias=False
        )
        if spec.is_nearest:
            # The code at the smallest distance has the largest product, less half of its own squared length.
            self._codes.bias = self._codes.weight.square().sum(-1) / -2
        self._embeddings = source.weights(_TABLE)

    def _encode(self, image: ImagePayload) -> Tensor:
        spec, unit = self.spec, self.spec.unit
        if image.width % unit or image.height % unit or not min(image.width, image.height) > 0:
            raise wrong_size(image, f"multiples of {unit} x {unit}")
        x = self._first(normalized_pixels(image, self._device, torch.float32))
        for block in self._blocks:
            x = block(x)
        x_PD = self._to_code(self._last(F.silu(self._norm(x)))).flatten(2)[0].T
        codes = self._codes(x_PD).argmax(-1).tolist()
        tokens = [spec.tokens[code] if spec.tokens else spec.first_token + code for code in codes]
        # The decoder has the table, too, but perhaps only a part of it.
        return self._embeddings.read_rows(_TABLE, tokens, spec.vocab_size, spec.output_size)


class _Convolution:
    def __init__(
        self, tensors: VisionWeights, name: str, outputs: int, inputs: int, side: int = 3
    ) -> None:
        self._weight = tensors.read(f"{name}.weight", outputs, inputs, side, side)
        self._bias = tensors.read(f"{name}.bias", outputs)
        self._margin = side // 2

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self._weight, self._bias, padding=self._margin)


class _Halving:
    """A convolution that halves both sides, and reads zeros below and at the right of the places."""

    def __init__(self, tensors: VisionWeights, name: str, channels: int) -> None:
        self._weight = tensors.read(f"{name}.weight", channels, channels, 3, 3)
        self._bias = tensors.read(f"{name}.bias", channels)

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self._weight, self._bias, stride=2)


class _GroupNorm:
    def __init__(self, tensors: VisionWeights, name: str, channels: int) -> None:
        self._weight = tensors.read(f"{name}.weight", channels)
        self._bias = tensors.read(f"{name}.bias", channels)

    def __call__(self, x: Tensor) -> Tensor:
        return F.group_norm(x, NUM_GROUPS, self._weight, self._bias, _NORM_EPS)


class _Block:
    def __init__(self, tensors: VisionWeights, prefix: str, inputs: int, outputs: int) -> None:
        self._norms = [
            _GroupNorm(tensors, f"{prefix}norm{i}", size) for i, size in ((1, inputs), (2, outputs))
        ]
        self._convolutions = [
            _Convolution(tensors, f"{prefix}conv{i}", outputs, size)
            for i, size in ((1, inputs), (2, outputs))
        ]
        self._shortcut: _Convolution | None = None
        if inputs != outputs:
            self._shortcut = _Convolution(tensors, f"{prefix}nin_shortcut", outputs, inputs, side=1)

    def __call__(self, x: Tensor) -> Tensor:
        y = x
        for norm, convolve in zip(self._norms, self._convolutions, strict=True):
            y = convolve(F.silu(norm(y)))
        return y + (x if self._shortcut is None else self._shortcut(x))


class _Attention:
    """Attention of all places to each other, with one head."""

    def __init__(self, tensors: VisionWeights, prefix: str, channels: int) -> None:
        self._norm = _GroupNorm(tensors, f"{prefix}norm", channels)
        self._q, self._k, self._v, self._output = (
            _Convolution(tensors, f"{prefix}{name}", channels, channels, side=1)
            for name in ("q", "k", "v", "proj_out")
        )

    def __call__(self, x: Tensor) -> Tensor:
        normed = self._norm(x)
        q, k, v = (part(normed).flatten(2).transpose(1, 2) for part in (self._q, self._k, self._v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self._output(attended.reshape(x.shape))
