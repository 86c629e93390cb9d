"""A layer of an encoder that computes in fewer elements than hidden states have; see `BottleneckSpec`.

Shapes: T tokens of a step, D hidden size, B size of the bottleneck, H heads of this shard, K head dimension.
"""

from __future__ import annotations

from msgspec.structs import replace
from torch import Tensor

from ...attention import AttentionLayer, DeviceAttention, as_backend
from ...layers.layer_spec import LayerSpec
from ...layers.layers import RMSNorm
from ...layers.parallel.tensor_parallel import elements
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..mlp import MLP
from ..norms import read_norm
from ..weights import Rows


class BottleneckLayer(DecoderLayer):
    """A layer with a stream of its own between two projections. Norms follow all blocks and projections."""

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        # The parts of other layers have other sizes, so none of them is made.
        self.rope, self.cache_groups = layer.rope, layer.cache_groups
        self.cross = self.shortcut = self.previous = self._mlp = self._beside = None
        spec, shard = source.spec, source.shard
        assert spec.bottleneck is not None
        hidden, size = spec.hidden_size, spec.bottleneck.size
        inner = source._replace(spec=replace(spec, hidden_size=size))
        self._backend = as_backend(attention).for_layer(spec, shard)
        self._attention_layer = AttentionLayer(spec.attention_scale, layer.window)
        self._head_dim = spec.head_dim
        part = elements(shard.heads(spec), spec.head_dim)
        q_rows, k_rows, v_rows = (
            Rows(f"{source.prefix}self_attn.{x}_proj", spec.num_heads * spec.head_dim, part)
            for x in "qkv"
        )
        self._queries_and_keys = source.read_rows([q_rows, k_rows], size, has_biases=True)
        self._values = source.read_rows([v_rows], hidden, has_biases=True)
        self._output = inner.at("self_attn.").read_columns(
            "o_proj", size, spec.num_heads * spec.head_dim, part, has_bias=True
        )
        self._to_stream, self._to_keys, self._from_stream = (
            source.read_linear(f"{name}.dense", *shape, has_bias=True)
            for name, shape in (
                ("input_bottleneck", (size, hidden)),
                ("key_bottleneck", (size, hidden)),
                ("output_bottleneck", (hidden, size)),
            )
        )
        self._stream_norm, self._keys_norm, self._attention_norm = (
            _norm(inner, name)
            for name in ("input_bottleneck.norm", "key_bottleneck.norm", "attention_norm")
        )
        self._last_norm = _norm(source, "output_bottleneck.norm")
        prefixes = [(f"ffn.{i}.", f"ffn.{i}.norm") for i in range(spec.bottleneck.num_mlps - 1)]
        self._mlps = [
            (MLP(inner.at(prefix), spec.intermediate_size), _norm(inner, norm))
            for prefix, norm in (*prefixes, ("mlp.", "mlp_norm"))
        ]

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """Update the hidden states `x_TD` in place. Nothing is left to be added, so the result is None."""
        assert block_TD is None
        stream_TB = self._stream_norm(self._to_stream(x_TD))
        keys_TB = self._keys_norm(self._to_keys(x_TD))
        qk_THK, v_THK = (
            each.unflatten(-1, (-1, self._head_dim))
            for each in (self._queries_and_keys(keys_TB), self._values(x_TD))
        )
        attended_THK = self._backend.forward_projected(
            qk_THK, v_THK, None, None, *step.caches[0], self._attention_layer
        )
        block_TB = self._output(attended_THK.flatten(1))
        stream_TB = self._attention_norm.add_and_norm(stream_TB, block_TB, 1.0)
        for mlp, norm in self._mlps:
            stream_TB = norm.add_and_norm(stream_TB, mlp.forward(stream_TB), 1.0)
        x_TD.copy_(self._last_norm.add_and_norm(x_TD, self._from_stream(stream_TB), 1.0))


def _norm(source: LayerSource, name: str) -> RMSNorm:
    return read_norm(source.spec, source.weights, f"{source.prefix}{name}", source.kernels)
