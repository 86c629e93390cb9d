"""A layer that gates the outputs of an earlier recurrent layer instead of attention (SambaY, arXiv 2507.06607).

Shapes: T tokens of a step, D hidden size, I channels of this shard.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import Mamba1
from ...attention import DeviceAttention
from ...layers.layer_spec import LayerSpec
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..mixers.mamba1 import Mamba1Mixer, own_channels
from ..norms import added, read_norm


class MemoryGateLayer(DecoderLayer):
    """A layer with a gated memory unit: its input gates the outputs that a Mamba layer had in the same step."""

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        super().__init__(layer, source, attention)
        spec, weights, prefix, shard, kernels = source
        assert layer.memory_source is not None
        memory = spec.layers[layer.memory_source].recurrent
        assert isinstance(memory, Mamba1)
        norms = layer.norms or spec.norms
        self._norm = read_norm(spec, weights, f"{prefix}{norms.attention_input}", kernels)
        inner, own = source.at("mixer."), own_channels(memory, shard.tensor_parallel)
        size, has_bias = memory.channels, memory.has_bias
        self._gate = inner.read_linear("in_proj", size, spec.hidden_size, own, has_bias=has_bias)
        self._output = inner.read_columns(
            "out_proj", spec.hidden_size, size, own, has_bias=has_bias
        )
        self._memory: Mamba1Mixer | None = None

    def read_memory(self, source: DecoderLayer) -> None:
        """Read the outputs of this layer's mixer, which must run first in every step."""
        assert isinstance(source.mixer, Mamba1Mixer)
        self._memory = source.mixer
        self._memory.keeps_outputs = True

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> Tensor | None:
        """See `DecoderLayer.forward`."""
        x = added(x_TD, block_TD, self._spec, self._norm)
        assert self._memory is not None and self._memory.outputs_TI is not None
        gate_TI = self._gate(x)
        gated_TI = self._memory.outputs_TI * F.silu(gate_TI.float())
        return super().forward(x_TD, self._output(gated_TI.to(gate_TI.dtype)), step)
