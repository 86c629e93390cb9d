"""A Q-Former, whose queries attend to each other and to rows of features, in torch, and the projection "former".

Shapes: B blocks of rows, Q queries of a block, D elements of a query, L rows of a block, E elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.config.query_former import QueryFormerSpec
from ...loaders import Checkpoint
from ..weights import Linear, VisionWeights, attend, find_activation


class QueryFormer:
    """The norm of the queries and the layers that `spec` describes."""

    def __init__(
        self, spec: QueryFormerSpec, tensors: VisionWeights, prefix: str, checkpoint: Checkpoint
    ) -> None:
        self._norm = tensors.read_layer_norm(f"{prefix}layernorm", spec.size, spec.norm_eps)
        self._layers = [
            _Layer(spec, tensors, f"{prefix}encoder.layer.{index}.", checkpoint, index)
            for index in range(spec.num_layers)
        ]

    def __call__(self, queries_BQD: Tensor, rows_BLE: Tensor) -> Tensor:
        """Return the outputs [B, Q, D] of queries that read rows."""
        x_BQD: Tensor = self._norm(queries_BQD)
        for layer in self._layers:
            x_BQD = layer(x_BQD, rows_BLE)
        return x_BQD


def read_former(
    spec: VisionSpec, checkpoint: Checkpoint, read: Callable[[str], VisionWeights]
) -> Callable[[Tensor, int], Tensor]:
    """Return the projection "former", in which learned queries read the patches of an image."""
    assert spec.former is not None
    weights = read("query_tokens")
    size = spec.former.size
    queries_BQD = weights.read("query_tokens", 1, spec.num_queries, size)
    former = QueryFormer(spec.former, weights, "qformer.", checkpoint)
    product = weights.read_linear("language_projection", spec.output_size, size)
    return lambda x_PD, num_columns: product(former(queries_BQD, x_PD[None])[0])


class _Layer:
    def __init__(
        self,
        spec: QueryFormerSpec,
        tensors: VisionWeights,
        prefix: str,
        checkpoint: Checkpoint,
        index: int,
    ) -> None:
        size, inner, eps = spec.size, spec.intermediate_size, spec.norm_eps
        self._num_heads = spec.num_heads

        def attention(name: str, columns: int) -> list[Linear]:
            name = f"{prefix}{name}."
            return [
                tensors.read_linear(f"{name}attention.query", size, size),
                tensors.read_linear(f"{name}attention.key", size, columns),
                tensors.read_linear(f"{name}attention.value", size, columns),
                tensors.read_linear(f"{name}output.dense", size, size),
            ]

        self._attentions = [attention("attention", size)]
        names = ["attention.output"]
        if index % spec.cross_attention_every == 0:
            self._attentions.append(attention("crossattention", spec.read_size))
            names.append("crossattention.output")
        self._norms = [
            tensors.read_layer_norm(f"{prefix}{name}.LayerNorm", size, eps)
            for name in (*names, "output_query")
        ]
        self._up = tensors.read_linear(f"{prefix}intermediate_query.dense", inner, size)
        self._down = tensors.read_linear(f"{prefix}output_query.dense", size, inner)
        self._activation = find_activation(checkpoint, spec.activation)

    def __call__(self, x_BQD: Tensor, rows_BLE: Tensor) -> Tensor:
        for index, (query, key, value, output) in enumerate(self._attentions):
            read = rows_BLE if index else x_BQD
            attended = attend(query(x_BQD), key(read), value(read), self._num_heads)
            x_BQD = self._norms[index](x_BQD + output(attended))
        return self._norms[-1](x_BQD + self._down(self._activation(self._up(x_BQD))))
