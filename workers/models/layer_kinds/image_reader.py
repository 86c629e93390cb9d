"""A decoder layer that reads images by cross attention and has no other attention (Llama 3.2 Vision).

Shapes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from ...attention import DeviceAttention
from ...layers.layer_spec import LayerSpec
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..norms import added


class ImageReaderLayer(DecoderLayer):
    """A decoder layer that changes only tokens with an image before them."""

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        super().__init__(layer, source, attention)
        self._attention_gate_1, self._mlp_gate_1 = (
            source.weights.read(f"{source.prefix}cross_attn_{name}_gate", 1).tanh()
            for name in ("attn", "mlp")
        )

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> Tensor | None:
        """Add the previous block's output to the stream `x_TD`, unless no token of the step reads an image."""
        assert self.cross is not None and self._mlp is not None
        if (reads_T1 := self.cross.reads_T1) is None:
            return block_TD
        x = added(x_TD, block_TD, self._spec, self._cross_input_norm)
        attended_TD = self.cross.forward(x, *step.caches[-1])
        attended_TD.mul_(self._attention_gate_1).masked_fill_(~reads_T1, 0)
        output_TD = self._mlp.forward(added(x_TD, attended_TD, self._spec, self._mlp_input_norm))
        return output_TD.mul_(self._mlp_gate_1).masked_fill_(~reads_T1, 0)
