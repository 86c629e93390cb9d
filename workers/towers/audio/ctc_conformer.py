"""A conformer that reads features and may write tokens (Wav2Vec2-BERT, MedASR and SeamlessM4T), in torch.

Shapes: C features of a row, D hidden size, P rows, R written tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.conformer_layers import Convolutions, CtcConformerSpec
from ...loaders import Checkpoint
from ..image_tower import TowerSource
from ..weights import Linear, Norm, VisionWeights, attend, find_activation
from .conformer_layers import ConformerStack
from .token_decoders import read_token_decoder

_MARKER = "encoder.subsampling.linear.weight"


class CtcConformer:
    """The conformer, what makes its rows, and its decoder."""

    def __init__(self, spec: CtcConformerSpec, source: TowerSource) -> None:
        tensors, checkpoint = source.weights(_MARKER, spec.tensor_names), source.checkpoint
        layers = spec.layers
        size = layers.hidden_size
        self._stem: Callable[[Tensor], Tensor]
        if spec.stem is None:
            name, eps = "encoder.subsampling.norm", layers.norm_eps
            self._stem = tensors.read_layer_norm(name, spec.num_mel_bins, eps)
            inputs = spec.num_mel_bins
        else:
            self._stem = _Stem(spec, spec.stem, tensors)
            inputs = spec.stem_channels
        self._input = tensors.read_linear("encoder.subsampling.linear", size, inputs)
        self._layers = ConformerStack(layers, tensors, checkpoint, "encoder.")
        self._norm: Norm | None = None
        if spec.has_last_norm:
            has_bias = layers.has_norm_bias
            self._norm = tensors.read_layer_norm(
                "encoder.out_norm", size, layers.norm_eps, has_bias=has_bias
            )
        self._middle: Callable[[Tensor], Tensor] | None = None
        if spec.has_middle_mlp:
            inner = layers.intermediate_size
            up = tensors.read_linear("encoder.middle.linear1", inner, size)
            down = tensors.read_linear("encoder.middle.linear2", size, inner)
            activation = find_activation(checkpoint, spec.adapter_activation)
            self._middle = lambda x_PD: x_PD + 0.5 * down(activation(up(x_PD)))
        self._adapters: list[_Adapter] = []
        if spec.adapters is not None:
            self._adapters = [
                _Adapter(spec, spec.adapters, tensors, checkpoint, f"encoder.adapters.{index}.")
                for index in range(spec.adapters.count)
            ]
        self._decoder: Callable[[Tensor], Tensor]
        if spec.decoder is None and spec.last == "norm":
            self._decoder = tensors.read_layer_norm("encoder.last_norm", size, layers.norm_eps)
        elif spec.decoder is None and spec.last == "matrix":
            self._decoder = tensors.read_linear("enc_to_dec_proj", spec.output_size, size)
        elif spec.decoder is None:
            self._decoder = lambda x_PD: x_PD
        else:
            self._decoder = read_token_decoder(spec.decoder, size, tensors, checkpoint)

    def __call__(self, features_CP: Tensor) -> Tensor:
        """Return the tokens [R, `TOKEN_FIELDS`], or without a decoder the outputs [R, D]."""
        x_PD = self._layers(self._input(self._stem(features_CP.T)))
        if self._norm is not None:
            x_PD = self._norm(x_PD)
        if self._middle is not None:
            x_PD = self._middle(x_PD)
        for adapter in self._adapters:
            x_PD = adapter(x_PD)
        return self._decoder(x_PD)


class _Stem:
    """A matrix, and convolutions over rows."""

    def __init__(
        self, spec: CtcConformerSpec, convolutions: Convolutions, tensors: VisionWeights
    ) -> None:
        size, name = spec.layers.hidden_size, "encoder.subsampling"
        self._first = tensors.read_linear(f"{name}.first", size, spec.num_mel_bins)
        self._stride = convolutions.stride
        channels = [size] * convolutions.count + [spec.stem_channels]
        self._convolutions = [
            _read_convolution(tensors, f"{name}.conv_{index}", *pair, convolutions.kernel_size)
            for index, pair in enumerate(pairwise(channels))
        ]

    def __call__(self, features_PC: Tensor) -> Tensor:
        x_DP = F.relu(self._first(features_PC)).T
        for weight, bias in self._convolutions:
            x_DP = F.relu(F.conv1d(x_DP[None], weight, bias, self._stride)[0])
        return x_DP.T


class _Adapter:
    """A layer of attention to the rows that a gated convolution makes, and an MLP."""

    def __init__(
        self,
        spec: CtcConformerSpec,
        convolutions: Convolutions,
        tensors: VisionWeights,
        checkpoint: Checkpoint,
        prefix: str,
    ) -> None:
        layers, self._spec = spec.layers, convolutions
        self._num_heads = layers.num_heads
        size, inner, eps = layers.hidden_size, layers.intermediate_size, layers.norm_eps

        def linear(name: str, rows: int = size, columns: int = size) -> Linear:
            return tensors.read_linear(prefix + name, rows, columns)

        self._residual_norm, self._attention_norm, self._mlp_norm = (
            tensors.read_layer_norm(f"{prefix}{name}_layer_norm", size, eps)
            for name in ("residual", "self_attn", "ffn")
        )
        self._residual, self._attended = (
            _read_convolution(
                tensors, f"{prefix}{name}_conv", size, 2 * size, convolutions.kernel_size
            )
            for name in ("residual", "self_attn")
        )
        self._qkv = [linear(f"self_attn.{name}_proj") for name in "qkv"]
        self._output = linear("self_attn.o_proj")
        self._up, self._down = linear("ffn.linear1", inner), linear("ffn.linear2", size, inner)
        self._activation = find_activation(checkpoint, spec.adapter_activation)

    def __call__(self, x_PD: Tensor) -> Tensor:
        kept_PD = self._convolve(self._residual_norm(x_PD), *self._residual)
        x_PD = self._convolve(self._attention_norm(x_PD), *self._attended)
        query, key, value = self._qkv
        x_PD = kept_PD + self._output(attend(query(x_PD), key(x_PD), value(x_PD), self._num_heads))
        return x_PD + self._down(self._activation(self._up(self._mlp_norm(x_PD))))

    def _convolve(self, x_PD: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        stride, padding = self._spec.stride, self._spec.padding
        return F.glu(F.conv1d(x_PD.T[None], weight, bias, stride, padding)[0], 0).T


def _read_convolution(
    tensors: VisionWeights, name: str, inputs: int, outputs: int, kernel_size: int
) -> tuple[Tensor, Tensor]:
    return (
        tensors.read(f"{name}.weight", outputs, inputs, kernel_size),
        tensors.read(f"{name}.bias", outputs),
    )
