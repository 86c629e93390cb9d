"""The code that all recurrent mixers share.

Shapes: N segments, C tokens of a segment, W inputs before a segment that the convolution reads, F channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import MixerLayer
from ...layers.layers import LayerKernels, Linear
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ...layers.rope import RotaryTables
from ..layer_source import LayerSource
from ..weights import Rows, WeightReader
from .states import StateBatch


class MixerRows(msgspec.Struct, frozen=True):
    """The parts of a mixer's weights that one rank has.

    Attributes:
        projection: The rows of the first product; none if a mixer has several first products.
        convolution: The channels of the convolution; none if there is no convolution.
        unit_size: The number of columns of the output projection in a unit, which is not divided.
        num_units: The number of units, which the ranks divide.
        has_projection_bias: True if the first product has biases.
        has_convolution_bias: True if the convolution has biases.
        has_output_bias: True if the output projection has biases.
        num_runs: The number of runs into which the units fall. Each rank has an equal part of each run.
    """

    projection: Sequence[Rows]
    convolution: Sequence[Rows]
    num_units: int
    unit_size: int = 1
    has_projection_bias: bool = False
    has_convolution_bias: bool = False
    has_output_bias: bool = False
    num_runs: int = 1

    @property
    def num_columns(self) -> int:
        """The number of columns of the output projection."""
        return self.num_units * self.unit_size

    def shares(self, tensor_parallel: TensorParallel) -> list[range]:
        """Return the columns of the output projection of each rank, in a mixer with one run."""
        return [elements(units, self.unit_size) for units in tensor_parallel.parts(self.num_units)]

    def runs(self, tensor_parallel: TensorParallel) -> list[list[range]]:
        """Return the columns of the output projection of each rank, as one range for each run."""
        size = self.num_columns // self.num_runs
        parts = (
            elements(units, self.unit_size)
            for units in tensor_parallel.parts(self.num_units // self.num_runs)
        )
        return [
            [range(i * size + part.start, i * size + part.stop) for i in range(self.num_runs)]
            for part in parts
        ]


class Mixer(ABC):
    """A layer that combines tokens through a recurrent state. `projection` is its first product, if there is one."""

    tables: RotaryTables | None = None
    """The tables of the layer's rotary embedding in the current step; None without one."""

    projection: Linear
    _conv: CausalConvolution

    def __init__(self, layer: MixerLayer, source: LayerSource) -> None:
        spec, weights, prefix, shard, _ = source
        tensor_parallel = shard.tensor_parallel
        rows = self.rows(layer, weights, prefix, tensor_parallel)
        if rows.projection:
            self.projection = source.read_rows(
                rows.projection,
                spec.hidden_size,
                has_biases=rows.has_projection_bias,
                is_adapted=True,
            )
        if channels := rows.convolution:
            taps = [
                weights.read(f"{x.name}.weight", x.total, 1, layer.kernel, part=x.part)
                for x in channels
            ]
            biases = [
                weights.read(f"{x.name}.bias", x.total, part=x.part)
                for x in channels
                if rows.has_convolution_bias
            ]
            self._conv = CausalConvolution(torch.cat(taps), torch.cat(biases) if biases else None)
        own = rows.runs(tensor_parallel)[tensor_parallel.rank]
        self._output = source.read_columns(
            "out_proj",
            spec.hidden_size,
            rows.num_columns,
            own,
            has_bias=rows.has_output_bias,
            is_adapted=len(own) == 1,
        )
        self._size = layer.state_parts.size(tensor_parallel.size)

    @staticmethod
    @abstractmethod
    def rows(
        layer: Any, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """Return this rank's parts of a layer's weights."""

    @abstractmethod
    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """Update the requests' states, and return the output [T, D].

        Args:
            x: The layer's input.
            memory: The blocks of the layer, uint8 [blocks, bytes].
            batch: The step's plan for the layer's group.
        """


class CausalConvolution:
    """A convolution of each channel over the last tokens, or over those at multiples of `distance`, in float32."""

    def __init__(self, weight_F1K: Tensor, bias_F: Tensor | None, distance: int = 1) -> None:
        self._taps = weight_F1K.float().squeeze(1).T.contiguous().unbind()
        self._bias_F = None if bias_F is None else bias_F.float()
        self._distance = distance

    def __call__(self, x_NXF: Tensor) -> Tensor:
        """Return float32 [N, C, F], the outputs for the last C of the W + C inputs."""
        x_NXF = x_NXF.float()
        length = x_NXF.shape[1] - (len(self._taps) - 1) * self._distance
        y_NCF = x_NXF[:, :length] * self._taps[0]
        for i, tap_F in enumerate(self._taps[1:], 1):
            start = i * self._distance
            y_NCF.addcmul_(x_NXF[:, start : start + length], tap_F)
        return y_NCF if self._bias_F is None else y_NCF.add_(self._bias_F)


class BlockLinear:
    """Products of blocks of channels, each with its own matrix.

    Shapes: T tokens, B blocks, W channels of a block, O outputs of a block.
    """

    def __init__(
        self, weight_BOW: Tensor, bias_BO: Tensor | None, dtype: torch.dtype, kernels: LayerKernels
    ) -> None:
        self._multiply = kernels.grouped_linear(
            [each.to(dtype).contiguous() for each in weight_BOW],
            [] if bias_BO is None else [each.to(dtype) for each in bias_BO],
        )
        self._numbers = torch.arange(1, len(weight_BOW) + 1, device=weight_BOW.device)

    def __call__(self, x_TBW: Tensor) -> Tensor:
        """Return the products [T, B, O]."""
        num_tokens, count = x_TBW.shape[:2]
        ends_B = (self._numbers * num_tokens).to(torch.int32)
        y_XO = self._multiply(x_TBW.transpose(0, 1).flatten(0, 1), ends_B)
        return y_XO.unflatten(0, (count, num_tokens)).transpose(0, 1)


def segments(name: str, sizes: Sequence[int], parts: Sequence[range]) -> list[Rows]:
    """Return this rank's rows of a module whose outputs are several projections, concatenated."""
    total, start, rows = sum(sizes), 0, []
    for size, part in zip(sizes, parts, strict=True):
        rows.append(Rows(name, total, range(start + part.start, start + part.stop)))
        start += size
    return rows
