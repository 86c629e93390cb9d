"""The causal encoder of Mimi, whose codes have vectors that are added to tokens (Kyutai's models), in torch.

It computes in float32, as transformers does, because rounding would change codes.

Shapes: C channels, N samples or outputs of a convolution, P rows, D hidden size, H heads, K head dimension, F frames,
O size of an output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.codec import CodecSpec
from ...loaders import Checkpoint
from ..image_tower import TowerSource
from ..rotary import PatchRotary, PatchRotation
from ..weights import VisionWeights, find_activation
from .causal import PartEncoder, attend_window

_MARKER: Final = "codec_model.encoder.layers.0.conv.weight"
_TABLE: Final = "embed_tokens.embed_tokens.weight"
_MIN_USAGE: Final = 1e-5


class CodecState(NamedTuple):
    """The state of the encoder after a part of a clip, from which the next part continues.

    `rows` has the last inputs of each convolution, and `keys_values` the keys and values [2, H, P, K] in the window of
    each layer. There are `num_rows` rows in all. `output_O` is the output of the last frame.
    """

    rows: list[Tensor]
    keys_values: list[Tensor]
    num_rows: int
    output_O: Tensor


class CodecEncoder(PartEncoder):
    """The encoder, its quantizers and the vectors of their codes."""

    def __init__(self, spec: CodecSpec, source: TowerSource) -> None:
        tensors = source._replace(dtype=torch.float32).weights(_MARKER)
        self._spec = spec
        self.frames_per_output = spec.frames_per_output
        self._encoder = _Convolutions(spec, tensors)
        self._layers = [
            _Layer(spec, tensors, source.checkpoint, f"codec_model.encoder_transformer.layers.{i}.")
            for i in range(spec.num_layers)
        ]
        self._rotary = PatchRotary("sequence", spec.theta, spec.head_dim)
        self._halve = _Convolution(
            tensors,
            "codec_model.downsample",
            spec.hidden_size,
            spec.hidden_size,
            4,
            2,
            is_last=True,
        )
        self._quantizers = [
            _Quantizers(spec, tensors, name, count)
            for name, count in (
                ("semantic", spec.num_semantic),
                ("acoustic", spec.num_codebooks - spec.num_semantic),
            )
        ]
        table = source.weights(_TABLE)
        total = spec.first_vector + spec.num_codebooks * spec.num_vectors + 1
        rows_VO = table.read(_TABLE, total, spec.output_size)
        self._vectors = rows_VO
        starts = torch.arange(spec.num_codebooks, device=rows_VO.device) * spec.num_vectors
        self._starts = starts + spec.first_vector
        self._first_O = rows_VO[self._starts + spec.first_code].sum(0)
        if spec.first_token != spec.prompt_token:
            self._first_O += rows_VO[spec.first_token] - rows_VO[spec.prompt_token]

    def __call__(self, samples_1N: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        """See `PartEncoder`. The outputs are [F, O]."""
        if state is None:
            none = samples_1N.new_zeros(2, self._spec.num_heads, 0, self._spec.head_dim)
            state = CodecState([], [none] * len(self._layers), 0, self._first_O)
        before, rows = iter(state.rows), list[Tensor]()
        x_PD = self._encoder(samples_1N, before, rows).T
        end = state.num_rows + len(x_PD)
        places_P = torch.arange(state.num_rows, end, device=x_PD.device)
        rotation = self._rotary.rotation(places_P[:, None].expand(-1, 2), x_PD.dtype)
        kept = []
        for layer, keys_values in zip(self._layers, state.keys_values, strict=True):
            x_PD, own = layer(x_PD, keys_values, rotation)
            kept.append(own)
        x_FD = self._halve(x_PD.T, before, rows).T
        codes_FQ = torch.cat([quantize(x_FD) for quantize in self._quantizers], 1)
        vectors_FO = self._vectors[codes_FQ + self._starts].sum(1)
        outputs_FO = torch.cat((state.output_O[None], vectors_FO))
        return outputs_FO[:-1], CodecState(rows, kept, end, outputs_FO[-1].clone())


class _Convolution:
    """A causal convolution, after zeros or, if it `is_last`, after copies of its first input."""

    def __init__(
        self,
        tensors: VisionWeights,
        name: str,
        inputs: int,
        outputs: int,
        taps: int,
        stride: int = 1,
        dilation: int = 1,
        *,
        is_last: bool = False,
    ) -> None:
        self._weight = tensors.read(f"{name}.conv.weight", outputs, inputs, taps)
        self._bias = None if is_last else tensors.read(f"{name}.conv.bias", outputs)
        self._stride, self._dilation, self._repeats = stride, dilation, is_last
        self._num_before = (taps - 1) * dilation + 1 - stride

    def __call__(self, x_CN: Tensor, before: Iterator[Tensor], rows: list[Tensor]) -> Tensor:
        """Return the outputs after the next rows of `before`, and append the last inputs to `rows`."""
        before_CN = next(before, None)
        if before_CN is None:
            before_CN = x_CN[:, :1].expand(-1, self._num_before) * self._repeats
        x_CN = torch.cat((before_CN, x_CN), 1)
        rows.append(x_CN[:, x_CN.shape[1] - self._num_before :].clone())
        return F.conv1d(
            x_CN[None], self._weight, self._bias, self._stride, dilation=self._dilation
        )[0]


class _Convolutions:
    """The convolutions from samples to the rows of the layers."""

    def __init__(self, spec: CodecSpec, tensors: VisionWeights) -> None:
        name, channels = "codec_model.encoder.layers", spec.num_filters
        self._first = _Convolution(tensors, f"{name}.0", 1, channels, spec.kernel_size)
        self._stages: list[tuple[list[_Residual], _Convolution]] = []
        # Activations are numbered, too.
        index = 1
        for ratio in spec.ratios:
            blocks = [
                _Residual(spec, tensors, f"{name}.{index + i}", channels, spec.dilation_growth**i)
                for i in range(spec.num_residuals)
            ]
            index += spec.num_residuals + 2
            stride = _Convolution(
                tensors, f"{name}.{index - 1}", channels, 2 * channels, 2 * ratio, ratio
            )
            self._stages.append((blocks, stride))
            channels *= 2
        self._last = _Convolution(
            tensors, f"{name}.{index + 1}", channels, spec.hidden_size, spec.last_kernel_size
        )

    def __call__(self, x_CN: Tensor, before: Iterator[Tensor], rows: list[Tensor]) -> Tensor:
        """Return the rows [D, P]."""
        x_CN = self._first(x_CN, before, rows)
        for blocks, stride in self._stages:
            for block in blocks:
                x_CN = block(x_CN, before, rows)
            x_CN = stride(F.elu(x_CN), before, rows)
        return self._last(F.elu(x_CN), before, rows)


class _Residual:
    """Two convolutions whose output is added to their input."""

    def __init__(
        self, spec: CodecSpec, tensors: VisionWeights, name: str, channels: int, dilation: int
    ) -> None:
        inner, taps = channels // spec.compress, spec.residual_kernel_size
        self._first = _Convolution(
            tensors, f"{name}.block.1", channels, inner, taps, dilation=dilation
        )
        self._second = _Convolution(tensors, f"{name}.block.3", inner, channels, 1)
        self._shortcut: _Convolution | None = None
        if spec.has_shortcut:
            self._shortcut = _Convolution(tensors, f"{name}.shortcut", channels, channels, 1)

    def __call__(self, x_CN: Tensor, before: Iterator[Tensor], rows: list[Tensor]) -> Tensor:
        y_CN = self._first(F.elu(x_CN), before, rows)
        y_CN = self._second(F.elu(y_CN), before, rows)
        return y_CN + (x_CN if self._shortcut is None else self._shortcut(x_CN, before, rows))


class _Layer:
    def __init__(
        self, spec: CodecSpec, tensors: VisionWeights, checkpoint: Checkpoint, prefix: str
    ) -> None:
        self._spec = spec
        size, inner, rows = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
        self._qkv = [
            tensors.read_linear(f"{prefix}self_attn.{name}_proj", rows, size, has_bias=False)
            for name in "qkv"
        ]
        self._output = tensors.read_linear(f"{prefix}self_attn.o_proj", size, rows, has_bias=False)
        self._up = tensors.read_linear(f"{prefix}mlp.fc1", inner, size, has_bias=False)
        self._down = tensors.read_linear(f"{prefix}mlp.fc2", size, inner, has_bias=False)
        self._activation = find_activation(checkpoint, spec.activation)
        self._before_attention, self._before_mlp = (
            tensors.read_layer_norm(f"{prefix}{name}_layernorm", size, spec.norm_eps)
            for name in ("input", "post_attention")
        )
        self._attention_scale, self._mlp_scale = (
            tensors.read(f"{prefix}{name}_layer_scale.scale", size) for name in ("self_attn", "mlp")
        )

    def __call__(
        self, x_PD: Tensor, before: Tensor, rotation: PatchRotation
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states, and the keys and values that later rows read."""
        attended_PD, kept = self._attend(self._before_attention(x_PD), before, rotation)
        x_PD = x_PD + self._attention_scale * attended_PD
        inner = self._activation(self._up(self._before_mlp(x_PD)))
        return x_PD + self._mlp_scale * self._down(inner), kept

    def _attend(
        self, x_PD: Tensor, before: Tensor, rotation: PatchRotation
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (linear(x_PD).unflatten(1, (self._spec.num_heads, -1)) for linear in self._qkv)
        out_HPK, kept = attend_window(q, k, v, before, rotation, self._spec.window)
        return self._output(out_HPK.transpose(0, 1).flatten(1)), kept


class _Quantizers:
    """Quantizers, each of which chooses the nearest code of what the ones before have left."""

    def __init__(self, spec: CodecSpec, tensors: VisionWeights, name: str, count: int) -> None:
        prefix, size = f"codec_model.quantizer.{name}_residual_vector_quantizer.", spec.codebook_dim
        self._input: Tensor | None = None
        if size != spec.hidden_size:
            weight = tensors.read(f"{prefix}input_proj.weight", size, spec.hidden_size, 1)
            self._input = weight.flatten(1)
        self._codebooks = []
        for index in range(count):
            codebook = f"{prefix}layers.{index}.codebook."
            sums = tensors.read(f"{codebook}embed_sum", spec.codebook_size, size)
            usage = tensors.read(f"{codebook}cluster_usage", spec.codebook_size)
            self._codebooks.append(sums / usage.clamp(min=_MIN_USAGE)[:, None])

    def __call__(self, x_FD: Tensor) -> Tensor:
        """Return the codes [F, quantizers]."""
        rest = x_FD if self._input is None else F.linear(x_FD, self._input)
        codes = []
        for codebook in self._codebooks:
            codes.append(torch.cdist(rest[None], codebook[None])[0].argmin(1))
            rest = rest - codebook[codes[-1]]
        return torch.stack(codes, 1)
