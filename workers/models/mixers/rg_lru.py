"""The real-gated linear recurrent unit of Griffin (De et al., 2024, arXiv 2402.19427), computed token by token.

Shapes: T tokens of a step, D hidden size, I channels of this shard, B blocks of channels of this shard, W channels of a
block, S requests, R requests of a round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.state_spaces.rg_lru import RgLru
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ..layer_source import LayerSource
from ..weights import Rows, WeightReader
from .mixer import BlockLinear, Mixer, MixerRows
from .states import StateBatch, StateCache

_DECAY_RATE = 8.0


class RgLruMixer(Mixer):
    """A convolution and a linear recurrence with gates, whose outputs are multiplied by an activated projection."""

    def __init__(self, layer: RgLru, source: LayerSource) -> None:
        super().__init__(layer, source)
        spec, weights, prefix, shard, kernels = source
        blocks = shard.tensor_parallel.part(layer.num_blocks)
        self._activation = kernels.activation(spec.activation)
        gates_BWW, biases_BW = read_gates(layer, weights, prefix, blocks)
        self._num_blocks = len(blocks)
        self._gates = BlockLinear(gates_BWW.mT, biases_BW, weights.dtype, kernels)
        self._decay_I = read_decay(layer, weights, prefix, elements(blocks, layer.block_size))

    @staticmethod
    def rows(
        layer: RgLru, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """See `Mixer.rows`. The projections are those to the outer gates and to the inputs."""
        own = elements(tensor_parallel.part(layer.num_blocks), layer.block_size)
        return MixerRows(
            [Rows(f"{prefix}in_proj_{name}", layer.channels, own) for name in "yx"],
            [Rows(f"{prefix}conv1d", layer.channels, own)],
            layer.num_blocks,
            layer.block_size,
            has_projection_bias=True,
            has_convolution_bias=True,
            has_output_bias=True,
        )

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        outer_TI, inputs_TI = self.projection(x).chunk(2, -1)
        dtype = inputs_TI.dtype
        cache = StateCache(memory, self._size, dtype)
        inputs_TXI = cache.all_inputs(inputs_TI, batch)[batch.inputs_of_segments]
        x_TI = self._conv(inputs_TXI).flatten(0, 1)[batch.tokens].to(dtype)
        input_gate_TI, recurrent_gate_TI = self._gates_of(x_TI)
        log_decay_TI = recurrent_gate_TI * self._decay_I
        y_TI = self._scan(x_TI.float() * input_gate_TI, log_decay_TI, cache, batch)
        return self._output(y_TI.to(dtype) * self._activation(outer_TI))

    def _gates_of(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gates of the input and of the recurrence, float32 [T, I]."""
        gates_TBW = self._gates(x_TI.unflatten(1, (self._num_blocks, -1))).float().sigmoid()
        first_TBW, second_TBW = gates_TBW.chunk(2, -1)
        return first_TBW.flatten(1), second_TBW.flatten(1)

    def _scan(
        self, x_TI: Tensor, log_decay_TI: Tensor, cache: StateCache, batch: StateBatch
    ) -> Tensor:
        """Update the states, and return the outputs of all tokens."""
        decay_TI = log_decay_TI.exp()
        scale_TI = torch.sqrt(1 - (2 * log_decay_TI).exp())
        states_SI, y_TI = cache.load(batch), torch.empty_like(x_TI)
        # A segment is one token, and the tokens of a request follow each other.
        for number, part in enumerate(batch.rounds):
            tokens, requests = part.segments, part.requests
            scale_RI = scale_TI[tokens]
            if number == 0:
                # The first token of a text is not scaled.
                scale_RI = torch.where(batch.is_new[requests, None], 1.0, scale_RI)
            states_RI = states_SI[requests] * decay_TI[tokens] + x_TI[tokens] * scale_RI
            states_SI[requests] = states_RI
            y_TI[tokens] = states_RI
        cache.store(states_SI, batch)
        return y_TI


def read_gates(
    layer: RgLru, weights: WeightReader, prefix: str, blocks: range
) -> tuple[Tensor, Tensor]:
    """Return the matrices [B, W, 2 * W] and biases [B, 2 * W] of the gates of some blocks, in float32.

    The columns are first the gates of a block's inputs, then those of its recurrence.
    """
    width = layer.block_size
    matrices, biases = [], []
    for name in ("input", "recurrent"):
        size = layer.num_blocks * width
        matrix = weights.read_elements(f"{prefix}{name}_gate_weight", size * width)
        matrices.append(matrix.view(-1, width, width)[blocks.start : blocks.stop])
        bias = weights.read_elements(f"{prefix}{name}_gate_bias", size)
        biases.append(bias.view(-1, width)[blocks.start : blocks.stop])
    return torch.cat(matrices, 2), torch.cat(biases, 1)


def read_decay(layer: RgLru, weights: WeightReader, prefix: str, own: range) -> Tensor:
    """Return the logarithm of the decay of some channels while their gates are open."""
    name = f"{prefix}recurrent_param"
    decay_I: Tensor = weights.read_elements(name, layer.channels)[own.start : own.stop]
    return -_DECAY_RATE * F.softplus(decay_I)
